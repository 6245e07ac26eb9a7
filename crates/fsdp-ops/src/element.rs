//! The element types of tensors, each with the type that its arithmetic is done in.

use std::borrow::Cow;

use candle_core::{DType, Device, Result, Tensor, WithDType};
use half::{bf16, f16};
use rayon::iter::{
    IndexedParallelIterator as _, IntoParallelRefIterator as _, ParallelIterator as _,
};

use crate::real::Real;

/// An element type that the operations take.
pub(crate) trait Element: WithDType {
    /// The type that arithmetic is done in.
    type Real: Real + WithDType;

    /// Returns the value, exactly.
    fn widen(self) -> Self::Real;
    /// Returns the nearest value that this type has.
    fn narrow(value: Self::Real) -> Self;
    /// Returns the values in the type that arithmetic is done in. Nothing is copied if that is this
    /// type itself.
    fn reals(values: &[Self]) -> Cow<'_, [Self::Real]>;
    /// Returns the nearest values that this type has. Nothing is copied if arithmetic is done in
    /// this type itself.
    fn of_reals(values: Vec<Self::Real>) -> Vec<Self>;
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

            fn of_reals(values: Vec<$type>) -> Vec<Self> {
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
                Cow::Owned(values.par_iter().with_min_len(CONVERTED).map(|value| value.to_f32()).collect())
            }

            fn of_reals(values: Vec<f32>) -> Vec<Self> {
                values.par_iter().with_min_len(CONVERTED).map(|&value| Self::from_f32(value)).collect()
            }
        })*
    };
}

real_element!(f32 f64);
half_element!(bf16 f16);

/// The least number of values that are worth a task to convert them.
const CONVERTED: usize = 16 << 10;

/// Widens all values.
pub(crate) fn widened<T: Element>(values: &[T]) -> Vec<T::Real> {
    values.iter().map(|&value| value.widen()).collect()
}

/// Makes a tensor of computed values.
pub(crate) fn tensor<T: Element>(values: Vec<T>, dims: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(values, dims, &Device::Cpu)
}

/// Makes a tensor of sums, rounded to the element type.
pub(crate) fn tensor_of_sums<T: Element>(sums: &[T::Real]) -> Result<Tensor> {
    tensor(
        sums.iter().map(|&sum| T::narrow(sum)).collect(),
        &[sums.len()],
    )
}

/// Returns the error of a dtype that an operation does not take.
pub(crate) fn unsupported<T>(dtype: DType, operation: &'static str) -> Result<T> {
    Err(candle_core::Error::UnsupportedDTypeForOp(dtype, operation).bt())
}

/// Runs code with `$type` as the element type of a dtype; an error for dtypes that no operation
/// here takes.
macro_rules! with_element {
    ($dtype:expr, $operation:expr, $type:ident => $code:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $type = f32;
                $code
            }
            candle_core::DType::F64 => {
                type $type = f64;
                $code
            }
            candle_core::DType::BF16 => {
                type $type = half::bf16;
                $code
            }
            candle_core::DType::F16 => {
                type $type = half::f16;
                $code
            }
            dtype => crate::element::unsupported(dtype, $operation),
        }
    };
}
pub(crate) use with_element;
