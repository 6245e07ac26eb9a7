//! One file of `torch.save` as a checkpoint.

use std::sync::Arc;

use fsdp_layout::{KeyPath, PathPart};
use tracing::warn;

use crate::error::FileError;
use crate::formats::assembled::{Assembled, Assembler};
use crate::formats::checkpoint::Format;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::torch::flat::{FlatFile, Leaf};
use crate::torch::zip::Directory;

/// Opens a file of `torch.save`, written by any version of torch. `archive` is the directory of its
/// records, if it has one.
///
/// Sharded tensors become whole tensors whose chunks are the parts of the ranks. In a file that one
/// of several ranks has written, the chunks of the other ranks are missing.
pub(crate) fn open(
    location: &Location,
    directory: CheckedDirectory,
    archive: Option<Directory>,
) -> Result<Assembled, FileError> {
    let (_, name) = location.split()?;
    let mut assembler = Assembler::new(Format::Torch, location.name(), directory);
    let name: Arc<str> = Arc::from(name);
    let file = assembler.directory().file(&name)?;
    let flat = match archive {
        Some(archive) => FlatFile::read_archive(&*file, archive),
        None => FlatFile::read(&*file),
    };
    let flat = flat.map_err(|source| assembler.directory().file_error(&name, source))?;
    warn_of_attributes(assembler.directory(), &name, &flat);
    // All keys are taken, without a prefix.
    add(&mut assembler, &name, &flat, &mut |_| Some(Vec::new()))?;
    Ok(assembler.finish(Some(flat.structure)))
}

/// Reads the state dict of one file, as flat keys. Tensors are located, but not read. Logs a
/// warning if some tensors have a class or attributes in Python that are not kept.
pub(crate) fn read_flat(directory: &CheckedDirectory, name: &str) -> Result<FlatFile, FileError> {
    let file = directory.file(name)?;
    let flat = FlatFile::read(&*file).map_err(|source| directory.file_error(name, source))?;
    warn_of_attributes(directory, name, &flat);
    Ok(flat)
}

/// Logs a warning if some tensors have a class or attributes in Python that are not kept.
fn warn_of_attributes(directory: &CheckedDirectory, name: &str, flat: &FlatFile) {
    let simplified: Vec<&str> = flat.tensors_without_attributes().collect();
    if let [first, ..] = simplified[..] {
        let path = directory.path().join(name).display().to_string();
        let tensors = simplified.len();
        warn!(%path, tensors, first, "some tensors have a class or attributes of their own in Python, which are not kept");
    }
}

/// Adds the tensors and values of a file. `prefix` returns the parts to put before the path of a
/// key, or `None` to leave the key out.
pub(crate) fn add(
    assembler: &mut Assembler,
    name: &Arc<str>,
    flat: &FlatFile,
    prefix: &mut dyn FnMut(&str) -> Option<Vec<PathPart>>,
) -> Result<(), FileError> {
    for (fqn, (path, leaf)) in &flat.found {
        let Some(mut parts) = prefix(fqn) else {
            continue;
        };
        parts.extend(path.0.iter().cloned());
        add_leaf(assembler, name, flat, &KeyPath(parts), leaf)?;
    }
    Ok(())
}

/// Adds one tensor or value of a file at a path.
pub(crate) fn add_leaf(
    assembler: &mut Assembler,
    name: &Arc<str>,
    flat: &FlatFile,
    path: &KeyPath,
    leaf: &Leaf,
) -> Result<(), FileError> {
    let (dtype, shape, parts) = match leaf {
        Leaf::Value(value) => return assembler.add_value(path, name, value.clone()),
        Leaf::Tensor(tensor, _) => (tensor.dtype, &tensor.shape, std::slice::from_ref(tensor)),
        Leaf::Sharded(sharded) => (sharded.dtype, &sharded.shape, &sharded.parts[..]),
    };
    let pieces = parts
        .iter()
        .map(|part| flat.piece(name, part))
        .collect::<Result<Vec<_>, _>>();
    let pieces = pieces.map_err(|source| assembler.directory().file_error(name, source))?;
    assembler.add_tensor(path, name, dtype, shape, pieces)?;
    match leaf {
        Leaf::Tensor(_, Some(quantizer)) => {
            assembler.add_quantizer(path.flat_key(), name, quantizer.clone())
        }
        _ => Ok(()),
    }
}
