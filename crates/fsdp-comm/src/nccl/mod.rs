//! The `nccl` backend: ranks are processes with GPUs, whose memory NCCL moves directly.
//!
//! Ballots, errors, objects and slices of host memory are sent as in the `tcp` backend, and
//! processes find each other as there. So a rank that dies or stops is named, and all ranks agree
//! before they make a call of NCCL's, unless all of them expect it. Only the collectives of
//! [`DeviceGroup`](crate::device::DeviceGroup) go through NCCL.

mod communicator;
mod late;
#[expect(unsafe_code, reason = "calls of a C library")]
pub(crate) mod library;
mod watch;
mod watcher;

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, CudaStream, DriverError};

use self::communicator::Communicators;
use self::late::LeftOut;
use self::library::{SplitPlace, UniqueId};
use self::watch::{OwnedRound, Watch};
use self::watcher::{Origin, WatchedCommunicator};
use crate::backend::{
    Backend, DeviceTransfer, Members, Movement, Planner, QueuedTransfer, Round, Vote,
};
use crate::backend_kind::BackendKind;
use crate::blame;
use crate::deadline::deadline_after;
use crate::environment::Environment;
use crate::error::CommError;
use crate::group::ProcessGroup;
use crate::record::{Call, Fault};
use crate::tcp::{TcpBackend, TcpOptions};
use crate::wire;

/// Creates the group of all processes of the job.
pub(crate) fn connect(timeout: Duration) -> Result<ProcessGroup, CommError> {
    let deadline = deadline_after(timeout);
    library::check().map_err(unavailable_error)?;
    let gpus = device_count()?;
    let environment = Environment::from_env()?;
    // If the launcher tells no local ranks, the ranks of each host are taken to have consecutive
    // numbers.
    let local_rank = environment.local_rank.unwrap_or(environment.rank % gpus);
    let ordinal = local_rank_ordinal(local_rank, gpus)?;
    let options = TcpOptions {
        deadline: timeout,
        ..TcpOptions::default()
    };
    let control = Arc::new(options.connect_backend(&environment)?);
    let rank = control.members().rank;
    let round = Round::rendezvous(timeout, deadline);
    let backend = blame::record(
        rank,
        NcclBackend::new(control, ordinal, Communicators::default(), &round),
    )?;
    // A launcher that does not tell how many ranks a host has counts as one with a rank on each.
    let ranks_on_host = environment.local_world_size.unwrap_or(1);
    Ok(ProcessGroup::new(Arc::new(backend), timeout, ranks_on_host))
}

/// Returns the number of GPUs that this process sees; an error if there is none.
fn device_count() -> Result<usize, CommError> {
    match CudaContext::device_count().map(usize::try_from) {
        Ok(Ok(count)) if count > 0 => Ok(count),
        Ok(_) | Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => Err(unavailable_error(
            "CUDA finds no GPU: see `CUDA_VISIBLE_DEVICES`".to_owned(),
        )),
        Err(error) => Err(unavailable_error(format!("CUDA does not start: {error}"))),
    }
}

/// Returns the GPU of a rank: the one with the number of its local rank, or the only one that it
/// sees. So a launcher can choose, and let several ranks share it. The error is a local rank
/// without a GPU.
fn local_rank_ordinal(local_rank: usize, devices: usize) -> Result<usize, CommError> {
    match devices {
        1 => Ok(0),
        _ if local_rank < devices => Ok(local_rank),
        _ => Err(unavailable_error(format!(
            "this is rank {local_rank} of its host, which has {devices} GPUs: start fewer ranks, or \
             let several share a GPU with `fsdp launch --ranks-per-gpu`"
        ))),
    }
}

/// Returns the error of an id that could not be exchanged.
fn id_exchange_error(round: &Round<'_>, message: String) -> CommError {
    CommError::object(round.operation, "exchange", message)
}

fn unavailable_error(message: String) -> CommError {
    BackendKind::Nccl.unavailable(message)
}

/// One rank of one group.
#[derive(Debug)]
struct NcclBackend {
    // This field is dropped first, so that this rank leaves NCCL before it tells the others that it
    // leaves the group.
    communicator: WatchedCommunicator,
    control: Arc<TcpBackend>,
    ordinal: usize,
    /// The communicators of all groups of this rank.
    communicators: Communicators,
}

impl NcclBackend {
    /// Makes the NCCL communicator of a group with all its ranks, which tell each other NCCL's id
    /// over `control`.
    fn new(
        control: Arc<TcpBackend>,
        ordinal: usize,
        communicators: Communicators,
        round: &Round<'_>,
    ) -> Result<Self, CommError> {
        // Rank 0 makes the id. If it cannot, all ranks get its error.
        let own_id: Option<Result<Vec<u8>, String>> =
            (control.members().rank == 0).then(|| library::unique_id().map(|id| id.0.to_vec()));
        let records = control.exchange_at_setup(round, &wire::encode_plain(&own_id))?;
        let root_id: Option<Result<Vec<u8>, String>> =
            wire::decode(&records[0]).map_err(|message| id_exchange_error(round, message))?;
        let bytes = root_id
            .unwrap_or_else(|| Err("it was not told".to_owned()))
            .map_err(|message| CommError::library("NCCL", "ncclGetUniqueId", message))?;
        let id = bytes
            .try_into()
            .map_err(|_| id_exchange_error(round, "an id of another length".to_owned()))?;
        let id = UniqueId(id);
        NcclBackend::start(control, ordinal, Origin::Id(id), communicators, round)
    }

