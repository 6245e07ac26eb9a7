//! Parameters in flat tensors.

use std::ops::Range;
use std::sync::Arc;

use fsdp_layout::boxes::{boxes_of_flat_range, row_major_strides};

use crate::error::{FileError, FormatError};
use crate::formats::assembled::Piece;
use crate::storage::checked_directory::CheckedDirectory;
use crate::strided::StridedLayout;
use crate::torch::flat::{FlatFile, Leaf};
use crate::torch::tensor_ref::TensorRef;

/// A file of `torch.save`, and its name.
pub(super) struct Named {
    pub(super) name: Arc<str>,
    pub(super) flat: FlatFile,
}

impl Named {
    /// Makes an error of this file.
    pub(super) fn error(&self, directory: &CheckedDirectory, reason: String) -> FileError {
        directory.file_error(
            &self.name,
            FormatError::Malformed {
                what: "DeepSpeed checkpoint",
                reason,
            },
        )
    }

    /// Returns a flat tensor by its key.
    pub(super) fn tensor(&self, key: &str) -> Option<&TensorRef> {
        match self.flat.found.get(key) {
            Some((_, Leaf::Tensor(tensor, _))) => Some(tensor),
            _ => None,
        }
    }

    /// Returns the boxes of a tensor of `shape` whose elements `range` lie in a flat tensor, from
    /// position `at` on.
    pub(super) fn pieces(
        &self,
        directory: &CheckedDirectory,
        tensor: &TensorRef,
        at: usize,
        shape: &[usize],
        range: Range<usize>,
    ) -> Result<Vec<Piece>, FileError> {
        let is_flat = matches!((&tensor.shape[..], &tensor.layout.strides[..]), ([size], [1]) if at + range.len() <= *size);
        if !is_flat {
            let reason = format!(
                "a flat tensor of shape {:?} is too short for its parameters",
                tensor.shape
            );
            return Err(self.error(directory, reason));
        }
        let piece = self.flat.piece(&self.name, tensor);
        let piece = piece.map_err(|source| directory.file_error(&self.name, source))?;
        let mut at = tensor.layout.offset + at as u64;
        let mut pieces = Vec::new();
        for bounds in boxes_of_flat_range(shape, range) {
            let (strides, elements) = (row_major_strides(&bounds.sizes), bounds.numel() as u64);
            pieces.push(Piece {
                layout: StridedLayout {
                    bounds,
                    offset: at,
                    strides,
                },
                ..piece.clone()
            });
            at += elements;
        }
        Ok(pieces)
    }
}
