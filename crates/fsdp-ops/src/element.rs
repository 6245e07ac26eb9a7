//! The element types of tensors, each with the type that its arithmetic is done in.

use candle_core::{DType, Device, Result, Tensor, WithDType};
use half::{bf16, f16};

use crate::real::Real;

/// An element type that the operations take.
pub(crate) trait Element: WithDType {
    /// The type that arithmetic is done in.
    type Real: Real + WithDType;

    /// Returns the value, exactly.
    fn widen(self) -> Self::Real;
    /// Returns the nearest value that this type has.
    fn narrow(value: Self::Real) -> Self;
}

macro_rules! element {
    ($($type:ty, $real:ty, $widen:expr, $narrow:expr;)*) => {
        $(impl Element for $type {
            type Real = $real;

            #[inline(always)]
            fn widen(self) -> $real {
                $widen(self)
            }

            #[inline(always)]
            fn narrow(value: $real) -> Self {
                $narrow(value)
            }
        })*
    };
}

element! {
    f32, f32, std::convert::identity, std::convert::identity;
    f64, f64, std::convert::identity, std::convert::identity;
    bf16, f32, bf16::to_f32, bf16::from_f32;
    f16, f32, f16::to_f32, f16::from_f32;
}

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
    tensor(sums.iter().map(|&sum| T::narrow(sum)).collect(), &[sums.len()])
}

/// Returns the error of a dtype that an operation does not take.
pub(crate) fn unsupported<T>(dtype: DType, operation: &'static str) -> Result<T> {
    Err(candle_core::Error::UnsupportedDTypeForOp(dtype, operation).bt())
}

/// Runs code with `$type` as the element type of a dtype; an error for dtypes that no operation here takes.
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
