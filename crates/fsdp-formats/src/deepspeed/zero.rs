//! The shards of ZeRO 1 to 3.
//!
//! ZeRO 1 and 2 flatten each group of parameters into one tensor and cut it over the ranks: a
//! parameter is a range of the ranks' parts one after the other. ZeRO 3 cuts each parameter over
//! the ranks, and flattens a rank's parts: a parameter takes the same range on each rank. The flat
//! tensors of the optimizer's state lie as those of the parameters do.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use fsdp_layout::{DType, KeyPath, PathPart, PlainValue};

use super::names::{MODEL_END, OPTIM_END, data_rank, is_model, is_optimizer};
use super::state::{Shapes, add_rest, model_path, param_shapes, shapes_below, shared, state_path};
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Assembled, Assembler, Held};
use crate::formats::checkpoint::Format;
use crate::formats::read::OpenOptions;
use crate::limits::MAX_RANKS;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::torch::flat::{FlatFile, Leaf};
use crate::torch::read::add_leaf;

/// The key of all state in a rank's file of optimizer states.
const ROOT: &str = "optimizer_state_dict";

/// A parameter, and where its parts lie.
struct CutParameter {
    shape: Vec<usize>,
    parts: Vec<FlatPart>,
}

/// A part of a parameter, which lies in a flat tensor of one rank.
struct FlatPart {
    rank: usize,
    /// The number of the flat tensor among those of the rank.
    group: usize,
    /// The position of the part's first element in the flat tensor.
    at: usize,
    /// The range of the flattened parameter.
    elements: Range<usize>,
}

/// An entry of the optimizer's state of one flat tensor.
#[derive(Clone, Copy)]
struct StateEntry<'r> {
    /// The key of the dict or the list of the state of all flat tensors.
    container: &'r str,
    entry: &'r str,
    leaf: &'r Leaf,
}

/// The optimizer's state in a rank's file, by the number of the flat tensor.
type States<'r> = HashMap<&'r str, Vec<StateEntry<'r>>>;

/// The files of all ranks.
struct Shards {
    models: Vec<FlatFile>,
    ranks: Vec<FlatFile>,
    /// The key of the flat parameters in each rank's file.
    groups_key: &'static str,
}

/// Opens a directory of such shards.
pub(crate) fn open(location: &Location, options: OpenOptions) -> Result<Assembled, FileError> {
    let directory = CheckedDirectory::open_covered(location, options.verify)?;
    let shards = Shards::read(&directory)?;
    let mut assembler = Assembler::new(Format::DeepSpeed, location.name(), directory);
    let model = &shards.models[0];
    add_rest(&mut assembler, model)?;
    let groups = param_shapes(model)?;
    let parameters = if shards.cuts_parameters() {
        shards.cut_each(&groups)?
    } else {
        shards.cut_groups(&groups)?
    };
    let ranks = shards.ranks.iter();
    let states: Vec<States<'_>> = ranks.map(|rank| shards.states_of_rank(rank)).collect();
    for (name, parameter) in &parameters {
        shards.add_parameter(&mut assembler, &states, name, parameter)?;
    }
    shards.add_frozen(&mut assembler)?;
    shards.add_values(&mut assembler)?;
    // Add each parameter that shares the elements of a trained parameter. Those that share the
    // elements of a frozen one have been added by `add_frozen`.
    for (name, of) in shared(model) {
        if let Some(parameter) = parameters.get(of) {
            shards.add_flat(&mut assembler, &model_path(name), parameter, &|group| {
                shards.flat_key(group)
            })?;
        }
    }
    Ok(assembler.finish(None))
}

