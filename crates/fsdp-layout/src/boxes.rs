//! Hyper-rectangles of a row-major tensor, and copies between them.
//!
//! A box is what DCP calls a chunk: offsets and sizes. Dim-0 chunks, flat ranges, 2-D mesh
//! placements and empty shards are all lists of boxes. So all resharding is done by intersecting
//! boxes.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::dtype::DType;

/// A hyper-rectangle of an N-d tensor: `offsets[d] .. offsets[d] + sizes[d]` in each dimension.
///
/// A 0-d tensor has exactly one box, with no dimensions and one element.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TensorBox {
    /// First index in each dimension.
    pub offsets: Vec<usize>,
    /// Extent in each dimension.
    pub sizes: Vec<usize>,
}

impl TensorBox {
    /// Creates the box at `offsets` of `sizes`. Both must have one entry per dimension.
    #[must_use]
    pub fn new(offsets: Vec<usize>, sizes: Vec<usize>) -> Self {
        debug_assert_eq!(offsets.len(), sizes.len());
        TensorBox { offsets, sizes }
    }

    /// Returns the box that is all of a tensor of `shape`.
    #[must_use]
    pub fn whole(shape: &[usize]) -> Self {
        TensorBox {
            offsets: vec![0; shape.len()],
            sizes: shape.to_vec(),
        }
    }

    /// Returns the number of dimensions.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.sizes.len()
    }

    /// Returns the number of elements. For boxes from untrusted input use [`checked_numel`].
    #[must_use]
    pub fn numel(&self) -> usize {
        if self.is_empty() {
            // The product of the other sizes may overflow, although no element is there.
            return 0;
        }
        self.sizes.iter().product()
    }

    /// Returns `true` if the box holds no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sizes.contains(&0)
    }

    /// Returns `true` if the box is well formed and lies inside a tensor of `shape`.
    #[must_use]
    pub fn fits(&self, shape: &[usize]) -> bool {
        if self.offsets.len() != shape.len() || self.sizes.len() != shape.len() {
            return false;
        }
        // Offsets and sizes may come from a damaged file, where their sum can overflow.
        (0..shape.len()).all(|d| {
            let end = self.offsets[d].checked_add(self.sizes[d]);
            end.is_some_and(|end| end <= shape[d])
        })
    }

    /// Returns the common part of two boxes of one tensor; `None` if they share no element, or
    /// differ in their number of dimensions.
    ///
    /// ```
    /// use fsdp_layout::TensorBox;
    /// let a = TensorBox::new(vec![0, 0], vec![2, 4]);
    /// let b = TensorBox::new(vec![1, 2], vec![3, 3]);
    /// assert_eq!(a.intersect(&b), Some(TensorBox::new(vec![1, 2], vec![1, 2])));
    /// ```
    #[must_use]
    pub fn intersect(&self, other: &TensorBox) -> Option<TensorBox> {
        if self.rank() != other.rank() {
            return None;
        }
        let mut offsets = Vec::with_capacity(self.rank());
        let mut sizes = Vec::with_capacity(self.rank());
        for d in 0..self.rank() {
            let start = self.offsets[d].max(other.offsets[d]);
            let end = (self.offsets[d] + self.sizes[d]).min(other.offsets[d] + other.sizes[d]);
            // Boxes that are apart in one dimension share no element, whatever the others are.
            if start >= end {
                return None;
            }
            offsets.push(start);
            sizes.push(end - start);
        }
        Some(TensorBox { offsets, sizes })
    }

    /// Returns the flat range of the box's elements in a row-major tensor of `shape`; `None` if
    /// they are not contiguous there.
    #[must_use]
    pub fn flat_range(&self, shape: &[usize]) -> Option<Range<usize>> {
        // Elements that are contiguous in the tensor are copied by a single run.
        let mut runs = copy_runs(self, &TensorBox::whole(shape), self);
        let Some(run) = runs.next() else {
            return Some(0..0);
        };
        runs.next().is_none().then(|| run.src..run.src + run.len)
    }
}

