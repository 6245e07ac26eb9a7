//! The thread that watches a communicator: it joins the other ranks, looks after the operations
//! that wait in the communicator's stream, and leaves the others or aborts.

use std::ops::Deref;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::communicator::{
    Communicator, Communicators, FINALIZE_TIMEOUT, Next, Operation, abort_process,
};
use super::late;
use super::library::{NcclCommunicator, UniqueId, open_stream};
use super::watch::{OwnedRound, Watch, driver_error, library_error};
use crate::asking::{GRACE_PERIOD, Pause};
use crate::backend::{Backend as _, Members, Round};
use crate::deadline::{deadline_after, time_left};
use crate::error::CommError;
use crate::sync::lock;
use crate::tcp::TcpBackend;

/// The time that NCCL may take to abort a communicator. It waits for work of the GPU that has
/// nothing to do with it, too.
const ABORT_TIMEOUT: Duration = Duration::from_secs(30);

/// The time that the other ranks have to hear of an error before their operations may end with
/// undefined results.
const NEWS_PERIOD: Duration = Duration::from_millis(100);

/// The origin of a communicator.
pub(super) enum Origin {
    /// All its ranks join the one that this id names.
    Id(UniqueId),
    /// It was split from another.
    Split(NcclCommunicator),
}

/// The time before the deadline of an operation at which ranks make up for its agreement, or half
/// of the time that it may take if that is shorter.
const ASKS_BEFORE_DEADLINE: Duration = Duration::from_secs(3);

/// A communicator and its watcher.
#[derive(Debug)]
pub(super) struct WatchedCommunicator {
    communicator: Arc<Communicator>,
    end_receiver: Mutex<Receiver<()>>,
}

impl WatchedCommunicator {
    /// Starts the watcher of a communicator, and waits until its ranks have joined it.
    pub(super) fn start(
        control: &Arc<TcpBackend>,
        ordinal: usize,
        origin: Origin,
        siblings: &Communicators,
        round: &Round<'_>,
    ) -> Result<WatchedCommunicator, CommError> {
        let (end_sender, end_receiver) = mpsc::channel();
        let (join_sender, join_receiver) = mpsc::channel();
        let control = Arc::clone(control);
        let siblings = siblings.clone();
        let owned_round = OwnedRound::new(round);
        thread::Builder::new()
            .name("nccl".to_owned())
            .spawn(move || {
                match join(&control, ordinal, origin, siblings, &owned_round.get()) {
                    Ok(communicator) => {
                        join_sender.send(Ok(Arc::clone(&communicator))).ok();
                        watch(&communicator, &control);
                    }
                    Err(error) => drop(join_sender.send(Err(error))),
                }
                // The connections to the other ranks must not outlive this thread.
                drop(control);
                end_sender.send(()).ok();
            })
            .map_err(|error| library_error("a thread", error.to_string()))?;
        // The answer comes at the latest soon after the round's deadline, unless NCCL does not
        // return.
        let communicator = join_receiver
            .recv_timeout(time_left(round.deadline) + GRACE_PERIOD + FINALIZE_TIMEOUT * 2)
            .map_err(|_| {
                library_error(round.operation, "it did not return in time".to_owned())
            })??;
        Ok(WatchedCommunicator {
            communicator,
            end_receiver: Mutex::new(end_receiver),
        })
    }
}

impl Deref for WatchedCommunicator {
    type Target = Arc<Communicator>;

    fn deref(&self) -> &Self::Target {
        &self.communicator
    }
}

impl Drop for WatchedCommunicator {
    /// Lets the operations that are queued end, and leaves the other ranks.
    fn drop(&mut self) {
        self.communicator.close();
        let end_receiver = lock(&self.end_receiver);
        // Operations end at their deadlines at the latest.
        while end_receiver.recv_timeout(FINALIZE_TIMEOUT * 2) == Err(RecvTimeoutError::Timeout) {
            if !self.communicator.is_busy() {
                tracing::warn!("NCCL did not leave its group in time");
                return;
            }
        }
    }
}

