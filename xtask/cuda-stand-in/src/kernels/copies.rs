//! Kernels that move, convert and choose elements.

use super::arguments::{Arguments, Grid, Kernel, by_type, input};
use super::element::Element;
use crate::machine::elements;
use crate::queue::Work;

/// Returns the kernel of an operation for a type.
pub(super) fn find(root: &str, dtype: &str) -> Option<Kernel> {
    match root {
        "ucopy" => by_type!(dtype, copy),
        "fill" => by_type!(dtype, fill),
        "const_set" => by_type!(dtype, set),
        "copy2d" => by_type!(dtype, copy_rows),
        "where_u8" => by_type!(dtype, choose_u8),
        "where_u32" => by_type!(dtype, choose_u32),
        "where_i64" => by_type!(dtype, choose_i64),
        "cast_u8" => by_type!(dtype, cast_u8),
        "cast_u32" => by_type!(dtype, cast_u32),
        "cast_i64" => by_type!(dtype, cast_i64),
        "cast_f16" => by_type!(dtype, cast_f16),
        "cast_bf16" => by_type!(dtype, cast_bf16),
        "cast_f32" => by_type!(dtype, cast_f32),
        "cast_f64" => by_type!(dtype, cast_f64),
        _ => None,
    }
}

fn copy<T: Element>(arguments: &mut Arguments, _: Grid) -> Work {
    let count = arguments.size();
    let layout = arguments.layout(2);
    let from = arguments.address();
    let to = arguments.address();
    Box::new(move || {
        let places = layout.places()?;
        let to = elements::<T>(to)?;
        let source = input(from, to)?;
        for k in 0..count {
            to.set(
                k,
                source.get(if from == 0 { k } else { places[0].place(k) }),
            );
        }
        Ok(())
    })
}

fn fill<T: Element>(arguments: &mut Arguments, _: Grid) -> Work {
    let to = arguments.address();
    let value = arguments.value::<T>();
    let count = arguments.size();
    Box::new(move || elements::<T>(to)?.fill_from(&vec![value; count]))
}

fn set<T: Element>(arguments: &mut Arguments, _: Grid) -> Work {
    let count = arguments.size();
    let layout = arguments.layout(2);
    let value = arguments.value::<T>();
    let to = arguments.address();
    Box::new(move || {
        let places = layout.places()?;
        let to = elements::<T>(to)?;
        for k in 0..count {
            to.set(places[0].place(k), value);
        }
        Ok(())
    })
}

fn copy_rows<T: Element>(arguments: &mut Arguments, _: Grid) -> Work {
    let from = arguments.address();
    let to = arguments.address();
    let rows = arguments.int();
    let columns = arguments.int();
    let from_stride = arguments.int();
    let to_stride = arguments.int();
    Box::new(move || {
        let from = elements::<T>(from)?;
        let to = elements::<T>(to)?;
        for row in 0..rows {
            for column in 0..columns {
                to.set(
                    row * to_stride + column,
                    from.get(row * from_stride + column),
                );
            }
        }
        Ok(())
    })
}

fn choose<C: Element, T: Element>(arguments: &mut Arguments) -> Work {
    let count = arguments.size();
    let layout = arguments.layout(4);
    let condition = arguments.address();
    let yes = arguments.address();
    let no = arguments.address();
    let to = arguments.address();
    Box::new(move || {
        let places = layout.places()?;
        let condition = elements::<C>(condition)?;
        let yes = elements::<T>(yes)?;
        let no = elements::<T>(no)?;
        let to = elements::<T>(to)?;
        for k in 0..count {
            let is_set = condition.get(places[0].place(k)).to_i64() != 0;
            to.set(
                k,
                if is_set {
                    yes.get(places[1].place(k))
                } else {
                    no.get(places[2].place(k))
                },
            );
        }
        Ok(())
    })
}

fn cast<S: Element, T: Element>(arguments: &mut Arguments) -> Work {
    let count = arguments.size();
    let layout = arguments.layout(2);
    let from = arguments.address();
    let to = arguments.address();
    Box::new(move || {
        let places = layout.places()?;
        let from = elements::<S>(from)?;
        let to = elements::<T>(to)?;
        for k in 0..count {
            let value = from.get(places[0].place(k));
            let is_plain = S::IS_FLOAT || T::IS_FLOAT;
            to.set(
                k,
                if is_plain {
                    T::from_f64(value.to_f64())
                } else {
                    T::from_i64(value.to_i64())
                },
            );
        }
        Ok(())
    })
}

macro_rules! by_first_type {
    ($function:ident: $($name:ident $type:ty),*) => {
        $(fn $name<T: Element>(arguments: &mut Arguments, _: Grid) -> Work {
            $function::<$type, T>(arguments)
        })*
    };
}

by_first_type!(choose: choose_u8 u8, choose_u32 u32, choose_i64 i64);
by_first_type!(cast: cast_u8 u8, cast_u32 u32, cast_i64 i64, cast_f16 half::f16, cast_bf16 half::bf16, cast_f32 f32, cast_f64 f64);
