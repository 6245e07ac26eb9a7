//! Reductions of many ranks' elements into one, always in rank order.

use std::fmt;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The way in which elements of all ranks become one: torch's `ReduceOp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum `x0 + x1 + …`. Integers wrap around.
    Sum,
    /// The sum divided by the number of ranks, for floating-point types only.
    Avg,
    /// The largest element, or NaN if any is NaN.
    Max,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::Max => "max",
        })
    }
}

/// The arithmetic of an element type. Private to this crate, which is what seals
/// [`Element`](crate::Element).
pub trait Reduce: bytemuck::Pod {
    /// `true` if [`ReduceOp::Avg`] exists.
    const AVERAGES: bool;

    /// Fills `output` with the reduction of `pieces`: for each rank, in rank order, the bytes of as
    /// many elements.
    fn reduce(op: ReduceOp, pieces: &[&[u8]], output: &mut [Self]);
}

/// Calls `with` on the elements in `bytes`, which need not be aligned.
fn with_elements<T: bytemuck::Pod>(bytes: &[u8], with: impl FnOnce(&[T])) {
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => with(elements),
        Err(_) => with(&bytemuck::pod_collect_to_vec(bytes)),
    }
}

/// Fills `output` with the pieces combined one after the other, the first two in one go. Without
/// pieces it stays as it is.
fn fold<T: bytemuck::Pod>(pieces: &[&[u8]], output: &mut [T], combine: impl Fn(T, T) -> T) {
    match pieces {
        [] => {}
        [only] => with_elements(only, |only| output.copy_from_slice(only)),
        [first, second, further_pieces @ ..] => {
            with_elements(first, |first: &[T]| {
                with_elements(second, |second: &[T]| {
                    output
                        .iter_mut()
                        .zip(first)
                        .zip(second)
                        .for_each(|((sum, &x), &y)| *sum = combine(x, y));
                });
            });
            for piece in further_pieces {
                with_elements(piece, |piece: &[T]| {
                    output
                        .iter_mut()
                        .zip(piece)
                        .for_each(|(sum, &x)| *sum = combine(*sum, x));
                });
            }
        }
    }
}

macro_rules! reduce_floats {
    ($($element:ty),*) => {
        $(impl Reduce for $element {
            const AVERAGES: bool = true;

            fn reduce(op: ReduceOp, pieces: &[&[u8]], output: &mut [Self]) {
                match op {
                    ReduceOp::Sum | ReduceOp::Avg => fold(pieces, output, |x: Self, y| x + y),
                    ReduceOp::Max => fold(pieces, output, |x: Self, y| {
                        if y > x || y.is_nan() { y } else { x }
                    }),
                }
                if op == ReduceOp::Avg {
                    let ranks = pieces.len() as Self;
                    output.iter_mut().for_each(|sum| *sum /= ranks);
                }
            }
        })*
    };
}

macro_rules! reduce_integers {
    ($($element:ty),*) => {
        $(impl Reduce for $element {
            const AVERAGES: bool = false;

            fn reduce(op: ReduceOp, pieces: &[&[u8]], output: &mut [Self]) {
                match op {
                    // An average is refused before any rank gets here.
                    ReduceOp::Sum | ReduceOp::Avg => fold(pieces, output, Self::wrapping_add),
                    ReduceOp::Max => fold(pieces, output, Self::max),
                }
            }
        })*
    };
}

/// The number of elements that are added up in `f32` at a time.
const HALF_BLOCK_LEN: usize = 1024;

