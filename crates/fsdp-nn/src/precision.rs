//! Mixed precision: the dtypes in which a unit is gathered, computed with and reduced.

use candle_core::{DType, Tensor};

/// The dtypes of a unit, where they are not those of its shards: torch's `MixedPrecision` and `MixedPrecisionPolicy`.
///
/// Shards, optimizer state and checkpoints have [`FsdpConfig::dtype`](crate::FsdpConfig::dtype), whatever this says. With `f32`
/// shards, steps that are too small for `bf16` values add up all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MixedPrecision {
    /// The dtype in which parameters are gathered and computed with: `BF16` or `F16` halve what the all-gathers move. The
    /// model's builder has it, so that parameters are asked for in it; one that is asked for in another dtype keeps that.
    pub param: Option<DType>,
    /// The dtype in which gradients are reduced over ranks; that of the parameters by default.
    pub reduce: Option<DType>,
    /// The dtype of running statistics that the model asks for; that of shards by default.
    pub buffer: Option<DType>,
    /// The dtype to which the output is converted: that of the model, or of the unit that this is given to. Units inside
    /// return what they compute.
    pub output: Option<DType>,
    /// `true` (the default) if the input of [`Unit::forward`](candle_nn::Module::forward) is converted to the dtype of the
    /// parameters. The inputs of a closure ([`Unit::run`](crate::Unit::run), the model's own forward) cannot be seen.
    pub cast_inputs: bool,
}

impl Default for MixedPrecision {
    fn default() -> Self {
        MixedPrecision { param: None, reduce: None, buffer: None, output: None, cast_inputs: true }
    }
}

impl MixedPrecision {
    /// Returns what a unit inside has of it.
    pub(crate) const fn inside(self) -> Self {
        MixedPrecision { output: None, ..self }
    }
}

/// Returns a tensor in a dtype, if one is given and the tensor holds floats; others as they are.
pub(crate) fn cast(tensor: Tensor, dtype: Option<DType>) -> candle_core::Result<Tensor> {
    match dtype {
        Some(dtype) if tensor.dtype().is_float() && tensor.dtype() != dtype => tensor.to_dtype(dtype),
        _ => Ok(tensor),
    }
}
