//! The shards of ZeRO 1 to 3.
//!
//! ZeRO 1 and 2 flatten each group of parameters into one tensor and cut it over the ranks: a
//! parameter is a range of the ranks' parts one after the other. ZeRO 3 cuts each parameter over
//! the ranks, and flattens a rank's parts: a parameter takes the same range on each rank. The flat
//! tensors of the optimizer's state lie as those of the parameters do.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use fsdp_layout::{DType, KeyPath, PathPart, PlainValue, count_text};

use super::alike::check_alike;
use super::names::{MODEL_END, OPTIM_END, data_rank, is_model, is_optimizer, precision};
use super::state::{
    Shapes, add_rest, model_path, param_shapes, read_states, shared_parameters, state_path,
};
use super::untrained::ModelFiles;
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

/// The keys of an optimizer's file that say how parameters lie in its flat tensors.
pub(super) const LAYOUT_KEYS: [&str; 6] = [
    "param_slice_mappings",
    "group_paddings",
    "param_alignment_paddings",
    "partition_count",
    "zero_stage",
    "ds_zero_partition_groups",
];

/// The key of the groups of parameters in the state of an optimizer.
const PARAM_GROUPS: &str = "param_groups";

/// The name of a count of steps, in a state or in a group of parameters.
const STEP: &str = "step";

/// The key of the count of steps beside a state without paddings.
const STEP_BESIDE_STATE: &str = "base_optimizer_state_step";

/// The values of a group of parameters that are the same on all ranks. An optimizer may keep others
/// there that it computes from the rank's own elements, as Prodigy does.
const HYPERPARAMETERS: [&str; 13] = [
    "alpha",
    "amsgrad",
    "betas",
    "dampening",
    "eps",
    "initial_lr",
    "lr",
    "maximize",
    "momentum",
    "nesterov",
    "rho",
    STEP,
    "weight_decay",
];

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
    flat_start: usize,
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

/// The files of one kind, by the data-parallel rank in their names: `None` is the rank of a file of
/// all ranks.
type RankFiles = BTreeMap<Option<usize>, FlatFile>;

/// The files of all ranks.
struct Shards {
    models: ModelFiles,
    optimizer_files: Vec<FlatFile>,
    /// The key of the flat parameters in each rank's file.
    groups_key: &'static str,
}

/// Opens a directory of such shards.
///
/// # Errors
/// Files that are missing, or are of another save; shapes that the flat tensors do not fit; steps
/// or hyperparameters that differ between ranks.
pub(crate) fn open(location: &Location, options: OpenOptions) -> Result<Assembled, FileError> {
    let directory = CheckedDirectory::open_covered(location, options.verify)?;
    let shards = Shards::read(&directory)?;
    let mut assembler = Assembler::new(Format::DeepSpeed, location.name(), directory);
    let model = &shards.models.files[0];
    add_rest(&mut assembler, model)?;
    let groups = param_shapes(model)?;
    let parameters = if shards.is_zero3() {
        shards.cut_each(&groups)?
    } else {
        shards.cut_groups(&groups)?
    };
    shards.check_alike(assembler.directory())?;
    let ranks = shards.optimizer_files.iter();
    let states: Vec<States<'_>> = ranks.map(|rank| shards.states_of_rank(rank)).collect();
    for (name, parameter) in &parameters {
        shards.add_parameter(&mut assembler, &states, name, parameter)?;
    }
    shards.add_values(&mut assembler)?;
    // Add each parameter that shares the elements of a trained parameter. Those that share the
    // elements of a frozen one are added with that.
    for (alias, stored_name) in shared_parameters(model) {
        if let Some(parameter) = parameters.get(stored_name) {
            shards.add_flat(&mut assembler, &model_path(alias), parameter, &|group| {
                shards.flat_key(group)
            })?;
        }
    }
    shards.models.add_untrained(&mut assembler)?;
    Ok(assembler.finish(None))
}