macro_rules! reduce_halves {
    ($($element:ty),*) => {
        $(impl Reduce for $element {
            const AVERAGES: bool = true;

            fn reduce(op: ReduceOp, pieces: &[&[u8]], output: &mut [Self]) {
                // Sums are kept in f32, so that each element is rounded to the half type once, and
                // block by block, so that they stay in the cache.
                let mut results = [0f32; HALF_BLOCK_LEN];
                let mut next = [0f32; HALF_BLOCK_LEN];
                for (block, output) in output.chunks_mut(HALF_BLOCK_LEN).enumerate() {
                    let start = block * HALF_BLOCK_LEN * size_of::<Self>();
                    let bytes = start..start + size_of_val(output);
                    let results = &mut results[..output.len()];
                    let next = &mut next[..output.len()];
                    for (rank, piece) in pieces.iter().enumerate() {
                        with_elements(&piece[bytes.clone()], |piece: &[Self]| {
                            piece.convert_to_f32_slice(next);
                        });
                        if rank == 0 {
                            results.copy_from_slice(next);
                            continue;
                        }
                        match op {
                            ReduceOp::Sum | ReduceOp::Avg => {
                                results.iter_mut().zip(&*next).for_each(|(x, &y)| *x += y);
                            }
                            ReduceOp::Max => {
                                results
                                    .iter_mut()
                                    .zip(&*next)
                                    .for_each(|(x, &y)| *x = if y > *x || y.is_nan() { y } else { *x });
                            }
                        }
                    }
                    if op == ReduceOp::Avg {
                        results.iter_mut().for_each(|sum| *sum /= pieces.len() as f32);
                    }
                    output.convert_from_f32_slice(results);
                }
            }
        })*
    };
}

reduce_floats!(f32, f64);
reduce_halves!(f16, bf16);
reduce_integers!(i64, i32, i16, i8, u64, u32, u16, u8);

#[cfg(test)]
mod tests {
    use super::*;

    fn reduce<T: Reduce>(op: ReduceOp, ranks: &[&[T]]) -> Vec<T> {
        let pieces: Vec<&[u8]> = ranks
            .iter()
            .map(|rank| bytemuck::cast_slice(rank))
            .collect();
        let mut output = vec![T::zeroed(); ranks[0].len()];
        T::reduce(op, &pieces, &mut output);
        output
    }

    #[test]
    fn halves_round_once_at_the_end() {
        // 256 + 1 is not a bf16, so adding 1 in bf16 would be lost each time.
        let ones = [bf16::ONE; 2000];
        let large = [bf16::from_f32(256.0); 2000];
        let ranks: Vec<&[bf16]> = [&large[..]].into_iter().chain([&ones[..]; 4]).collect();
        assert_eq!(reduce(ReduceOp::Sum, &ranks), [bf16::from_f32(260.0); 2000]);
        assert_eq!(reduce(ReduceOp::Avg, &ranks), [bf16::from_f32(52.0); 2000]);
        assert_eq!(reduce(ReduceOp::Max, &ranks), [bf16::from_f32(256.0); 2000]);
    }

    #[test]
    fn sums_are_in_rank_order() {
        assert_eq!(
            reduce::<f32>(ReduceOp::Sum, &[&[1e8], &[1.0], &[-1e8]]),
            [0.0]
        );
        assert_eq!(
            reduce::<f32>(ReduceOp::Sum, &[&[1e8], &[-1e8], &[1.0]]),
            [1.0]
        );
    }

    #[test]
    fn a_nan_is_the_largest() {
        assert!(reduce::<f32>(ReduceOp::Max, &[&[f32::NAN], &[1.0]])[0].is_nan());
        assert!(reduce::<f64>(ReduceOp::Max, &[&[1.0], &[f64::NAN], &[2.0]])[0].is_nan());
        assert!(reduce::<f16>(ReduceOp::Max, &[&[f16::ONE], &[f16::NAN]])[0].is_nan());
        assert_eq!(
            reduce::<f32>(ReduceOp::Max, &[&[-3.0], &[-1.0], &[-2.0]]),
            [-1.0]
        );
    }

    #[test]
    fn integers_wrap_around() {
        assert_eq!(
            reduce::<u8>(ReduceOp::Sum, &[&[200, 1], &[100, 2]]),
            [44, 3]
        );
        assert_eq!(reduce::<i64>(ReduceOp::Max, &[&[-5], &[i64::MIN]]), [-5]);
    }

    #[test]
    fn pieces_may_lie_anywhere() {
        let bytes: Vec<u8> = [0u8]
            .into_iter()
            .chain(bytemuck::cast_slice(&[1.5f32, -2.0]).iter().copied())
            .collect();
        let mut output = [0f32; 2];
        f32::reduce(ReduceOp::Sum, &[&bytes[1..], &bytes[1..]], &mut output);
        assert_eq!(output, [3.0, -4.0]);
    }
}
