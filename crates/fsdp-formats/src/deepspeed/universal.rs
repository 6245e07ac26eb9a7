//! The Universal Checkpoint: a directory for each parameter, with a file for each of its tensors.
//!
//! `ds_to_universal.py` also makes a directory of each other name in the model's state dict, with a
//! copy of its tensor as `f32`: of buffers, frozen parameters, and the second names of shared ones.
//! These are read from the model states, where they have their own dtype, and shared ones have the
//! elements of the parameter that was trained.

use std::collections::{BTreeMap, HashMap};

use fsdp_layout::{DType, KeyPath, PathPart};

use super::names::{MODEL_END, data_rank, is_model};
use super::state::{
    Shapes, add_rest, model_path, param_shapes, read_states, shared_parameters, state_path,
};
use super::untrained::ModelFiles;
use super::zero::{LAYOUT_KEYS, ZERO_3_GROUPS, check_ranks};
use crate::error::FileError;
use crate::formats::assembled::{Assembled, Assembler};
use crate::formats::checkpoint::Format;
use crate::formats::read::OpenOptions;
use crate::storage::backend::EntryKind;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::torch::flat::{FlatFile, Leaf};
use crate::torch::read::add_leaf;

/// The directory of the parameters.
const PARAMETERS_DIRECTORY: &str = "zero";
/// The name, without `.pt`, of the file of a parameter's own elements.
const PARAMETER_ENTRY: &str = "fp32";
/// The file of a parameter's own elements.
const PARAMETER_FILE: &str = "fp32.pt";
/// The file of what the optimizer keeps besides.
const OPTIMIZER_FILE: &str = "optimizer_state.pt";

/// Returns `true` if this directory, with entries of these names, is a Universal Checkpoint.
pub(crate) fn is_there(location: &Location, names: &[String]) -> Result<bool, FileError> {
    let is_listed = names.iter().any(|name| name == PARAMETERS_DIRECTORY)
        && names.iter().any(|name| is_model(name));
    Ok(is_listed
        && location.join(PARAMETERS_DIRECTORY).storage()?.kind()? == Some(EntryKind::Directory))
}

/// Returns the files of the parameters in such a directory, relative to it. DeepSpeed needs the
/// copies too, which are not read here.
pub fn parameter_files(location: &Location) -> Result<Vec<String>, FileError> {
    let parameters_directory = location.join(PARAMETERS_DIRECTORY);
    let mut files = Vec::new();
    for name in parameters_directory.names()? {
        let parameter_directory = parameters_directory.join(&name);
        if parameter_directory.storage()?.kind()? == Some(EntryKind::Directory) {
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
/// A parameter that the model states list, and that has no directory.
pub(crate) fn open(location: &Location, options: OpenOptions) -> Result<Assembled, FileError> {
    let directory = CheckedDirectory::open_covered(location, options.verify)?;
    let models = read_models(&directory)?;
    let mut assembler = Assembler::new(Format::DeepSpeedUniversal, location.name(), directory);
    let mut trained = Shapes::new();
    // The names that share a trained parameter, by the name that it is stored under.
    let mut aliases: HashMap<&str, Vec<&str>> = HashMap::new();
    if let Some(model) = models.files.first() {
        add_rest(&mut assembler, model)?;
        trained = param_shapes(model)?.into_iter().flatten().collect();
        for (alias, stored_name) in shared_parameters(model) {
            aliases.entry(stored_name).or_default().push(alias);
        }
    }
    let parameters_directory = location.join(PARAMETERS_DIRECTORY);
    for name in parameters_directory.names()? {
        let parameter_directory = parameters_directory.join(&name);
        if parameter_directory.storage()?.kind()? != Some(EntryKind::Directory) {
            if name == OPTIMIZER_FILE {
                add_optimizer(&mut assembler)?;
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
        }
    }
    add_empty(&mut assembler, &models, &trained)?;
    models.add_untrained(&mut assembler)?;
    Ok(assembler.finish(None))
}

/// Reads the files of model states; of ZeRO 3 there is one for each rank.
fn read_models(directory: &CheckedDirectory) -> Result<ModelFiles, FileError> {
    let mut files = BTreeMap::new();
    for name in directory.names()? {
        if is_model(&name) {
            let rank = data_rank(&name).map_err(|source| directory.file_error(&name, source))?;
            files.insert(rank, read_states(directory, &name)?);
        }
    }
    let last_rank = files.keys().flatten().max();
    let are_cut = last_rank.is_some();
    if let Some(&rank) = last_rank {
        check_ranks(directory, &files, rank + 1, MODEL_END)?;
    }
    Ok(ModelFiles {
        files: files.into_values().collect(),
        are_cut,
    })
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

    /// Adds the tensors of the parameter, its own elements also under the names that share it.
    ///
    /// # Errors
    /// There is no `fp32.pt`; a file has no tensor.
    fn add(&self, assembler: &mut Assembler) -> Result<(), FileError> {
        if !self.files.iter().any(|file| file == PARAMETER_FILE) {
            let missing_file = format!("{PARAMETERS_DIRECTORY}/{}/{PARAMETER_FILE}", self.name);
            assembler.directory().check_missing([missing_file])?;
        }
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
            if entry != PARAMETER_ENTRY {
                self.add_leaf(assembler, &flat, &state_path(self.name, entry), leaf)?;
                continue;
            }
            for name in std::iter::once(self.name).chain(self.aliases.iter().copied()) {
                self.add_leaf(assembler, &flat, &model_path(name), leaf)?;
            }
        }
        Ok(())
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
        if let (Leaf::Tensor(tensor, None), Some(shape)) = (leaf, self.shape)
            && shape.len() != 1
            && tensor.shape == [shape.iter().product::<usize>()]
        {
            let pieces = flat.pieces(tensor, 0, shape, 0..tensor.shape[0])?;
            return assembler.add_tensor(path, &flat.name, tensor.dtype, shape, pieces);
        }
        add_leaf(assembler, flat, path, leaf)
    }
}