impl Shards {
    /// Reads the pickles of all ranks' files, and checks that no file is missing and none is of
    /// another save.
    fn read(directory: &CheckedDirectory) -> Result<Self, FileError> {
        let mut models = BTreeMap::new();
        let mut ranks = BTreeMap::new();
        for name in directory.names()? {
            let files = if is_model(&name) {
                &mut models
            } else if is_optimizer(&name) {
                &mut ranks
            } else {
                continue;
            };
            let rank = data_rank(&name).map_err(|source| directory.file_error(&name, source))?;
            let flat = FlatFile::read(directory, &name, None)?;
            if let Some(other) = files.insert(rank, flat) {
                let reason = format!(
                    "it is of the same rank as `{}`: these are files of two saves",
                    other.name
                );
                let source = FormatError::malformed("checkpoint", reason);
                return Err(directory.file_error(&name, source));
            }
        }
        if models.is_empty() {
            directory.check_missing(["mp_rank_00_model_states.pt".to_owned()])?;
        }
        let Some(first) = ranks.values().next() else {
            check_is_sharded(models.values())?;
            return Err(FileError::MissingFiles {
                path: directory.path().to_owned(),
                files: vec!["zero_pp_rank_0_mp_rank_00_optim_states.pt".to_owned()],
            });
        };
        // The number of ranks is written in each of their files.
        let count = ranks.len();
        let world_size = partitions(first).unwrap_or(count);
        check_ranks(directory, &ranks, world_size, OPTIM_END)?;
        if count != world_size {
            return Err(first.malformed(format!(
                "it is of {world_size} ranks, and there are files of {count}"
            )));
        }
        // Only ZeRO 3 keeps the flat parameters under its key, and has a file of model states for
        // each rank.
        let mut groups_key = "single_partition_of_fp32_groups";
        if first
            .found
            .contains_key(&format!("{ROOT}.{ZERO_3_GROUPS}.0"))
        {
            groups_key = ZERO_3_GROUPS;
            check_ranks(directory, &models, world_size, MODEL_END)?;
        }
        Ok(Shards {
            models: models.into_values().collect(),
            ranks: ranks.into_values().collect(),
            groups_key,
        })
    }

    /// Returns `true` for ZeRO 3.
    fn cuts_parameters(&self) -> bool {
        self.groups_key == ZERO_3_GROUPS
    }

    fn flat_key(&self, group: usize) -> String {
        format!("{ROOT}.{}.{group}", self.groups_key)
    }

    /// Returns the lengths of a rank's flat tensors.
    fn lengths(&self, rank: usize) -> Vec<usize> {
        (0..)
            .map_while(|group| self.ranks[rank].tensor(&self.flat_key(group)))
            .map(|tensor| tensor.shape.iter().product())
            .collect()
    }

    /// Returns where the parts of each parameter lie under ZeRO 1 and 2. There the parameters of a
    /// group, with paddings between them, form one tensor, and the ranks' flat tensors are the
    /// consecutive parts of it.
    fn cut_groups(&self, groups: &[Shapes]) -> Result<BTreeMap<String, CutParameter>, FileError> {
        let lengths: Vec<Vec<usize>> = (0..self.ranks.len())
            .map(|rank| self.lengths(rank))
            .collect();
        for (rank, lengths) in self.ranks.iter().zip(&lengths) {
            if lengths.len() > groups.len() {
                return Err(rank.malformed(format!(
                    "it has {} flat tensors for {} groups of parameters",
                    lengths.len(),
                    groups.len()
                )));
            }
        }
        let mut parameters = BTreeMap::new();
        for (group, shapes) in groups.iter().enumerate() {
            let paddings = self.paddings(group);
            // The rank, and the position in its flat tensor, where the next parameter begins.
            let mut rank = 0;
            let mut at = 0;
            for (number, (name, shape)) in shapes.iter().enumerate() {
                let numel: usize = shape.iter().product();
                let mut parts = Vec::new();
                // The elements that have been located, and the padding that is still to be skipped.
                let mut done = 0;
                let padding = paddings.as_ref().and_then(|paddings| paddings.get(number));
                let mut skip = padding.copied().unwrap_or(0);
                while done < numel || skip > 0 {
                    let Some(length) = lengths.get(rank).and_then(|lengths| lengths.get(group))
                    else {
                        // Padding at the end need not be stored.
                        if done == numel {
                            break;
                        }
                        return Err(self.ranks[0].malformed(format!(
                            "the parts of all ranks are too short for `{name}`"
                        )));
                    };
                    let left = length - at;
                    if done < numel {
                        let count = left.min(numel - done);
                        if count > 0 {
                            parts.push(FlatPart {
                                rank,
                                group,
                                at,
                                elements: done..done + count,
                            });
                        }
                        done += count;
                        at += count;
                    } else {
                        let skipped = left.min(skip);
                        skip -= skipped;
                        at += skipped;
                    }
                    // The next rank's flat tensor continues this one's.
                    if at == *length {
                        rank += 1;
                        at = 0;
                    }
                }
                let shape = shape.clone();
                parameters.insert(name.clone(), CutParameter { shape, parts });
            }
            // The elements after the last parameter are padding. If there are more of them than
            // DeepSpeed can have added, parameters are missing from the list of shapes.
            let rest = lengths
                .iter()
                .skip(rank)
                .filter_map(|lengths| lengths.get(group));
            let left = rest.fold(0, |sum: usize, length| sum.saturating_add(*length)) - at;
            if left >= 2 * self.ranks.len() * ALIGNMENT {
                return Err(self.ranks[0].malformed(format!(
                    "group {group} has {left} elements more than its parameters"
                )));
            }
        }
        Ok(parameters)
    }

