//! A communicator, and the operations that wait in its stream.
//!
//! The threads that call operations queue them here, and the [watcher](super::watcher) looks after
//! them until the GPU has done them.
//!
//! The communicator has a stream of its own. It waits for the stream that wrote an operation's
//! input, and that stream then waits for the operation, both on the GPU. So memory that is freed in
//! the order of that stream, as CUDA's allocator does, is freed after the operation.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, TryLockError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream, DriverError};

use super::late::LeftOut;
use super::library::{NcclCommunicator, SplitPlace};
use super::watch::{OwnedRound, Watch, driver_error, library_error};
use crate::asking::{GRACE_PERIOD, PEER_CHECK_INTERVAL, Pause};
use crate::backend::{Backend as _, Movement, QueuedTransfer, Round};
use crate::blame;
use crate::deadline::MAX_TIMEOUT;
use crate::error::CommError;
use crate::record::Call;
use crate::sync::{lock, wait_timeout};
use crate::tcp::TcpBackend;

/// The time that NCCL may take to leave the other ranks, or to end an operation that was aborted.
pub(super) const FINALIZE_TIMEOUT: Duration = Duration::from_secs(2);

/// An operation in the stream of a communicator.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) round: OwnedRound,
    pub(super) call: Call,
    /// The point behind the work that the operation waits for.
    pub(super) input: CudaEvent,
    /// The point behind the operation.
    pub(super) done: CudaEvent,
    /// Set by the watcher, or by the failure of the communicator.
    outcome: OnceLock<Result<(), CommError>>,
}

/// The next task of the watcher.
pub(super) enum Next {
    /// Look after this operation.
    Watch(Arc<Operation>),
    /// Wait for a thread that is queueing an operation, or for a rank that asks for an agreement
    /// which was left out.
    Wait,
    /// Leave the other ranks, as no more operations will come.
    Leave,
    /// Abort the communicator, which has failed.
    Abort,
}

/// A rank's communicator.
#[derive(Debug)]
pub(super) struct Communicator {
    /// NCCL's communicator; `None` once the watcher has taken it to end it. It is locked for single
    /// calls only.
    nccl: Mutex<Option<NcclCommunicator>>,
    stream: Arc<CudaStream>,
    /// The rank in the group of all ranks.
    global_rank: usize,
    /// The connections to the other ranks, which end with the watcher.
    control: Weak<TcpBackend>,
    siblings: Communicators,
    state: Mutex<State>,
    changed: Condvar,
}

/// The communicators of a rank, one for each of its groups. What one of them moves may be what
/// another one has received: then its operation waits on the GPU for that of the other.
#[derive(Debug, Clone, Default)]
pub(super) struct Communicators(Arc<Mutex<Vec<Weak<Communicator>>>>);

impl Communicators {
    /// Adds a new communicator, and forgets those that are gone.
    fn add(&self, communicator: &Arc<Communicator>) {
        let mut list = lock(&self.0);
        list.retain(|communicator| communicator.strong_count() > 0);
        list.push(Arc::downgrade(communicator));
    }

    /// Lets those fail that have operations which are not done. Returns `true` if one had not
    /// failed yet.
    fn fail_busy(&self, error: &CommError) -> bool {
        let list: Vec<_> = lock(&self.0).iter().filter_map(Weak::upgrade).collect();
        let mut has_failed = false;
        for communicator in list {
            has_failed |= communicator.fail_if_busy(error);
        }
        has_failed
    }
}

#[derive(Debug, Default)]
struct State {
    /// The operations that are not known to be done, in the order of the stream.
    pending: VecDeque<Arc<Operation>>,
    /// The round of the operation that a thread is queueing.
    queueing: Option<OwnedRound>,
    left_out: LeftOut,
    failure: Option<CommError>,
    /// `true` once NCCL has ended the operations of a communicator that has failed, and begins no
    /// more.
    is_aborted: bool,
    /// `true` if no more operations will come.
    is_closed: bool,
}

