//! The `mpi` backend: ranks are processes that `mpirun` or `srun` has started; tensors go through
//! MPI's collectives.
//!
//! Ballots, errors and heartbeats are sent as in the `tcp` backend, between processes that find
//! each other through MPI. So a rank that dies or stops is named, and all ranks agree before they
//! make a call of MPI's, which cannot be undone. Reductions are exchanges followed by this crate's
//! own reduction, as MPI promises no order.

mod job;
#[expect(unsafe_code, reason = "calls of a C library")]
mod library;
mod transfer;

use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use self::job::{Job, library_error, wait};
use self::library::Communicator;
use crate::asking::wait_until;
use crate::backend::{Backend, Members, Plan, Planner, Round, Vote};
use crate::backend_kind::BackendKind;
use crate::blame;
use crate::deadline::deadline_after;
use crate::error::CommError;
use crate::group::ProcessGroup;
use crate::sync::lock;
use crate::tcp::TcpBackend;

/// Creates the group of all processes that an MPI launcher has started with this one.
pub(crate) fn connect(timeout: Duration) -> Result<ProcessGroup, CommError> {
    let deadline = deadline_after(timeout);
    let job = Job::join(timeout)?;
    let control = Arc::clone(&job.control);
    let round = Round::rendezvous(timeout, deadline);
    let rank = control.members().rank;
    let ranks_on_host = job.ranks_on_host;
    let backend = blame::record(rank, MpiBackend::new(job, control, &round))?;
    Ok(ProcessGroup::new(Arc::new(backend), timeout, ranks_on_host))
}

/// One rank of one group.
#[derive(Debug)]
struct MpiBackend {
    control: Arc<TcpBackend>,
    /// The communicator; `None` for a group of one rank.
    communicator: Mutex<Option<Communicator>>,
    job: Arc<Job>,
}

impl MpiBackend {
    /// Makes the backend of one group, and its MPI communicator. `control` is the same group over
    /// TCP, over which the ranks agree on each operation. Collective over the group, except in a
    /// group of one rank, which needs no communicator.
    fn new(job: Arc<Job>, control: Arc<TcpBackend>, round: &Round<'_>) -> Result<Self, CommError> {
        let communicator = if control.members().global_ranks.len() > 1 {
            Some(create_communicator(&job, &control, round)?)
        } else {
            None
        };
        Ok(MpiBackend {
            control,
            communicator: Mutex::new(communicator),
            job,
        })
    }

    /// Moves the bytes of a round. If that fails, this process does not use MPI any more.
    fn transfer(&self, round: &Round<'_>, send: &[u8], plan: Plan<'_>) -> Result<(), CommError> {
        let mut communicator_slot = lock(&self.communicator);
        let Some(communicator) = &*communicator_slot else {
            return plan.deliver(&[send], self.control.members(), round);
        };
        let outcome = transfer::transfer(communicator, send, plan, &mut |call| {
            wait(round.operation, call, || self.control.failure(round))
        });
        if outcome.is_err() {
            // A call that MPI has begun can neither be undone nor waited for.
            self.job.give_up();
            communicator_slot.iter_mut().for_each(Communicator::give_up);
        }
        outcome
    }
}

impl Backend for MpiBackend {
    fn name(&self) -> &'static str {
        "mpi"
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
        match self.control.plan(round, vote, plan)? {
            Some(plan) => self.transfer(round, send, plan),
            None => Ok(()),
        }
    }

    fn subgroup(&self, round: &Round<'_>, members: Members) -> Result<Arc<dyn Backend>, CommError> {
        let control = Arc::new(self.control.create_subgroup(round, members)?);
        let job = Arc::clone(&self.job);
        Ok(Arc::new(MpiBackend::new(job, control, round)?))
    }

    fn shrink(&self, _round: &Round<'_>, _members: Members) -> Result<Arc<dyn Backend>, CommError> {
        Err(BackendKind::Mpi
            .unavailable("MPI does not go on without a lost rank: start the job again without it"))
    }

    fn abort(&self, round: u64, error: &CommError) {
        self.job.fail();
        self.control.abort(round, error);
    }
}

/// Creates a communicator, on a thread that can be left behind, because MPI has only a blocking
/// call for it. If the wait for it fails, this process uses MPI no more.
fn create_communicator(
    job: &Job,
    control: &TcpBackend,
    round: &Round<'_>,
) -> Result<Communicator, CommError> {
    const CALL: &str = "MPI_Comm_create_group";
    // A rank may have given up already, and then no rank may make the call.
    control.exchange_at_setup(round, &[])?;
    let id = control.members().id;
    let ranks = control.members().global_ranks.clone();
    let (maker, made_communicators) = mpsc::channel();
    thread::Builder::new()
        .name("mpi-group".to_owned())
        .spawn(move || drop(maker.send(Communicator::create(&ranks, id))))
        .map_err(|error| library_error(CALL, error.to_string()))?;
    let mut communicator = None;
    let waited = wait_until(
        || match made_communicators.try_recv() {
            Ok(made) => {
                communicator = Some(made.map_err(|error| library_error(CALL, error))?);
                Ok(true)
            }
            Err(mpsc::TryRecvError::Empty) => Ok(false),
            Err(mpsc::TryRecvError::Disconnected) => {
                Err(library_error(CALL, "its thread ended".to_owned()))
            }
        },
        || control.failure(round),
    );
    waited.inspect_err(|_| job.give_up())?;
    Ok(communicator.expect("the wait ends when the communicator is made"))
}
