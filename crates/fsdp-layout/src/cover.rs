//! Differences of hyper-rectangles: the parts of a box that other boxes leave uncovered.

use crate::boxes::TensorBox;

/// Returns the elements of `from` that are not in `taken`, as at most `2 N` boxes that do not
/// overlap.
///
/// ```
/// use fsdp_layout::{TensorBox, cover::subtract};
/// let whole = TensorBox::whole(&[4, 3]);
/// let rest = subtract(&whole, &TensorBox::new(vec![0, 0], vec![3, 3]));
/// assert_eq!(rest, [TensorBox::new(vec![3, 0], vec![1, 3])]);
/// ```
#[must_use]
pub fn subtract(from: &TensorBox, taken: &TensorBox) -> Vec<TensorBox> {
    if from.is_empty() {
        return Vec::new();
    }
    let Some(overlap) = from.intersect(taken) else {
        return vec![from.clone()];
    };
    let mut uncovered_boxes = Vec::new();
    // `core` is the part of `from` between the slabs that have been cut off in the dimensions so
    // far.
    let mut core = from.clone();
    for dim in 0..from.rank() {
        let end = core.offsets[dim] + core.sizes[dim];
        let cut_start = overlap.offsets[dim];
        let cut_end = cut_start + overlap.sizes[dim];
        // The elements before the overlap in this dimension are a slab, and those after it another.
        for slab in [core.offsets[dim]..cut_start, cut_end..end] {
            if !slab.is_empty() {
                let mut part = core.clone();
                part.offsets[dim] = slab.start;
                part.sizes[dim] = slab.len();
                uncovered_boxes.push(part);
            }
        }
        core.offsets[dim] = cut_start;
        core.sizes[dim] = cut_end - cut_start;
    }
    uncovered_boxes
}

/// Returns the elements of `wanted` that are in none of `boxes`, as boxes that do not overlap; the
/// list is empty if all are covered. The boxes may overlap each other.
///
/// ```
/// use fsdp_layout::{TensorBox, cover::uncovered};
/// let rows = |start, len| TensorBox::new(vec![start, 0], vec![len, 2]);
/// assert!(uncovered(&TensorBox::whole(&[5, 2]), &[rows(0, 3), rows(2, 3)]).is_empty());
/// assert_eq!(uncovered(&TensorBox::whole(&[5, 2]), &[rows(0, 2), rows(3, 2)]), [rows(2, 1)]);
/// ```
#[must_use]
pub fn uncovered<'a>(
    wanted: &TensorBox,
    boxes: impl IntoIterator<Item = &'a TensorBox>,
) -> Vec<TensorBox> {
    // Go through the boxes in the order of their positions. Each then trims the front of the
    // uncovered part, so that the list of its boxes stays short.
    let mut boxes: Vec<&TensorBox> = boxes.into_iter().collect();
    boxes.sort();
    let mut remaining = vec![wanted.clone()];
    // A box without elements is covered by no boxes at all.
    remaining.retain(|part| !part.is_empty());
    for taken in boxes {
        // Most lists of boxes cover all long before their end.
        if remaining.is_empty() {
            break;
        }
        remaining = remaining
            .iter()
            .flat_map(|part| subtract(part, taken))
            .collect();
    }
    remaining
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn box_in(shape: Vec<usize>) -> impl Strategy<Value = TensorBox> {
        let spans: Vec<_> = shape.iter().map(|&dim| (0..=dim, 0..=dim)).collect();
        spans.prop_map(|spans| {
            let (offsets, sizes) = spans
                .into_iter()
                .map(|(a, b): (usize, usize)| (a.min(b), a.abs_diff(b)))
                .unzip();
            TensorBox { offsets, sizes }
        })
    }

    fn holds(bounds: &TensorBox, index: &[usize]) -> bool {
        let spans = bounds.offsets.iter().zip(&bounds.sizes);
        index
            .iter()
            .zip(spans)
            .all(|(i, (offset, size))| (*offset..offset + size).contains(i))
    }

    fn indices(shape: &[usize]) -> Vec<Vec<usize>> {
        shape.iter().fold(vec![Vec::new()], |all, &dim| {
            all.iter()
                .flat_map(|index| {
                    (0..dim).map(|i| {
                        let mut index = index.clone();
                        index.push(i);
                        index
                    })
                })
                .collect()
        })
    }

    proptest! {
        #[test]
        fn each_element_is_either_taken_or_left_once(
            (shape, wanted, taken) in prop::collection::vec(0usize..5, 0..4).prop_flat_map(|shape| {
                let taken = prop::collection::vec(box_in(shape.clone()), 0..5);
                (Just(shape.clone()), box_in(shape), taken)
            })
        ) {
            let remaining = uncovered(&wanted, &taken);
            prop_assert!(remaining.iter().all(|part| !part.is_empty()));
            for index in indices(&shape) {
                let is_uncovered = holds(&wanted, &index) && !taken.iter().any(|taken| holds(taken, &index));
                let parts = remaining.iter().filter(|part| holds(part, &index)).count();
                prop_assert_eq!(parts, usize::from(is_uncovered), "{:?}", index);
            }
        }
    }

    #[test]
    fn a_scalar_is_there_or_not() {
        let scalar = TensorBox::whole(&[]);
        assert_eq!(uncovered(&scalar, []), vec![scalar.clone()]);
        assert!(uncovered(&scalar, [&scalar]).is_empty());
        assert!(uncovered(&TensorBox::whole(&[0, 3]), []).is_empty());
    }
}
