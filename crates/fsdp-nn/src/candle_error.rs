//! Errors of this crate that pass through candle, and candle's errors about memory that is not
//! there.

use std::io;

use crate::NnError;

impl NnError {
    /// Returns the error of a computation, which is [`NnError::ParametersSharded`] if candle read
    /// released memory. `sharded` returns the parameters that are not there, and their units.
    pub(crate) fn of_computation(
        error: candle_core::Error,
        sharded: impl FnOnce() -> (Vec<String>, Vec<String>),
    ) -> Self {
        if !reads_released(&error) {
            return error.into();
        }
        let (parameters, units) = sharded();
        if parameters.is_empty() {
            return error.into();
        }
        NnError::ParametersSharded {
            parameters,
            units,
            error: operation(&error),
        }
    }

    /// Turns this into candle's error, to pass through code that candle calls. `From` turns it back
    /// into this error.
    pub(crate) fn into_candle(self) -> candle_core::Error {
        match self {
            NnError::Candle(error) => error,
            // candle's variant for I/O is the one that keeps the type of the error inside.
            other => candle_core::Error::Io(io::Error::other(other)),
        }
    }
}

impl From<candle_core::Error> for NnError {
    /// Takes candle's error, or the one of this crate that went through candle.
    fn from(error: candle_core::Error) -> Self {
        use candle_core::Error;
        match error {
            Error::Io(error) => match error.downcast::<NnError>() {
                Ok(error) => error,
                Err(error) => NnError::Candle(Error::Io(error)),
            },
            Error::WithBacktrace { inner, .. } if is_ours(&inner) => Self::from(*inner),
            Error::Context { inner, .. } if is_ours(&inner) => Self::from(*inner),
            error => NnError::Candle(error),
        }
    }
}

/// Returns `true` if an operation met the dummy dtype of released memory, or may have.
fn reads_released(error: &candle_core::Error) -> bool {
    use candle_core::{DType::F4, Error};
    match error {
        Error::UnexpectedDType { got, .. } => *got == F4,
        Error::DTypeMismatchBinaryOp { lhs, rhs, .. } => *lhs == F4 || *rhs == F4,
        // candle's fused norms name the dtype of their input, and not that of the weight that is
        // not there.
        Error::UnsupportedDTypeForOp(dtype, _) => *dtype == F4 || dtype.is_float(),
        Error::WithBacktrace { inner, .. }
        | Error::Context { inner, .. }
        | Error::WithPath { inner, .. } => reads_released(inner),
        _ => false,
    }
}

/// Returns the operation that met released memory, for messages. The dtype of that memory says
/// nothing to whoever wrote the model; another dtype may be the true cause.
fn operation(error: &candle_core::Error) -> String {
    use candle_core::Error;
    match error {
        Error::UnexpectedDType { msg, .. } => (*msg).to_owned(),
        // The tensors may all be there, and the operation may not know their dtype: the error is
        // the same.
        Error::UnsupportedDTypeForOp(dtype, op) if *dtype != candle_core::DType::F4 => {
            format!("in {op}, or {op} does not support {}", dtype.as_str())
        }
        Error::DTypeMismatchBinaryOp { op, .. } | Error::UnsupportedDTypeForOp(_, op) => {
            format!("in {op}")
        }
        Error::WithBacktrace { inner, .. }
        | Error::Context { inner, .. }
        | Error::WithPath { inner, .. } => operation(inner),
        error => error.to_string(),
    }
}

/// Returns `true` if an error of candle's type wraps an [`NnError`], at any depth.
fn is_ours(error: &candle_core::Error) -> bool {
    use candle_core::Error;
    match error {
        Error::Io(error) => error.get_ref().is_some_and(|inner| inner.is::<NnError>()),
        Error::WithBacktrace { inner, .. } | Error::Context { inner, .. } => is_ours(inner),
        _ => false,
    }
}
