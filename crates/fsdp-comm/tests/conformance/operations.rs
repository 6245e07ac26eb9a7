//! Every tensor collective moves the right elements, of every type, in any number.

use std::ops::RangeInclusive;

use fsdp_comm::{ProcessGroup, ReduceOp};

use super::Case;
use super::elements::{TestElement, for_each_element, number, numbers};

const WORLDS: RangeInclusive<usize> = 1..=5;

/// None, one, fewer than ranks, and on both sides of what travels inline, of a cache line and of a
/// block.
const LENGTHS: [usize; 7] = [0, 1, 3, 64, 1025, 4099, 70_001];

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("operations: barrier", WORLDS, |group| {
            (0..100).for_each(|_| group.barrier().unwrap())
        }),
        Case::new("operations: all-gather", WORLDS, |group| {
            for_each_element!(all_gather(&group))
        }),
        Case::new("operations: all-gather, uneven", WORLDS, |group| {
            for_each_element!(all_gather_uneven(&group))
        }),
        Case::new("operations: all-gather into slices", WORLDS, |group| {
            all_gather_into_slices(&group)
        }),
        Case::new("operations: reduce-scatter", WORLDS, |group| {
            for_each_element!(reduce_scatter(&group))
        }),
        Case::new("operations: all-reduce", WORLDS, |group| {
            for_each_element!(all_reduce(&group))
        }),
        Case::new("operations: broadcast", WORLDS, |group| {
            for_each_element!(broadcast(&group))
        }),
        Case::new("operations: gather", WORLDS, |group| {
            for_each_element!(gather(&group))
        }),
        Case::new("operations: scatter", WORLDS, |group| {
            for_each_element!(scatter(&group))
        }),
        Case::new("operations: all-to-all, uneven", WORLDS, |group| {
            for_each_element!(all_to_all_uneven(&group))
        }),
        Case::new("operations: thousands in any order", WORLDS, |group| {
            thousands(&group)
        }),
    ]
}

/// Counts for each rank, some of them none.
fn uneven_counts(group: &ProcessGroup) -> Vec<Vec<usize>> {
    [
        [0; 5],
        [3, 0, 5000, 1, 0],
        [0, 0, 0, 0, 7],
        [20_000, 20_001, 3, 0, 9],
    ]
    .map(|counts| counts[..group.world_size()].to_vec())
    .into()
}

/// Returns the elements of every rank, one after the other.
fn gathered<T: TestElement>(counts: &[usize]) -> Vec<T> {
    counts
        .iter()
        .enumerate()
        .flat_map(|(rank, &len)| numbers::<T>(rank, len))
        .collect()
}

fn all_gather<T: TestElement>(group: &ProcessGroup) {
    for len in LENGTHS {
        let mut output = vec![T::of(99); len * group.world_size()];
        group
            .all_gather_into(&mut output, &numbers::<T>(group.rank(), len))
            .unwrap();
        assert_eq!(output, gathered::<T>(&vec![len; group.world_size()]));
    }
}

fn all_gather_uneven<T: TestElement>(group: &ProcessGroup) {
    for counts in uneven_counts(group) {
        let mut output = vec![T::of(99); counts.iter().sum()];
        let input = numbers::<T>(group.rank(), counts[group.rank()]);
        group
            .all_gather_uneven_into_slices(&mut [&mut output], &counts, &input)
            .unwrap();
        assert_eq!(output, gathered::<T>(&counts));
    }
}

fn all_gather_into_slices(group: &ProcessGroup) {
    for len in LENGTHS {
        let expected = gathered::<f32>(&vec![len; group.world_size()]);
        let mut output = vec![99.0; expected.len()];
        // Cut at other places on each rank, with empty slices among them.
        let mut slices: Vec<&mut [f32]> = vec![&mut []];
        let (mut rest, mut size) = (&mut output[..], group.rank() + 1);
        while !rest.is_empty() {
            let (head, tail) = rest.split_at_mut(size.min(rest.len()));
            slices.push(head);
            slices.push(&mut []);
            (rest, size) = (tail, size * 3);
        }
        group
            .all_gather_into_slices(&mut slices, &numbers(group.rank(), len))
            .unwrap();
        assert_eq!(output, expected);
    }
}

/// Returns the sum and the maximum over all ranks at this index.
fn reduced(world_size: usize, index: usize) -> (usize, usize) {
    let all = (0..world_size).map(|rank| number(rank, index));
    (all.clone().sum(), all.max().unwrap())
}

fn reduce_scatter<T: TestElement>(group: &ProcessGroup) {
    for len in LENGTHS {
        let input = numbers::<T>(group.rank(), len * group.world_size());
        let (mut sum, mut max) = (vec![T::of(99); len], vec![T::of(99); len]);
        group
            .reduce_scatter(&mut sum, &input, ReduceOp::Sum)
            .unwrap();
        group
            .reduce_scatter(&mut max, &input, ReduceOp::Max)
            .unwrap();
        for (index, result) in sum.into_iter().zip(max).enumerate() {
            let expected = reduced(group.world_size(), group.rank() * len + index);
            assert_eq!(
                result,
                (T::of(expected.0), T::of(expected.1)),
                "at {index} of {len}"
            );
        }
    }
}

