//! Searches boxes for two that share an element.

use std::ops::Range;

use fsdp_layout::TensorBox;

/// Returns two of the boxes (none empty, all inside `shape`) that share an element, if there are
/// any.
pub(super) fn find_overlap<'c>(
    shape: &[usize],
    boxes: &[&'c TensorBox],
) -> Option<(&'c TensorBox, &'c TensorBox)> {
    if boxes.len() < 2 {
        return None;
    }
    // A dimension that every box spans completely separates no boxes.
    let mut dims: Vec<usize> = (0..shape.len())
        .filter(|&dim| boxes.iter().any(|bounds| bounds.sizes[dim] != shape[dim]))
        .collect();
    // The dimension along which the boxes are shortest comes first, because it leaves the fewest
    // pairs for the others. The bits of numbers that are not negative are in the order of the
    // numbers.
    dims.sort_by_cached_key(|&dim| sum_of_shares(shape, boxes, dim).to_bits());
    let (first, second) = match dims[..] {
        [] => (0, 1),
        [dim] => find_overlap_of_ranges(boxes.iter().enumerate().map(|(index, bounds)| {
            (
                bounds.offsets[dim]..bounds.offsets[dim] + bounds.sizes[dim],
                index,
            )
        }))?,
        _ => match flat_ranges(shape, boxes) {
            Some(ranges) => find_overlap_of_ranges(ranges)?,
            None => {
                let positions: Vec<usize> = (0..boxes.len()).collect();
                Search { boxes }.find_between(&positions, &positions, &dims)?
            }
        },
    };
    Some((boxes[first], boxes[second]))
}

/// Returns the sum over all boxes of the share of a dimension that each of them spans.
fn sum_of_shares(shape: &[usize], boxes: &[&TensorBox], dim: usize) -> f64 {
    boxes
        .iter()
        .map(|bounds| bounds.sizes[dim] as f64 / shape[dim] as f64)
        .sum()
}

/// Finds two ranges that overlap, and returns the indices that belong to them. In the order of
/// their starts only neighbours can.
fn find_overlap_of_ranges(
    ranges: impl IntoIterator<Item = (Range<usize>, usize)>,
) -> Option<(usize, usize)> {
    let mut ranges: Vec<(usize, usize, usize)> = ranges
        .into_iter()
        .map(|(range, index)| (range.start, range.end, index))
        .collect();
    ranges.sort_unstable();
    ranges
        .windows(2)
        .find(|pair| pair[1].0 < pair[0].1)
        .map(|pair| (pair[0].2, pair[1].2))
}

/// Returns the boxes as ranges of the flat tensor, with their positions, if each is one.
fn flat_ranges(shape: &[usize], boxes: &[&TensorBox]) -> Option<Vec<(Range<usize>, usize)>> {
    boxes
        .iter()
        .enumerate()
        .map(|(index, bounds)| Some((bounds.flat_range(shape)?, index)))
        .collect()
}

/// The lengths up to which each box of a list is compared with each of another list.
const FEW_BOXES: usize = 16;

/// A search for two boxes that overlap. Each box is given as its index in `boxes`.
///
/// Two boxes overlap along a dimension if one of them holds the start of the other. The starts are
/// divided into halves again and again. At each step the boxes that hold all starts of a part
/// overlap along this dimension with all boxes that start there, so for them only the other
/// dimensions are left. A box goes on with at most two parts of each size. So `n` boxes that are
/// cut along one dimension take about `n log n`, and each further dimension in which they are cut
/// multiplies that by at most a few times `log n`, but all of it takes no more than about `n²`.
struct Search<'b, 'c> {
    boxes: &'b [&'c TensorBox],
}

impl Search<'_, '_> {
    /// Returns where a box starts along a dimension.
    fn start(&self, index: usize, dim: usize) -> usize {
        self.boxes[index].offsets[dim]
    }

    /// Returns the indices of a box along a dimension.
    fn range(&self, index: usize, dim: usize) -> Range<usize> {
        let start = self.start(index, dim);
        start..start + self.boxes[index].sizes[dim]
    }

    /// Returns boxes in the order of their starts along a dimension.
    fn by_start(&self, boxes: &[usize], dim: usize) -> Vec<usize> {
        let mut sorted = boxes.to_vec();
        sorted.sort_by_key(|&index| self.start(index, dim));
        sorted
    }

