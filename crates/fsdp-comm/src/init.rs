//! Which backends there are, and the group of all ranks of a job.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::environment::Environment;
use crate::error::CommError;
use crate::group::{DEFAULT_DEADLINE, ProcessGroup};
use crate::tcp::TcpOptions;

/// How the ranks of a job reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackendKind {
    /// Threads of one process: see [`run_local`](crate::run_local).
    Local,
    /// Processes, over sockets and shared memory.
    Tcp,
    /// Processes, over MPI.
    Mpi,
    /// Processes with a GPU each, over NCCL.
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
        let all = [BackendKind::Local, BackendKind::Tcp, BackendKind::Mpi, BackendKind::Nccl];
        all.into_iter().find(|kind| kind.to_string() == name).ok_or_else(|| CommError::BackendUnavailable {
            backend: name.to_owned(),
            message: "there are local, tcp, mpi and nccl".to_owned(),
        })
    }
}

impl BackendKind {
    /// Whether this build has it.
    ///
    /// # Errors
    /// [`CommError::BackendUnavailable`] says how to get a build that has.
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
        Err(unavailable(self, message))
    }
}

fn unavailable(backend: BackendKind, message: &str) -> CommError {
    CommError::BackendUnavailable { backend: backend.to_string(), message: message.to_owned() }
}

/// The group of all ranks of the job that a launcher started this process in. torch's `init_process_group`.
///
/// # Errors
/// [`CommError::Environment`] where no launcher says who this process is, [`CommError::Rendezvous`] where the ranks do
/// not find each other within [`DEFAULT_DEADLINE`], [`CommError::BackendUnavailable`] where this build or this machine
/// lacks what the backend needs.
pub fn init_process_group(backend: BackendKind) -> Result<ProcessGroup, CommError> {
    init_process_group_within(backend, DEFAULT_DEADLINE)
}

/// As [`init_process_group`], with the time that the ranks have to find each other, which is then the group's deadline:
/// torch's `timeout`.
///
/// # Errors
/// As [`init_process_group`].
pub fn init_process_group_within(backend: BackendKind, deadline: Duration) -> Result<ProcessGroup, CommError> {
    backend.check_compiled_in()?;
    match backend {
        BackendKind::Tcp => TcpOptions::new(Environment::from_env()?).deadline(deadline).connect(),
        #[cfg(feature = "mpi")]
        BackendKind::Mpi => crate::mpi::connect(deadline),
        #[cfg(feature = "nccl")]
        BackendKind::Nccl => crate::nccl::connect(deadline),
        _ => Err(unavailable(backend, "its ranks are threads of one process, which `run_local` starts")),
    }
}