impl fmt::Display for TensorBox {
    /// Writes the box like a Python index: `[0:2, 3:5]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (d, (offset, size)) in self.offsets.iter().zip(&self.sizes).enumerate() {
            let comma = if d == 0 { "" } else { ", " };
            // The box may be one that was refused because this sum overflows.
            write!(f, "{comma}{offset}:{}", offset.saturating_add(*size))?;
        }
        f.write_str("]")
    }
}

/// Returns the number of elements of a shape, or `None` if it does not fit a `usize`. A dimension
/// of 0 makes it 0.
#[must_use]
pub fn checked_numel(shape: &[usize]) -> Option<usize> {
    // A tensor without elements is possible, even if its other dimensions would overflow.
    if shape.contains(&0) {
        return Some(0);
    }
    shape
        .iter()
        .try_fold(1usize, |numel, &dim| numel.checked_mul(dim))
}

/// Returns the number of bytes of the elements of a shape, or `None` if it does not fit a `usize`.
#[must_use]
pub fn checked_bytes(shape: &[usize], dtype: DType) -> Option<usize> {
    checked_numel(shape)?.checked_mul(dtype.size_in_bytes() as usize)
}

/// Returns the number of bytes of the elements of a shape, or the largest number if they are more.
#[must_use]
pub fn saturating_bytes(shape: &[usize], dtype: DType) -> u64 {
    checked_bytes(shape, dtype).map_or(u64::MAX, |bytes| bytes as u64)
}

/// Returns, for each dimension of a row-major tensor, the number of elements from one index to the
/// next.
#[must_use]
pub fn row_major_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d];
    }
    strides
}

/// Returns the boxes that exactly cover elements `range` of a row-major tensor of `shape`, in
/// flat order.
///
/// There are at most `2 * (N - 1) + 1` of them for an N-d tensor. The elements of each box are
/// contiguous in the range, and each box starts where the one before it ends.
///
/// ```
/// use fsdp_layout::{TensorBox, boxes::boxes_of_flat_range};
/// // Elements 3..11 of a 3x5 tensor: the end of row 0, all of row 1, the first element of row 2.
/// assert_eq!(boxes_of_flat_range(&[3, 5], 3..11), [
///     TensorBox::new(vec![0, 3], vec![1, 2]),
///     TensorBox::new(vec![1, 0], vec![1, 5]),
///     TensorBox::new(vec![2, 0], vec![1, 1]),
/// ]);
/// ```
#[must_use]
pub fn boxes_of_flat_range(shape: &[usize], range: Range<usize>) -> Vec<TensorBox> {
    let strides = row_major_strides(shape);
    let end = range.end.min(shape.iter().product());
    let mut start = range.start;
    let mut boxes = Vec::new();
    while start < end {
        // Elements that follow each other form a box if they are whole indices of one dimension.
        // Take the outermost such dimension, because its indices have the most elements.
        let dim = strides
            .iter()
            .position(|&stride| start.is_multiple_of(stride) && stride <= end - start);
        let Some(dim) = dim else {
            // An index of the last dimension is one element, so only a scalar gets here.
            return vec![TensorBox::whole(shape)];
        };
        let offsets: Vec<usize> = strides
            .iter()
            .zip(shape)
            .map(|(stride, size)| start / stride % size)
            .collect();
        // A box cannot go past the end of its dimension: the next element has another index in a
        // dimension further out.
        let count = ((end - start) / strides[dim]).min(shape[dim] - offsets[dim]);
        start += count * strides[dim];
        let mut sizes = vec![1; dim];
        sizes.push(count);
        sizes.extend_from_slice(&shape[dim + 1..]);
        boxes.push(TensorBox { offsets, sizes });
    }
    boxes
}

/// A run of `len` elements that are contiguous both in the source box and in the destination box.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyRun {
    /// First element in the source box, row-major.
    pub src: usize,
    /// First element in the destination box, row-major.
    pub dst: usize,
    /// Number of elements.
    pub len: usize,
}

