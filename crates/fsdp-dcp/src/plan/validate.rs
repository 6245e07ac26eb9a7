//! Checks that chunks lie inside their tensor, do not overlap, and cover it.

use std::collections::BTreeMap;

use fsdp_layout::TensorBox;
use fsdp_layout::boxes::checked_numel;
use thiserror::Error;

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

/// Checks that the chunks lie inside a tensor of this shape and share no element, and returns how many they hold.
/// Empty chunks need only lie inside. Takes `n log n` for chunks that are flat ranges or grids.
pub(crate) fn validate_chunks<'c>(
    shape: &[usize],
    chunks: impl IntoIterator<Item = &'c TensorBox>,
) -> Result<usize, ChunkError> {
    checked_numel(shape).ok_or_else(|| ChunkError::Shape { shape: shape.to_vec() })?;
    let mut boxes = Vec::new();
    for bounds in chunks {
        if !bounds.fits(shape) {
            return Err(ChunkError::OutOfBounds { bounds: bounds.clone(), shape: shape.to_vec() });
        }
        if !bounds.is_empty() {
            boxes.push(bounds);
        }
    }
    if let Some((first, second)) = find_overlap(shape, &boxes) {
        return Err(ChunkError::Overlap { first: first.clone(), second: second.clone() });
    }
    // The boxes are disjoint and inside the tensor, so the sum cannot exceed its number of elements.
    Ok(boxes.iter().map(|bounds| bounds.numel()).sum())
}

/// Checks the same as [`validate_chunks`], and that every element is in a chunk.
pub(super) fn validate_cover<'c>(
    shape: &[usize],
    chunks: impl IntoIterator<Item = &'c TensorBox>,
) -> Result<(), ChunkError> {
    let covered = validate_chunks(shape, chunks)?;
    match checked_numel(shape) {
        Some(numel) if covered == numel => Ok(()),
        numel => Err(ChunkError::Incomplete { covered, numel: numel.unwrap_or(usize::MAX) }),
    }
}

/// Checks every tensor of a checkpoint: bounds, overlaps, coverage. Returns the first key that fails, and how.
pub fn validate_metadata(metadata: &Metadata) -> Result<(), (String, ChunkError)> {
    for (fqn, tensor) in metadata.tensors() {
        let chunks = tensor.chunks.iter().map(|chunk| &chunk.bounds);
        validate_cover(&tensor.shape, chunks).map_err(|error| (fqn.to_owned(), error))?;
    }
    Ok(())
}

/// Returns two of the boxes (none empty, all inside `shape`) that share an element, if there are any.
fn find_overlap<'c>(shape: &[usize], boxes: &[&'c TensorBox]) -> Option<(&'c TensorBox, &'c TensorBox)> {
    if boxes.len() < 2 {
        return None;
    }
    // Dimensions that every box spans completely cannot separate boxes.
    let dims: Vec<usize> = (0..shape.len()).filter(|&d| boxes.iter().any(|b| b.sizes[d] != shape[d])).collect();
    let Some(&first) = dims.first() else { return Some((boxes[0], boxes[1])) };
    let mut order: Vec<(usize, usize)> = boxes.iter().enumerate().map(|(i, b)| (b.offsets[first], i)).collect();
    order.sort_unstable();
    // If boxes are cut along one dimension only, then in the order of their starts only neighbours can overlap.
    if dims.len() == 1 {
        return order.windows(2).find_map(|pair| {
            let (before, after) = (boxes[pair[0].1], boxes[pair[1].1]);
            (before.offsets[first] + before.sizes[first] > after.offsets[first]).then_some((before, after))
        });
    }
    // Boxes that are ranges of the flat tensor are compared as such; anything else takes a sweep.
    match flat_ranges(shape, boxes) {
        Some(mut ranges) => {
            ranges.sort_unstable();
            ranges.windows(2).find(|pair| pair[1].0 < pair[0].1).map(|pair| (boxes[pair[0].2], boxes[pair[1].2]))
        }
        None => sweep(boxes, &order, first, &dims[1..]),
    }
}

/// Returns the boxes as flat ranges (start, end, index), if each is one.
fn flat_ranges(shape: &[usize], boxes: &[&TensorBox]) -> Option<Vec<(usize, usize, usize)>> {
    let ranges = boxes.iter().enumerate().map(|(index, bounds)| {
        let range = bounds.flat_range(shape)?;
        Some((range.start, range.end, index))
    });
    ranges.collect()
}

/// Returns `true` if two boxes overlap in each of these dimensions.
fn overlap_along(dimensions: &[usize], a: &TensorBox, b: &TensorBox) -> bool {
    dimensions.iter().all(|&d| a.offsets[d] < b.offsets[d] + b.sizes[d] && b.offsets[d] < a.offsets[d] + a.sizes[d])
}

/// Finds two boxes that overlap by moving along dimension `first`, with the boxes being crossed in the order of the
/// next dimension.
fn sweep<'c>(
    boxes: &[&'c TensorBox],
    order: &[(usize, usize)],
    first: usize,
    rest: &[usize],
) -> Option<(&'c TensorBox, &'c TensorBox)> {
    let second = rest[0];
    let mut ends: Vec<(usize, usize)> =
        boxes.iter().enumerate().map(|(i, b)| (b.offsets[first] + b.sizes[first], i)).collect();
    ends.sort_unstable();
    let mut ended = 0;
    // Keyed by start in the second dimension. In two dimensions crossed boxes are disjoint there, so only the two
    // neighbours of a newcomer can touch it; in more, all that start before its end are asked.
    let mut active: BTreeMap<(usize, usize), &TensorBox> = BTreeMap::new();
    for &(start, index) in order {
        // Boxes that end before this one starts are behind the sweep.
        while ended < ends.len() && ends[ended].0 <= start {
            let gone = ends[ended].1;
            active.remove(&(boxes[gone].offsets[second], gone));
            ended += 1;
        }
        let new = boxes[index];
        let end = new.offsets[second] + new.sizes[second];
        let mut candidates = active.range(..(end, 0)).rev().map(|(_, &b)| b);
        let hit = if rest.len() == 1 {
            candidates.next().filter(|b| overlap_along(rest, b, new))
        } else {
            candidates.find(|b| overlap_along(rest, b, new))
        };
        if let Some(hit) = hit {
            return boxes.iter().find(|b| **b == hit && !std::ptr::eq(**b, new)).map(|b| (*b, new));
        }
        active.insert((new.offsets[second], index), new);
    }
    None
}