    /// Returns the number of padding elements after each parameter of a group; `None` if the file
    /// does not list them.
    fn paddings(&self, group: usize) -> Option<Vec<usize>> {
        let key = format!("{ROOT}.param_alignment_paddings");
        let PlainValue::List(groups) = value(&self.ranks[0], &key)? else {
            return None;
        };
        let PlainValue::List(paddings) = groups.get(group)? else {
            return None;
        };
        paddings
            .iter()
            .map(|padding| usize::try_from(padding.as_int()?).ok())
            .collect()
    }

    /// Returns where the parts of each parameter lie under ZeRO 3.
    ///
    /// Each parameter is cut into equal parts, one for each rank, the last of which may be shorter
    /// or empty. All of them take the same number of elements in the ranks' flat tensors, and lie
    /// at the same position there.
    fn cut_each(&self, groups: &[Shapes]) -> Result<BTreeMap<String, CutParameter>, FileError> {
        let count = self.ranks.len();
        let lengths = self.lengths(0);
        if let Some(other) = (1..count).find(|&rank| self.lengths(rank) != lengths) {
            let reason = "its flat tensors are not as long as the first rank's";
            return Err(self.ranks[other].malformed(reason));
        }
        let mut parameters = BTreeMap::new();
        // The number of the flat tensor, and the position in it, where the next parameter begins.
        // They are the same on each rank.
        let mut group = 0;
        let mut at = 0;
        for (name, shape) in groups.iter().flatten() {
            let numel: usize = shape.iter().product();
            // A rank's part may span several flat tensors. `done` elements of each rank's part have
            // been located.
            let each = numel.div_ceil(count);
            let mut parts = Vec::new();
            let mut done = 0;
            while done < each {
                let Some(length) = lengths.get(group) else {
                    let reason = format!("its flat tensors are too short for `{name}`");
                    return Err(self.ranks[0].malformed(reason));
                };
                let now = (length - at).min(each - done);
                for rank in 0..count {
                    let start = (rank * each + done).min(numel);
                    let end = (rank * each + done + now).min(numel);
                    if start < end {
                        parts.push(FlatPart {
                            rank,
                            group,
                            at,
                            elements: start..end,
                        });
                    }
                }
                done += now;
                at += now;
                // The rank's next flat tensor continues this one.
                if at == *length {
                    group += 1;
                    at = 0;
                }
            }
            let shape = shape.clone();
            parameters.insert(name.clone(), CutParameter { shape, parts });
        }
        if group < lengths.len() {
            let reason = "its flat tensors are longer than its parameters";
            return Err(self.ranks[0].malformed(reason));
        }
        Ok(parameters)
    }

