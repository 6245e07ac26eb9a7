//! Kernels that compute each element of their output from one element of each input.

use std::cmp::Ordering;

use super::arguments::{Arguments, Grid, Kernel, by_type, input};
use super::element::Element;
use crate::machine::elements;
use crate::queue::Work;

/// Returns the kernel of an operation for a type.
pub(super) fn find(root: &str, dtype: &str) -> Option<Kernel> {
    match root {
        "affine" => by_type!(dtype, affine),
        "uelu" => by_type!(dtype, elu),
        "upowf" => by_type!(dtype, powf),
        "eq" => by_type!(dtype, eq),
        "ne" => by_type!(dtype, ne),
        "lt" => by_type!(dtype, lt),
        "le" => by_type!(dtype, le),
        "gt" => by_type!(dtype, gt),
        "ge" => by_type!(dtype, ge),
        _ => operation(root, dtype),
    }
}

/// An operation as a type, so that each has kernels that are plain functions.
trait Unary: 'static {
    fn apply(x: f64) -> f64;
}

trait Binary: 'static {
    fn floats(x: f64, y: f64) -> f64;
    fn integers(x: i64, y: i64) -> i64;
}

fn unary<T: Element, O: Unary>(arguments: &mut Arguments, _: Grid) -> Work {
    let count = arguments.size();
    let layout = arguments.layout(2);
    let from = arguments.address();
    let to = arguments.address();
    Box::new(move || {
        let places = layout.places()?;
        let to = elements::<T>(to)?;
        let source = input(from, to)?;
        for k in 0..count {
            let place = if from == 0 { k } else { places[0].place(k) };
            to.set(k, T::from_f64(O::apply(source.get(place).to_f64())));
        }
        Ok(())
    })
}

/// Writes `combine` of the elements of two tensors.
fn combine<T: Element, R: Element>(arguments: &mut Arguments, combine: fn(T, T) -> R) -> Work {
    let count = arguments.size();
    let layout = arguments.layout(3);
    let left = arguments.address();
    let right = arguments.address();
    let to = arguments.address();
    Box::new(move || {
        let places = layout.places()?;
        let left = elements::<T>(left)?;
        let right = elements::<T>(right)?;
        let to = elements::<R>(to)?;
        for k in 0..count {
            to.set(
                k,
                combine(left.get(places[0].place(k)), right.get(places[1].place(k))),
            );
        }
        Ok(())
    })
}

fn binary<T: Element, O: Binary>(arguments: &mut Arguments, _: Grid) -> Work {
    combine::<T, T>(arguments, |x, y| {
        if T::IS_FLOAT {
            T::from_f64(O::floats(x.to_f64(), y.to_f64()))
        } else {
            T::from_i64(O::integers(x.to_i64(), y.to_i64()))
        }
    })
}

macro_rules! comparisons {
    ($($name:ident: $test:expr;)*) => {
        $(fn $name<T: Element>(arguments: &mut Arguments, _: Grid) -> Work {
            combine::<T, u8>(arguments, |x, y| {
                // Nothing compares with what is not a number, but for being unequal.
                let order = if T::IS_FLOAT { x.to_f64().partial_cmp(&y.to_f64()) } else { Some(x.to_i64().cmp(&y.to_i64())) };
                u8::from($test(order))
            })
        })*
    };
}

comparisons! {
    eq: |order: Option<Ordering>| order == Some(Ordering::Equal);
    ne: |order: Option<Ordering>| order != Some(Ordering::Equal);
    lt: |order: Option<Ordering>| order == Some(Ordering::Less);
    le: |order: Option<Ordering>| order.is_some_and(Ordering::is_le);
    gt: |order: Option<Ordering>| order == Some(Ordering::Greater);
    ge: |order: Option<Ordering>| order.is_some_and(Ordering::is_ge);
}

macro_rules! operations {
    (unary { $($unary:ident $unary_name:literal $apply:expr;)* }
     binary { $($binary:ident $binary_name:literal $floats:expr, $integers:expr;)* }) => {
        $(struct $unary;

        impl Unary for $unary {
            fn apply(x: f64) -> f64 {
                $apply(x)
            }
        })*

        $(struct $binary;

        impl Binary for $binary {
            fn floats(x: f64, y: f64) -> f64 {
                $floats(x, y)
            }

            fn integers(x: i64, y: i64) -> i64 {
                $integers(x, y)
            }
        })*

        /// Returns the kernel of an operation on elements alone.
        fn operation(root: &str, dtype: &str) -> Option<Kernel> {
            match root {
                $($unary_name => unary_kernel::<$unary>(dtype),)*
                $($binary_name => binary_kernel::<$binary>(dtype),)*
                _ => None,
            }
        }
    };
}

fn unary_kernel<O: Unary>(dtype: &str) -> Option<Kernel> {
    match dtype {
        "f16" => Some(unary::<half::f16, O>),
        "bf16" => Some(unary::<half::bf16, O>),
        "f32" => Some(unary::<f32, O>),
        "f64" => Some(unary::<f64, O>),
        _ => None,
    }
}

