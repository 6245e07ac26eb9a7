//! The shards of ZeRO 1 to 3.
//!
//! ZeRO 1 and 2 flatten each group of parameters into one tensor and cut it over the ranks: a
//! parameter is a range of the ranks' parts one after the other. ZeRO 3 cuts each parameter over
//! the ranks, and flattens a rank's parts: a parameter takes the same range on each rank. The flat
//! tensors of the optimizer's state lie as those of the parameters do.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use fsdp_layout::{DType, KeyPath, PathPart, PlainValue};

use super::flat::Named;
use super::names::{MODEL_END, OPTIM_END, data_rank, is_model, is_optimizer};
use super::state::{Shapes, add_rest, model_path, param_shapes, shapes_below, shared, state_path};
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Assembled, Assembler, Held, Piece};
use crate::formats::checkpoint::Format;
use crate::formats::read::OpenOptions;
use crate::storage::backend::Links;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::torch::flat::Leaf;
use crate::torch::read::{add_leaf, read_flat};

/// The key of all state in a rank's file of optimizer states.
const ROOT: &str = "optimizer_state_dict";

/// A part of a parameter, which lies in a flat tensor of one rank.
struct Part {
    rank: usize,
    /// The number of the flat tensor among those of the rank.
    group: usize,
    /// The position of the part's first element in the flat tensor.
    at: usize,
    /// The range of the flattened parameter.
    elements: Range<usize>,
}

/// The pieces of a tensor in the file of a rank: the rank, and the dtype. Most are `f32`, but
/// DeepSpeed may keep parameters and moments in 16 bits too.
type OfRank = (usize, DType, Vec<Piece>);

/// An entry of the optimizer's state of one flat tensor.
#[derive(Clone, Copy)]
struct State<'r> {
    /// `true` if the state of all flat tensors is in a dict, `false` if it is in a list.
    is_dict: bool,
    entry: &'r str,
    leaf: &'r Leaf,
}

/// The optimizer's state in a rank's file, by the number of the flat tensor.
type States<'r> = HashMap<&'r str, Vec<State<'r>>>;

/// The files of all ranks.
struct Shards {
    models: Vec<Named>,
    ranks: Vec<Named>,
    /// The key of the flat parameters in each rank's file.
    groups_key: &'static str,
}

/// Opens a directory of such shards.
pub(crate) fn open(location: &Location, options: OpenOptions) -> Result<Assembled, FileError> {
    let directory = CheckedDirectory::open(location, options.verify, Links::Follow)?;
    directory.check_covered()?;
    let shards = Shards::read(&directory)?;
    let mut assembler = Assembler::new(Format::DeepSpeed, location.name(), directory);
    add_rest(&mut assembler, &shards.models[0])?;
    let groups = param_shapes(assembler.directory(), &shards.models[0])?;
    let parts = if shards.cuts_parameters() {
        shards.cut_each(assembler.directory(), &groups)?
    } else {
        shards.cut_groups(assembler.directory(), &groups)?
    };
    let shapes: Shapes = groups
        .iter()
        .flatten()
        .map(|(name, shape)| (name.clone(), shape.clone()))
        .collect();
    let states: Vec<States<'_>> = shards
        .ranks
        .iter()
        .map(|rank| shards.states(rank))
        .collect();
    for (name, parts) in &parts {
        shards.add_parameter(&mut assembler, &states, name, &shapes[name], parts)?;
    }
    shards.add_frozen(&mut assembler)?;
    shards.add_values(&mut assembler)?;
    // Add each parameter that shares the elements of a trained parameter. Those that share the
    // elements of a frozen one have been added by `add_frozen`.
    for (name, of) in shared(&shards.models[0]) {
        if let Some(parts) = parts.get(of) {
            let pieces = shards.pieces(assembler.directory(), &shapes[of], parts, &|group| {
                shards.flat_key(group)
            })?;
            shards.add(&mut assembler, &model_path(name), &shapes[of], pieces)?;
        }
    }
    Ok(assembler.finish(None))
}