impl Shards {
    /// Reads the pickles of all ranks' files, and checks that no file is missing and none is of
    /// another save.
    fn read(directory: &CheckedDirectory) -> Result<Self, FileError> {
        let model_files = read_ranks(directory, is_model)?;
        let optimizer_files = read_ranks(directory, is_optimizer)?;
        if model_files.is_empty() {
            directory.check_missing(["mp_rank_00_model_states.pt".to_owned()])?;
        }
        let Some(first_rank) = optimizer_files.values().next() else {
            check_is_sharded(model_files.values())?;
            return Err(FileError::MissingFiles {
                path: directory.path().to_owned(),
                files: vec!["zero_pp_rank_0_mp_rank_00_optim_states.pt".to_owned()],
            });
        };
        // The number of ranks is written in each of their files.
        let world_size = partition_count(first_rank).unwrap_or(optimizer_files.len());
        check_ranks(directory, &optimizer_files, world_size, OPTIM_END)?;
        // Only ZeRO 3 keeps the flat parameters under its key, and has a file of model states for
        // each rank.
        let mut groups_key = "single_partition_of_fp32_groups";
        if first_rank
            .found
            .contains_key(&format!("{ROOT}.{ZERO_3_GROUPS}.0"))
        {
            groups_key = ZERO_3_GROUPS;
            check_ranks(directory, &model_files, world_size, MODEL_END)?;
        } else if let Some(second) = model_files.values().nth(1) {
            return Err(second.malformed(
                "all ranks have one file of model states: these are files of two saves",
            ));
        }
        Ok(Shards {
            models: ModelFiles {
                files: model_files.into_values().collect(),
                are_cut: groups_key == ZERO_3_GROUPS,
            },
            optimizer_files: optimizer_files.into_values().collect(),
            groups_key,
        })
    }

    /// Returns `true` for ZeRO 3, which cuts each parameter over the ranks.
    fn is_zero3(&self) -> bool {
        self.models.are_cut
    }

    /// Checks that the files of all ranks have the same steps and hyperparameters.
    fn check_alike(&self, directory: &CheckedDirectory) -> Result<(), FileError> {
        self.models.check_step(directory)?;
        let container = self.state_container();
        check_alike(directory, &self.optimizer_files, |path| {
            is_alike(path, container)
        })
    }

    /// Returns the key of the flat tensor of a group.
    fn flat_key(&self, group: usize) -> String {
        format!("{ROOT}.{}.{group}", self.groups_key)
    }

    /// Returns the lengths of a rank's flat tensors.
    fn flat_lengths(&self, rank: usize) -> Vec<usize> {
        (0..)
            .map_while(|group| self.optimizer_files[rank].tensor(&self.flat_key(group)))
            .map(|tensor| tensor.shape.iter().product())
            .collect()
    }

    /// Returns where the parts of each parameter lie under ZeRO 1 and 2. There the parameters of a
    /// group, with paddings between them, form one tensor, and the ranks' flat tensors are the
    /// consecutive parts of it.
    ///
    /// # Errors
    /// A rank with more flat tensors than groups; flat tensors that are too short for their
    /// parameters, or longer than paddings explain.
    fn cut_groups(&self, groups: &[Shapes]) -> Result<BTreeMap<String, CutParameter>, FileError> {
        let lengths: Vec<Vec<usize>> = (0..self.optimizer_files.len())
            .map(|rank| self.flat_lengths(rank))
            .collect();
        for (file, lengths) in self.optimizer_files.iter().zip(&lengths) {
            if lengths.len() > groups.len() {
                return Err(file.malformed(format!(
                    "it has {} for {} of parameters",
                    count_text(lengths.len(), "flat tensor", "flat tensors"),
                    count_text(groups.len(), "group", "groups")
                )));
            }
        }
        let mut parameters = BTreeMap::new();
        for (group, shapes) in groups.iter().enumerate() {
            let paddings = self.paddings(group);
            // The rank, and the position in its flat tensor, where the next parameter begins.
            let mut rank = 0;
            let mut flat_position = 0;
            for (index, (name, shape)) in shapes.iter().enumerate() {
                let numel: usize = shape.iter().product();
                let mut parts = Vec::new();
                // The elements that have been located, and the padding that is still to be skipped.
                let mut located = 0;
                let padding = paddings.as_ref().and_then(|paddings| paddings.get(index));
                let mut padding_left = padding.copied().unwrap_or(0);
                while located < numel || padding_left > 0 {
                    let Some(length) = lengths.get(rank).and_then(|lengths| lengths.get(group))
                    else {
                        // Padding at the end need not be stored.
                        if located == numel {
                            break;
                        }
                        return Err(self.optimizer_files[0].malformed(format!(
                            "the parts of all ranks are too short for `{name}`"
                        )));
                    };
                    let length_left = length - flat_position;
                    if located < numel {
                        let count = length_left.min(numel - located);
                        if count > 0 {
                            parts.push(FlatPart {
                                rank,
                                group,
                                flat_start: flat_position,
                                elements: located..located + count,
                            });
                        }
                        located += count;
                        flat_position += count;
                    } else {
                        let skipped = length_left.min(padding_left);
                        padding_left -= skipped;
                        flat_position += skipped;
                    }
                    // The next rank's flat tensor continues this one's.
                    if flat_position == *length {
                        rank += 1;
                        flat_position = 0;
                    }
                }
                let shape = shape.clone();
                parameters.insert(name.clone(), CutParameter { shape, parts });
            }
            let part_lengths: Vec<usize> = lengths
                .iter()
                .map(|lengths| lengths.get(group).copied().unwrap_or(0))
                .collect();
            let used = total(&part_lengths[..rank]).saturating_add(flat_position);
            self.check_unused(group, &part_lengths, used)?;
        }
        Ok(parameters)
    }

