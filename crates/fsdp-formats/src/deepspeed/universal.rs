//! The Universal Checkpoint: a directory for each parameter, with a file for each of its tensors.
//!
//! `ds_to_universal.py` also makes a directory of each other name in the model's state dict, with a
//! copy of its tensor as `f32`: of buffers, frozen parameters, and the second names of shared ones.
//! These are read from the model states, where they have their own dtype, and shared ones have the
//! elements of the parameter that was trained.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use fsdp_layout::{DType, KeyPath, PathPart};

use super::names::{MODEL_END, is_model};
use super::state::{Shapes, add_rest, model_path, param_shapes, shared_parameters, state_path};
use super::untrained::ModelFiles;
use super::zero::{LAYOUT_KEYS, ZERO_3_GROUPS, check_ranks, read_ranks};
use crate::error::FileError;
use crate::formats::assembled::{Assembled, Assembler};
use crate::formats::checkpoint::Format;
use crate::formats::read::OpenOptions;
use crate::limits::MAX_LISTED_FILES;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::torch::flat::{FlatFile, Leaf};
use crate::torch::read::add_leaf;
use crate::torch::tensor_ref::TensorRef;

/// The directory of the parameters.
const PARAMETERS_DIRECTORY: &str = "zero";
/// The name, without `.pt`, of the file of a parameter's own elements.
const PARAMETER_ENTRY: &str = "fp32";
/// The file of a parameter's own elements.
const PARAMETER_FILE: &str = "fp32.pt";
/// The file of what the optimizer keeps besides.
const OPTIMIZER_FILE: &str = "optimizer_state.pt";

/// The most entries of the directory of the parameters that are looked at for the sake of a
/// message.
const MAX_LOOKED_AT: usize = 100;

/// The moments of Adam.
const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];
/// The states of Adam.
const ADAM_STATES: [&str; 3] = ["exp_avg", "exp_avg_sq", "step"];
/// The states that have the shape of their parameter.
const SHAPED_STATES: [&str; 4] = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"];

/// Returns `true` if this directory, with entries of these names, is a Universal Checkpoint.
pub(crate) fn is_there(location: &Location, names: &[String]) -> Result<bool, FileError> {
    let is_listed = names.iter().any(|name| name == PARAMETERS_DIRECTORY)
        && names.iter().any(|name| is_model(name));
    Ok(is_listed && location.join(PARAMETERS_DIRECTORY).is_directory()?)
}

