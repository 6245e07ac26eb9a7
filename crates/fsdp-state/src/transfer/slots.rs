//! Memory that receives elements: disjoint parts of lent slices, in the order in which a collective
//! delivers them.

use std::ops::Range;

/// A part of one of several slices: the position of the slice, and a range of its bytes.
pub(super) type Part = (usize, Range<usize>);

/// Returns parts of `slices` in the order in which they are asked for. The parts must not overlap.
///
/// Parts that overlap or lie outside their slice come as empty slices.
pub(super) fn carve<'a>(slices: Vec<&'a mut [u8]>, parts: &[Part]) -> Vec<&'a mut [u8]> {
    // Slices can only be split from front to back, so this goes by position and then puts the parts
    // in order again.
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_key(|&index| (parts[index].0, parts[index].1.start));
    let mut carved: Vec<&'a mut [u8]> = parts.iter().map(|_| Default::default()).collect();
    let mut order = order.into_iter().peekable();
    for (position, slice) in slices.into_iter().enumerate() {
        let (mut rest, mut at) = (slice, 0);
        while let Some(index) = order.next_if(|&index| parts[index].0 == position) {
            let range = &parts[index].1;
            let Some(skipped) = range.start.checked_sub(at) else {
                continue;
            };
            let Some((_, from)) = std::mem::take(&mut rest).split_at_mut_checked(skipped) else {
                break;
            };
            let Some((part, after)) = from.split_at_mut_checked(range.len()) else {
                break;
            };
            carved[index] = part;
            (rest, at) = (after, range.end);
        }
    }
    carved
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_in_the_order_asked_for() {
        let (mut a, mut b) = (*b"abcdef", *b"xyz");
        let parts = [(1, 0..2), (0, 4..6), (0, 0..1), (1, 2..3)];
        let carved = carve(vec![&mut a, &mut b], &parts);
        assert!(
            carved
                .iter()
                .map(|part| &**part)
                .eq([&b"xy"[..], b"ef", b"a", b"z"])
        );
    }

    #[test]
    fn parts_that_overlap_or_are_too_long_are_empty() {
        let mut a = *b"abcd";
        let carved = carve(vec![&mut a], &[(0, 0..3), (0, 2..4), (0, 3..9)]);
        assert!(
            carved
                .iter()
                .map(|part| &**part)
                .eq([&b"abc"[..], b"", b""])
        );
    }
}