    /// Checks that the elements after the last parameter of a group are padding. `part_lengths` has
    /// the lengths of the ranks' flat tensors, and `used` elements of them are of parameters.
    ///
    /// DeepSpeed pads a group to a multiple of twice the number of ranks, and cuts it into equal
    /// parts. ZeRO saves each part without its padding. Its older versions take off that of the
    /// last part only, and the optimizer for bf16 takes off none.
    ///
    /// # Errors
    /// More elements than padding explains: parameters are missing from the list of shapes.
    fn check_unused(
        &self,
        group: usize,
        part_lengths: &[usize],
        used: usize,
    ) -> Result<(), FileError> {
        let unused = total(part_lengths).saturating_sub(used);
        let most = match self.noted_paddings(group) {
            Some(paddings) => {
                let mut padded_lengths = part_lengths
                    .iter()
                    .zip(&paddings)
                    .map(|(length, padding)| length.saturating_add(*padding));
                let first = padded_lengths.next();
                // With its padding each part is as long as the others, unless none was taken off.
                // The part of a single rank does not tell.
                let is_taken_off = part_lengths.len() > 1
                    && padded_lengths.all(|padded_length| Some(padded_length) == first);
                if is_taken_off { 0 } else { total(&paddings) }
            }
            None => {
                let alignment = 2 * part_lengths.len();
                (alignment - used % alignment) % alignment
            }
        };
        if unused > most {
            return Err(self.models.files[0].malformed(format!(
                "its `param_shapes` lack parameters: the flat tensors of group {group} have {}",
                count_text(unused, "element more", "elements more")
            )));
        }
        Ok(())
    }

    /// Returns the number of padding elements that each rank has noted for its part of a group;
    /// `None` if a file notes none.
    fn noted_paddings(&self, group: usize) -> Option<Vec<usize>> {
        let key = format!("{ROOT}.group_paddings");
        let ranks = self.optimizer_files.iter();
        ranks
            .map(|file| {
                let PlainValue::List(paddings) = plain_value(file, &key)? else {
                    return None;
                };
                usize::try_from(paddings.get(group)?.as_int()?).ok()
            })
            .collect()
    }