impl Shards {
    /// Reads the pickles of all ranks' files, and checks that no file is missing and none is of
    /// another save.
    fn read(directory: &CheckedDirectory) -> Result<Self, FileError> {
        let (mut models, mut ranks) = (BTreeMap::new(), BTreeMap::new());
        for name in directory.names()? {
            let of = match (is_model(&name), is_optimizer(&name)) {
                (true, _) => &mut models,
                (_, true) => &mut ranks,
                _ => continue,
            };
            let rank = data_rank(&name).map_err(|source| directory.file_error(&name, source))?;
            let flat = read_flat(directory, &name)?;
            if let Some(other) = of.insert(
                rank,
                Named {
                    name: Arc::from(name.as_str()),
                    flat,
                },
            ) {
                let reason = format!(
                    "it is of the same rank as `{}`: these are files of two saves",
                    other.name
                );
                let source = FormatError::Malformed {
                    what: "checkpoint",
                    reason,
                };
                return Err(directory.file_error(&name, source));
            }
        }
        let count = ranks.len();
        if models.is_empty() {
            let files = vec!["mp_rank_00_model_states.pt".to_owned()];
            return Err(FileError::MissingFiles {
                path: directory.path().to_owned(),
                files,
            });
        }
        let Some(first) = ranks.values().next() else {
            check_is_sharded(directory, models.values())?;
            let files = vec!["zero_pp_rank_0_mp_rank_00_optim_states.pt".to_owned()];
            return Err(FileError::MissingFiles {
                path: directory.path().to_owned(),
                files,
            });
        };
        // The number of ranks is written in each of their files.
        let world_size = partitions(first).unwrap_or(count);
        let lacks = |files: &BTreeMap<Option<usize>, Named>, end: &str| -> Vec<String> {
            let missing = (0..world_size).filter(|rank| !files.contains_key(&Some(*rank)));
            missing
                .take(1000)
                .map(|rank| format!("zero_pp_rank_{rank}_mp_rank_00{end}"))
                .collect()
        };
        directory.check_missing(lacks(&ranks, OPTIM_END))?;
        if count != world_size {
            let reason = format!("it is of {world_size} ranks, and there are files of {count}");
            return Err(first.error(directory, reason));
        }
        let groups_key = if has_key(first, "fp32_flat_groups") {
            "fp32_flat_groups"
        } else {
            "single_partition_of_fp32_groups"
        };
        if groups_key == "fp32_flat_groups" {
            directory.check_missing(lacks(&models, MODEL_END))?;
        }
        Ok(Shards {
            models: models.into_values().collect(),
            ranks: ranks.into_values().collect(),
            groups_key,
        })
    }

    /// Returns `true` for ZeRO 3.
    fn cuts_parameters(&self) -> bool {
        self.groups_key == "fp32_flat_groups"
    }

    fn flat_key(&self, group: usize) -> String {
        format!("{ROOT}.{}.{group}", self.groups_key)
    }

    /// Returns the lengths of a rank's flat tensors.
    fn lengths(&self, rank: usize) -> Vec<usize> {
        let tensor = |group| self.ranks[rank].tensor(&self.flat_key(group));
        (0..)
            .map_while(tensor)
            .map(|tensor| tensor.shape.iter().product())
            .collect()
    }

    /// Returns where the parts of each parameter lie under ZeRO 1 and 2. There the parameters of a
    /// group, with paddings between them, form one tensor, and the ranks' flat tensors are the
    /// consecutive parts of it.
    fn cut_groups(
        &self,
        directory: &CheckedDirectory,
        groups: &[Shapes],
    ) -> Result<BTreeMap<String, Vec<Part>>, FileError> {
        let lengths: Vec<Vec<usize>> = (0..self.ranks.len())
            .map(|rank| self.lengths(rank))
            .collect();
        if let Some(rank) = lengths
            .iter()
            .position(|lengths| lengths.len() > groups.len())
        {
            let reason = format!(
                "it has {} flat tensors for {} groups of parameters",
                lengths[rank].len(),
                groups.len()
            );
            return Err(self.ranks[rank].error(directory, reason));
        }
        let mut parts = BTreeMap::new();
        for (group, shapes) in groups.iter().enumerate() {
            let paddings = self.paddings(group);
            // The rank, and the position in its flat tensor, where the next parameter begins.
            let (mut rank, mut at) = (0, 0);
            for (number, (name, shape)) in shapes.iter().enumerate() {
                let numel: usize = shape.iter().product();
                let mut of = Vec::new();
                let mut done = 0;
                let mut skip = paddings
                    .as_ref()
                    .and_then(|paddings| paddings.get(number).copied())
                    .unwrap_or(0);
                while done < numel || skip > 0 {
                    let Some(length) = lengths.get(rank).and_then(|lengths| lengths.get(group))
                    else {
                        // Padding at the end need not be stored.
                        if done == numel {
                            break;
                        }
                        let reason = format!("the parts of all ranks are too short for `{name}`");
                        return Err(self.ranks[0].error(directory, reason));
                    };
                    let left = length - at;
                    if done < numel {
                        let count = left.min(numel - done);
                        if count > 0 {
                            of.push(Part {
                                rank,
                                group,
                                at,
                                elements: done..done + count,
                            });
                        }
                        (done, at) = (done + count, at + count);
                    } else {
                        let count = left.min(skip);
                        (skip, at) = (skip - count, at + count);
                    }
                    if at == *length {
                        (rank, at) = (rank + 1, 0);
                    }
                }
                parts.insert(name.clone(), of);
            }
            // The elements after the last parameter are padding. If there are more of them than
            // DeepSpeed can have added, parameters are missing from the list of shapes.
            let rest = lengths
                .iter()
                .skip(rank)
                .filter_map(|lengths| lengths.get(group));
            let left = rest.fold(0, |sum: usize, length| sum.saturating_add(*length)) - at;
            if left >= 2 * self.ranks.len().max(1) * ALIGNMENT {
                let reason = format!("group {group} has {left} elements more than its parameters");
                return Err(self.ranks[0].error(directory, reason));
            }
        }
        Ok(parts)
    }

