//! The Universal Checkpoint: a directory for each parameter, with a file for each of its tensors.

use std::sync::Arc;

use fsdp_layout::{KeyPath, PathPart};

use super::flat::Named;
use super::names::{data_rank, is_model};
use super::state::{add_rest, model_path, shared, state_path};
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Assembled, Assembler};
use crate::formats::checkpoint::Format;
use crate::formats::read::OpenOptions;
use crate::storage::backend::{EntryKind, Links};
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::torch::read::{add, add_leaf, read_flat};

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
    let directory = CheckedDirectory::open(location, options.verify, Links::Follow)?;
    directory.check_covered()?;
    let models: Vec<String> = directory
        .names()?
        .into_iter()
        .filter(|name| is_model(name))
        .collect();
    for name in &models {
        data_rank(name).map_err(|source| directory.file_error(name, source))?;
    }
    let mut assembler = Assembler::new(Format::DeepSpeedUniversal, location.name(), directory);
    let mut aliases = Vec::new();
    if let Some(name) = models.first() {
        let flat = read_flat(assembler.directory(), name)?;
        let model = Named {
            name: Arc::from(name.as_str()),
            flat,
        };
        add_rest(&mut assembler, &model)?;
        aliases.extend(
            shared(&model)
                .into_iter()
                .map(|(name, of)| (name.to_owned(), of.to_owned())),
        );
    }
    let zero = location.join(ZERO);
    for parameter in zero.names()? {
        let place = zero.join(&parameter);
        match place.storage()?.kind()? {
            Some(EntryKind::Directory) => {
                // The others that share the parameter have the same elements.
                let others = aliases
                    .iter()
                    .filter(|(_, of)| *of == parameter)
                    .map(|(name, _)| name.as_str());
                add_parameter(&mut assembler, &place, &parameter, others.collect())?;
            }
            _ if parameter == OPTIMIZER => {
                let name: Arc<str> = Arc::from(format!("{ZERO}/{OPTIMIZER}"));
                let flat = read_flat(assembler.directory(), &name)?;
                let prefix = PathPart::Key("optim".to_owned());
                add(&mut assembler, &name, &flat, &mut |_| {
                    Some(vec![prefix.clone()])
                })?;
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
    others: Vec<&str>,
) -> Result<(), FileError> {
    let files = place.names()?;
    if !files.iter().any(|file| file == "fp32.pt") {
        let files = vec![format!("{ZERO}/{parameter}/fp32.pt")];
        return Err(FileError::MissingFiles {
            path: assembler.directory().path().to_owned(),
            files,
        });
    }
    for file in &files {
        let Some(entry) = file.strip_suffix(".pt") else {
            continue;
        };
        let name: Arc<str> = Arc::from(format!("{ZERO}/{parameter}/{file}"));
        let flat = read_flat(assembler.directory(), &name)?;
        let path: KeyPath = if entry == FP32 {
            model_path(parameter)
        } else {
            state_path(parameter, entry)
        };
        // A tensor lies in a dict, with notes on how it was cut; a count of steps lies there by
        // itself.
        let Some((_, leaf)) = flat.found.get("param").or_else(|| flat.found.get("")) else {
            let reason = "it holds no `param`".to_owned();
            let source = FormatError::Malformed {
                what: "DeepSpeed checkpoint",
                reason,
            };
            return Err(assembler.directory().file_error(&name, source));
        };
        add_leaf(assembler, &name, &flat, &path, leaf)?;
        for other in others.iter().filter(|_| entry == FP32) {
            add_leaf(assembler, &name, &flat, &model_path(other), leaf)?;
        }
    }
    Ok(())
}