/// Takes over or joins a communicator, on the GPU `ordinal`: waits until all ranks have joined. An
/// error is reported to the other ranks.
fn join(
    control: &Arc<TcpBackend>,
    ordinal: usize,
    origin: Origin,
    siblings: Communicators,
    round: &Round<'_>,
) -> Result<Arc<Communicator>, CommError> {
    let watch = Watch {
        control,
        round: *round,
    };
    try_join(ordinal, origin, siblings, &watch).inspect_err(|error| watch.abort(error))
}

fn try_join(
    ordinal: usize,
    origin: Origin,
    siblings: Communicators,
    watch: &Watch<'_>,
) -> Result<Arc<Communicator>, CommError> {
    let stream =
        open_stream(ordinal).map_err(|error| driver_error("cuStreamCreateWithPriority", error))?;
    // The ranks of the group that `control` connects are those of the communicator.
    let Members {
        rank, global_ranks, ..
    } = watch.control.members();
    let nccl = match origin {
        Origin::Id(id) => NcclCommunicator::begin(id, *rank, global_ranks.len())
            .map_err(|error| library_error("ncclCommInitRankConfig", error))?,
        Origin::Split(nccl) => nccl,
    };
    // Report an error to the other ranks before the communicator is dropped, because the drop
    // waits for them.
    watch
        .wait("ncclCommInitRankConfig", || nccl.is_all_enqueued())
        .inspect_err(|error| watch.abort(error))?;
    Ok(Communicator::new(nccl, stream, watch.control, siblings))
}

/// Looks after the operations of a communicator until it has ended.
fn watch(communicator: &Arc<Communicator>, control: &Arc<TcpBackend>) {
    let mut progress = Progress::default();
    loop {
        answer(communicator, control);
        match communicator.next() {
            Next::Watch(operation) => match progress.look_at(&operation, communicator, control) {
                Ok(true) => {
                    communicator.finish_first();
                    progress = Progress::default();
                }
                Ok(false) => communicator.pause(),
                Err(error) => {
                    let round = operation.round.get();
                    communicator.fail(error, &Watch { control, round });
                }
            },
            Next::Wait => communicator.pause(),
            Next::Leave => return leave(communicator),
            Next::Abort => return abort(communicator),
        }
    }
}

/// Makes up for an agreement that was left out, if another rank asks for it. The communicator fails
/// if the ranks do not agree.
fn answer(communicator: &Communicator, control: &Arc<TcpBackend>) {
    let awaited = communicator.with_left_out(|left_out| {
        let (&last_number, _) = left_out.last_key_value()?;
        left_out.get(&control.awaited_round(last_number)?).cloned()
    });
    let Some((owned_round, call)) = awaited else {
        return;
    };
    let mut round = owned_round.get();
    // The deadline of the call may have passed long ago.
    round.deadline = deadline_after(round.timeout);
    match late::agree(control, &round, &call, None) {
        Ok(()) => communicator.forget_left_out(round.number),
        Err(error) => drop(communicator.fail(error, &Watch { control, round })),
    }
}

/// The state of the first operation in a communicator's stream, as far as the watcher knows it.
#[derive(Debug, Default)]
struct Progress {
    /// The deadline of the operation. It begins when everything before the operation is done, as
    /// what the GPU computes before it may take any time.
    deadline: Option<Instant>,
    /// The time at which the first reason was found for which the operation may never end.
    failing_since: Option<Instant>,
}

impl Progress {
    /// Returns `true` if the operation is done.
    ///
    /// # Errors
    /// NCCL's and CUDA's errors, or that of the rank that has caused them. The loss of another
    /// rank, or the deadline, if the operation is not done within [`GRACE_PERIOD`] after that.
    fn look_at(
        &mut self,
        operation: &Operation,
        communicator: &Communicator,
        control: &Arc<TcpBackend>,
    ) -> Result<bool, CommError> {
        let mut round = operation.round.get();
        // Errors of the network and of other ranks are reported here, and not by the GPU.
        if let Some(message) = communicator.asynchronous_error() {
            return Err(Watch { control, round }.blame(round.operation, message));
        }
        if is_reached(&operation.done)? {
            return communicator.group_error(&round).map_or(Ok(true), Err);
        }
        if !is_reached(&operation.input)? {
            return Ok(false);
        }
        round.deadline = *self
            .deadline
            .get_or_insert_with(|| round.deadline.max(deadline_after(round.timeout)));
        // Shortly before the deadline, find out which ranks have not made the call.
        let asks_at = round
            .deadline
            .checked_sub(ASKS_BEFORE_DEADLINE.min(round.timeout / 2));
        if asks_at.is_none_or(|asks_at| Instant::now() >= asks_at)
            && communicator.with_left_out(|left_out| left_out.contains_key(&round.number))
        {
            late::agree(control, &round, &operation.call, None)?;
            communicator.forget_left_out(round.number);
        }
        match (Watch { control, round }).failure() {
            Some(failure) if is_over(&mut self.failing_since, GRACE_PERIOD) => Err(failure),
            _ => Ok(false),
        }
    }
}

