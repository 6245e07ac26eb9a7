//! The group of all ranks of a job.

use std::time::Duration;

use crate::backend_kind::BackendKind;
use crate::deadline::DEFAULT_DEADLINE;
use crate::environment::Environment;
use crate::error::CommError;
use crate::group::ProcessGroup;
use crate::tcp::TcpOptions;

/// Creates the group of all ranks of the job that a launcher started this process in. torch's
/// `init_process_group`.
///
/// # Errors
/// [`CommError::Environment`] if no launcher has set the variables of this process,
/// [`CommError::Rendezvous`] if the ranks do not find each other within [`DEFAULT_DEADLINE`],
/// [`CommError::BackendUnavailable`] if this build or this machine lacks something that the backend
/// needs.
pub fn init_process_group(backend: BackendKind) -> Result<ProcessGroup, CommError> {
    init_process_group_within(backend, DEFAULT_DEADLINE)
}

/// Creates the group as [`init_process_group`] does, with a deadline for the rendezvous, which is
/// then the group's deadline: torch's `timeout`.
///
/// # Errors
/// The same as [`init_process_group`].
pub fn init_process_group_within(
    backend: BackendKind,
    timeout: Duration,
) -> Result<ProcessGroup, CommError> {
    backend.check_compiled_in()?;
    match backend {
        BackendKind::Tcp => {
            let options = TcpOptions {
                deadline: timeout,
                ..TcpOptions::default()
            };
            options.connect(&Environment::from_env()?)
        }
        #[cfg(feature = "mpi")]
        BackendKind::Mpi => crate::mpi::connect(timeout),
        #[cfg(feature = "nccl")]
        BackendKind::Nccl => crate::nccl::connect(timeout),
        _ => {
            Err(backend
                .unavailable("its ranks are threads of one process, which `run_local` starts"))
        }
    }
}