fn all_reduce<T: TestElement>(group: &ProcessGroup) {
    for len in LENGTHS {
        let mut sum = numbers::<T>(group.rank(), len);
        let mut max = sum.clone();
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        group.all_reduce(&mut max, ReduceOp::Max).unwrap();
        for (index, result) in sum.into_iter().zip(max).enumerate() {
            let expected = reduced(group.world_size(), index);
            assert_eq!(
                result,
                (T::of(expected.0), T::of(expected.1)),
                "at {index} of {len}"
            );
        }
    }
}

fn broadcast<T: TestElement>(group: &ProcessGroup) {
    for len in LENGTHS {
        for root in 0..group.world_size() {
            let mut buffer = numbers::<T>(group.rank(), len);
            group.broadcast(&mut buffer, root).unwrap();
            assert_eq!(buffer, numbers::<T>(root, len));
        }
    }
}

fn gather<T: TestElement>(group: &ProcessGroup) {
    let root = group.world_size() - 1;
    let is_root = group.rank() == root;
    for len in LENGTHS {
        let mut output = vec![T::of(99); len * group.world_size()];
        group
            .gather(
                is_root.then_some(&mut output[..]),
                &numbers::<T>(group.rank(), len),
                root,
            )
            .unwrap();
        if is_root {
            assert_eq!(output, gathered::<T>(&vec![len; group.world_size()]));
        }
    }
    for counts in uneven_counts(group) {
        for root in 0..group.world_size() {
            let mut output = vec![T::of(99); counts.iter().sum()];
            let is_root = group.rank() == root;
            let input = numbers::<T>(group.rank(), counts[group.rank()]);
            let outputs = &mut [&mut output[..]][..];
            group
                .gather_uneven_into_slices(is_root.then_some(outputs), &counts, &input, root)
                .unwrap();
            if is_root {
                assert_eq!(output, gathered::<T>(&counts));
            }
        }
    }
}

fn scatter<T: TestElement>(group: &ProcessGroup) {
    let (rank, world_size) = (group.rank(), group.world_size());
    for len in LENGTHS {
        let root = len % world_size;
        let input = gathered::<T>(&vec![len; world_size]);
        let mut output = vec![T::of(99); len];
        group
            .scatter(&mut output, (rank == root).then_some(&input[..]), root)
            .unwrap();
        assert_eq!(output, numbers::<T>(rank, len));
    }
    for counts in uneven_counts(group) {
        for root in 0..world_size {
            let input = gathered::<T>(&counts);
            let mut output = vec![T::of(99); counts[rank]];
            group
                .scatter_uneven_into_slices(
                    &mut [&mut output],
                    (rank == root).then_some(&input[..]),
                    &counts,
                    root,
                )
                .unwrap();
            assert_eq!(output, numbers::<T>(rank, counts[rank]));
        }
    }
}

fn all_to_all_uneven<T: TestElement>(group: &ProcessGroup) {
    let (rank, ranks) = (group.rank(), 0..group.world_size());
    for scale in [0, 1, 700, 9001] {
        let count = |from: usize, to: usize| (from * 2 + to * 3) % 4 * scale;
        let element = |from: usize, to: usize, index: usize| T::of(number(from * 5 + to, index));
        let elements = |from, to| (0..count(from, to)).map(move |index| element(from, to, index));
        let send_counts: Vec<usize> = ranks.clone().map(|to| count(rank, to)).collect();
        let receive_counts: Vec<usize> = ranks.clone().map(|from| count(from, rank)).collect();
        let input: Vec<T> = ranks.clone().flat_map(|to| elements(rank, to)).collect();
        let mut output = vec![T::of(99); receive_counts.iter().sum()];
        group
            .all_to_all_uneven(&mut output, &receive_counts, &input, &send_counts)
            .unwrap();
        assert_eq!(
            output,
            ranks
                .clone()
                .flat_map(|from| elements(from, rank))
                .collect::<Vec<T>>()
        );
    }
}

/// Runs many operations of all kinds, one right after the other: nothing that one leaves behind may
/// reach the next.
fn thousands(group: &ProcessGroup) {
    let (rank, world_size) = (group.rank(), group.world_size());
    for turn in 0..2000usize {
        // The same on all ranks, with no pattern in time.
        let random = turn.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        let len = [1, 7, 600, 2500][random / 8 % 4];
        let value = |rank: usize| (turn * 31 + rank) as u32;
        match random % 5 {
            0 => group.barrier().unwrap(),
            1 => {
                let mut output = vec![0; len * world_size];
                group
                    .all_gather_into(&mut output, &vec![value(rank); len])
                    .unwrap();
                assert!(
                    (0..output.len()).all(|index| output[index] == value(index / len)),
                    "turn {turn}"
                );
            }
            2 => {
                let mut buffer = vec![value(rank); len];
                group.all_reduce(&mut buffer, ReduceOp::Max).unwrap();
                assert_eq!(buffer, vec![value(world_size - 1); len], "turn {turn}");
            }
            3 => {
                let root = turn % world_size;
                let mut buffer = vec![value(rank); len];
                group.broadcast(&mut buffer, root).unwrap();
                assert_eq!(buffer, vec![value(root); len], "turn {turn}");
            }
            _ => {
                let objects = group
                    .all_gather_object(&vec![value(rank); len * rank])
                    .unwrap();
                let expected = (0..world_size).map(|rank| vec![value(rank); len * rank]);
                assert!(objects.into_iter().eq(expected), "turn {turn}");
            }
        }
    }
}
