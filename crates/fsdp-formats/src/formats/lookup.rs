//! Looks up keys of a checkpoint. A missing key, or one of another kind, is an error.

use fsdp_layout::TensorBox;

use crate::error::{FileError, FormatError};
use crate::metadata::{Entry, Metadata, StorageInfo, TensorEntry};
use crate::plan::{LoadPlanError, LoadRequest};
use crate::storage::checked_directory::CheckedDirectory;

/// Returns the entry of a tensor, or the error that there is none.
pub fn tensor_of<'m>(metadata: &'m Metadata, fqn: &str) -> Result<&'m TensorEntry, FileError> {
    let error = match metadata.entries.get(fqn) {
        Some(Entry::Tensor(tensor)) => return Ok(tensor),
        Some(Entry::Bytes(_)) => LoadPlanError::Kind {
            fqn: fqn.to_owned(),
            saved: "value",
            wanted: "tensor",
        },
        None => LoadPlanError::Missing {
            fqn: fqn.to_owned(),
        },
    };
    Err(error.into())
}

/// Makes the request for one box of a tensor, in the dtype and shape that it has.
pub(crate) fn request_of(
    metadata: &Metadata,
    fqn: &str,
    bounds: &TensorBox,
) -> Result<LoadRequest, FileError> {
    let tensor = tensor_of(metadata, fqn)?;
    Ok(LoadRequest {
        fqn: fqn.to_owned(),
        dtype: tensor.properties.dtype,
        shape: tensor.shape.clone(),
        boxes: vec![bounds.clone()],
    })
}

/// Returns the error that a key is not a value.
pub(crate) fn no_value(metadata: &Metadata, fqn: &str) -> FileError {
    let fqn = fqn.to_owned();
    let error = match metadata.tensor(&fqn) {
        Some(_) => LoadPlanError::Kind {
            fqn,
            saved: "tensor",
            wanted: "value",
        },
        None => LoadPlanError::Missing { fqn },
    };
    error.into()
}

/// Returns the error of a tensor or value that is stored in a file of `directory`.
pub(crate) fn item_error(
    directory: &CheckedDirectory,
    fqn: &str,
    stored: &StorageInfo,
    source: FormatError,
) -> FileError {
    FileError::Item {
        fqn: fqn.to_owned(),
        path: directory.path().join(&stored.relative_path),
        offset: stored.offset,
        source,
    }
}

/// Checks that a destination is as long as its box.
pub(crate) fn check_length(
    fqn: &str,
    bounds: &TensorBox,
    element: u64,
    dst: &[u8],
) -> Result<(), FileError> {
    let given = dst.len() as u64;
    let planned = bounds.numel() as u64 * element;
    if given != planned {
        return Err(FileError::PayloadLength {
            fqn: fqn.to_owned(),
            given,
            planned,
        });
    }
    Ok(())
}

/// Returns the key of the value that says what the integers of a quantized tensor mean.
pub fn quantizer_key(fqn: &str) -> String {
    format!("{fqn}.quantizer")
}
