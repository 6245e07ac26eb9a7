//! Conversions between candle's dtypes and those of `fsdp-layout`.

use fsdp_layout::DType;

use crate::error::FlatError;

/// The dtypes that candle computes with, and ours for them.
const COMPUTED: [(candle_core::DType, DType); 9] = [
    (candle_core::DType::U8, DType::U8),
    (candle_core::DType::U32, DType::U32),
    (candle_core::DType::I16, DType::I16),
    (candle_core::DType::I32, DType::I32),
    (candle_core::DType::I64, DType::I64),
    (candle_core::DType::BF16, DType::BF16),
    (candle_core::DType::F16, DType::F16),
    (candle_core::DType::F32, DType::F32),
    (candle_core::DType::F64, DType::F64),
];

/// The dtypes that candle holds but hardly computes with, and ours for them.
const HELD: [(candle_core::DType, DType); 2] = [
    (candle_core::DType::F8E4M3, DType::F8E4M3Fn),
    (candle_core::DType::F8E8M0, DType::F8E8M0Fnu),
];

/// Returns the dtype of files and state dicts for a candle dtype; `None` for candle's dummy types
/// (6-bit floats).
#[must_use]
pub fn from_candle(dtype: candle_core::DType) -> Option<DType> {
    let mut known_dtypes = COMPUTED.iter().chain(&HELD);
    known_dtypes
        .find(|(candle, _)| *candle == dtype)
        .map(|pair| pair.1)
}

/// Returns the candle dtype for ours.
///
/// # Errors
/// [`FlatError::NotInCandle`] for what candle does not compute with; such tensors are kept as
/// [`RawTensor`](crate::RawTensor). (Eight-bit floats are among them: candle holds but hardly
/// computes with them.)
pub fn to_candle(dtype: DType) -> Result<candle_core::DType, FlatError> {
    let found = COMPUTED.iter().find(|(_, file_dtype)| *file_dtype == dtype);
    found
        .map(|pair| pair.0)
        .ok_or(FlatError::NotInCandle { dtype })
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

pub(crate) use with_float;
