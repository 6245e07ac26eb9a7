//! The Universal Checkpoint: a directory for each parameter, with a file for each of its tensors.

use fsdp_layout::PathPart;

use super::names::{data_rank, is_model};
use super::state::{add_rest, model_path, shared, state_path};
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
const ZERO: &str = "zero";
/// The file of a parameter's own elements.
const FP32: &str = "fp32";
/// The file of what the optimizer keeps besides.
const OPTIMIZER: &str = "optimizer_state.pt";

/// Returns `true` if this directory, with entries of these names, is a Universal Checkpoint.
pub(crate) fn is_there(location: &Location, names: &[String]) -> Result<bool, FileError> {
    let is_listed =
        names.iter().any(|name| name == ZERO) && names.iter().any(|name| is_model(name));
    Ok(is_listed && location.join(ZERO).storage()?.kind()? == Some(EntryKind::Directory))
}

/// Opens such a directory.
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
    let aliases = model.as_ref().map_or_else(Vec::new, shared);
    let zero = location.join(ZERO);
    for parameter in zero.names()? {
        let place = zero.join(&parameter);
        match place.storage()?.kind()? {
            Some(EntryKind::Directory) => {
                // The others that share the parameter have the same elements.
                let others: Vec<&str> = aliases
                    .iter()
                    .filter(|(_, of)| *of == parameter)
                    .map(|(name, _)| *name)
                    .collect();
                add_parameter(&mut assembler, &place, &parameter, &others)?;
            }
            _ if parameter == OPTIMIZER => {
                let name = format!("{ZERO}/{OPTIMIZER}");
                let flat = FlatFile::read(assembler.directory(), &name, None)?;
                add(&mut assembler, &flat, &[PathPart::Key("optim".to_owned())])?;
            }
            _ => {}
        }
    }
    Ok(assembler.finish(None))
}

/// Adds the tensors of one parameter.
fn add_parameter(
    assembler: &mut Assembler,
    place: &Location,
    parameter: &str,
    others: &[&str],
) -> Result<(), FileError> {
    let files = place.names()?;
    if !files.iter().any(|file| file == "fp32.pt") {
        let missing = format!("{ZERO}/{parameter}/fp32.pt");
        assembler.directory().check_missing([missing])?;
    }
    for file in &files {
        let Some(entry) = file.strip_suffix(".pt") else {
            continue;
        };
        let name = format!("{ZERO}/{parameter}/{file}");
        let flat = FlatFile::read(assembler.directory(), &name, None)?;
        // A tensor lies in a dict, with notes on how it was cut; a count of steps lies there by
        // itself.
        let found = flat.found.get("param").or_else(|| flat.found.get(""));
        let (_, leaf) = found.ok_or_else(|| flat.malformed("it holds no `param`"))?;
        if entry != FP32 {
            add_leaf(assembler, &flat, &state_path(parameter, entry), leaf)?;
            continue;
        }
        add_leaf(assembler, &flat, &model_path(parameter), leaf)?;
        for other in others {
            add_leaf(assembler, &flat, &model_path(other), leaf)?;
        }
    }
    Ok(())
}