/// Returns `true` if this directory, with entries of these names, has the parameters of a Universal
/// Checkpoint, and no file of model states.
pub(crate) fn lacks_model_states(location: &Location, names: &[String]) -> Result<bool, FileError> {
    if !names.iter().any(|name| name == PARAMETERS_DIRECTORY)
        || names.iter().any(|name| is_model(name))
    {
        return Ok(false);
    }
    let parameters_directory = location.join(PARAMETERS_DIRECTORY);
    if !parameters_directory.is_directory()? {
        return Ok(false);
    }
    for name in parameters_directory.names()?.iter().take(MAX_LOOKED_AT) {
        let parameter_file = parameters_directory.join(name).join(PARAMETER_FILE);
        if parameter_file.is_file()? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the files of the parameters in such a directory, relative to it. DeepSpeed needs the
/// copies too, which are not read here.
pub fn parameter_files(location: &Location) -> Result<Vec<String>, FileError> {
    let parameters_directory = location.join(PARAMETERS_DIRECTORY);
    let mut files = Vec::new();
    for name in parameters_directory.names()? {
        let parameter_directory = parameters_directory.join(&name);
        if parameter_directory.is_directory()? {
            for file in parameter_directory.names()? {
                files.push(format!("{PARAMETERS_DIRECTORY}/{name}/{file}"));
            }
        }
    }
    Ok(files)
}

/// Opens such a directory.
///
/// # Errors
/// A parameter that the model states list, and that has no directory; one that lacks a state that
/// others have, or has one of another shape; no file of what the optimizer keeps besides its
/// states.
pub(crate) fn open(location: &Location, options: OpenOptions) -> Result<Assembled, FileError> {
    let directory = CheckedDirectory::open_covered(location, options.verify)?;
    let models = read_models(&directory)?;
    let mut assembler = Assembler::new(Format::DeepSpeedUniversal, location.name(), directory);
    let mut groups: Vec<Shapes> = Vec::new();
    // The names that share a trained parameter, by the name that it is stored under.
    let mut aliases: HashMap<&str, Vec<&str>> = HashMap::new();
    if let Some(model) = models.files.first() {
        add_rest(&mut assembler, model)?;
        groups = param_shapes(model)?;
        for (alias, stored_name) in shared_parameters(model) {
            aliases.entry(stored_name).or_default().push(alias);
        }
    }
    let trained: Shapes = groups
        .iter()
        .flatten()
        .map(|(name, shape)| (name.clone(), shape.clone()))
        .collect();
    let mut states = States::new();
    let mut has_optimizer_file = false;
    let parameters_directory = location.join(PARAMETERS_DIRECTORY);
    for name in parameters_directory.names()? {
        let parameter_directory = parameters_directory.join(&name);
        if !parameter_directory.is_directory()? {
            if name == OPTIMIZER_FILE {
                add_optimizer(&mut assembler)?;
                has_optimizer_file = true;
            }
            continue;
        }
        let parameter = Parameter {
            files: parameter_directory.names()?,
            shape: trained.get(&name).map(Vec::as_slice),
            aliases: aliases.get(name.as_str()).map_or(&[][..], Vec::as_slice),
            name: &name,
        };
        // Without a list of what was trained, everything may have been.
        if trained.is_empty() || !parameter.is_copy(&models) {
            parameter.add(&mut assembler)?;
            if !parameter.is_empty() {
                states.insert(name.clone(), parameter.states());
            }
        }
    }
    add_empty(&mut assembler, &models, &trained)?;
    let mut missing_files = find_missing_states(&groups, &states);
    // `ds_to_universal.py` always writes it, and DeepSpeed loads no states without it.
    if !has_optimizer_file && states.values().any(|entries| !entries.is_empty()) {
        missing_files.insert(format!("{PARAMETERS_DIRECTORY}/{OPTIMIZER_FILE}"));
    }
    assembler.directory().check_missing(missing_files)?;
    models.add_untrained(&mut assembler)?;
    Ok(assembler.finish(None))
}

/// Reads the files of model states; of ZeRO 3 there is one for each rank.
fn read_models(directory: &CheckedDirectory) -> Result<ModelFiles, FileError> {
    let files = read_ranks(directory, is_model)?;
    let last_rank = files.keys().flatten().max();
    let are_cut = last_rank.is_some();
    if let Some(&rank) = last_rank {
        check_ranks(directory, &files, rank + 1, MODEL_END)?;
    }
    let models = ModelFiles {
        files: files.into_values().collect(),
        are_cut,
    };
    models.check_step(directory)?;
    Ok(models)
}

/// Adds trained parameters without elements, which have no files.
///
/// # Errors
/// A trained parameter with elements that is not there.
fn add_empty(
    assembler: &mut Assembler,
    models: &ModelFiles,
    trained: &Shapes,
) -> Result<(), FileError> {
    for (name, shape) in trained {
        let path = model_path(name);
        if assembler.has(&path) {
            continue;
        }
        if !shape.contains(&0) {
            let missing_file = format!("{PARAMETERS_DIRECTORY}/{name}/{PARAMETER_FILE}");
            assembler.directory().check_missing([missing_file])?;
        }
        if let Some(model) = models.files.first() {
            assembler.add_tensor(&path, &model.name, DType::F32, shape, Vec::new())?;
        }
    }
    Ok(())
}

/// The states of each parameter with elements: the names of its files, without `.pt`.
type States = BTreeMap<String, BTreeSet<String>>;

/// Returns the files of states that are missing.
///
/// DeepSpeed flattens the parameters of a group, and the optimizer has one state for all of them.
/// So each of them has the states of the others. Different groups may have different optimizers, or
/// none, but Adam has the same states in all of its groups.
fn find_missing_states(groups: &[Shapes], states: &States) -> BTreeSet<String> {
    let mut missing_files = BTreeSet::new();
    for group in groups {
        let parameters: Vec<(&String, &BTreeSet<String>)> = group
            .keys()
            .filter_map(|name| states.get_key_value(name))
            .collect();
        missing_files.extend(missing_states(&parameters, |_| true));
    }
    let of_adam: Vec<(&String, &BTreeSet<String>)> = states
        .iter()
        .filter(|(_, entries)| MOMENTS.iter().any(|moment| entries.contains(*moment)))
        .collect();
    missing_files.extend(missing_states(&of_adam, |entry| {
        ADAM_STATES.contains(&entry)
    }));
    missing_files
}

/// Returns the files of states that some of these parameters have and others lack, or as many of
/// them as an error names. Only states for which `is_compared` returns `true` count.
fn missing_states(
    parameters: &[(&String, &BTreeSet<String>)],
    is_compared: impl Fn(&str) -> bool,
) -> Vec<String> {
    let expected: BTreeSet<&String> = parameters
        .iter()
        .flat_map(|(_, entries)| entries.iter())
        .filter(|entry| is_compared(entry))
        .collect();
    let mut missing_files = Vec::new();
    for (name, entries) in parameters {
        for entry in &expected {
            if !entries.contains(*entry) {
                missing_files.push(format!("{PARAMETERS_DIRECTORY}/{name}/{entry}.pt"));
            }
            if missing_files.len() == MAX_LISTED_FILES {
                return missing_files;
            }
        }
    }
    missing_files
}

/// Adds what the optimizer keeps besides the tensors of parameters. ZeRO 3 also leaves one rank's
/// flat tensors there, which say nothing without those of the others.
fn add_optimizer(assembler: &mut Assembler) -> Result<(), FileError> {
    let name = format!("{PARAMETERS_DIRECTORY}/{OPTIMIZER_FILE}");
    let flat = FlatFile::read(assembler.directory(), &name)?;
    for (path, leaf) in flat.found.values() {
        let is_of_one_rank = match &path.0[..] {
            [PathPart::Key(first_key), PathPart::Key(second_key), ..]
                if first_key == "optimizer_state_dict" =>
            {
                second_key == "state"
            }
            [PathPart::Key(first_key), ..] => {
                first_key == ZERO_3_GROUPS || LAYOUT_KEYS.contains(&first_key.as_str())
            }
            _ => false,
        };
        if !is_of_one_rank {
            let prefix = [PathPart::Key("optim".to_owned())];
            let path = KeyPath([&prefix[..], &path.0[..]].concat());
            add_leaf(assembler, &flat, &path, leaf)?;
        }
    }
    Ok(())
}

/// A directory of a parameter.
struct Parameter<'p> {
    name: &'p str,
    files: Vec<String>,
    /// The shape that the model states list, if they list the parameter among the trained ones.
    shape: Option<&'p [usize]>,
    /// The names that share it.
    aliases: &'p [&'p str],
}