    /// Returns the number of padding elements after each parameter of a group; `None` if the file
    /// does not list them.
    fn paddings(&self, group: usize) -> Option<Vec<usize>> {
        let key = format!("{ROOT}.param_alignment_paddings");
        let PlainValue::List(groups) = plain_value(&self.optimizer_files[0], &key)? else {
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
    ///
    /// # Errors
    /// Flat tensors whose lengths differ between ranks, or are not those of their parameters.
    fn cut_each(&self, groups: &[Shapes]) -> Result<BTreeMap<String, CutParameter>, FileError> {
        let rank_count = self.optimizer_files.len();
        let lengths = self.flat_lengths(0);
        if let Some(differing_rank) =
            (1..rank_count).find(|&rank| self.flat_lengths(rank) != lengths)
        {
            let reason = "its flat tensors are not as long as the first rank's";
            return Err(self.optimizer_files[differing_rank].malformed(reason));
        }
        let mut parameters = BTreeMap::new();
        // The number of the flat tensor, and the position in it, where the next parameter begins.
        // They are the same on each rank.
        let mut group = 0;
        let mut flat_position = 0;
        for (name, shape) in groups.iter().flatten() {
            let numel: usize = shape.iter().product();
            // A rank's part may span several flat tensors. `located` elements of each rank's part
            // have been located.
            let part_length = numel.div_ceil(rank_count);
            let mut parts = Vec::new();
            let mut located = 0;
            while located < part_length {
                let Some(length) = lengths.get(group) else {
                    let reason = format!("its flat tensors are too short for `{name}`");
                    return Err(self.optimizer_files[0].malformed(reason));
                };
                let count = (length - flat_position).min(part_length - located);
                for rank in 0..rank_count {
                    let start = (rank * part_length + located).min(numel);
                    let end = (rank * part_length + located + count).min(numel);
                    if start < end {
                        parts.push(FlatPart {
                            rank,
                            group,
                            flat_start: flat_position,
                            elements: start..end,
                        });
                    }
                }
                located += count;
                flat_position += count;
                // The rank's next flat tensor continues this one.
                if flat_position == *length {
                    group += 1;
                    flat_position = 0;
                }
            }
            let shape = shape.clone();
            parameters.insert(name.clone(), CutParameter { shape, parts });
        }
        if group < lengths.len() {
            let reason = "its flat tensors are longer than its parameters";
            return Err(self.optimizer_files[0].malformed(reason));
        }
        Ok(parameters)
    }

    /// Adds a tensor that lies in flat tensors of the ranks. `key_of_group` returns the key of the
    /// flat tensor of a group; it is an error if a rank's file lacks one. Most are `f32`, but
    /// DeepSpeed may keep parameters and moments in 16 bits too.
    fn add_flat(
        &self,
        assembler: &mut Assembler,
        path: &KeyPath,
        parameter: &CutParameter,
        key_of_group: &dyn Fn(usize) -> String,
    ) -> Result<(), FileError> {
        let shape = &parameter.shape;
        if parameter.parts.is_empty() {
            // A tensor without elements lies in no file, but it is a part of the model.
            return assembler.add_tensor(
                path,
                &self.optimizer_files[0].name,
                DType::F32,
                shape,
                Vec::new(),
            );
        }
        for part in &parameter.parts {
            let file = &self.optimizer_files[part.rank];
            let key = key_of_group(part.group);
            let tensor = file
                .tensor(&key)
                .ok_or_else(|| file.malformed(format!("it has no tensor `{key}`")))?;
            let pieces = file.pieces(tensor, part.flat_start, shape, part.elements.clone())?;
            assembler.add_tensor(path, &file.name, tensor.dtype, shape, pieces)?;
        }
        Ok(())
    }

    /// Returns the optimizer's state in a rank's file. It is in a list or in a dict, by the number
    /// of the flat tensor.
    fn states_of_rank<'r>(&self, rank: &'r FlatFile) -> States<'r> {
        let state_key = self.state_key();
        let mut states = States::new();
        for (key, (_, leaf)) in &rank.found {
            let Some(below) = key
                .strip_prefix(&state_key)
                .and_then(|below| below.strip_prefix('.'))
            else {
                continue;
            };
            let below = below.strip_prefix("state.").unwrap_or(below);
            let container = &key[..key.len() - below.len() - 1];
            if let Some((group, entry)) = below.split_once('.') {
                states.entry(group).or_default().push(StateEntry {
                    container,
                    entry,
                    leaf,
                });
            }
        }
        states
    }

    /// Adds a parameter and its state. An entry of the state that is no flat tensor (a count of
    /// steps) is copied to each parameter of the flat tensor, and charged.
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
        let Some(first_part) = parameter.parts.first() else {
            return Ok(());
        };
        let file = &self.optimizer_files[first_part.rank];
        let group = first_part.group.to_string();
        for &StateEntry {
            container,
            entry,
            leaf,
        } in states[first_part.rank]
            .get(group.as_str())
            .into_iter()
            .flatten()
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
        format!("{ROOT}.{}", self.state_container())
    }

    /// Returns the last part of that key. ZeRO 1 and 2 put the wrapped optimizer's state below a
    /// key of its own.
    fn state_container(&self) -> &'static str {
        if self.is_zero3() {
            ROOT
        } else {
            "base_optimizer_state"
        }
    }

    /// Adds the values of the first rank's optimizer that are not about how parameters lie.
    fn add_values(&self, assembler: &mut Assembler) -> Result<(), FileError> {
        let file = &self.optimizer_files[0];
        let state_key = self.state_key();
        for (key, (path, leaf)) in &file.found {
            let Some(PathPart::Key(second_key)) = path.0.get(1) else {
                continue;
            };
            if !key.starts_with(ROOT)
                || second_key == self.groups_key
                || LAYOUT_KEYS.contains(&second_key.as_str())
            {
                continue;
            }
            let skipped = match key.strip_prefix(&state_key) {
                Some(below) if below.starts_with(".param_groups") => 2,
                // The state of the parameters has been added with them.
                Some(below) if below.starts_with('.') => continue,
                _ => 1,
            };
            let mut parts = vec![PathPart::Key("optim".to_owned())];
            parts.extend_from_slice(&path.0[skipped..]);
            add_leaf(assembler, file, &KeyPath(parts), leaf)?;
        }
        Ok(())
    }
}

