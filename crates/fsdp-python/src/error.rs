//! Errors of the engine as Python exceptions.

use anyhow::Error;
use fsdp_cli::embed::explain;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Returns an error as a Python exception, made by `exception_of` of `fsdp_checkpoint.errors`. Its
/// class is the one for the exit code with which the command `fsdp` would end.
pub(crate) fn to_exception(py: Python<'_>, error: impl Into<Error>) -> PyErr {
    let explained = explain(&error.into());
    let arguments = (explained.exit_code, explained.message, explained.hint);
    let instance = py
        .import("fsdp_checkpoint.errors")
        .and_then(|errors| errors.call_method1("exception_of", arguments));
    // If the exception cannot be made, for example because its module cannot be imported, that
    // error is raised.
    instance.map_or_else(|error| error, PyErr::from_value)
}

/// Runs a function without the lock of the interpreter, so that other Python threads go on. Its
/// error becomes an exception.
pub(crate) fn run_detached<T: Send, E: Into<Error> + Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, E> + Send,
) -> PyResult<T> {
    py.detach(work).map_err(|error| to_exception(py, error))
}

/// Returns a Python `ValueError`, for a wrong argument.
pub(crate) fn wrong_argument(message: impl Into<String>) -> PyErr {
    PyValueError::new_err(message.into())
}