impl Parameter<'_> {
    /// Returns `true` if the directory has only a copy of what is in the model states.
    fn is_copy(&self, models: &ModelFiles) -> bool {
        self.shape.is_none() && self.files == [PARAMETER_FILE] && models.has(self.name)
    }

    /// Returns `true` if the parameter has no elements, and so no state either.
    fn is_empty(&self) -> bool {
        self.shape.is_some_and(|shape| shape.contains(&0))
    }

    /// Returns the names of its states.
    fn states(&self) -> BTreeSet<String> {
        self.files
            .iter()
            .filter_map(|file| file.strip_suffix(".pt"))
            .filter(|entry| *entry != PARAMETER_ENTRY)
            .map(str::to_owned)
            .collect()
    }

    /// Adds the tensors of the parameter, its own elements also under the names that share it.
    ///
    /// # Errors
    /// There is no `fp32.pt`; a file has no tensor; a moment has another shape.
    fn add(&self, assembler: &mut Assembler) -> Result<(), FileError> {
        if !self.files.iter().any(|file| file == PARAMETER_FILE) {
            let missing_file = format!("{PARAMETERS_DIRECTORY}/{}/{PARAMETER_FILE}", self.name);
            assembler.directory().check_missing([missing_file])?;
        }
        // The shapes of the parameter and of the states that have its shape.
        let mut shapes = Vec::new();
        for file in &self.files {
            let Some(entry) = file.strip_suffix(".pt") else {
                continue;
            };
            let file_name = format!("{PARAMETERS_DIRECTORY}/{}/{file}", self.name);
            let flat = FlatFile::read(assembler.directory(), &file_name)?;
            // A tensor lies in a dict, with notes on how it was cut; a count of steps, and all of
            // ZeRO 3, lies there by itself.
            let tensor_leaf = flat.found.get("param").or_else(|| flat.found.get(""));
            let (_, leaf) = tensor_leaf.ok_or_else(|| flat.malformed("it holds no `param`"))?;
            if let Leaf::Tensor(tensor, _) = leaf
                && (entry == PARAMETER_ENTRY || SHAPED_STATES.contains(&entry))
            {
                let shape = self.unflattened(tensor).unwrap_or(&tensor.shape);
                shapes.push((entry, shape.to_vec()));
            }
            if entry != PARAMETER_ENTRY {
                self.add_leaf(assembler, &flat, &state_path(self.name, entry), leaf)?;
                continue;
            }
            for name in std::iter::once(self.name).chain(self.aliases.iter().copied()) {
                self.add_leaf(assembler, &flat, &model_path(name), leaf)?;
            }
        }
        self.check_shapes(&shapes)
    }

    /// Checks that all of these shapes are that of the parameter, which is one of them. Each comes
    /// with the name of its file, without `.pt`.
    fn check_shapes(&self, shapes: &[(&str, Vec<usize>)]) -> Result<(), FileError> {
        let own = shapes.iter().find(|(entry, _)| *entry == PARAMETER_ENTRY);
        let Some((_, own_shape)) = own else {
            return Ok(());
        };
        for (entry, shape) in shapes {
            if shape != own_shape {
                return Err(FileError::Differing {
                    fqn: state_path(self.name, entry).flat_key(),
                    what: format!("has the shape {shape:?}, and its parameter {own_shape:?}"),
                    first: format!("{PARAMETERS_DIRECTORY}/{}/{PARAMETER_FILE}", self.name),
                    second: format!("{PARAMETERS_DIRECTORY}/{}/{entry}.pt", self.name),
                });
            }
        }
        Ok(())
    }

    /// Returns the shape of the parameter for a tensor that lies flat in its file; `None` for any
    /// other tensor.
    fn unflattened(&self, tensor: &TensorRef) -> Option<&[usize]> {
        self.shape
            .filter(|shape| shape.len() != 1 && tensor.shape == [shape.iter().product::<usize>()])
    }

    /// Adds a tensor or value. A tensor that lies flat in its file, as those of ZeRO 3 do, gets the
    /// shape of the parameter.
    fn add_leaf(
        &self,
        assembler: &mut Assembler,
        flat: &FlatFile,
        path: &KeyPath,
        leaf: &Leaf,
    ) -> Result<(), FileError> {
        if let Leaf::Tensor(tensor, None) = leaf
            && let Some(shape) = self.unflattened(tensor)
        {
            let pieces = flat.pieces(tensor, 0, shape, 0..tensor.shape[0])?;
            return assembler.add_tensor(path, &flat.name, tensor.dtype, shape, pieces);
        }
        add_leaf(assembler, flat, path, leaf)
    }
}
