//! Mixed precision: the dtypes in which a unit is gathered, computed with and reduced.

use candle_core::{DType, Tensor};

/// The dtypes of a unit that differ from the dtype of its shards: torch's `MixedPrecision` and
/// `MixedPrecisionPolicy`.
///
/// Shards, optimizer state and checkpoints always have
/// [`FsdpConfig::dtype`](crate::FsdpConfig::dtype). With `f32` shards, updates that are too small
/// for a `bf16` value are not lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MixedPrecision {
    /// The dtype in which parameters are gathered and used in the computation: `BF16` or `F16`
    /// halve what the all-gathers move. It is the dtype of the model's builder, so parameters are
    /// requested in it. A parameter that the model requests in another dtype keeps that dtype.
    pub param: Option<DType>,
    /// The dtype in which gradients are reduced over ranks; that of the parameters by default.
    pub reduce: Option<DType>,
    /// The dtype of running statistics that the model requests; that of shards by default.
    pub buffer: Option<DType>,
    /// The dtype to which the output of the model is converted, or of the unit for which this is
    /// given. Units inside of it do not convert their outputs.
    pub output: Option<DType>,
    /// `true` (the default) if the input of [`Unit::forward`](candle_nn::Module::forward) is
    /// converted to the dtype of the parameters. The inputs of closures
    /// ([`Unit::run`](crate::Unit::run), the model's own forward) cannot be converted.
    pub cast_inputs: bool,
}

impl Default for MixedPrecision {
    fn default() -> Self {
        MixedPrecision {
            param: None,
            reduce: None,
            buffer: None,
            output: None,
            cast_inputs: true,
        }
    }
}

impl MixedPrecision {
    /// Returns the setting for the units inside, which do not convert their outputs.
    pub(crate) const fn inside(self) -> Self {
        MixedPrecision {
            output: None,
            ..self
        }
    }
}

/// Returns a tensor in a dtype, if one is given and the tensor holds floats; others as they are.
pub(crate) fn cast(tensor: Tensor, dtype: Option<DType>) -> candle_core::Result<Tensor> {
    match dtype {
        Some(dtype) if tensor.dtype().is_float() && tensor.dtype() != dtype => {
            tensor.to_dtype(dtype)
        }
        _ => Ok(tensor),
    }
}
