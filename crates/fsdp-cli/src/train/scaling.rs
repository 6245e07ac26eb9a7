//! The precision of a run, and the scale of its loss.

use anyhow::Result;
use candle_core::DType;
use fsdp::nn::{GradScaler, GradScalerOptions, MixedPrecision};
use fsdp::prelude::*;

use super::arguments::HalfPrecision;
use super::settings::Resume;

/// The key of the scaler's state in a checkpoint.
pub(super) const SCALER: &str = "scaler";

/// Returns the dtypes of a run.
pub(super) fn precision(half: Option<HalfPrecision>) -> MixedPrecision {
    let Some(half) = half else { return MixedPrecision::default() };
    let param = match half {
        HalfPrecision::Bf16 => DType::BF16,
        HalfPrecision::F16 => DType::F16,
    };
    MixedPrecision { param: Some(param), reduce: Some(DType::F32), ..MixedPrecision::default() }
}

/// Makes the scaler of a run, which goes on from that of a checkpoint if it has one. Only `f16` needs a scale.
///
/// # Errors
/// A checkpoint whose scaler cannot be read.
pub(super) fn scaler(half: Option<HalfPrecision>, resume: Option<&Resume>) -> Result<GradScaler> {
    let enabled = half == Some(HalfPrecision::F16);
    let mut scaler = GradScaler::new(GradScalerOptions { enabled, ..GradScalerOptions::default() })?;
    let mut state = StateDict::new();
    for key in scaler.state_dict().keys() {
        let name = format!("{SCALER}.{key}");
        let saved = resume.map_or(Ok(None), |resume| resume.read(&name, |value| Some(value.clone())))?;
        if let Some(value) = saved {
            state.insert(key, StateValue::Plain(value));
        }
    }
    if !state.is_empty() {
        scaler.load_state_dict(&state)?;
    }
    Ok(scaler)
}