/// Returns the contiguous runs that copy `overlap` from a row-major buffer of box `src` to one of
/// box `dst`.
///
/// `overlap` must lie inside both. Runs come in row-major order and are as long as possible.
pub fn copy_runs(
    overlap: &TensorBox,
    src: &TensorBox,
    dst: &TensorBox,
) -> impl Iterator<Item = CopyRun> + use<> {
    let rank = overlap.rank();
    let src_strides = row_major_strides(&src.sizes);
    let dst_strides = row_major_strides(&dst.sizes);
    // A run always spans the last dimension. If the overlap has all of a dimension in both boxes,
    // the run before it continues without a gap, so one run spans the dimension before it too.
    let mut inner = rank.saturating_sub(1);
    while inner > 0
        && overlap.sizes[inner] == src.sizes[inner]
        && overlap.sizes[inner] == dst.sizes[inner]
    {
        inner -= 1;
    }
    let first_run = (!overlap.is_empty()).then(|| CopyRun {
        src: first_index(overlap, src, &src_strides),
        dst: first_index(overlap, dst, &dst_strides),
        len: overlap.sizes[inner..].iter().product(),
    });
    CopyRuns {
        outer: overlap.sizes[..inner].to_vec(),
        src_steps: src_strides[..inner].to_vec(),
        dst_steps: dst_strides[..inner].to_vec(),
        index: vec![0; inner],
        next: first_run,
    }
}

/// The iterator of [`copy_runs`].
struct CopyRuns {
    /// The extents of the outer dimensions, those that a run does not span. The iterator steps
    /// through them.
    outer: Vec<usize>,
    /// The number of elements in the source box from one index of each outer dimension to the next.
    src_steps: Vec<usize>,
    /// The same for the destination box.
    dst_steps: Vec<usize>,
    /// The indices of `next` in the outer dimensions.
    index: Vec<usize>,
    /// The run that the next call returns; `None` at the end.
    next: Option<CopyRun>,
}

/// Returns the index of the first element of `inner` in the row-major buffer of box `outer`, which
/// contains `inner`. `strides` are those of the buffer.
fn first_index(inner: &TensorBox, outer: &TensorBox, strides: &[usize]) -> usize {
    inner
        .offsets
        .iter()
        .zip(&outer.offsets)
        .zip(strides)
        .map(|((inner, outer), stride)| (inner - outer) * stride)
        .sum()
}

impl Iterator for CopyRuns {
    type Item = CopyRun;

