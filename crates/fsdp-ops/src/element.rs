//! The element types of tensors, each with the type that its arithmetic is done in.

use std::borrow::Cow;

use candle_core::WithDType;
use half::{bf16, f16};
use rayon::iter::{
    IndexedParallelIterator as _, IntoParallelRefIterator as _, ParallelIterator as _,
};

use crate::real::Real;

/// An element type that the operations take.
pub(crate) trait Element: WithDType {
    /// The type that arithmetic is done in.
    type Real: Real;

    /// Returns the value, exactly.
    fn widen(self) -> Self::Real;
    /// Returns the nearest value that this type has.
    fn narrow(value: Self::Real) -> Self;
    /// Returns the values in the type that arithmetic is done in. Nothing is copied if that is this
    /// type itself.
    fn reals(values: &[Self]) -> Cow<'_, [Self::Real]>;
    /// Returns the nearest values that this type has. Nothing is copied if arithmetic is done in
    /// this type itself.
    fn from_reals(values: Vec<Self::Real>) -> Vec<Self>;
}

macro_rules! real_element {
    ($($type:ty)*) => {
        $(impl Element for $type {
            type Real = $type;

            #[inline(always)]
            fn widen(self) -> $type {
                self
            }

            #[inline(always)]
            fn narrow(value: $type) -> Self {
                value
            }

            fn reals(values: &[Self]) -> Cow<'_, [$type]> {
                Cow::Borrowed(values)
            }

            fn from_reals(values: Vec<$type>) -> Vec<Self> {
                values
            }
        })*
    };
}

macro_rules! half_element {
    ($($type:ty)*) => {
        $(impl Element for $type {
            type Real = f32;

            #[inline(always)]
            fn widen(self) -> f32 {
                self.to_f32()
            }

            #[inline(always)]
            fn narrow(value: f32) -> Self {
                Self::from_f32(value)
            }

            fn reals(values: &[Self]) -> Cow<'_, [f32]> {
                Cow::Owned(values.par_iter().with_min_len(MIN_TASK_LEN).map(|value| value.to_f32()).collect())
            }

            fn from_reals(values: Vec<f32>) -> Vec<Self> {
                values.par_iter().with_min_len(MIN_TASK_LEN).map(|&value| Self::from_f32(value)).collect()
            }
        })*
    };
}

real_element!(f32 f64);
half_element!(bf16 f16);

/// The least number of values that are worth a task to convert them.
const MIN_TASK_LEN: usize = 16 << 10;
