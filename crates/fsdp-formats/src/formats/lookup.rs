//! Looks up keys of a checkpoint. A missing key, or one of another kind, is an error.

use fsdp_layout::TensorBox;

use crate::error::FileError;
use crate::metadata::{Metadata, TensorEntry};
use crate::plan::{LoadPlanError, LoadRequest};

/// Returns the entry of a tensor, or the error that there is none.
pub fn tensor_of<'m>(metadata: &'m Metadata, fqn: &str) -> Result<&'m TensorEntry, FileError> {
    metadata.tensor(fqn).ok_or_else(|| {
        let is_value = metadata.entries.contains_key(fqn);
        let fqn = fqn.to_owned();
        if is_value {
            LoadPlanError::Kind {
                fqn,
                saved: "value",
                wanted: "tensor",
            }
            .into()
        } else {
            LoadPlanError::Missing { fqn }.into()
        }
    })
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
pub fn no_value(metadata: &Metadata, fqn: &str) -> FileError {
    let is_tensor = metadata.tensor(fqn).is_some();
    let fqn = fqn.to_owned();
    if is_tensor {
        LoadPlanError::Kind {
            fqn,
            saved: "tensor",
            wanted: "value",
        }
        .into()
    } else {
        LoadPlanError::Missing { fqn }.into()
    }
}

/// Checks that a destination is as long as its box.
pub(crate) fn check_length(
    fqn: &str,
    bounds: &TensorBox,
    element: u64,
    dst: &[u8],
) -> Result<(), FileError> {
    let (given, planned) = (dst.len() as u64, bounds.numel() as u64 * element);
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
