//! Errors of the engine as Python exceptions.

use anyhow::Error;
use fsdp_cli::embed::Explained;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Returns the exception of an error: of the class in `fsdp_checkpoint.errors` that its exit code has.
pub(crate) fn exception(py: Python<'_>, error: impl Into<Error>) -> PyErr {
    let explained = Explained::new(&error.into());
    match class_of(py, &explained) {
        Ok(error) | Err(error) => error,
    }
}

fn class_of(py: Python<'_>, explained: &Explained) -> PyResult<PyErr> {
    let make = py.import("fsdp_checkpoint.errors")?.getattr("exception_of")?;
    let made = make.call1((explained.exit_code, &explained.message, explained.hint))?;
    Ok(PyErr::from_value(made))
}

/// Returns an error of wrong arguments, as Python has it.
pub(crate) fn wrong_argument(message: impl Into<String>) -> PyErr {
    PyErr::new::<pyo3::exceptions::PyValueError, _>(message.into())
}

/// Returns a tuple of sizes.
pub(crate) fn sizes<'py>(py: Python<'py>, sizes: &[usize]) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, sizes)
}
