//! Memory that receives elements: disjoint parts of lent slices, in the order in which a collective
//! delivers them.

use std::ops::Range;

/// A part of one of several slices: the position of the slice, and a range of its bytes.
pub(super) type SlotPart = (usize, Range<usize>);

/// Returns parts of `slices` in the order in which they are asked for.
///
/// # Panics
/// If parts overlap or lie outside their slice.
pub(super) fn carve<'a>(slices: Vec<&'a mut [u8]>, parts: &[SlotPart]) -> Vec<&'a mut [u8]> {
    // Slices can only be split from front to back, so this goes by position and then puts the parts
    // in order again.
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_key(|&index| (parts[index].0, parts[index].1.start));
    let mut next = order.into_iter().peekable();
    let mut carved: Vec<&'a mut [u8]> = parts.iter().map(|_| Default::default()).collect();
    for (position, mut remaining) in slices.into_iter().enumerate() {
        let mut slice_offset = 0;
        while let Some(index) = next.next_if(|&index| parts[index].0 == position) {
            let range = &parts[index].1;
            let skipped = range
                .start
                .checked_sub(slice_offset)
                .expect("parts do not overlap");
            let part = remaining
                .split_off_mut(..skipped)
                .and_then(|_| remaining.split_off_mut(..range.len()));
            carved[index] = part.expect("parts lie in their slices");
            slice_offset = range.end;
        }
    }
    carved
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_in_the_order_asked_for() {
        let (mut letters, mut other_letters) = (*b"abcdef", *b"xyz");
        let parts = [(1, 0..2), (0, 4..6), (0, 0..1), (1, 2..3)];
        let carved = carve(vec![&mut letters, &mut other_letters], &parts);
        assert!(
            carved
                .iter()
                .map(|part| &**part)
                .eq([&b"xy"[..], b"ef", b"a", b"z"])
        );
    }

    #[test]
    #[should_panic(expected = "parts do not overlap")]
    fn parts_that_overlap_are_refused() {
        let mut letters = *b"abcd";
        carve(vec![&mut letters], &[(0, 0..3), (0, 2..4)]);
    }

    #[test]
    #[should_panic(expected = "parts lie in their slices")]
    fn parts_that_are_too_long_are_refused() {
        let mut letters = *b"abcd";
        carve(vec![&mut letters], &[(0, 0..3), (0, 3..9)]);
    }
}