    /// Adds a tensor that lies in flat tensors of the ranks. `key` returns the key of the flat
    /// tensor of a group. Most are `f32`, but DeepSpeed may keep parameters and moments in 16 bits
    /// too.
    fn add_flat(
        &self,
        assembler: &mut Assembler,
        path: &KeyPath,
        parameter: &CutParameter,
        key: &dyn Fn(usize) -> String,
    ) -> Result<(), FileError> {
        let shape = &parameter.shape;
        if parameter.parts.is_empty() {
            // A tensor without elements lies in no file, but it is a part of the model.
            return assembler.add_tensor(path, &self.ranks[0].name, DType::F32, shape, Vec::new());
        }
        for part in &parameter.parts {
            let file = &self.ranks[part.rank];
            let key = key(part.group);
            let tensor = file
                .tensor(&key)
                .ok_or_else(|| file.malformed(format!("it has no tensor `{key}`")))?;
            let pieces = file.pieces(tensor, part.at, shape, part.elements.clone())?;
            assembler.add_tensor(path, &file.name, tensor.dtype, shape, pieces)?;
        }
        Ok(())
    }

    /// Returns the optimizer's state in a rank's file. It is in a list or in a dict, by the number
    /// of the flat tensor.
    fn states_of_rank<'r>(&self, rank: &'r FlatFile) -> States<'r> {
        let base = self.state_key();
        let mut states = States::new();
        for (key, (_, leaf)) in &rank.found {
            let Some(rest) = key
                .strip_prefix(&base)
                .and_then(|rest| rest.strip_prefix('.'))
            else {
                continue;
            };
            let rest = rest.strip_prefix("state.").unwrap_or(rest);
            let container = &key[..key.len() - rest.len() - 1];
            if let Some((group, entry)) = rest.split_once('.') {
                states.entry(group).or_default().push(StateEntry {
                    container,
                    entry,
                    leaf,
                });
            }
        }
        states
    }

    /// Adds a parameter and its state.
    fn add_parameter(
        &self,
        assembler: &mut Assembler,
        states: &[States<'_>],
        name: &str,
        parameter: &CutParameter,
    ) -> Result<(), FileError> {
        self.add_flat(assembler, &model_path(name), parameter, &|group| {
            self.flat_key(group)
        })?;
        let Some(first) = parameter.parts.first() else {
            return Ok(());
        };
        let file = &self.ranks[first.rank];
        let group = first.group.to_string();
        for &StateEntry {
            container,
            entry,
            leaf,
        } in states[first.rank].get(group.as_str()).into_iter().flatten()
        {
            let path = state_path(name, entry);
            let is_flat = matches!(leaf, Leaf::Tensor(tensor, _) if matches!(tensor.shape[..], [size] if size > 1));
            if !is_flat {
                // All parameters of the flat tensor get a copy.
                if let Leaf::Value(value) = leaf {
                    assembler.charge_copy(&file.name, value)?;
                }
                add_leaf(assembler, file, &path, leaf)?;
                continue;
            }
            self.add_flat(assembler, &path, parameter, &|group| {
                format!("{container}.{group}.{entry}")
            })?;
        }
        Ok(())
    }

    /// Returns the key of the state of the optimizer that DeepSpeed wraps.
    fn state_key(&self) -> String {
        let of = if self.cuts_parameters() {
            ROOT
        } else {
            "base_optimizer_state"
        };
        format!("{ROOT}.{of}")
    }

    /// Adds parameters that are not trained, also under the names of those that share their
    /// elements. ZeRO 3 cuts them too.
    fn add_frozen(&self, assembler: &mut Assembler) -> Result<(), FileError> {
        let first = &self.models[0];
        let mut aliases: HashMap<&str, Vec<&str>> = HashMap::new();
        for (alias, of) in shared(first) {
            aliases.entry(of).or_default().push(alias);
        }
        for (name, shape) in shapes_below(first, "frozen_param_shapes")? {
            let key = format!("frozen_param_fragments.{name}");
            let sharing = aliases.get(name.as_str()).into_iter().flatten().copied();
            for path in std::iter::once(name.as_str())
                .chain(sharing)
                .map(model_path)
            {
                if self.cuts_parameters() {
                    self.add_frozen_parts(assembler, &path, &key, &shape)?;
                    continue;
                }
                let Some((_, leaf)) = first.found.get(&key) else {
                    return Err(first.malformed(format!("it has no `{name}`")));
                };
                add_leaf(assembler, first, &path, leaf)?;
            }
        }
        Ok(())
    }

    /// Adds a parameter that is not trained from the equal parts into which ZeRO 3 has cut it, one
    /// for each rank.
    fn add_frozen_parts(
        &self,
        assembler: &mut Assembler,
        path: &KeyPath,
        key: &str,
        shape: &[usize],
    ) -> Result<(), FileError> {
        let numel: usize = shape.iter().product();
        let each = numel.div_ceil(self.models.len());
        for (rank, file) in self.models.iter().enumerate() {
            let range = (rank * each).min(numel)..((rank + 1) * each).min(numel);
            let tensor = file
                .tensor(key)
                .ok_or_else(|| file.malformed(format!("it has no `{key}`")))?;
            let pieces = file.pieces(tensor, 0, shape, range)?;
            assembler.add_tensor(path, &file.name, tensor.dtype, shape, pieces)?;
        }
        Ok(())
    }

    /// Adds the values of the first rank's optimizer that are not about how parameters lie.
    fn add_values(&self, assembler: &mut Assembler) -> Result<(), FileError> {
        const OF_LAYOUT: [&str; 6] = [
            "param_slice_mappings",
            "group_paddings",
            "param_alignment_paddings",
            "partition_count",
            "zero_stage",
            "ds_zero_partition_groups",
        ];
        let file = &self.ranks[0];
        let base = self.state_key();
        for (key, (path, leaf)) in &file.found {
            let Some(PathPart::Key(second)) = path.0.get(1) else {
                continue;
            };
            if !key.starts_with(ROOT)
                || second == self.groups_key
                || OF_LAYOUT.contains(&second.as_str())
            {
                continue;
            }
            let skipped = match key.strip_prefix(&base) {
                Some(rest) if rest.starts_with(".param_groups") => 2,
                // The state of the parameters has been added with them.
                Some(rest) if rest.starts_with('.') => continue,
                _ => 1,
            };
            let mut parts = vec![PathPart::Key("optim".to_owned())];
            parts.extend_from_slice(&path.0[skipped..]);
            add_leaf(assembler, file, &KeyPath(parts), leaf)?;
        }
        Ok(())
    }
}

