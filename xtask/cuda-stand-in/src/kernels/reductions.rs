//! Kernels that make one element of the last dimensions of a tensor.

use super::arguments::{Arguments, Grid, Kernel, by_type};
use super::element::Element;
use crate::machine::elements;
use crate::queue::Work;

/// Returns the kernel of an operation for a type.
pub(super) fn find(root: &str, dtype: &str) -> Option<Kernel> {
    match root {
        "fast_sum" => by_type!(dtype, sum),
        "fast_sum_small" => by_type!(dtype, small_sum),
        "fast_max" => by_type!(dtype, max),
        "fast_min" => by_type!(dtype, min),
        "fast_argmax" => by_type!(dtype, argmax),
        "fast_argmin" => by_type!(dtype, argmin),
        _ => None,
    }
}

/// Writes `reduce` of each group of elements. There are `groups` groups, or as many as the first
/// argument tells.
fn reduce<T: Element, R: Element>(
    arguments: &mut Arguments,
    groups: Option<usize>,
    reduce: fn(&[T]) -> R,
) -> Work {
    let count = arguments.size();
    let len = arguments.size();
    let layout = arguments.layout(2);
    let from = arguments.address();
    let to = arguments.address();
    Box::new(move || {
        let places = layout.places()?;
        let from = elements::<T>(from)?;
        let to = elements::<R>(to)?;
        let mut group = Vec::with_capacity(len);
        for k in 0..groups.unwrap_or(count) {
            group.clear();
            group.extend((k * len..(k + 1) * len).map(|k| from.get(places[0].place(k))));
            to.set(k, reduce(&group));
        }
        Ok(())
    })
}

fn sum_of<T: Element>(group: &[T]) -> T {
    if T::IS_FLOAT {
        T::from_f64(group.iter().map(|x| x.to_f64()).sum())
    } else {
        T::from_i64(
            group
                .iter()
                .fold(0, |sum: i64, x| sum.wrapping_add(x.to_i64())),
        )
    }
}

fn sum<T: Element>(arguments: &mut Arguments, grid: Grid) -> Work {
    reduce::<T, T>(arguments, Some(grid.blocks), sum_of)
}

fn small_sum<T: Element>(arguments: &mut Arguments, _: Grid) -> Work {
    reduce::<T, T>(arguments, None, sum_of)
}

/// Returns the place of the first element that no other comes before, by `is_before`. Elements that
/// are not a number come before no other.
fn first<T: Element>(group: &[T], is_before: fn(T, T) -> bool) -> usize {
    let mut best = 0;
    for (k, &x) in group.iter().enumerate() {
        if is_before(x, group[best]) || (group[best].to_f64().is_nan() && !x.to_f64().is_nan()) {
            best = k;
        }
    }
    best
}

fn is_more<T: Element>(x: T, y: T) -> bool {
    if T::IS_FLOAT {
        x.to_f64() > y.to_f64()
    } else {
        x.to_i64() > y.to_i64()
    }
}

fn is_less<T: Element>(x: T, y: T) -> bool {
    is_more(y, x)
}

/// Returns an element that is not a number, if the type's maximum and minimum are that then.
fn nan<T: Element>(group: &[T]) -> Option<T> {
    group
        .iter()
        .copied()
        .find(|x| !T::SKIPS_NAN && x.to_f64().is_nan())
}

fn max<T: Element>(arguments: &mut Arguments, grid: Grid) -> Work {
    reduce::<T, T>(arguments, Some(grid.blocks), |group| {
        nan(group).unwrap_or_else(|| group[first(group, is_more)])
    })
}

fn min<T: Element>(arguments: &mut Arguments, grid: Grid) -> Work {
    reduce::<T, T>(arguments, Some(grid.blocks), |group| {
        nan(group).unwrap_or_else(|| group[first(group, is_less)])
    })
}

fn argmax<T: Element>(arguments: &mut Arguments, grid: Grid) -> Work {
    reduce::<T, u32>(arguments, Some(grid.blocks), |group| {
        first(group, is_more) as u32
    })
}

fn argmin<T: Element>(arguments: &mut Arguments, grid: Grid) -> Work {
    reduce::<T, u32>(arguments, Some(grid.blocks), |group| {
        first(group, is_less) as u32
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn extremes_pass_over_what_is_not_a_number_where_a_gpu_does() {
        let group = [f32::NAN, 2.0, 7.0, 7.0, -1.0];
        assert_eq!((first(&group, is_more), first(&group, is_less)), (2, 4));
        assert!(nan(&group).is_none());
        assert!(nan(&[bf16::NAN, bf16::ONE]).is_some());
        assert_eq!(sum_of(&[200u8, 100]), 44);
    }
}