    /// Returns the number of padding elements after each parameter of a group; `None` if the file
    /// does not list them.
    fn paddings(&self, group: usize) -> Option<Vec<usize>> {
        let value = value(&self.ranks[0], &format!("{ROOT}.param_alignment_paddings"))?;
        let PlainValue::List(groups) = value else {
            return None;
        };
        let PlainValue::List(of) = groups.get(group)? else {
            return None;
        };
        of.iter()
            .map(|padding| usize::try_from(padding.as_int()?).ok())
            .collect()
    }

    /// Returns where the parts of each parameter lie under ZeRO 3.
    ///
    /// Each parameter is cut into equal parts, one for each rank, the last of which may be shorter
    /// or empty. All of them take the same number of elements in the ranks' flat tensors, and lie
    /// at the same position there.
    fn cut_each(
        &self,
        directory: &CheckedDirectory,
        groups: &[Shapes],
    ) -> Result<BTreeMap<String, Vec<Part>>, FileError> {
        let count = self.ranks.len();
        let lengths = self.lengths(0);
        if let Some(other) = (1..count).find(|&rank| self.lengths(rank) != lengths) {
            return Err(self.ranks[other].error(
                directory,
                "its flat tensors are not as long as the first rank's".to_owned(),
            ));
        }
        let mut parts = BTreeMap::new();
        // The number of the flat tensor, and the position in it, where the next parameter begins.
        // They are the same on each rank.
        let (mut group, mut at) = (0, 0);
        for (name, shape) in groups.iter().flatten() {
            let numel: usize = shape.iter().product();
            // A rank's part may span several flat tensors. `done` elements of each rank's part have
            // been located.
            let each = numel.div_ceil(count);
            let mut of = Vec::new();
            let mut done = 0;
            while done < each {
                let Some(length) = lengths.get(group) else {
                    return Err(self.ranks[0].error(
                        directory,
                        format!("its flat tensors are too short for `{name}`"),
                    ));
                };
                let now = (length - at).min(each - done);
                for rank in 0..count {
                    let start = (rank * each + done).min(numel);
                    let end = (rank * each + done + now).min(numel);
                    if start < end {
                        of.push(Part {
                            rank,
                            group,
                            at,
                            elements: start..end,
                        });
                    }
                }
                (done, at) = (done + now, at + now);
                if at == *length {
                    (group, at) = (group + 1, 0);
                }
            }
            parts.insert(name.clone(), of);
        }
        if group < lengths.len() {
            let reason = "its flat tensors are longer than its parameters".to_owned();
            return Err(self.ranks[0].error(directory, reason));
        }
        Ok(parts)
    }

    /// Returns the pieces of a parameter or of its state, with the rank and the dtype of each.
    /// `key` returns the key of the flat tensor of a group.
    fn pieces(
        &self,
        directory: &CheckedDirectory,
        shape: &[usize],
        parts: &[Part],
        key: &dyn Fn(usize) -> String,
    ) -> Result<Vec<OfRank>, FileError> {
        let mut pieces = Vec::new();
        for part in parts {
            let file = &self.ranks[part.rank];
            let key = key(part.group);
            let tensor = file
                .tensor(&key)
                .ok_or_else(|| file.error(directory, format!("it has no tensor `{key}`")))?;
            let of_rank = file.pieces(directory, tensor, part.at, shape, part.elements.clone())?;
            pieces.push((part.rank, tensor.dtype, of_rank));
        }
        Ok(pieces)
    }

    /// Adds a tensor of pieces of several ranks.
    fn add(
        &self,
        assembler: &mut Assembler,
        path: &KeyPath,
        shape: &[usize],
        pieces: Vec<OfRank>,
    ) -> Result<(), FileError> {
        if pieces.is_empty() {
            // A tensor without elements lies in no file, but it is a part of the model.
            return assembler.add_tensor(path, &self.ranks[0].name, DType::F32, shape, Vec::new());
        }
        for (rank, dtype, pieces) in pieces {
            assembler.add_tensor(path, &self.ranks[rank].name, dtype, shape, pieces)?;
        }
        Ok(())
    }

