//! The Universal Checkpoint: a directory for each parameter, with a file for each of its tensors.

use fsdp_layout::PathPart;

use super::names::{data_rank, is_model};
use super::state::{add_rest, model_path, shared_parameters, state_path};
use crate::error::FileError;
use crate::formats::assembled::{Assembled, Assembler};
use crate::formats::checkpoint::Format;
use crate::formats::read::OpenOptions;
use crate::storage::backend::EntryKind;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::torch::flat::FlatFile;
use crate::torch::read::{add, add_leaf};

/// The directory of the parameters.
const PARAMETERS_DIRECTORY: &str = "zero";
/// The name, without `.pt`, of the file of a parameter's own elements.
const PARAMETER_ENTRY: &str = "fp32";
/// The file of what the optimizer keeps besides.
const OPTIMIZER_FILE: &str = "optimizer_state.pt";

/// Returns `true` if this directory, with entries of these names, is a Universal Checkpoint.
pub(crate) fn is_there(location: &Location, names: &[String]) -> Result<bool, FileError> {
    let is_listed = names.iter().any(|name| name == PARAMETERS_DIRECTORY)
        && names.iter().any(|name| is_model(name));
    Ok(is_listed
        && location.join(PARAMETERS_DIRECTORY).storage()?.kind()? == Some(EntryKind::Directory))
}

/// Opens such a directory. A directory without its file of model states has no buffers.
pub(crate) fn open(location: &Location, options: OpenOptions) -> Result<Assembled, FileError> {
    let directory = CheckedDirectory::open_covered(location, options.verify)?;
    let mut models = directory.names()?;
    models.retain(|name| is_model(name));
    for name in &models {
        data_rank(name).map_err(|source| directory.file_error(name, source))?;
    }
    let mut assembler = Assembler::new(Format::DeepSpeedUniversal, location.name(), directory);
    let mut model = None;
    if let Some(name) = models.first() {
        let flat = FlatFile::read(assembler.directory(), name, None)?;
        add_rest(&mut assembler, &flat)?;
        model = Some(flat);
    }
    let aliases = model.as_ref().map_or_else(Vec::new, shared_parameters);
    let parameters_directory = location.join(PARAMETERS_DIRECTORY);
    for parameter in parameters_directory.names()? {
        let parameter_directory = parameters_directory.join(&parameter);
        match parameter_directory.storage()?.kind()? {
            Some(EntryKind::Directory) => {
                // The names that share the parameter have the same elements.
                let sharing_names: Vec<&str> = aliases
                    .iter()
                    .filter(|(_, stored_name)| *stored_name == parameter)
                    .map(|(name, _)| *name)
                    .collect();
                add_parameter(
                    &mut assembler,
                    &parameter_directory,
                    &parameter,
                    &sharing_names,
                )?;
            }
            _ if parameter == OPTIMIZER_FILE => {
                let name = format!("{PARAMETERS_DIRECTORY}/{OPTIMIZER_FILE}");
                let flat = FlatFile::read(assembler.directory(), &name, None)?;
                add(&mut assembler, &flat, &[PathPart::Key("optim".to_owned())])?;
            }
            _ => {}
        }
    }
    Ok(assembler.finish(None))
}

/// Adds the tensors of one parameter, those of the parameter itself also under `sharing_names`.
///
/// # Errors
/// There is no `fp32.pt`; a file has no tensor.
fn add_parameter(
    assembler: &mut Assembler,
    parameter_directory: &Location,
    parameter: &str,
    sharing_names: &[&str],
) -> Result<(), FileError> {
    let files = parameter_directory.names()?;
    if !files.iter().any(|file| file == "fp32.pt") {
        let missing_file = format!("{PARAMETERS_DIRECTORY}/{parameter}/fp32.pt");
        assembler.directory().check_missing([missing_file])?;
    }
    for file in &files {
        let Some(entry) = file.strip_suffix(".pt") else {
            continue;
        };
        let name = format!("{PARAMETERS_DIRECTORY}/{parameter}/{file}");
        let flat = FlatFile::read(assembler.directory(), &name, None)?;
        // A tensor lies in a dict, with notes on how it was cut; a count of steps lies there by
        // itself.
        let tensor_leaf = flat.found.get("param").or_else(|| flat.found.get(""));
        let (_, leaf) = tensor_leaf.ok_or_else(|| flat.malformed("it holds no `param`"))?;
        if entry != PARAMETER_ENTRY {
            add_leaf(assembler, &flat, &state_path(parameter, entry), leaf)?;
            continue;
        }
        add_leaf(assembler, &flat, &model_path(parameter), leaf)?;
        for sharing_name in sharing_names {
            add_leaf(assembler, &flat, &model_path(sharing_name), leaf)?;
        }
    }
    Ok(())
}
