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
        .filter(|&d| boxes.iter().any(|b| b.sizes[d] != shape[d]))
        .collect();
    // The dimension along which the boxes are shortest comes first, because it leaves the fewest
    // pairs for the others. The bits of numbers that are not negative are in the order of the
    // numbers.
    dims.sort_by_cached_key(|&dim| share(shape, boxes, dim).to_bits());
    let (first, second) = match dims[..] {
        [] => (0, 1),
        [dim] => neighbours(
            boxes
                .iter()
                .enumerate()
                .map(|(index, b)| (b.offsets[dim]..b.offsets[dim] + b.sizes[dim], index)),
        )?,
        _ => match flat_ranges(shape, boxes) {
            Some(ranges) => neighbours(ranges)?,
            None => {
                let all: Vec<usize> = (0..boxes.len()).collect();
                Search { boxes }.between(&all, &all, &dims)?
            }
        },
    };
    Some((boxes[first], boxes[second]))
}

/// Returns the sum over all boxes of the share of a dimension that each of them spans.
fn share(shape: &[usize], boxes: &[&TensorBox], dim: usize) -> f64 {
    boxes
        .iter()
        .map(|bounds| bounds.sizes[dim] as f64 / shape[dim] as f64)
        .sum()
}

/// Finds two ranges that overlap, and returns what belongs to them. In the order of their starts
/// only neighbours can.
fn neighbours(ranges: impl IntoIterator<Item = (Range<usize>, usize)>) -> Option<(usize, usize)> {
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
const FEW: usize = 16;

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
    /// Returns the indices of a box along a dimension.
    fn range(&self, index: usize, dim: usize) -> Range<usize> {
        let start = self.boxes[index].offsets[dim];
        start..start + self.boxes[index].sizes[dim]
    }

    /// Finds a box of `a` and another one of `b` that overlap along all of these dimensions, of
    /// which there is one at least.
    fn between(&self, a: &[usize], b: &[usize], dims: &[usize]) -> Option<(usize, usize)> {
        if a.len().min(b.len()) <= FEW {
            return self.among_few(a, b, dims);
        }
        if let [dim] = *dims {
            return self.along(a, b, dim);
        }
        let by_start = |boxes: &[usize]| {
            let mut sorted = boxes.to_vec();
            sorted.sort_by_key(|&index| self.boxes[index].offsets[dims[0]]);
            sorted
        };
        // Starts that are equal are found the first time.
        self.holding(a, &by_start(b), dims, false)
            .or_else(|| self.holding(b, &by_start(a), dims, true))
    }

    /// Finds a box of `a` that holds the start of a box of `b` along the first of these dimensions
    /// (and does not start there itself, if `starts_before`), and that overlaps with it along the
    /// others. `b` is sorted by these starts.
    fn holding(
        &self,
        a: &[usize],
        b: &[usize],
        dims: &[usize],
        starts_before: bool,
    ) -> Option<(usize, usize)> {
        if a.len().min(b.len()) <= FEW {
            return self.among_few(a, b, dims);
        }
        let (dim, rest) = (dims[0], &dims[1..]);
        let start = |index: usize| self.boxes[index].offsets[dim];
        let (first, last) = (start(b[0]), start(b[b.len() - 1]));
        let (mut hold_all, mut hold_some) = (Vec::new(), Vec::new());
        for &index in a {
            let mut range = self.range(index, dim);
            range.start += usize::from(starts_before);
            if range.start <= first && last < range.end {
                hold_all.push(index);
            } else if range.start <= last && first < range.end {
                hold_some.push(index);
            }
        }
        let found = self.between(&hold_all, b, rest);
        if found.is_some() || hold_some.is_empty() {
            return found;
        }
        // Two parts that have no start in common. There are several starts, as no box can hold a
        // part of a single one.
        let middle = start(b[b.len() / 2]);
        let split = match b.partition_point(|&index| start(index) < middle) {
            0 => b.partition_point(|&index| start(index) == middle),
            split => split,
        };
        let (low, high) = b.split_at(split);
        self.holding(&hold_some, low, dims, starts_before)
            .or_else(|| self.holding(&hold_some, high, dims, starts_before))
    }

    /// Finds what [`between`](Self::between) finds along a single dimension.
    fn along(&self, a: &[usize], b: &[usize], dim: usize) -> Option<(usize, usize)> {
        let of = |boxes: &[usize], list: usize| -> Vec<(usize, usize, usize)> {
            boxes
                .iter()
                .map(|&index| (self.boxes[index].offsets[dim], index, list))
                .collect()
        };
        let mut order = [of(a, 0), of(b, 1)].concat();
        order.sort_unstable();
        // For each list, the end and the position of that box so far which reaches farthest.
        let mut farthest = [None, None];
        // A box that is in both lists comes twice, and must not be compared with itself.
        for same in order.chunk_by(|(_, one, _), (_, other, _)| one == other) {
            for &(start, index, list) in same {
                if let Some((end, other)) = farthest[1 - list]
                    && end > start
                {
                    return Some((other, index));
                }
            }
            for &(_, index, list) in same {
                farthest[list] = farthest[list].max(Some((self.range(index, dim).end, index)));
            }
        }
        None
    }

    /// Finds what [`between`](Self::between) finds by comparing each box with each.
    fn among_few(&self, a: &[usize], b: &[usize], dims: &[usize]) -> Option<(usize, usize)> {
        let do_overlap = |one: usize, other: usize| {
            let along = |&dim: &usize| {
                let (one, other) = (self.range(one, dim), self.range(other, dim));
                one.start < other.end && other.start < one.end
            };
            one != other && dims.iter().all(along)
        };
        a.iter()
            .find_map(|&one| Some((one, *b.iter().find(|&&other| do_overlap(one, other))?)))
    }
}
