//! The names of the backends.

use std::fmt;
use std::str::FromStr;

use crate::error::CommError;

/// The way in which the ranks of a job reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackendKind {
    /// Threads of one process: see [`run_local`](crate::run_local).
    Local,
    /// Processes, over sockets and shared memory.
    Tcp,
    /// Processes, over MPI.
    Mpi,
    /// Processes with GPUs, over NCCL.
    Nccl,
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BackendKind::Local => "local",
            BackendKind::Tcp => "tcp",
            BackendKind::Mpi => "mpi",
            BackendKind::Nccl => "nccl",
        })
    }
}

impl FromStr for BackendKind {
    type Err = CommError;

    fn from_str(name: &str) -> Result<Self, CommError> {
        BackendKind::ALL
            .into_iter()
            .find(|kind| kind.to_string() == name)
            .ok_or_else(|| CommError::BackendUnavailable {
                backend: name.to_owned(),
                message: "there are local, tcp, mpi and nccl".to_owned(),
            })
    }
}

impl BackendKind {
    /// Every kind, whether compiled in or not.
    pub const ALL: [BackendKind; 4] = [
        BackendKind::Local,
        BackendKind::Tcp,
        BackendKind::Mpi,
        BackendKind::Nccl,
    ];

    /// Checks that this build has the backend.
    ///
    /// # Errors
    /// [`CommError::BackendUnavailable`] says how to get a build that has it.
    pub fn check_compiled_in(self) -> Result<(), CommError> {
        let message = match self {
            BackendKind::Local | BackendKind::Tcp => return Ok(()),
            BackendKind::Mpi if cfg!(feature = "mpi") => return Ok(()),
            BackendKind::Mpi => {
                "it is not compiled in: install an MPI library and libclang, and build with `--features mpi`"
            }
            BackendKind::Nccl if cfg!(feature = "nccl") => return Ok(()),
            BackendKind::Nccl => {
                "it is not compiled in: build with `--features nccl`, for which the program needs a CUDA toolkit"
            }
        };
        Err(self.unavailable(message))
    }

    /// Returns the error for a build or a machine that lacks something that the backend needs.
    pub(crate) fn unavailable(self, message: impl Into<String>) -> CommError {
        CommError::BackendUnavailable {
            backend: self.to_string(),
            message: message.into(),
        }
    }
}
