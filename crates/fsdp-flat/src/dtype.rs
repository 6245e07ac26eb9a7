//! Conversions between candle's dtypes and those of `fsdp-layout`.

use fsdp_layout::DType;

use crate::error::FlatError;

/// Returns the dtype of files and state dicts for a candle dtype; `None` for candle's dummy types
/// (6-bit floats).
#[must_use]
pub const fn from_candle(dtype: candle_core::DType) -> Option<DType> {
    match dtype {
        candle_core::DType::U8 => Some(DType::U8),
        candle_core::DType::U32 => Some(DType::U32),
        candle_core::DType::I16 => Some(DType::I16),
        candle_core::DType::I32 => Some(DType::I32),
        candle_core::DType::I64 => Some(DType::I64),
        candle_core::DType::BF16 => Some(DType::BF16),
        candle_core::DType::F16 => Some(DType::F16),
        candle_core::DType::F32 => Some(DType::F32),
        candle_core::DType::F64 => Some(DType::F64),
        candle_core::DType::F8E4M3 => Some(DType::F8E4M3Fn),
        candle_core::DType::F8E8M0 => Some(DType::F8E8M0Fnu),
        _ => None,
    }
}

/// Returns the candle dtype for ours.
///
/// # Errors
/// [`FlatError::NotInCandle`] for what candle does not compute with; such tensors are kept as
/// [`RawTensor`](crate::RawTensor). (Eight-bit floats are among them: candle holds but hardly
/// computes with them.)
pub const fn to_candle(dtype: DType) -> Result<candle_core::DType, FlatError> {
    match dtype {
        DType::U8 => Ok(candle_core::DType::U8),
        DType::U32 => Ok(candle_core::DType::U32),
        DType::I16 => Ok(candle_core::DType::I16),
        DType::I32 => Ok(candle_core::DType::I32),
        DType::I64 => Ok(candle_core::DType::I64),
        DType::BF16 => Ok(candle_core::DType::BF16),
        DType::F16 => Ok(candle_core::DType::F16),
        DType::F32 => Ok(candle_core::DType::F32),
        DType::F64 => Ok(candle_core::DType::F64),
        dtype => Err(FlatError::NotInCandle { dtype }),
    }
}

/// Returns the dtype of files and state dicts, like [`from_candle`].
///
/// # Errors
/// candle's errors, for its dummy dtypes (6-bit floats), which files do not know.
pub fn file_dtype(dtype: candle_core::DType) -> Result<DType, FlatError> {
    from_candle(dtype).ok_or(FlatError::Candle(
        candle_core::Error::UnsupportedDTypeForOp(dtype, "state dict"),
    ))
}

/// Calls a generic function with the Rust type of a floating-point candle dtype:
/// `with_float!(dtype, T => body, else other)`. Without `else`, other dtypes are a bug of the
/// caller's.
#[macro_export]
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::with_float!($dtype, $T => $body, else {
            unreachable!("{:?} is none of the dtypes that are computed with", $dtype)
        })
    };
    ($dtype:expr, $T:ident => $body:expr, else $otherwise:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $T = half::f16;
                $body
            }
            _ => $otherwise,
        }
    };
}