    /// Returns the optimizer's state in a rank's file. It is in a list or in a dict, by the number
    /// of the flat tensor.
    fn states<'r>(&self, rank: &'r Named) -> States<'r> {
        let base = self.base();
        let mut states = States::new();
        for (key, (_, leaf)) in &rank.flat.found {
            let Some(rest) = key
                .strip_prefix(&base)
                .and_then(|rest| rest.strip_prefix('.'))
            else {
                continue;
            };
            let (is_dict, rest) = rest
                .strip_prefix("state.")
                .map_or((false, rest), |rest| (true, rest));
            if let Some((group, entry)) = rest.split_once('.') {
                states.entry(group).or_default().push(State {
                    is_dict,
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
        shape: &[usize],
        parts: &[Part],
    ) -> Result<(), FileError> {
        let pieces = self.pieces(assembler.directory(), shape, parts, &|group| {
            self.flat_key(group)
        })?;
        self.add(assembler, &model_path(name), shape, pieces)?;
        let Some(first) = parts.first() else {
            return Ok(());
        };
        let (file, base, group) = (
            &self.ranks[first.rank],
            self.base(),
            first.group.to_string(),
        );
        for &State {
            is_dict,
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
                add_leaf(assembler, &file.name, &file.flat, &path, leaf)?;
                continue;
            }
            let key = |group: usize| match is_dict {
                true => format!("{base}.state.{group}.{entry}"),
                false => format!("{base}.{group}.{entry}"),
            };
            let pieces = self.pieces(assembler.directory(), shape, parts, &key)?;
            self.add(assembler, &path, shape, pieces)?;
        }
        Ok(())
    }

    /// Returns the key of the state of the optimizer that DeepSpeed wraps.
    fn base(&self) -> String {
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
        for (name, shape) in shapes_below(assembler.directory(), first, "frozen_param_shapes")? {
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
                let Some((_, leaf)) = first.flat.found.get(&key) else {
                    return Err(first.error(assembler.directory(), format!("it has no `{name}`")));
                };
                add_leaf(assembler, &first.name, &first.flat, &path, leaf)?;
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
            let tensor = file.tensor(key);
            let tensor = tensor
                .ok_or_else(|| file.error(assembler.directory(), format!("it has no `{key}`")))?;
            let pieces = file.pieces(assembler.directory(), tensor, 0, shape, range)?;
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
        let base = self.base();
        for (key, (path, leaf)) in &file.flat.found {
            let Some(PathPart::Key(second)) = path.0.get(1) else {
                continue;
            };
            let is_group = key
                .strip_prefix(&base)
                .is_some_and(|rest| rest.starts_with(".param_groups"));
            let is_base = key
                .strip_prefix(&base)
                .is_some_and(|rest| rest.starts_with('.'));
            if !key.starts_with(ROOT)
                || second == self.groups_key
                || OF_LAYOUT.contains(&second.as_str())
            {
                continue;
            }
            if is_base && !is_group {
                continue;
            }
            let skipped = if is_group { 2 } else { 1 };
            let mut parts = vec![PathPart::Key("optim".to_owned())];
            parts.extend(path.0[skipped..].iter().cloned());
            add_leaf(assembler, &file.name, &file.flat, &KeyPath(parts), leaf)?;
        }
        Ok(())
    }
}

/// The largest number of elements to which DeepSpeed aligns a rank's part.
const ALIGNMENT: usize = 128;

/// Refuses files of model states that list no shapes of parameters: DeepSpeed writes those for the
/// shards of ZeRO only.
fn check_is_sharded<'f>(
    directory: &CheckedDirectory,
    mut models: impl Iterator<Item = &'f Named>,
) -> Result<(), FileError> {
    let lists_none = |model: &&Named| {
        !model
            .flat
            .found
            .keys()
            .any(|key| key.starts_with("param_shapes."))
    };
    let Some(model) = models.find(lists_none) else {
        return Ok(());
    };
    let what = "a directory of DeepSpeed without ZeRO (name this file: it has the whole model),"
        .to_owned();
    Err(directory.file_error(&model.name, FormatError::Unsupported { what }))
}

fn has_key(file: &Named, key: &str) -> bool {
    file.flat.found.contains_key(&format!("{ROOT}.{key}.0"))
}

/// Returns a plain value of a file.
fn value<'f>(file: &'f Named, key: &str) -> Option<&'f PlainValue> {
    match file.flat.found.get(key) {
        Some((_, Leaf::Value(Held::Plain(value)))) => Some(value),
        _ => None,
    }
}

/// Returns the number of ranks that is recorded in a rank's file.
fn partitions(file: &Named) -> Option<usize> {
    let count = match value(file, &format!("{ROOT}.partition_count"))? {
        PlainValue::List(groups) => groups.iter().filter_map(PlainValue::as_int).max()?,
        count => count.as_int()?,
    };
    usize::try_from(count)
        .ok()
        .filter(|count| (1..1 << 20).contains(count))
}
