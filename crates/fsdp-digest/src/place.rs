//! The place of a box in its tensor.

use fsdp_layout::TensorBox;
use fsdp_layout::boxes::{checked_numel, row_major_strides};

use crate::error::DigestError;

/// The place of a box's bytes in the string of the whole tensor's bytes. Made once for a box that
/// is digested in pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoxPlace {
    /// The bytes of the box.
    length: u64,
    /// The bytes that follow each other in both the box and the tensor.
    run_len: u64,
    /// The position of the box's first byte.
    start_offset: u64,
    /// Sizes of the dimensions outside of a run, and the bytes from one index to the next; the
    /// slowest first.
    outer: Vec<(u64, u64)>,
}

impl BoxPlace {
    /// Returns the place of a box in a tensor of `shape`, whose elements have
    /// `element_size` bytes each.
    ///
    /// # Errors
    /// A box that is not inside of the tensor; a tensor of more bytes than this machine can count.
    pub fn new(
        shape: &[usize],
        bounds: &TensorBox,
        element_size: usize,
    ) -> Result<Self, DigestError> {
        let bytes = checked_numel(shape).and_then(|numel| numel.checked_mul(element_size));
        if !bounds.fits(shape) || bytes.is_none() {
            return Err(DigestError::OutsideOfTensor {
                bounds: bounds.clone(),
                shape: shape.to_vec(),
            });
        }
        let steps: Vec<u64> = row_major_strides(shape)
            .iter()
            .map(|&stride| (stride * element_size) as u64)
            .collect();
        let start_offset = bounds
            .offsets
            .iter()
            .zip(&steps)
            .map(|(&offset, step)| offset as u64 * step)
            .sum();
        // The innermost dimensions that the box has whole, and the one outside of them, make up a
        // run.
        let whole_dimensions = (0..shape.len())
            .rev()
            .take_while(|&dimension| bounds.sizes[dimension] == shape[dimension])
            .count();
        let outside = shape.len().saturating_sub(whole_dimensions + 1);
        let run_len = bounds.sizes[outside..].iter().product::<usize>() * element_size;
        let sizes = bounds.sizes[..outside].iter().map(|&size| size as u64);
        Ok(BoxPlace {
            length: (bounds.numel() * element_size) as u64,
            run_len: run_len as u64,
            start_offset,
            outer: sizes.zip(steps).collect(),
        })
    }

    /// Returns the number of bytes of the box.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Returns the pieces of a range of the box's bytes that are contiguous in the tensor: where
    /// each begins there, and its length.
    pub(crate) fn pieces(&self, offset: u64, length: u64) -> impl Iterator<Item = (u64, u64)> {
        let end = offset + length;
        let mut offset_in_box = offset;
        std::iter::from_fn(move || {
            if offset_in_box >= end {
                return None;
            }
            // The range may begin and end within a run.
            let offset_in_run = offset_in_box % self.run_len;
            let piece_length = (self.run_len - offset_in_run).min(end - offset_in_box);
            let start = self.run_start_offset(offset_in_box / self.run_len) + offset_in_run;
            offset_in_box += piece_length;
            Some((start, piece_length))
        })
    }

    /// Returns where a run begins in the tensor.
    fn run_start_offset(&self, mut index: u64) -> u64 {
        let mut start = self.start_offset;
        // The number of a run has its indices as digits, of which the fastest is the lowest.
        for &(size, step) in self.outer.iter().rev() {
            start += index % size * step;
            index /= size;
        }
        start
    }
}
