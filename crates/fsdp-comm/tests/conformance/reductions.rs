//! Reductions give the bits of a sum in rank order, whatever the size.

use fsdp_comm::{ProcessGroup, ReduceOp};
use half::{bf16, f16};

use super::Case;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("reductions: bits of a sum in rank order", 1..=5, |group| {
            for len in [1, 5, 1000, 33_333] {
                check(&group, len, |x| x, |x| x, f32::to_bits);
                check(&group, len, f16::from_f32, f16::to_f32, f16::to_bits);
                check(&group, len, bf16::from_f32, bf16::to_f32, bf16::to_bits);
            }
        }),
        Case::new(
            "reductions: of more than ranks look at together",
            2..=3,
            |group| {
                let value = |rank: usize, index: usize| (index % 1000 + rank) as f32;
                let mut buffer: Vec<f32> = (0..2_500_001)
                    .map(|index| value(group.rank(), index))
                    .collect();
                group.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                let sum = |index: usize| {
                    (0..group.world_size())
                        .map(|rank| value(rank, index))
                        .sum::<f32>()
                };
                assert!((0..buffer.len()).all(|index| buffer[index] == sum(index)));
            },
        ),
        Case::new("reductions: averages in double precision", 2..=3, |group| {
            let mut buffer = vec![0.1 + group.rank() as f64; 3000];
            group.all_reduce(&mut buffer, ReduceOp::Avg).unwrap();
            let sum = (1..group.world_size()).fold(0.1, |sum, rank| sum + (0.1 + rank as f64));
            assert_eq!(buffer, vec![sum / group.world_size() as f64; 3000]);
        }),
        Case::new("reductions: nan is the maximum", 2..=3, |group| {
            for len in [4, 40_000] {
                let mut buffer = vec![1.0f32; len];
                if group.rank() == 1 {
                    buffer[len / 2] = f32::NAN;
                }
                group.all_reduce(&mut buffer, ReduceOp::Max).unwrap();
                assert!((0..len).all(|index| buffer[index].is_nan() == (index == len / 2)));
            }
        }),
    ]
}

/// Numbers of very different sizes and both signs, whose sum depends on the order.
fn unruly(rank: usize, index: usize) -> f32 {
    let random = (rank * 1_000_003 + index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    let magnitude = (random % 23) as i32 - 11;
    ((random / 23 % 2000) as f32 / 1000.0 - 1.0) * 2f32.powi(magnitude)
}

fn check<T: fsdp_comm::Element, B: PartialEq + std::fmt::Debug>(
    group: &ProcessGroup,
    len: usize,
    from: fn(f32) -> T,
    to: fn(T) -> f32,
    bits: fn(T) -> B,
) {
    let (rank, world_size) = (group.rank(), group.world_size());
    let of_rank = |rank: usize| -> Vec<T> {
        (0..len * world_size)
            .map(|index| from(unruly(rank, index)))
            .collect()
    };
    let input = of_rank(rank);
    let all: Vec<Vec<T>> = (0..world_size).map(of_rank).collect();
    for op in [ReduceOp::Sum, ReduceOp::Avg] {
        let expected: Vec<B> = (0..input.len())
            .map(|index| {
                let sum = all[1..]
                    .iter()
                    .fold(to(all[0][index]), |sum, rank| sum + to(rank[index]));
                bits(from(if op == ReduceOp::Avg {
                    sum / world_size as f32
                } else {
                    sum
                }))
            })
            .collect();
        let mut everything = input.clone();
        group.all_reduce(&mut everything, op).unwrap();
        assert_eq!(
            everything.into_iter().map(bits).collect::<Vec<_>>(),
            expected
        );
        let mut piece = vec![T::zeroed(); len];
        group.reduce_scatter(&mut piece, &input, op).unwrap();
        let piece: Vec<B> = piece.into_iter().map(bits).collect();
        assert_eq!(piece, expected[rank * len..(rank + 1) * len]);
    }
}