    fn next(&mut self) -> Option<CopyRun> {
        let run = self.next?;
        let mut following = run;
        self.next = None;
        // Count up the index like an odometer, the last dimension first. If every dimension wraps
        // around, `run` was the last one.
        for d in (0..self.outer.len()).rev() {
            self.index[d] += 1;
            if self.index[d] < self.outer[d] {
                following.src += self.src_steps[d];
                following.dst += self.dst_steps[d];
                self.next = Some(following);
                break;
            }
            // This dimension starts again at 0, so go back over its steps and carry into the
            // dimension before it.
            following.src -= (self.outer[d] - 1) * self.src_steps[d];
            following.dst -= (self.outer[d] - 1) * self.dst_steps[d];
            self.index[d] = 0;
        }
        Some(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn indices(shape: &[usize]) -> Vec<usize> {
        (0..shape.iter().product()).collect()
    }

    /// Lists the flat indices of a box's elements.
    fn elements(shape: &[usize], b: &TensorBox) -> Vec<usize> {
        let strides = row_major_strides(shape);
        (0..b.numel())
            .map(|i| {
                let local = row_major_strides(&b.sizes);
                (0..shape.len())
                    .map(|d| (b.offsets[d] + i / local[d] % b.sizes[d]) * strides[d])
                    .sum()
            })
            .collect()
    }

    fn shape_and_range() -> impl Strategy<Value = (Vec<usize>, Range<usize>)> {
        prop::collection::vec(1usize..6, 0..5).prop_flat_map(|shape| {
            let numel: usize = shape.iter().product();
            (
                Just(shape),
                (0..=numel, 0..=numel).prop_map(|(a, b)| a.min(b)..a.max(b)),
            )
        })
    }

    fn box_in(shape: Vec<usize>) -> impl Strategy<Value = TensorBox> {
        shape
            .into_iter()
            .map(|dim| (0..dim).prop_flat_map(move |offset| (Just(offset), 1..=dim - offset)))
            .collect::<Vec<_>>()
            .prop_map(|dims| {
                let (offsets, sizes) = dims.into_iter().unzip();
                TensorBox { offsets, sizes }
            })
    }

    proptest! {
        #[test]
        fn boxes_of_a_range_cover_it_exactly_in_order((shape, range) in shape_and_range()) {
            let boxes = boxes_of_flat_range(&shape, range.clone());
            let covered: Vec<usize> = boxes.iter().flat_map(|b| elements(&shape, b)).collect();
            prop_assert_eq!(covered, range.collect::<Vec<_>>());
            prop_assert!(boxes.len() <= (2 * shape.len()).saturating_sub(1).max(1));
            for b in &boxes {
                prop_assert!(b.fits(&shape));
                prop_assert!(b.flat_range(&shape).is_some(), "{} is not contiguous", b);
            }
        }

        #[test]
        fn runs_copy_the_overlap_and_nothing_else(
            (shape, src, dst) in prop::collection::vec(1usize..6, 0..4).prop_flat_map(|shape| {
                (Just(shape.clone()), box_in(shape.clone()), box_in(shape))
            })
        ) {
            let whole = indices(&shape);
            let src_data: Vec<usize> = elements(&shape, &src).into_iter().map(|i| whole[i]).collect();
            let mut copied = vec![None; dst.numel()];
            if let Some(overlap) = src.intersect(&dst) {
                for run in copy_runs(&overlap, &src, &dst) {
                    for k in 0..run.len {
                        copied[run.dst + k] = Some(src_data[run.src + k]);
                    }
                }
            }
            let in_src: std::collections::HashSet<usize> = src_data.iter().copied().collect();
            for (value, element) in copied.into_iter().zip(elements(&shape, &dst)) {
                prop_assert_eq!(value, in_src.contains(&element).then_some(element));
            }
        }
    }

    #[test]
    fn scalars_and_empty_boxes() {
        let scalar = TensorBox::whole(&[]);
        assert_eq!(scalar.numel(), 1);
        assert!(!scalar.is_empty());
        assert_eq!(
            boxes_of_flat_range(&[], 0..1),
            std::slice::from_ref(&scalar)
        );
        assert_eq!(scalar.intersect(&scalar), Some(scalar.clone()));
        assert_eq!(copy_runs(&scalar, &scalar, &scalar).count(), 1);
        assert_eq!(boxes_of_flat_range(&[0, 3], 0..0), []);
        assert_eq!(boxes_of_flat_range(&[2, 3], 4..4), []);
        let empty = TensorBox::new(vec![2, 0], vec![0, 3]);
        assert!(empty.is_empty());
        assert!(empty.fits(&[2, 3]));
        assert_eq!(empty.flat_range(&[2, 3]), Some(0..0));
    }

    #[test]
    fn absurd_sizes_do_not_overflow() {
        assert_eq!(checked_numel(&[usize::MAX, 2]), None);
        assert_eq!(checked_numel(&[usize::MAX, 0, 9]), Some(0));
        assert_eq!(checked_bytes(&[3, 5], DType::BF16), Some(30));
        assert_eq!(checked_bytes(&[usize::MAX / 2, 2], DType::F32), None);
        assert_eq!(saturating_bytes(&[usize::MAX, 2], DType::U8), u64::MAX);
        assert_eq!(saturating_bytes(&[usize::MAX, 2, 0], DType::U8), 0);
        assert!(!TensorBox::new(vec![usize::MAX], vec![2]).fits(&[5]));
        assert_eq!(
            TensorBox::new(vec![usize::MAX], vec![2]).to_string(),
            format!("[{0}:{0}]", usize::MAX)
        );
    }
}
