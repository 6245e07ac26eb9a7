//! The native part of the Python package `fsdp_checkpoint`: the engine of `fsdp-formats`, and the
//! command of `fsdp-cli`.
//!
//! The package's Python files make the public interface of this. Nothing here knows numpy or torch:
//! tensors come and go as buffers of bytes.

mod checkpoint;
mod command;
mod error;
mod hashed;
mod memory;
mod staging;
mod value;

use pyo3::prelude::*;

/// The native module of `fsdp_checkpoint`. Use the package, not this.
#[pymodule(name = "_native")]
mod native {
    #[pymodule_export]
    use super::checkpoint::Checkpoint;
    #[pymodule_export]
    use super::command::{report, run};
    #[pymodule_export]
    use super::hashed::{FileHasher, HashedFile, HashedFiles, join_integrity};
    #[pymodule_export]
    use super::staging::Staging;
}
