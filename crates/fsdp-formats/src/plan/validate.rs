//! Checks that chunks lie inside their tensor, do not overlap, and cover it.

use fsdp_layout::TensorBox;
use fsdp_layout::boxes::checked_numel;
use thiserror::Error;

use super::overlap::find_overlap;
use crate::metadata::Metadata;

/// The error of chunks that do not make up their tensor.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ChunkError {
    /// A chunk has other dimensions than the tensor, or reaches beyond it.
    #[error("chunk {bounds} does not lie in the tensor's shape {shape:?}")]
    OutOfBounds {
        /// The chunk.
        bounds: TensorBox,
        /// The shape.
        shape: Vec<usize>,
    },
    /// Two chunks share elements.
    #[error("chunks {first} and {second} overlap")]
    Overlap {
        /// One of them.
        first: TensorBox,
        /// The other one.
        second: TensorBox,
    },
    /// Some elements are in no chunk.
    #[error("the chunks hold {covered} of {numel} elements")]
    Incomplete {
        /// Elements in chunks.
        covered: usize,
        /// Elements of the tensor.
        numel: usize,
    },
    /// The shape's element count does not fit this machine.
    #[error("the shape {shape:?} is too large")]
    Shape {
        /// The shape.
        shape: Vec<usize>,
    },
}

/// Checks that the chunks lie inside a tensor of this shape and share no element, and returns how
/// many they hold. Empty chunks need only lie inside. `n` chunks of a grid take about `n log n`.
/// Long chunks that overlap along many dimensions, which only a crafted file has, take more.
pub fn validate_chunks<'c>(
    shape: &[usize],
    chunks: impl IntoIterator<Item = &'c TensorBox>,
) -> Result<usize, ChunkError> {
    checked_numel(shape).ok_or_else(|| ChunkError::Shape {
        shape: shape.to_vec(),
    })?;
    let mut boxes = Vec::new();
    for bounds in chunks {
        if !bounds.fits(shape) {
            return Err(ChunkError::OutOfBounds {
                bounds: bounds.clone(),
                shape: shape.to_vec(),
            });
        }
        if !bounds.is_empty() {
            boxes.push(bounds);
        }
    }
    if let Some((first, second)) = find_overlap(shape, &boxes) {
        return Err(ChunkError::Overlap {
            first: first.clone(),
            second: second.clone(),
        });
    }
    // The boxes are disjoint and inside the tensor, so the sum cannot exceed its number of
    // elements.
    Ok(boxes.iter().map(|bounds| bounds.numel()).sum())
}

/// Checks the same as [`validate_chunks`], and that every element is in a chunk.
pub(crate) fn validate_cover<'c>(
    shape: &[usize],
    chunks: impl IntoIterator<Item = &'c TensorBox>,
) -> Result<(), ChunkError> {
    let covered = validate_chunks(shape, chunks)?;
    let numel = checked_numel(shape).expect("the shape was checked with the chunks");
    if covered != numel {
        return Err(ChunkError::Incomplete { covered, numel });
    }
    Ok(())
}

/// Checks every tensor of a checkpoint: bounds, overlaps, coverage. Returns the first key that
/// fails, and how.
pub fn validate_metadata(metadata: &Metadata) -> Result<(), (String, ChunkError)> {
    for (fqn, tensor) in metadata.tensors() {
        let chunks = tensor.chunks.iter().map(|chunk| &chunk.bounds);
        validate_cover(&tensor.shape, chunks).map_err(|error| (fqn.to_owned(), error))?;
    }
    Ok(())
}
