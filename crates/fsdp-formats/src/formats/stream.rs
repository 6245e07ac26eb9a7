//! Reading a tensor as a stream of bytes, in pieces of bounded size.

use std::ops::Range;

use fsdp_layout::boxes::boxes_of_flat_range;
use fsdp_layout::{DType, TensorBox};

use super::checkpoint::Checkpoint;
use super::lookup::request_of;
use crate::budget::{Budget, FREE_BYTES};
use crate::error::FileError;
use crate::payload::slot::Slot;
use crate::plan::plan_load;

/// The bytes of a tensor that [`stream`] reads at once.
const PIECE_BYTES: usize = 16 << 20;

/// Reads bytes `range` of the row-major box `bounds` of a tensor, in order, and gives them to
/// `sink` in pieces of bounded size.
///
/// The bytes are in the dtype that the checkpoint has the tensor in. `range` must begin and end
/// between elements.
///
/// # Errors
/// A box that cannot be read; a tensor with vastly more elements than are stored; those of `sink`.
pub fn stream<E: From<FileError>>(
    checkpoint: &dyn Checkpoint,
    fqn: &str,
    bounds: &TensorBox,
    range: Range<u64>,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    check_expansion(checkpoint, fqn, range.end)?;
    if range.is_empty() {
        return Ok(());
    }
    // The box is planned once, and then read piece by piece.
    let request = request_of(checkpoint.metadata(), fqn, bounds)?;
    plan_load(checkpoint.metadata(), [&request]).map_err(FileError::from)?;
    stream_boxes(
        &mut |part, dst| checkpoint.read_boxes(fqn, &mut [Slot::new(part.clone(), dst)]),
        request.dtype,
        bounds,
        range,
        sink,
    )
}

/// The largest ratio of a tensor's bytes to its stored bytes, for tensors whose elements are
/// repeated by strides of 0.
const MAX_EXPANSION: u64 = 16;

/// Refuses a tensor with vastly more elements than are stored, so that a small file cannot cause an
/// unbounded amount of work.
pub fn check_expansion(
    checkpoint: &dyn Checkpoint,
    fqn: &str,
    length_bytes: u64,
) -> Result<(), FileError> {
    if length_bytes <= FREE_BYTES {
        return Ok(());
    }
    let mut stored_bytes = 0u64;
    // A key that is missing here has no bytes; reading it says so.
    let tensor = checkpoint.metadata().tensor(fqn).into_iter();
    for stored in tensor
        .flat_map(|tensor| &tensor.chunks)
        .flat_map(|chunk| &chunk.stored)
    {
        // The growth of a transformed item is bounded where the transform is undone.
        stored_bytes = stored_bytes.saturating_add(match stored.transforms[..] {
            [] => stored.length,
            _ => u64::MAX / MAX_EXPANSION,
        });
    }
    Budget::new(stored_bytes, MAX_EXPANSION)
        .charge("bytes of elements that are not stored", length_bytes)
        .map_err(|over| FileError::Item {
            fqn: fqn.to_owned(),
            path: checkpoint.path().to_owned(),
            offset: 0,
            source: over.into(),
        })
}

/// A function that fills a buffer with the row-major bytes of a box.
type ReadBox<'r> = dyn FnMut(&TensorBox, &mut [u8]) -> Result<(), FileError> + 'r;

/// Streams as [`stream`] does, but calls `read_box` for the bytes of each box instead of reading a
/// checkpoint, and checks nothing.
pub fn stream_boxes<E: From<FileError>>(
    read_box: &mut ReadBox<'_>,
    dtype: DType,
    bounds: &TensorBox,
    range: Range<u64>,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    if range.is_empty() {
        return Ok(());
    }
    let element_bytes = dtype.size_in_bytes() as usize;
    let mut position = range.start as usize / element_bytes;
    let end = range.end as usize / element_bytes;
    // A scalar is one row of one element.
    let row_elements: usize = bounds.sizes.iter().skip(1).product();
    let max_elements = (PIECE_BYTES / element_bytes).max(1);
    let mut buffer = vec![0; (end - position).min(max_elements) * element_bytes];
    while position < end {
        let mut next_position = end.min(position + max_elements);
        // End the piece at the end of a row, if at least one whole row fits: then fewer boxes make
        // up the piece.
        if next_position < end
            && row_elements > 0
            && next_position / row_elements > position.div_ceil(row_elements)
        {
            next_position -= next_position % row_elements;
        }
        // A flat range is several boxes, whose bytes follow each other in the buffer.
        let mut filled_bytes = 0;
        for mut part_bounds in boxes_of_flat_range(&bounds.sizes, position..next_position) {
            // Its parts count from the beginning of the box.
            for (offset, start) in part_bounds.offsets.iter_mut().zip(&bounds.offsets) {
                *offset += start;
            }
            let length = part_bounds.numel() * element_bytes;
            read_box(
                &part_bounds,
                &mut buffer[filled_bytes..filled_bytes + length],
            )?;
            filled_bytes += length;
        }
        sink(&buffer[..filled_bytes])?;
        position = next_position;
    }
    Ok(())
}
