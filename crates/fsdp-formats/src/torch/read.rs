//! One file of `torch.save` as a checkpoint.

use fsdp_layout::{KeyPath, PathPart};

use crate::error::FileError;
use crate::formats::assembled::{Assembled, Assembler};
use crate::formats::checkpoint::{Format, KeyFilter};
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::torch::flat::{FlatFile, Leaf, Selection};
use crate::zip::Directory;

/// Opens a file of `torch.save`, written by any version of torch. `archive` is the directory of its
/// records, if it has one. Very large values whose keys are not wanted may be left out.
///
/// Sharded tensors become whole tensors whose chunks are the parts of the ranks. In a file that one
/// of several ranks has written, the chunks of the other ranks are missing.
pub(crate) fn open(
    location: &Location,
    directory: CheckedDirectory,
    archive: Option<Directory>,
    is_wanted: KeyFilter<'_>,
) -> Result<Assembled, FileError> {
    let (_, name) = location.split()?;
    let mut assembler = Assembler::new(Format::Torch, location.name(), directory);
    let selection = Selection {
        is_wanted,
        ..Selection::default()
    };
    let flat = FlatFile::read_with(assembler.directory(), name, archive, selection)?;
    add(&mut assembler, &flat, &[])?;
    Ok(assembler.finish(Some(flat.structure)))
}

/// Adds the tensors and values of a file. `prefix` comes before the paths of their keys.
pub(crate) fn add(
    assembler: &mut Assembler,
    flat: &FlatFile,
    prefix: &[PathPart],
) -> Result<(), FileError> {
    for (path, leaf) in flat.found.values() {
        let path = KeyPath([prefix, &path.0].concat());
        add_leaf(assembler, flat, &path, leaf)?;
    }
    Ok(())
}

/// Adds one tensor or value of a file at a path, a tensor with its quantizer if it has one.
pub(crate) fn add_leaf(
    assembler: &mut Assembler,
    flat: &FlatFile,
    path: &KeyPath,
    leaf: &Leaf,
) -> Result<(), FileError> {
    let (dtype, shape, parts) = match leaf {
        Leaf::Value(value) => return assembler.add_value(path, &flat.name, value.clone()),
        Leaf::Tensor(tensor, _) => (tensor.dtype, &tensor.shape, std::slice::from_ref(tensor)),
        Leaf::Sharded(sharded) => (sharded.dtype, &sharded.shape, &sharded.parts[..]),
    };
    let pieces = parts
        .iter()
        .map(|part| flat.piece(part))
        .collect::<Result<Vec<_>, _>>()?;
    assembler.add_tensor(path, &flat.name, dtype, shape, pieces)?;
    match leaf {
        Leaf::Tensor(_, Some(quantizer)) => {
            assembler.add_quantizer(path.flat_key(), &flat.name, quantizer.clone())
        }
        _ => Ok(()),
    }
}
