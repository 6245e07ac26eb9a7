//! What a checkpoint has under a key, or the error that it has no such thing.

use fsdp_layout::TensorBox;

use crate::error::FileError;
use crate::metadata::{Metadata, TensorEntry};
use crate::plan::LoadPlanError;

/// The entry of a tensor, or the error that it is none.
pub(crate) fn tensor_of<'m>(metadata: &'m Metadata, fqn: &str) -> Result<&'m TensorEntry, FileError> {
    metadata.tensor(fqn).ok_or_else(|| {
        let fqn = fqn.to_owned();
        match metadata.entries.contains_key(&fqn) {
            true => LoadPlanError::Kind { fqn, saved: "value", wanted: "tensor" }.into(),
            false => LoadPlanError::Missing { fqn }.into(),
        }
    })
}

/// The error that a key is no value.
pub(crate) fn no_value(metadata: &Metadata, fqn: &str) -> FileError {
    let fqn = fqn.to_owned();
    match metadata.tensor(&fqn) {
        Some(_) => LoadPlanError::Kind { fqn, saved: "tensor", wanted: "value" }.into(),
        None => LoadPlanError::Missing { fqn }.into(),
    }
}

/// Checks that a destination holds exactly the box.
pub(crate) fn check_length(fqn: &str, bounds: &TensorBox, element: u64, dst: &[u8]) -> Result<(), FileError> {
    let planned = bounds.numel() as u64 * element;
    match dst.len() as u64 == planned {
        true => Ok(()),
        false => Err(FileError::PayloadLength { fqn: fqn.to_owned(), given: dst.len() as u64, planned }),
    }
}
