//! What can go wrong with state dicts.

use fsdp_comm::CommError;
use fsdp_flat::FlatError;
use thiserror::Error;

/// An error of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StateError {
    /// A tensor does not fit.
    #[error(transparent)]
    Flat(#[from] FlatError),
    /// candle refused.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// A collective failed, or another rank did.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// Two places of a nested state dict have one flat key.
    #[error("duplicated flatten key `{key}`: two values of the state dict would share it")]
    DuplicateKey {
        /// The flat key.
        key: String,
    },
    /// A path leads through something that is no container, or that is of another kind.
    #[error("`{path}` is not a {expected}")]
    WrongContainer {
        /// The flat key of the path up to the value.
        path: String,
        /// What it should be.
        expected: &'static str,
    },
}
