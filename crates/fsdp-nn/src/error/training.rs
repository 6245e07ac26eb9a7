//! The errors of gradient scalers and samplers.

use thiserror::Error;

/// A [`GradScaler`](crate::GradScaler) that is used in the wrong order, or given options or state
/// that cannot be.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum ScalerError {
    /// An option is outside its range.
    #[error("a gradient scaler cannot work with `{key}` = {value}: it must be {range}")]
    OutOfRange {
        /// The option, by torch's name.
        key: &'static str,
        /// The value found.
        value: f64,
        /// The values allowed.
        range: &'static str,
    },
    /// Gradients would be divided by the scale twice.
    #[error("the gradients of this step have been unscaled already: call `update` after each step")]
    UnscaledTwice,
    /// A backward has run between unscaling and the step.
    #[error(
        "a backward has run since the gradients were unscaled: call `update` after each step, and \
         `unscale` after the last backward of a step"
    )]
    NewGradients,
    /// An update without a step.
    #[error("the scale cannot be updated before `unscale` or `step` has looked at gradients")]
    NothingToUpdate,
    /// A state dict lacks a key, or has another kind of value there.
    #[error("`{key}` in the state of a gradient scaler is {found}, but must be {expected}")]
    State {
        /// The key.
        key: &'static str,
        /// The kind of value found, or `nothing`.
        found: &'static str,
        /// The kind of value that belongs there.
        expected: &'static str,
    },
}

/// A sampler without samples or batches, or a state that cannot be loaded into one.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// There are no samples, or batches have none.
    #[error("a sampler of {samples} samples in batches of {batch} never has a batch")]
    Empty {
        /// The number of samples.
        samples: u64,
        /// The number of samples of a batch.
        batch: u64,
    },
    /// The state is of another data set, or of another order of it.
    #[error(
        "the state of the sampler has `{key}` = {saved}, but here it is {here}: the order would be \
         another"
    )]
    Other {
        /// The key.
        key: &'static str,
        /// The value there.
        saved: String,
        /// The value here.
        here: String,
    },
    /// The state lacks a key, or has another kind of value there.
    #[error("the state of the sampler has no {expected} under `{key}`")]
    State {
        /// The key.
        key: &'static str,
        /// The kind of value that belongs there.
        expected: &'static str,
    },
}
