//! The group of all ranks of a job.

use std::time::Duration;

use crate::backend_kind::BackendKind;
use crate::environment::Environment;
use crate::error::CommError;
use crate::group::{DEFAULT_DEADLINE, ProcessGroup};
use crate::tcp::TcpOptions;

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
        _ => Err(backend.unavailable("its ranks are threads of one process, which `run_local` starts")),
    }
}