fn binary_kernel<O: Binary>(dtype: &str) -> Option<Kernel> {
    match dtype {
        "u8" => Some(binary::<u8, O>),
        "u32" => Some(binary::<u32, O>),
        "i64" => Some(binary::<i64, O>),
        "f16" => Some(binary::<half::f16, O>),
        "bf16" => Some(binary::<half::bf16, O>),
        "f32" => Some(binary::<f32, O>),
        "f64" => Some(binary::<f64, O>),
        _ => None,
    }
}

operations! {
    unary {
    Negative "uneg" |x: f64| -x;
    Reciprocal "urecip" |x: f64| 1.0 / x;
    Exponential "uexp" f64::exp;
    Logarithm "ulog" f64::ln;
    Sine "usin" f64::sin;
    Cosine "ucos" f64::cos;
    Tangent "utanh" f64::tanh;
    ErrorFunction "uerf" libm::erf;
    Ceiling "uceil" f64::ceil;
    Floor "ufloor" f64::floor;
    Rounded "uround" f64::round;
    Normal "unormcdf" normal;
    Absolute "uabs" f64::abs;
    Square "usqr" |x: f64| x * x;
    Root "usqrt" f64::sqrt;
    Gelu "ugelu" gelu;
    GeluErf "ugelu_erf" |x: f64| x * normal(x);
    Relu "urelu" |x: f64| x.max(0.0);
    Silu "usilu" |x: f64| x / (1.0 + (-x).exp());
    Sigmoid "usigmoid" |x: f64| 1.0 / (1.0 + (-x).exp());
    Sign "usign" sign;
    }
    binary {
    Sum "badd" |x: f64, y: f64| x + y, i64::wrapping_add;
    Difference "bsub" |x: f64, y: f64| x - y, i64::wrapping_sub;
    Product "bmul" |x: f64, y: f64| x * y, i64::wrapping_mul;
    // A GPU gives all ones for a division of integers by zero.
    Quotient "bdiv" |x: f64, y: f64| x / y, |x: i64, y: i64| x.checked_div(y).unwrap_or(-1);
    Maximum "bmaximum" f64::max, i64::max;
    Minimum "bminimum" f64::min, i64::min;
    }
}

fn normal(x: f64) -> f64 {
    0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
}

fn gelu(x: f64) -> f64 {
    let inner = x + 0.044_715 * x * x * x;
    0.5 * x
        * (1.0
            + (std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2 * inner).tanh())
}

fn sign(x: f64) -> f64 {
    f64::from(i8::from(x > 0.0) - i8::from(x < 0.0))
}

fn affine<T: Element>(arguments: &mut Arguments, _: Grid) -> Work {
    let count = arguments.size();
    let layout = arguments.layout(2);
    let from = arguments.address();
    let to = arguments.address();
    let factor = arguments.value::<T>();
    let summand = arguments.value::<T>();
    Box::new(move || {
        let places = layout.places()?;
        let to = elements::<T>(to)?;
        let source = input(from, to)?;
        for k in 0..count {
            let x = source.get(if from == 0 { k } else { places[0].place(k) });
            let value = if T::IS_FLOAT {
                T::from_f64(x.to_f64() * factor.to_f64() + summand.to_f64())
            } else {
                T::from_i64(
                    x.to_i64()
                        .wrapping_mul(factor.to_i64())
                        .wrapping_add(summand.to_i64()),
                )
            };
            to.set(k, value);
        }
        Ok(())
    })
}

/// Writes `apply` of each element and of one number.
fn with_number<T: Element>(arguments: &mut Arguments, apply: fn(f64, f64) -> f64) -> Work {
    let count = arguments.size();
    let layout = arguments.layout(2);
    let number = arguments.value::<T>().to_f64();
    let from = arguments.address();
    let to = arguments.address();
    Box::new(move || {
        let places = layout.places()?;
        let to = elements::<T>(to)?;
        let source = input(from, to)?;
        for k in 0..count {
            let place = if from == 0 { k } else { places[0].place(k) };
            to.set(k, T::from_f64(apply(source.get(place).to_f64(), number)));
        }
        Ok(())
    })
}

fn elu<T: Element>(arguments: &mut Arguments, _: Grid) -> Work {
    with_number::<T>(
        arguments,
        |x, alpha| if x > 0.0 { x } else { alpha * (x.exp() - 1.0) },
    )
}

fn powf<T: Element>(arguments: &mut Arguments, _: Grid) -> Work {
    with_number::<T>(arguments, f64::powf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_have_their_known_values() {
        assert!((gelu(1.0) - 0.841_191_990_6).abs() < 1e-9);
        assert!((normal(1.0) - 0.841_344_746_1).abs() < 1e-9);
        assert_eq!([sign(-3.0), sign(0.0), sign(2.0)], [-1.0, 0.0, 1.0]);
    }
}
