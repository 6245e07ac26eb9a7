//! Looks up keys of a checkpoint. A missing key, or one of another kind, is an error.

use fsdp_layout::{DType, TensorBox};

use crate::error::{FileError, FormatError};
use crate::metadata::{Entry, Metadata, Replica, StorageInfo, TensorEntry};
use crate::payload::slot::Slot;
use crate::plan::{LoadPlanError, LoadRequest};
use crate::storage::checked_directory::CheckedDirectory;

/// Returns the entry of a tensor, or the error that there is none.
pub fn tensor_of<'m>(metadata: &'m Metadata, fqn: &str) -> Result<&'m TensorEntry, FileError> {
    let tensor = metadata.tensor(fqn);
    tensor.ok_or_else(|| lookup_error(metadata, fqn, "tensor"))
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

/// Returns where the bytes of a value are stored. A key that is missing, has a tensor, or is stored
/// nowhere is an error.
pub(crate) fn find_value<'m>(
    metadata: &'m Metadata,
    fqn: &str,
) -> Result<&'m StorageInfo, FileError> {
    let Some(Entry::Bytes(value)) = metadata.entries.get(fqn) else {
        return Err(lookup_error(metadata, fqn, "value"));
    };
    let stored = value.stored.as_ref();
    stored.ok_or_else(|| FileError::not_stored(fqn))
}

/// Returns the error of a key that is missing, or is not of the kind that is `wanted`: `tensor` or
/// `value`.
pub(crate) fn lookup_error(metadata: &Metadata, fqn: &str, wanted: &'static str) -> FileError {
    let fqn = fqn.to_owned();
    let saved = match metadata.entries.get(&fqn) {
        None => return LoadPlanError::Missing { fqn }.into(),
        Some(Entry::Tensor(_)) => "tensor",
        Some(Entry::Bytes(_)) => "value",
    };
    LoadPlanError::Kind { fqn, saved, wanted }.into()
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

/// Calls `fill` for each chunk of a tensor and each slot that overlap, with the box of the chunk,
/// its place and the slot. A chunk that is wanted and is stored nowhere is an error.
pub(crate) fn fill_from_chunks(
    fqn: &str,
    tensor: &TensorEntry,
    slots: &mut [Slot<'_>],
    fill: &dyn Fn(&TensorBox, &StorageInfo, &mut Slot<'_>) -> Result<(), FileError>,
) -> Result<(), FileError> {
    for chunk in &tensor.chunks {
        for slot in &mut *slots {
            if chunk.bounds.intersect(&slot.bounds).is_some() {
                let stored = chunk.stored.as_ref();
                let stored = stored.ok_or_else(|| FileError::not_stored(fqn))?;
                fill(&chunk.bounds, stored, slot)?;
            }
        }
    }
    Ok(())
}

/// Checks that a box of a tensor can be read from this copy of one of its chunks: that the copy has
/// a box, and that `dst` is as long as `bounds`. Returns the dtype of the tensor, and the box of
/// the whole copy.
pub(crate) fn check_replica<'r>(
    metadata: &Metadata,
    replica: &'r Replica,
    bounds: &TensorBox,
    dst: &[u8],
) -> Result<(DType, &'r TensorBox), FileError> {
    let fqn = &replica.fqn;
    let dtype = tensor_of(metadata, fqn)?.properties.dtype;
    let Some(copy_bounds) = &replica.bounds else {
        return Err(FileError::not_stored(fqn));
    };
    let given = dst.len() as u64;
    let planned = bounds.numel() as u64 * dtype.size_in_bytes();
    if given != planned {
        return Err(FileError::PayloadLength {
            fqn: fqn.to_owned(),
            given,
            planned,
        });
    }
    Ok((dtype, copy_bounds))
}

/// Returns the key of the value that says what the integers of a quantized tensor mean.
pub fn quantizer_key(fqn: &str) -> String {
    format!("{fqn}.quantizer")
}