/// Returns `true` if the GPU has reached an event.
fn is_reached(event: &cudarc::driver::CudaEvent) -> Result<bool, CommError> {
    event
        .try_is_complete()
        .map_err(|error| driver_error("cuEventQuery", error))
}

/// Aborts a communicator that has failed, and waits until the GPU no longer uses the memory of its
/// operations. Ends the process if it does not end them.
fn abort(communicator: &Arc<Communicator>) {
    thread::sleep(NEWS_PERIOD);
    // Operations of other communicators that wait for its operations would begin now, with
    // undefined contents.
    while communicator.fail_siblings() {
        thread::sleep(NEWS_PERIOD);
    }
    let nccl = communicator.take_nccl();
    let (sender, returned) = mpsc::channel();
    // This is `ncclCommAbort`: it makes the kernels that are under way end. It may wait for other
    // work of the GPU, so a thread of its own calls it.
    let aborted = Arc::clone(communicator);
    let end = move || {
        if let Err(error) = aborted.bind_to_thread() {
            tracing::debug!(%error, "a communicator is aborted without a context of CUDA's");
        }
        drop(nccl);
        sender.send(()).ok();
    };
    if let Err(error) = thread::Builder::new()
        .name("nccl-abort".to_owned())
        .spawn(end)
    {
        // What was to be dropped in the thread has been dropped here instead.
        tracing::debug!(%error, "an NCCL communicator is aborted without a thread");
    }
    let begun = Instant::now();
    let mut is_returned = false;
    let mut pending = communicator.take_pending();
    let mut stuck_since = None;
    let mut pause = Pause::new();
    while !(is_returned && pending.is_empty()) {
        if !is_returned && returned.try_recv() != Err(mpsc::TryRecvError::Empty) {
            is_returned = true;
            communicator.set_aborted();
        }
        // An error counts as done: the driver has ended all work of this process on the GPU.
        while pending
            .pop_front_if(|first| is_reached(&first.done) != Ok(false))
            .is_some()
        {
            stuck_since = None;
        }
        // An operation that waits for no other work must end soon.
        let stuck = pending
            .front()
            .filter(|first| is_reached(&first.input) != Ok(false));
        match stuck {
            Some(first) if is_over(&mut stuck_since, FINALIZE_TIMEOUT) => {
                abort_process(first.round.get().operation);
            }
            None if !is_returned && begun.elapsed() >= ABORT_TIMEOUT => {
                abort_process("ncclCommAbort");
            }
            _ => {}
        }
        pause.wait();
    }
}

/// Returns `true` if `limit` has passed since this was called first with this value.
fn is_over(since: &mut Option<Instant>, limit: Duration) -> bool {
    since.get_or_insert_with(Instant::now).elapsed() >= limit
}

/// Leaves the communicator together with the other ranks. If they do not leave in time, it is
/// aborted.
fn leave(communicator: &Communicator) {
    let Some(nccl) = communicator.take_nccl() else {
        return;
    };
    let deadline = Instant::now() + FINALIZE_TIMEOUT;
    let outcome = nccl.finalize().and_then(|()| {
        let mut pause = Pause::new();
        while !nccl.is_all_enqueued()? {
            if Instant::now() >= deadline {
                return Err(format!("not all ranks left within {FINALIZE_TIMEOUT:?}"));
            }
            pause.wait();
        }
        Ok(())
    });
    match outcome {
        Ok(()) => nccl.destroy(),
        Err(error) => {
            tracing::debug!(error, "an NCCL communicator is aborted");
            drop(nccl);
        }
    }
}