/// The key of the flat parameters under ZeRO 3.
const ZERO_3_GROUPS: &str = "fp32_flat_groups";

/// The largest number of elements to which DeepSpeed aligns a rank's part.
const ALIGNMENT: usize = 128;

/// Refuses files of model states that list no shapes of parameters: DeepSpeed writes those for the
/// shards of ZeRO only.
fn check_is_sharded<'f>(models: impl Iterator<Item = &'f FlatFile>) -> Result<(), FileError> {
    for model in models {
        let mut keys = model.found.keys();
        if !keys.any(|key| key.starts_with("param_shapes.")) {
            let what =
                "a directory of DeepSpeed without ZeRO (name this file: it has the whole model),";
            return Err(model.error(FormatError::unsupported(what)));
        }
    }
    Ok(())
}

/// Checks that there is a file of each rank; `end` is the end of their names.
fn check_ranks(
    directory: &CheckedDirectory,
    files: &BTreeMap<Option<usize>, FlatFile>,
    world_size: usize,
    end: &str,
) -> Result<(), FileError> {
    let missing = (0..world_size)
        .filter(|rank| !files.contains_key(&Some(*rank)))
        .map(|rank| format!("zero_pp_rank_{rank}_mp_rank_00{end}"));
    directory.check_missing(missing)
}

/// Returns a plain value of a file.
fn value<'f>(file: &'f FlatFile, key: &str) -> Option<&'f PlainValue> {
    match file.found.get(key) {
        Some((_, Leaf::Value(Held::Plain(value)))) => Some(value),
        _ => None,
    }
}

/// Returns the number of ranks that is recorded in a rank's file.
fn partitions(file: &FlatFile) -> Option<usize> {
    let count = match value(file, &format!("{ROOT}.partition_count"))? {
        PlainValue::List(groups) => groups.iter().filter_map(PlainValue::as_int).max()?,
        count => count.as_int()?,
    };
    usize::try_from(count)
        .ok()
        .filter(|count| (1..MAX_RANKS).contains(count))
}
