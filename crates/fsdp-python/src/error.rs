//! Errors of the engine as Python exceptions.

use anyhow::Error;
use fsdp_cli::embed::explain;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Returns an error as a Python exception. Its class is the one in `fsdp_checkpoint.errors` for the
/// exit code with which the command `fsdp` would end.
pub(crate) fn exception(py: Python<'_>, error: impl Into<Error>) -> PyErr {
    match make_exception(py, &error.into()) {
        // If the exception cannot be made, for example because its module cannot be imported, that
        // error is raised.
        Ok(error) | Err(error) => error,
    }
}

/// Runs a function without the lock of the interpreter, so that other Python threads go on. Its
/// error becomes an exception.
pub(crate) fn detached<T: Send, E: Into<Error> + Send>(
    py: Python<'_>,
    f: impl FnOnce() -> Result<T, E> + Send,
) -> PyResult<T> {
    py.detach(f).map_err(|error| exception(py, error))
}

/// Makes the exception with `exception_of` of `fsdp_checkpoint.errors`.
fn make_exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let explained = explain(error);
    let make = py
        .import("fsdp_checkpoint.errors")?
        .getattr("exception_of")?;
    let made = make.call1((explained.exit_code, explained.message, explained.hint))?;
    Ok(PyErr::from_value(made))
}

/// Returns a Python `ValueError`, for a wrong argument.
pub(crate) fn wrong_argument(message: impl Into<String>) -> PyErr {
    PyValueError::new_err(message.into())
}