/// Returns `true` for the path of a step or a hyperparameter in a rank's file. `container` is where
/// the state of the optimizer is that DeepSpeed wraps.
fn is_alike(path: &KeyPath, container: &str) -> bool {
    let [PathPart::Key(root), PathPart::Key(key), below @ ..] = &path.0[..] else {
        return false;
    };
    if root != ROOT {
        return false;
    }
    match below {
        [] => key == STEP_BESIDE_STATE,
        [
            PathPart::Key(groups),
            PathPart::Index(_),
            PathPart::Key(entry),
        ] if key == container && groups == PARAM_GROUPS => {
            HYPERPARAMETERS.contains(&entry.as_str())
        }
        // The states are in a list, or in a dict below a key of their own.
        [_, PathPart::Key(entry)] | [_, _, PathPart::Key(entry)] => {
            key == container && entry == STEP
        }
        _ => false,
    }
}

/// The key of the flat parameters under ZeRO 3.
pub(super) const ZERO_3_GROUPS: &str = "fp32_flat_groups";

/// Returns the sum of lengths. Those of a hostile file may be too large for one.
fn total(lengths: &[usize]) -> usize {
    lengths
        .iter()
        .fold(0, |sum: usize, length| sum.saturating_add(*length))
}

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

/// Reads the files with the states of one kind, by the data-parallel rank in their names.
///
/// # Errors
/// Two files of the same rank; names of files that are not of ranks of this kind of parallelism.
pub(super) fn read_ranks(
    directory: &CheckedDirectory,
    is_wanted: fn(&str) -> bool,
) -> Result<RankFiles, FileError> {
    let mut files = RankFiles::new();
    for name in directory
        .names()?
        .into_iter()
        .filter(|name| is_wanted(name))
    {
        let rank = data_rank(&name).map_err(|source| directory.file_error(&name, source))?;
        let flat = read_states(directory, &name)?;
        if let Some(earlier) = files.insert(rank, flat) {
            let reason = format!(
                "it is of the same rank as `{}`: these are files of two saves",
                earlier.name
            );
            let source = FormatError::malformed("checkpoint", reason);
            return Err(directory.file_error(&name, source));
        }
    }
    Ok(files)
}

/// Checks that there is a file of each rank, and no other; `name_end` is the end of their names.
pub(super) fn check_ranks(
    directory: &CheckedDirectory,
    files: &RankFiles,
    world_size: usize,
    name_end: &str,
) -> Result<(), FileError> {
    // The names of all ranks begin alike.
    let first_file = files.values().next();
    let start = first_file.map_or("", |file| precision(&file.name));
    let missing = (0..world_size)
        .filter(|rank| !files.contains_key(&Some(*rank)))
        .map(|rank| format!("{start}zero_pp_rank_{rank}_mp_rank_00{name_end}"));
    directory.check_missing(missing)?;
    match first_file {
        Some(first_file) if files.len() != world_size => Err(first_file.malformed(format!(
            "it is of {}, and there are files of {}",
            count_text(world_size, "rank", "ranks"),
            files.len()
        ))),
        _ => Ok(()),
    }
}

/// Returns the plain value of this key in a file; `None` if it has none, or a tensor there.
fn plain_value<'f>(file: &'f FlatFile, key: &str) -> Option<&'f PlainValue> {
    match file.found.get(key) {
        Some((_, Leaf::Value(Held::Plain(value)))) => Some(value),
        _ => None,
    }
}

/// Returns the number of ranks that is recorded in a rank's file: the largest of all groups. `None`
/// if there is none, or it is not to be believed.
fn partition_count(file: &FlatFile) -> Option<usize> {
    let count = match plain_value(file, &format!("{ROOT}.partition_count"))? {
        PlainValue::List(groups) => groups.iter().filter_map(PlainValue::as_int).max()?,
        count => count.as_int()?,
    };
    usize::try_from(count)
        .ok()
        .filter(|count| (1..MAX_RANKS).contains(count))
}
