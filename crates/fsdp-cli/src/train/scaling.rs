//! The precision of a run, and the scale of its loss.

use anyhow::Result;
use candle_core::DType;
use fsdp::nn::{GradScaler, GradScalerOptions, MixedPrecision};

use super::arguments::HalfPrecision;

/// Returns the dtypes of a run.
pub(super) fn precision(half: Option<HalfPrecision>) -> MixedPrecision {
    let Some(half) = half else {
        return MixedPrecision::default();
    };
    let param = match half {
        HalfPrecision::Bf16 => DType::BF16,
        HalfPrecision::F16 => DType::F16,
    };
    MixedPrecision {
        param: Some(param),
        reduce: Some(DType::F32),
        ..MixedPrecision::default()
    }
}

/// Makes the scaler of a run. Only `f16` needs a scale.
pub(super) fn scaler(half: Option<HalfPrecision>) -> Result<Option<GradScaler>> {
    match half {
        Some(HalfPrecision::F16) => Ok(Some(GradScaler::new(GradScalerOptions::default())?)),
        Some(HalfPrecision::Bf16) | None => Ok(None),
    }
}