    /// Makes the backend of a group whose communicator comes from `origin`: starts the watcher, and
    /// waits until all ranks have joined the communicator.
    fn start(
        control: Arc<TcpBackend>,
        ordinal: usize,
        origin: Origin,
        communicators: Communicators,
        round: &Round<'_>,
    ) -> Result<Self, CommError> {
        let communicator =
            WatchedCommunicator::start(&control, ordinal, origin, &communicators, round)?;
        Ok(NcclBackend {
            communicator,
            control,
            ordinal,
            communicators,
        })
    }

    /// Returns the conditions under which waits of this round end.
    fn watch<'w>(&'w self, round: &Round<'w>) -> Watch<'w> {
        Watch {
            control: &self.control,
            round: *round,
        }
    }
}

impl DeviceTransfer for NcclBackend {
    fn ordinal(&self) -> usize {
        self.ordinal
    }

    fn queue(
        &self,
        round: &Round<'_>,
        call: &Call,
        movement: &Movement,
        stream: &CudaStream,
    ) -> Result<Arc<dyn QueuedTransfer>, CommError> {
        self.communicator
            .queue(call, movement, stream, &self.watch(round))
    }

    fn leave_out(&self, round: &Round<'_>, call: &Call) {
        let left_out = (OwnedRound::new(round), call.clone());
        self.communicator
            .with_left_out(|calls| calls.insert(round.number, left_out));
    }

    fn forget_left_out(&self) {
        self.communicator.with_left_out(LeftOut::clear);
    }

    fn agree_late(
        &self,
        round: &Round<'_>,
        call: &Call,
        fault: Option<&Fault>,
    ) -> Result<(), CommError> {
        late::agree(&self.control, round, call, fault)
    }

    fn synchronize(&self) -> Result<(), CommError> {
        self.communicator.synchronize()
    }
}

impl Backend for NcclBackend {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn members(&self) -> &Members {
        self.control.members()
    }

    fn round<'p>(
        &self,
        round: &Round<'_>,
        vote: &Vote<'_>,
        send: &[u8],
        plan: Planner<'p, '_>,
    ) -> Result<(), CommError> {
        self.control.round(round, vote, send, plan)
    }

    fn subgroup(&self, round: &Round<'_>, members: Members) -> Result<Arc<dyn Backend>, CommError> {
        // Groups that are made at once have no rank in common, so their first ranks tell them
        // apart.
        let own_ranks = &self.control.members().global_ranks;
        let first_rank = members.global_ranks[0];
        let color = own_ranks.iter().position(|&rank| rank == first_rank);
        let place = SplitPlace {
            color: color.expect("the ranks of a subgroup are ranks of the group"),
            key: members.rank,
        };
        let split = self
            .communicator
            .split(Some(place), &self.watch(round))?
            .expect("a rank with a color gets a communicator");
        let control = Arc::new(self.control.create_subgroup(round, members)?);
        let (origin, communicators) = (Origin::Split(split), self.communicators.clone());
        let backend = NcclBackend::start(control, self.ordinal, origin, communicators, round)?;
        Ok(Arc::new(backend))
    }

    fn without_subgroup(&self, round: &Round<'_>) -> Result<(), CommError> {
        self.communicator.split(None, &self.watch(round)).map(drop)
    }

    /// Creates a communicator that has nothing of this one. A call that fails ends its
    /// communicator, so that the caller gets its memory back, and `ncclCommShrink` needs one that
    /// has not ended.
    fn shrink(&self, round: &Round<'_>, members: Members) -> Result<Arc<dyn Backend>, CommError> {
        let control = Arc::new(self.control.create_subgroup(round, members)?);
        let communicators = self.communicators.clone();
        let backend = NcclBackend::new(control, self.ordinal, communicators, round)?;
        Ok(Arc::new(backend))
    }

    fn abort(&self, round: u64, error: &CommError) {
        self.control.abort(round, error);
    }

    fn queued_failure(&self) -> Option<CommError> {
        self.communicator.failure()
    }

    fn device(&self) -> Option<&dyn DeviceTransfer> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_of_a_host_has_the_gpu_of_its_number() {
        assert_eq!(local_rank_ordinal(3, 4), Ok(3));
        assert_eq!(
            local_rank_ordinal(3, 1),
            Ok(0),
            "a launcher shows each rank its own GPU only"
        );
        let error = local_rank_ordinal(4, 4).unwrap_err().to_string();
        assert!(
            error.contains("rank 4 of its host, which has 4") && error.contains("--ranks-per-gpu"),
            "{error}"
        );
    }

    /// Checks that a machine without GPUs gets an error, and no panic.
    #[test]
    fn a_machine_without_gpus_says_what_is_missing() {
        let checked = library::check().map_err(unavailable_error);
        match checked.and_then(|()| device_count()) {
            Ok(count) => assert!(count > 0),
            Err(CommError::BackendUnavailable { backend, message }) => {
                assert_eq!(backend, "nccl");
                let named = [
                    "libcuda.so.1",
                    "libnccl.so.2",
                    "NCCL is too old",
                    "CUDA does not start",
                    "no GPU",
                ];
                assert!(named.iter().any(|name| message.contains(name)), "{message}");
            }
            Err(other) => panic!("{other}"),
        }
    }
}
