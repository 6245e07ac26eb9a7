//! Parameters in flat tensors.

use std::ops::Range;

use fsdp_layout::boxes::{boxes_of_flat_range, row_major_strides};

use crate::error::{FileError, FormatError};
use crate::formats::assembled::Piece;
use crate::strided::StridedLayout;
use crate::torch::flat::{FlatFile, Leaf};
use crate::torch::tensor_ref::TensorRef;

impl FlatFile {
    /// Makes the error of a file of DeepSpeed's.
    pub(super) fn malformed(&self, reason: impl ToString) -> FileError {
        self.error(FormatError::malformed("DeepSpeed checkpoint", reason))
    }

    /// Returns a flat tensor by its key.
    pub(super) fn tensor(&self, key: &str) -> Option<&TensorRef> {
        match self.found.get(key) {
            Some((_, Leaf::Tensor(tensor, _))) => Some(tensor),
            _ => None,
        }
    }

    /// Returns the boxes of a tensor of `shape` whose elements `elements` lie in a flat tensor,
    /// from position `flat_start` on.
    pub(super) fn pieces(
        &self,
        tensor: &TensorRef,
        flat_start: usize,
        shape: &[usize],
        elements: Range<usize>,
    ) -> Result<Vec<Piece>, FileError> {
        match (&tensor.shape[..], &tensor.layout.strides[..]) {
            ([size], [1]) if flat_start + elements.len() <= *size => {}
            _ => {
                return Err(self.malformed(format!(
                    "a flat tensor of shape {:?} is too short for its parameters",
                    tensor.shape
                )));
            }
        }
        let piece = self.piece(tensor)?;
        let mut offset = tensor.layout.offset + flat_start as u64;
        let mut pieces = Vec::new();
        for bounds in boxes_of_flat_range(shape, elements) {
            let numel = bounds.numel() as u64;
            let layout = StridedLayout {
                strides: row_major_strides(&bounds.sizes),
                bounds,
                offset,
            };
            pieces.push(Piece {
                layout,
                ..piece.clone()
            });
            offset += numel;
        }
        Ok(pieces)
    }
}