    /// Finds a box of `a` and another one of `b` that overlap along all of these dimensions, of
    /// which there is one at least.
    fn find_between(&self, a: &[usize], b: &[usize], dims: &[usize]) -> Option<(usize, usize)> {
        if a.len().min(b.len()) <= FEW_BOXES {
            return self.find_among_few(a, b, dims);
        }
        if let [dim] = *dims {
            return self.find_along(a, b, dim);
        }
        // Starts that are equal are found the first time.
        self.find_holding(a, &self.by_start(b, dims[0]), dims, false)
            .or_else(|| self.find_holding(b, &self.by_start(a, dims[0]), dims, true))
    }

    /// Finds a box of `a` that holds the start of a box of `b` along the first of these dimensions
    /// (and does not start there itself, if `starts_before`), and that overlaps with it along the
    /// others. `b` is sorted by these starts.
    fn find_holding(
        &self,
        a: &[usize],
        b: &[usize],
        dims: &[usize],
        starts_before: bool,
    ) -> Option<(usize, usize)> {
        if a.len().min(b.len()) <= FEW_BOXES {
            return self.find_among_few(a, b, dims);
        }
        let dim = dims[0];
        let first_start = self.start(b[0], dim);
        let last_start = self.start(b[b.len() - 1], dim);
        let mut hold_all = Vec::new();
        let mut hold_some = Vec::new();
        for &index in a {
            let mut range = self.range(index, dim);
            range.start += usize::from(starts_before);
            if range.start <= first_start && last_start < range.end {
                hold_all.push(index);
            } else if range.start <= last_start && first_start < range.end {
                hold_some.push(index);
            }
        }
        let found = self.find_between(&hold_all, b, &dims[1..]);
        if found.is_some() || hold_some.is_empty() {
            return found;
        }
        // Two parts that have no start in common. There are several starts, as no box can hold a
        // part of a single one.
        let middle = self.start(b[b.len() / 2], dim);
        let split = match b.partition_point(|&index| self.start(index, dim) < middle) {
            0 => b.partition_point(|&index| self.start(index, dim) == middle),
            split => split,
        };
        let (low, high) = b.split_at(split);
        self.find_holding(&hold_some, low, dims, starts_before)
            .or_else(|| self.find_holding(&hold_some, high, dims, starts_before))
    }

    /// Finds what [`find_between`](Self::find_between) finds along a single dimension.
    fn find_along(&self, a: &[usize], b: &[usize], dim: usize) -> Option<(usize, usize)> {
        // The start, the box, and the list that it is in.
        let mut boxes_by_start: Vec<(usize, usize, usize)> = [a, b]
            .into_iter()
            .enumerate()
            .flat_map(|(list, boxes)| boxes.iter().map(move |&index| (index, list)))
            .map(|(index, list)| (self.start(index, dim), index, list))
            .collect();
        boxes_by_start.sort_unstable();
        // For each list, the end and the position of that box so far which reaches farthest.
        let mut farthest = [None, None];
        // A box that is in both lists comes twice, and must not be compared with itself.
        for entries_of_box in boxes_by_start.chunk_by(|(_, one, _), (_, other, _)| one == other) {
            for &(start, index, list) in entries_of_box {
                if let Some((end, other)) = farthest[1 - list]
                    && end > start
                {
                    return Some((other, index));
                }
            }
            for &(_, index, list) in entries_of_box {
                farthest[list] = farthest[list].max(Some((self.range(index, dim).end, index)));
            }
        }
        None
    }

    /// Finds what [`find_between`](Self::find_between) finds by comparing each box with each.
    fn find_among_few(&self, a: &[usize], b: &[usize], dims: &[usize]) -> Option<(usize, usize)> {
        for &one in a {
            for &other in b {
                if one != other && dims.iter().all(|&dim| self.do_overlap(one, other, dim)) {
                    return Some((one, other));
                }
            }
        }
        None
    }

    /// Returns `true` if two boxes overlap along a dimension.
    fn do_overlap(&self, one: usize, other: usize, dim: usize) -> bool {
        self.start(one, dim) < self.range(other, dim).end
            && self.start(other, dim) < self.range(one, dim).end
    }
}