impl Communicator {
    pub(super) fn new(
        nccl: NcclCommunicator,
        stream: Arc<CudaStream>,
        control: &Arc<TcpBackend>,
        siblings: Communicators,
    ) -> Arc<Communicator> {
        let members = control.members();
        let communicator = Arc::new(Communicator {
            nccl: Mutex::new(Some(nccl)),
            stream,
            global_rank: members.global_ranks[members.rank],
            control: Arc::downgrade(control),
            siblings,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        communicator.siblings.add(&communicator);
        communicator
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Returns the error that has ended the communicator.
    pub(super) fn failure(&self) -> Option<CommError> {
        self.state().failure.clone()
    }

    /// Queues an operation behind all earlier work of `stream`, whose later work then waits for it.
    /// Returns when NCCL has handed it to the GPU.
    ///
    /// # Errors
    /// The communicator's failure; NCCL's and CUDA's errors, a lost rank, or the deadline, each of
    /// which ends the communicator. The GPU then no longer uses the memory of this operation, as
    /// far as later work of `stream` can see.
    pub(super) fn queue(
        self: &Arc<Self>,
        call: &Call,
        movement: &Movement,
        stream: &CudaStream,
        watch: &Watch<'_>,
    ) -> Result<Arc<dyn QueuedTransfer>, CommError> {
        self.begin_queueing(&watch.round)?;
        let events = self.hand_to_gpu(movement, stream, watch);
        let queued = events.and_then(|[input, done]| {
            self.add(Operation {
                round: OwnedRound::new(&watch.round),
                call: call.clone(),
                input,
                done,
                outcome: OnceLock::new(),
            })
        });
        match queued {
            Ok(operation) => Ok(Arc::new(Queued {
                communicator: Arc::clone(self),
                operation,
            })),
            Err(error) => {
                let error = self.fail(error, watch);
                // NCCL may be about to hand the operation to the GPU, until it has been aborted.
                self.wait_until_aborted();
                // Without a driver that answers, the GPU does nothing any more.
                stream.join(&self.stream).ok();
                Err(error)
            }
        }
    }

    /// Splits the communicator into groups of its ranks, all of which call this. Waits until all
    /// queued operations are done, as NCCL demands, and the new communicators are complete. Returns
    /// that of this rank's group, or `None` for a rank without a place in any.
    ///
    /// # Errors
    /// Those of [`Self::queue`], each of which ends the communicator.
    pub(super) fn split(
        &self,
        place: Option<SplitPlace>,
        watch: &Watch<'_>,
    ) -> Result<Option<NcclCommunicator>, CommError> {
        self.wait_until_idle()?;
        self.begin_queueing(&watch.round)?;
        match self.try_split(place, watch) {
            Ok(split) => {
                self.state().queueing = None;
                self.changed.notify_all();
                Ok(split)
            }
            Err(error) => {
                let error = self.fail(error, watch);
                self.wait_until_aborted();
                Err(error)
            }
        }
    }

    /// Makes the calls of [`Self::split`].
    fn try_split(
        &self,
        place: Option<SplitPlace>,
        watch: &Watch<'_>,
    ) -> Result<Option<NcclCommunicator>, CommError> {
        const CALL: &str = "ncclCommSplit";
        self.bind_to_thread()
            .map_err(|error| driver_error("cuCtxSetCurrent", error))?;
        let result = self
            .with_nccl(|nccl| nccl.begin_split(place))
            .map_err(|error| library_error(CALL, error))?;
        watch.wait(CALL, || self.is_all_enqueued())?;
        let split = result.take();
        if split.is_none() && place.is_some() {
            let message = "it made no communicator".to_owned();
            return Err(library_error(CALL, message));
        }
        Ok(split)
    }

    /// Waits until no operation is pending. They end at their deadlines at the latest.
    ///
    /// # Errors
    /// The communicator's failure.
    fn wait_until_idle(&self) -> Result<(), CommError> {
        let mut state = self.state();
        loop {
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            if state.pending.is_empty() {
                return Ok(());
            }
            state = wait_timeout(&self.changed, state, PEER_CHECK_INTERVAL);
        }
    }

    /// Waits on the host until the GPU has done all operations that are queued.
    ///
    /// # Errors
    /// The communicator's failure.
    pub(super) fn synchronize(self: &Arc<Self>) -> Result<(), CommError> {
        let last = self.state().pending.back().cloned();
        if let Some(operation) = last {
            let communicator = Arc::clone(self);
            Queued {
                communicator,
                operation,
            }
            .wait()?;
        }
        let outcome = self.failure().map_or(Ok(()), Err);
        blame::record(self.global_rank, outcome)
    }

    /// Tells the watcher that a thread is about to call NCCL.
    ///
    /// # Errors
    /// The communicator's failure.
    fn begin_queueing(&self, round: &Round<'_>) -> Result<(), CommError> {
        let mut state = self.state();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        state.queueing = Some(OwnedRound::new(round));
        // Otherwise the watcher is awake.
        if state.pending.is_empty() {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Makes a call of NCCL's between two events: the one that it waits for, and the one behind it,
    /// which `stream` waits for.
    fn hand_to_gpu(
        &self,
        movement: &Movement,
        stream: &CudaStream,
        watch: &Watch<'_>,
    ) -> Result<[CudaEvent; 2], CommError> {
        let operation = watch.round.operation;
        let record = |stream: &CudaStream| stream.record_event(None).map_err(record_error);
        let input = record(stream)?;
        self.stream.wait(&input).map_err(wait_error)?;
        self.with_nccl(|nccl| nccl.call(movement, &self.stream))
            .map_err(|error| library_error(operation, error))?;
        // Before that, an event would not come behind the call.
        watch.wait(operation, || self.is_all_enqueued())?;
        let done = record(&self.stream)?;
        stream.wait(&done).map_err(wait_error)?;
        Ok([input, done])
    }

    /// Adds an operation to those that the watcher looks after.
    ///
    /// # Errors
    /// The failure of the communicator meanwhile.
    fn add(&self, operation: Operation) -> Result<Arc<Operation>, CommError> {
        let mut state = self.state();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        // Both in one step: between them the watcher would fall asleep.
        state.queueing = None;
        let operation = Arc::new(operation);
        state.pending.push_back(Arc::clone(&operation));
        Ok(operation)
    }

    /// Calls NCCL. The error of a communicator that has ended says so.
    fn with_nccl<R>(
        &self,
        call: impl FnOnce(&NcclCommunicator) -> Result<R, String>,
    ) -> Result<R, String> {
        call(lock(&self.nccl).as_ref().ok_or(ENDED)?)
    }

    /// Returns `true` if all calls that were begun have been handed to the GPU.
    fn is_all_enqueued(&self) -> Result<bool, String> {
        self.with_nccl(NcclCommunicator::is_all_enqueued)
    }

    /// Returns NCCL's error if a call has failed since it began; `None` too if another thread is in
    /// a call of NCCL's.
    pub(super) fn asynchronous_error(&self) -> Option<String> {
        match self.nccl.try_lock() {
            Ok(nccl) => nccl.as_ref()?.is_all_enqueued().err(),
            Err(_) => None,
        }
    }

    /// Makes the context of the communicator's GPU that of this thread. Without one, NCCL would
    /// make one on the first GPU, whichever that of this rank is.
    pub(super) fn bind_to_thread(&self) -> Result<(), DriverError> {
        self.stream.context().bind_to_thread()
    }

    /// Returns the error that has ended the group of the communicator by this round. Operations of
    /// it and later rounds have undefined results even where the GPU has done them: a rank that
    /// aborts lets those of its neighbours end, as if it had sent what they wait for.
    pub(super) fn group_error(&self, round: &Round<'_>) -> Option<CommError> {
        self.control.upgrade()?.group_error(round)
    }

    /// Lets all communicators of this rank fail that have operations which are not done, as this
    /// one has failed. Returns `true` if one of them had not failed yet.
    pub(super) fn fail_siblings(&self) -> bool {
        self.failure()
            .is_some_and(|failure| self.siblings.fail_busy(&failure))
    }

    /// Lets the communicator fail if it has operations which are not done. Returns `true` if it had
    /// not failed yet.
    fn fail_if_busy(&self, error: &CommError) -> bool {
        let first_round = {
            let state = self.state();
            if state.failure.is_some() {
                return false;
            }
            let pending = state.pending.front().map(|operation| &operation.round);
            pending.or(state.queueing.as_ref()).cloned()
        };
        let (Some(first_round), Some(control)) = (first_round, self.control.upgrade()) else {
            return false;
        };
        let watch = Watch {
            control: &control,
            round: first_round.get(),
        };
        self.fail(error.clone(), &watch);
        true
    }

    /// Lets the communicator and its pending operations fail, unless it has failed already, and
    /// tells the other ranks. Returns the error that it has failed with.
    pub(super) fn fail(&self, error: CommError, watch: &Watch<'_>) -> CommError {
        let mut state = self.state();
        if let Some(failure) = &state.failure {
            return failure.clone();
        }
        // Those that wait for an operation must learn of this before the abort ends it.
        for operation in &state.pending {
            operation.outcome.set(Err(error.clone())).ok();
        }
        let first_pending = state.pending.front();
        let first_number = first_pending.map_or(u64::MAX, |first| first.round.get().number);
        state.failure = Some(error.clone());
        state.queueing = None;
        drop(state);
        self.changed.notify_all();
        // NCCL ends a communicator only when all ranks do, and all that is pending ends with it.
        let number = watch.round.number.min(first_number);
        watch.control.abort(number, &error);
        error
    }

    fn wait_until_aborted(&self) {
        let mut state = self.state();
        while !state.is_aborted {
            state = wait_timeout(&self.changed, state, FINALIZE_TIMEOUT);
        }
    }
}

/// The part for the watcher.
impl Communicator {
    /// Waits until the watcher has something to do, and returns it. Ends the process if NCCL does
    /// not return from a call.
    pub(super) fn next(&self) -> Next {
        let mut state = self.state();
        loop {
            if state.failure.is_some() {
                return Next::Abort;
            }
            end_if_stuck(&state);
            if let Some(operation) = state.pending.front() {
                return Next::Watch(Arc::clone(operation));
            }
            if state.queueing.is_some() {
                return Next::Wait;
            }
            if state.is_closed {
                return Next::Leave;
            }
            if !state.left_out.is_empty() {
                return Next::Wait;
            }
            state = wait_timeout(&self.changed, state, MAX_TIMEOUT);
        }
    }

    /// Calls `use_them` with the calls whose agreements were left out.
    pub(super) fn with_left_out<R>(&self, use_them: impl FnOnce(&mut LeftOut) -> R) -> R {
        use_them(&mut self.state().left_out)
    }

    /// Forgets the calls up to the round of this number, on which all ranks have agreed.
    pub(super) fn forget_left_out(&self, up_to: u64) {
        self.with_left_out(|left_out| left_out.retain(|&number, _| number > up_to));
    }

    /// Waits a little, or until something has changed.
    pub(super) fn pause(&self) {
        drop(wait_timeout(
            &self.changed,
            self.state(),
            PEER_CHECK_INTERVAL,
        ));
    }

    /// Records that the first of the pending operations is done.
    pub(super) fn finish_first(&self) {
        if let Some(operation) = self.state().pending.pop_front() {
            // An operation that has failed meanwhile stays so.
            operation.outcome.set(Ok(())).ok();
        }
    }

    /// Takes NCCL's communicator, to end it, once no thread is in a call of it. Ends the process if
    /// NCCL does not return from one.
    pub(super) fn take_nccl(&self) -> Option<NcclCommunicator> {
        loop {
            match self.nccl.try_lock() {
                Ok(mut nccl) => return nccl.take(),
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner().take(),
                Err(TryLockError::WouldBlock) => {
                    end_if_stuck(&self.state());
                    thread::sleep(PEER_CHECK_INTERVAL);
                }
            }
        }
    }

    /// Records that NCCL begins no more operations.
    pub(super) fn set_aborted(&self) {
        self.state().is_aborted = true;
        self.changed.notify_all();
    }

    /// Takes the operations that are still pending.
    pub(super) fn take_pending(&self) -> VecDeque<Arc<Operation>> {
        std::mem::take(&mut self.state().pending)
    }

    /// Tells the watcher that no more operations will come.
    pub(super) fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_all();
    }

    /// Returns `true` if operations are pending.
    pub(super) fn is_busy(&self) -> bool {
        !self.state().pending.is_empty()
    }
}

/// Ends the process if a thread has been in a call of NCCL's for too long.
fn end_if_stuck(state: &State) {
    let Some(queueing) = &state.queueing else {
        return;
    };
    let round = queueing.get();
    if Instant::now() >= round.deadline + GRACE_PERIOD + FINALIZE_TIMEOUT * 2 {
        abort_process(round.operation);
    }
}

/// Aborts this process without running destructors, as the GPU may still read and write memory that
/// the program would use for something else. All other ranks learn that this one has ended.
pub(super) fn abort_process(operation: &str) -> ! {
    tracing::error!(
        operation,
        "a call of NCCL cannot be ended, and may still use GPU memory: this process ends"
    );
    std::process::abort();
}

/// The message of a call to a communicator that has ended.
const ENDED: &str = "an earlier call failed, which ended its communicator";

fn record_error(error: cudarc::driver::DriverError) -> CommError {
    driver_error("cuEventRecord", error)
}

fn wait_error(error: cudarc::driver::DriverError) -> CommError {
    driver_error("cuStreamWaitEvent", error)
}

/// An operation that its caller may wait for.
#[derive(Debug)]
struct Queued {
    communicator: Arc<Communicator>,
    operation: Arc<Operation>,
}

impl QueuedTransfer for Queued {
    fn delay(&self, stream: &CudaStream) -> Result<(), CommError> {
        stream.wait(&self.operation.done).map_err(wait_error)
    }

    fn is_done(&self) -> Result<bool, CommError> {
        let is_reached = self
            .operation
            .done
            .try_is_complete()
            .map_err(|error| driver_error("cuEventQuery", error))?;
        // An abort lets the GPU reach the event too, but only after this has been set.
        if let Some(outcome) = self.operation.outcome.get() {
            return blame::record(self.communicator.global_rank, outcome.clone()).map(|()| true);
        }
        if is_reached
            && let Some(error) = self.communicator.group_error(&self.operation.round.get())
        {
            return blame::record(self.communicator.global_rank, Err(error));
        }
        // An error of the network is NCCL's, and not the GPU's: the watcher finds out who is to
        // blame.
        Ok(is_reached && self.communicator.is_all_enqueued().is_ok())
    }

    fn wait(&self) -> Result<(), CommError> {
        let mut pause = Pause::new();
        while !self.is_done()? {
            pause.wait();
        }
        Ok(())
    }
}
