//! Kernels that read and write at places which a tensor names.

use super::arguments::{Arguments, Grid, Kernel, by_type};
use super::element::Element;
use crate::machine::elements;
use crate::memory::Elements;
use crate::queue::Work;

/// Returns the kernel of an operation for a type.
pub(super) fn find(root: &str, dtype: &str) -> Option<Kernel> {
    match root {
        "is_u8" => by_type!(dtype, select_u8),
        "is_u32" => by_type!(dtype, select_u32),
        "is_i64" => by_type!(dtype, select_i64),
        "gather_u8" => by_type!(dtype, gather_u8),
        "gather_u32" => by_type!(dtype, gather_u32),
        "gather_i64" => by_type!(dtype, gather_i64),
        "ia_u8" => by_type!(dtype, index_add_u8),
        "ia_u32" => by_type!(dtype, index_add_u32),
        "ia_i64" => by_type!(dtype, index_add_i64),
        "s_u8" => by_type!(dtype, scatter_u8),
        "s_u32" => by_type!(dtype, scatter_u32),
        "s_i64" => by_type!(dtype, scatter_i64),
        "sa_u8" => by_type!(dtype, scatter_add_u8),
        "sa_u32" => by_type!(dtype, scatter_add_u32),
        "sa_i64" => by_type!(dtype, scatter_add_i64),
        _ => None,
    }
}

/// A type of the numbers that name places.
trait Index: Element {
    /// The number that names no place.
    const NONE: Self;
}

impl Index for u8 {
    const NONE: Self = Self::MAX;
}

impl Index for u32 {
    const NONE: Self = Self::MAX;
}

impl Index for i64 {
    const NONE: Self = Self::MAX;
}

/// Returns the place that an index names; `None` if it names none.
#[track_caller]
fn place<I: Index>(ids: &Elements<I>, k: usize, size: usize) -> Option<usize> {
    let id = ids.get(k).to_i64();
    if id == I::NONE.to_i64() {
        return None;
    }
    let place = usize::try_from(id).ok().filter(|&id| id < size);
    assert!(place.is_some(), "index {id} is used where there are {size}");
    place
}

fn add<T: Element>(x: T, y: T) -> T {
    if T::IS_FLOAT {
        T::from_f64(x.to_f64() + y.to_f64())
    } else {
        T::from_i64(x.to_i64().wrapping_add(y.to_i64()))
    }
}

fn select<I: Index, T: Element>(arguments: &mut Arguments) -> Work {
    let count = arguments.size();
    let layout = arguments.layout(2);
    let ids = arguments.address();
    let from = arguments.address();
    let to = arguments.address();
    let _left = arguments.size();
    let source = arguments.size();
    let chosen = arguments.size();
    let right = arguments.size();
    Box::new(move || {
        let places = layout.places()?;
        let ids = elements::<I>(ids)?;
        let from = elements::<T>(from)?;
        let to = elements::<T>(to)?;
        for k in 0..count {
            let row = k / (chosen * right);
            let column = k % right;
            let value = place(&ids, k / right % chosen, source).map_or(T::ZERO, |place_of_id| {
                from.get(places[0].place((row * source + place_of_id) * right + column))
            });
            to.set(k, value);
        }
        Ok(())
    })
}

fn gather<I: Index, T: Element>(arguments: &mut Arguments) -> Work {
    let count = arguments.size();
    let ids = arguments.address();
    let from = arguments.address();
    let to = arguments.address();
    let _left = arguments.size();
    let source = arguments.size();
    let chosen = arguments.size();
    let right = arguments.size();
    Box::new(move || {
        let ids = elements::<I>(ids)?;
        let from = elements::<T>(from)?;
        let to = elements::<T>(to)?;
        for k in 0..count {
            let row = k / (right * chosen);
            let column = k % right;
            let value = place(&ids, k, source)
                .map_or(T::ZERO, |id| from.get((row * source + id) * right + column));
            to.set(k, value);
        }
        Ok(())
    })
}

fn index_add<I: Index, T: Element>(arguments: &mut Arguments) -> Work {
    let ids = arguments.address();
    let chosen = arguments.size();
    let from = arguments.address();
    let to = arguments.address();
    let left = arguments.size();
    let _source = arguments.size();
    let size = arguments.size();
    let right = arguments.size();
    Box::new(move || {
        let ids = elements::<I>(ids)?;
        let from = elements::<T>(from)?;
        let to = elements::<T>(to)?;
        for row in 0..left {
            for k in 0..chosen {
                let Some(id) = place(&ids, k, size) else {
                    continue;
                };
                for column in 0..right {
                    let there = (row * size + id) * right + column;
                    to.set(
                        there,
                        add(to.get(there), from.get((row * chosen + k) * right + column)),
                    );
                }
            }
        }
        Ok(())
    })
}

/// Returns the work of candle's `scatter` kernels: each source element is combined into the place
/// that its id names along the scattered dimension.
fn scatter_with<I: Index, T: Element>(arguments: &mut Arguments, combine: fn(T, T) -> T) -> Work {
    let ids = arguments.address();
    let from = arguments.address();
    let to = arguments.address();
    let left = arguments.size();
    let source = arguments.size();
    let size = arguments.size();
    let right = arguments.size();
    Box::new(move || {
        let ids = elements::<I>(ids)?;
        let from = elements::<T>(from)?;
        let to = elements::<T>(to)?;
        for row in 0..left {
            for here in (row * source * right)..((row + 1) * source * right) {
                let Some(id) = place(&ids, here, size) else {
                    continue;
                };
                let there = (row * size + id) * right + here % right;
                to.set(there, combine(to.get(there), from.get(here)));
            }
        }
        Ok(())
    })
}

fn scatter<I: Index, T: Element>(arguments: &mut Arguments) -> Work {
    scatter_with::<I, T>(arguments, |_, new| new)
}

fn scatter_add<I: Index, T: Element>(arguments: &mut Arguments) -> Work {
    scatter_with::<I, T>(arguments, add)
}

macro_rules! by_index {
    ($($function:ident: $bytes:ident, $words:ident, $longs:ident;)*) => {
        $(
            fn $bytes<T: Element>(arguments: &mut Arguments, _: Grid) -> Work {
                $function::<u8, T>(arguments)
            }

            fn $words<T: Element>(arguments: &mut Arguments, _: Grid) -> Work {
                $function::<u32, T>(arguments)
            }

            fn $longs<T: Element>(arguments: &mut Arguments, _: Grid) -> Work {
                $function::<i64, T>(arguments)
            }
        )*
    };
}

by_index! {
    select: select_u8, select_u32, select_i64;
    gather: gather_u8, gather_u32, gather_i64;
    index_add: index_add_u8, index_add_u32, index_add_i64;
    scatter: scatter_u8, scatter_u32, scatter_i64;
    scatter_add: scatter_add_u8, scatter_add_u32, scatter_add_i64;
}
