//! The types of elements, and how kernels compute with them.

use half::{bf16, f16};

/// An element of a tensor.
pub(crate) trait Element: Copy + Send + 'static {
    /// `true` for floating-point numbers.
    const IS_FLOAT: bool;
    /// `true` for types of which a maximum passes over values that are not a number.
    const SKIPS_NAN: bool;
    const ZERO: Self;

    fn to_f64(self) -> f64;
    fn from_f64(value: f64) -> Self;
    /// Returns an integer, wrapped into 64 bits; the nearest one to a floating-point number.
    fn to_i64(self) -> i64;
    /// Keeps the low bits of an integer.
    fn from_i64(value: i64) -> Self;
}

macro_rules! floats {
    ($($type:ty, $zero:expr, $skips:expr, $to:expr, $from:expr;)*) => {
        $(impl Element for $type {
            const IS_FLOAT: bool = true;
            const SKIPS_NAN: bool = $skips;
            const ZERO: Self = $zero;

            fn to_f64(self) -> f64 {
                $to(self)
            }

            fn from_f64(value: f64) -> Self {
                $from(value)
            }

            fn to_i64(self) -> i64 {
                self.to_f64() as i64
            }

            fn from_i64(value: i64) -> Self {
                Self::from_f64(value as f64)
            }
        })*
    };
}

floats! {
    f16, f16::ZERO, false, f16::to_f64, f16::from_f64;
    bf16, bf16::ZERO, false, bf16::to_f64, bf16::from_f64;
    f32, 0.0, true, f64::from, |value: f64| value as f32;
    f64, 0.0, true, |value| value, |value| value;
}

macro_rules! integers {
    ($($type:ty),*) => {
        $(impl Element for $type {
            const IS_FLOAT: bool = false;
            const SKIPS_NAN: bool = true;
            const ZERO: Self = 0;

            fn to_f64(self) -> f64 {
                self as f64
            }

            fn from_f64(value: f64) -> Self {
                // Values that do not fit become the nearest one that does, as on a GPU.
                value as $type
            }

            fn to_i64(self) -> i64 {
                self as i64
            }

            fn from_i64(value: i64) -> Self {
                value as $type
            }
        })*
    };
}

integers!(u8, u32, i16, i32, i64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_rounded_wrapped_or_held_at_the_ends() {
        assert_eq!(bf16::from_f64(1.0 + 1.0 / 512.0), bf16::ONE);
        assert_eq!(<u8 as Element>::from_i64(257), 1);
        assert_eq!(<u8 as Element>::from_f64(300.0), 255);
        assert_eq!(Element::to_i64(2.9f32), 2);
        assert!(Element::to_f64(f16::NAN).is_nan());
    }
}
