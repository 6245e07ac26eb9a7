//! The thread that owns a communicator. Only this thread makes, calls, watches and ends it.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};

use super::library::{NcclCommunicator, SplitPlace, UniqueId};
use crate::backend::{Backend as _, Members, Movement, Round};
use crate::error::CommError;
use crate::polling::{GRACE_PERIOD, PEER_CHECK_INTERVAL, Pause, wait_until};
use crate::sync::lock;
use crate::tcp::TcpBackend;

/// The time that NCCL may take to leave the other ranks, or to abort a call.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(2);

/// The origin of a communicator.
pub(super) enum Origin {
    /// All its ranks join the one that this id names.
    Id(UniqueId),
    /// It was split from another.
    Split(NcclCommunicator),
}

/// Work for the thread.
enum Request {
    Call(CallRequest),
    Split(SplitRequest),
}

/// A split of the communicator into groups of its ranks. It comes after all earlier calls.
struct SplitRequest {
    /// This rank's place in the groups; `None` if it is in none.
    place: Option<SplitPlace>,
    watch: Watch,
    reply: Sender<Result<Option<NcclCommunicator>, CommError>>,
}

/// A call for the thread.
struct CallRequest {
    call: Movement,
    /// The event of the GPU that must come before the call.
    earlier_work: CudaEvent,
    watch: Watch,
    reply: Sender<Result<(), CommError>>,
}

/// A rank's communicator, on a thread of its own.
#[derive(Debug)]
pub(super) struct OwnerThread {
    requests: Mutex<Option<Sender<Request>>>,
    end_receiver: Mutex<Receiver<()>>,
}

impl OwnerThread {
    /// Starts the thread of a communicator, and waits until its ranks have joined it.
    pub(super) fn start(
        control: &Arc<TcpBackend>,
        ordinal: usize,
        origin: Origin,
        round: &Round<'_>,
    ) -> Result<OwnerThread, CommError> {
        let (requests, incoming_requests) = mpsc::channel();
        let (end_sender, end_receiver) = mpsc::channel();
        let (join_sender, join_receiver) = mpsc::channel();
        let watch = Watch::new(control, round);
        thread::Builder::new()
            .name("nccl".to_owned())
            .spawn(move || {
                match Owned::join(ordinal, origin, &watch) {
                    Ok(owned) => {
                        join_sender.send(Ok(())).ok();
                        owned.work(&incoming_requests);
                    }
                    Err(error) => drop(join_sender.send(Err(error))),
                }
                // The watch holds connections to the other ranks, which must not outlive this
                // thread.
                drop(watch);
                end_sender.send(()).ok();
            })
            .map_err(|error| library_error("a thread", error.to_string()))?;
        wait_for_answer(&join_receiver, round).unwrap_or_else(|| {
            Err(library_error(
                round.operation,
                "it did not return in time".to_owned(),
            ))
        })?;
        Ok(OwnerThread {
            requests: Mutex::new(Some(requests)),
            end_receiver: Mutex::new(end_receiver),
        })
    }

    /// Carries out a call after all earlier work of the stream. When this returns, the call is over
    /// on the GPU. If NCCL does not return after the deadline, this ends the process.
    pub(super) fn run(
        &self,
        control: &Arc<TcpBackend>,
        call: Movement,
        stream: &CudaStream,
        round: &Round<'_>,
    ) -> Result<(), CommError> {
        let earlier_work = stream
            .record_event(None)
            .map_err(|error| driver_error("cuEventRecord", error))?;
        let (reply, replies) = mpsc::channel();
        let request = CallRequest {
            call,
            earlier_work,
            watch: Watch::new(control, round),
            reply,
        };
        self.send(Request::Call(request), round)?;
        wait_for_answer(&replies, round).unwrap_or_else(|| abort_process(round.operation))
    }

    /// Splits the communicator into groups of its ranks, all of which call this. Returns the
    /// communicator of this rank's group, or `None` for a rank without a place in any. A failed
    /// split ends the communicator, as a failed call does.
    pub(super) fn split(
        &self,
        control: &Arc<TcpBackend>,
        place: Option<SplitPlace>,
        round: &Round<'_>,
    ) -> Result<Option<NcclCommunicator>, CommError> {
        let (reply, replies) = mpsc::channel();
        let request = SplitRequest {
            place,
            watch: Watch::new(control, round),
            reply,
        };
        self.send(Request::Split(request), round)?;
        wait_for_answer(&replies, round).unwrap_or_else(|| abort_process(round.operation))
    }

    /// Hands work to the thread. The error is that of a communicator which has ended.
    fn send(&self, request: Request, round: &Round<'_>) -> Result<(), CommError> {
        lock(&self.requests)
            .as_ref()
            .and_then(|requests| requests.send(request).ok())
            .ok_or_else(|| ended_communicator_error(round))
    }
}

impl Drop for OwnerThread {
    fn drop(&mut self) {
        // The thread goes on to the end once there are no more requests.
        lock(&self.requests).take();
        if lock(&self.end_receiver).recv_timeout(FINALIZE_TIMEOUT * 2)
            == Err(RecvTimeoutError::Timeout)
        {
            tracing::warn!("NCCL did not leave its group in time");
        }
    }
}

/// Waits for the thread's answer. It comes at the latest soon after the round's deadline, unless
/// NCCL does not return. Then there is none.
fn wait_for_answer<T>(
    answers: &Receiver<Result<T, CommError>>,
    round: &Round<'_>,
) -> Option<Result<T, CommError>> {
    let remaining = round.deadline.saturating_duration_since(Instant::now());
    match answers.recv_timeout(remaining + GRACE_PERIOD + FINALIZE_TIMEOUT * 2) {
        Ok(answer) => Some(answer),
        Err(RecvTimeoutError::Disconnected) => Some(Err(ended_communicator_error(round))),
        Err(RecvTimeoutError::Timeout) => None,
    }
}

/// Aborts this process without running destructors, as the GPU may still read and write memory that
/// the caller gets back with any answer. All other ranks learn that this one has ended.
fn abort_process(operation: &str) -> ! {
    tracing::error!(
        operation,
        "a call of NCCL cannot be ended, and may still use GPU memory: this process ends"
    );
    std::process::abort();
}

fn ended_communicator_error(round: &Round<'_>) -> CommError {
    library_error(
        round.operation,
        "an earlier call failed, which ended its communicator".to_owned(),
    )
}

fn library_error(call: &str, message: String) -> CommError {
    CommError::library("NCCL", call, message)
}

fn driver_error(call: &str, error: DriverError) -> CommError {
    CommError::library("CUDA", call, error.to_string())
}

/// The communicator and the stream, which the thread owns.
struct Owned {
    communicator: NcclCommunicator,
    stream: Arc<CudaStream>,
}

impl Owned {
    /// Takes over or joins a communicator, on the GPU `ordinal`. An error is reported to the other
    /// ranks.
    fn join(ordinal: usize, origin: Origin, watch: &Watch) -> Result<Owned, CommError> {
        Owned::try_join(ordinal, origin, watch).inspect_err(|error| watch.abort(error))
    }

    /// Joins the communicator of the group: waits until all ranks have joined.
    fn try_join(ordinal: usize, origin: Origin, watch: &Watch) -> Result<Owned, CommError> {
        // The communicator gets a stream of its own, so that candle's streams never wait for a
        // collective.
        let context = CudaContext::new(ordinal)
            .map_err(|error| driver_error("cuDevicePrimaryCtxRetain", error))?;
        let stream = context
            .new_stream()
            .map_err(|error| driver_error("cuStreamCreate", error))?;
        // The ranks of the group that `control` connects are those of the communicator.
        let Members {
            rank, global_ranks, ..
        } = watch.control.members();
        let communicator = match origin {
            Origin::Id(id) => NcclCommunicator::begin(id, *rank, global_ranks.len())
                .map_err(|error| library_error("ncclCommInitRankConfig", error))?,
            Origin::Split(communicator) => communicator,
        };
        // Report an error to the other ranks before the communicator is dropped, because the drop
        // waits for them.
        watch
            .wait("ncclCommInitRankConfig", || communicator.is_all_enqueued())
            .inspect_err(|error| watch.abort(error))?;
        Ok(Owned {
            communicator,
            stream,
        })
    }

    /// Carries out requests until there are no more, or one has failed. A failed call cannot be
    /// undone on its own, so the communicator ends with it.
    fn work(self, requests: &Receiver<Request>) {
        for request in requests {
            match request {
                Request::Call(request) => {
                    let outcome =
                        self.carry_out(&request.call, &request.earlier_work, &request.watch);
                    match outcome {
                        Ok(()) => request.reply.send(Ok(())).ok(),
                        Err(error) => return self.fail(error, &request.watch, &request.reply),
                    }
                }
                Request::Split(request) => match self.split(request.place, &request.watch) {
                    Ok(communicator) => request.reply.send(Ok(communicator)).ok(),
                    Err(error) => return self.fail(error, &request.watch, &request.reply),
                },
            };
        }
        self.leave();
    }

    /// Ends the communicator after an error, which the other ranks and the caller are told.
    fn fail<T>(self, error: CommError, watch: &Watch, reply: &Sender<Result<T, CommError>>) {
        // Tell the others first: NCCL ends a communicator only when all ranks do.
        watch.abort(&error);
        // The caller may use the memory again as soon as it has its answer.
        if !self.abort_and_wait() {
            abort_process(&watch.operation);
        }
        reply.send(Err(error)).ok();
    }

    /// Splits the communicator, and waits until this rank's new one, if there is one, is complete.
    fn split(
        &self,
        place: Option<SplitPlace>,
        watch: &Watch,
    ) -> Result<Option<NcclCommunicator>, CommError> {
        const CALL: &str = "ncclCommSplit";
        let result = self
            .communicator
            .begin_split(place)
            .map_err(|error| library_error(CALL, error))?;
        watch.wait(CALL, || self.communicator.is_all_enqueued())?;
        let made = result.take();
        if made.is_none() && place.is_some() {
            let message = "it made no communicator".to_owned();
            return Err(library_error(CALL, message));
        }
        Ok(made)
    }

    /// Carries out a call after the work that `earlier_work` stands for, and waits until the GPU is
    /// done with it.
    fn carry_out(
        &self,
        call: &Movement,
        earlier_work: &CudaEvent,
        watch: &Watch,
    ) -> Result<(), CommError> {
        let operation = watch.operation.as_str();
        self.stream
            .wait(earlier_work)
            .map_err(|error| driver_error("cuStreamWaitEvent", error))?;
        self.communicator
            .call(call, &self.stream)
            .map_err(|error| library_error(operation, error))?;
        watch.wait(operation, || self.communicator.is_all_enqueued())?;
        let all_done = self
            .stream
            .record_event(None)
            .map_err(|error| driver_error("cuEventRecord", error))?;
        watch.wait(operation, || {
            // Errors of the network and of other ranks are reported here, and not by the GPU.
            self.communicator.is_all_enqueued()?;
            all_done
                .try_is_complete()
                .map_err(|error| error.to_string())
        })
    }

    /// Aborts the running call, and waits until the GPU no longer touches the borrowed memory.
    /// Returns `true` if it does not touch it any more.
    fn abort_and_wait(self) -> bool {
        let Owned {
            communicator,
            stream,
        } = self;
        // This is `ncclCommAbort`: it makes the kernels that are under way end.
        drop(communicator);
        let deadline = Instant::now() + FINALIZE_TIMEOUT;
        let mut pause = Pause::new();
        let all_done = match stream.record_event(None) {
            Ok(event) => event,
            Err(error) => {
                // The driver has ended this process's work on the GPU.
                tracing::warn!(%error, "the GPU does not answer");
                return true;
            }
        };
        // An error counts as done: the driver has ended all work of this process on the GPU.
        while all_done.try_is_complete() == Ok(false) {
            if Instant::now() >= deadline {
                return false;
            }
            pause.wait();
        }
        true
    }

    /// Leaves the communicator together with the other ranks. If they do not leave in time, it is
    /// aborted.
    fn leave(self) {
        let Owned {
            communicator,
            stream,
        } = self;
        let deadline = Instant::now() + FINALIZE_TIMEOUT;
        let outcome = communicator.finalize().and_then(|()| {
            let mut pause = Pause::new();
            while !communicator.is_all_enqueued()? {
                if Instant::now() >= deadline {
                    return Err(format!("not all ranks left within {FINALIZE_TIMEOUT:?}"));
                }
                pause.wait();
            }
            Ok(())
        });
        match outcome {
            Ok(()) => communicator.destroy(),
            Err(error) => {
                tracing::debug!(error, "an NCCL communicator is aborted");
                drop(communicator);
            }
        }
        drop(stream);
    }
}

/// The conditions that end a wait of the thread: the loss of another rank, and the deadline.
struct Watch {
    /// The sockets between the ranks of the communicator, over which a lost rank is noticed.
    control: Arc<TcpBackend>,
    operation: String,
    /// The round, without the operation.
    round: Round<'static>,
}

impl Watch {
    fn new(control: &Arc<TcpBackend>, round: &Round<'_>) -> Watch {
        Watch {
            control: Arc::clone(control),
            operation: round.operation.to_owned(),
            round: Round {
                operation: "",
                ..*round
            },
        }
    }

    fn round(&self) -> Round<'_> {
        Round {
            operation: &self.operation,
            ..self.round
        }
    }

    /// Tells the other ranks that the operation has failed.
    fn abort(&self, error: &CommError) {
        self.control.abort(self.round.number, error);
    }

    /// Returns the error that names another rank, or `None` if none is to blame. NCCL may have
    /// noticed a loss first, so this waits for up to [`GRACE_PERIOD`].
    fn blamed_rank_error(&self) -> Option<CommError> {
        let deadline = Instant::now() + GRACE_PERIOD;
        loop {
            let failure = self.control.failure(&self.round());
            if failure.is_some() || Instant::now() >= deadline {
                return failure;
            }
            thread::sleep(PEER_CHECK_INTERVAL);
        }
    }

    /// Returns the reason that the operation cannot end, if there is one.
    fn failure(&self) -> Option<CommError> {
        let round = self.round();
        // A group of one rank can miss no other, but has a deadline too.
        self.control
            .failure(&round)
            .or_else(|| (Instant::now() >= round.deadline).then(|| round.timeout_error(Vec::new())))
    }

    /// Waits until `is_done` returns `true`.
    ///
    /// # Errors
    /// The error of `is_done`, or that of the rank that has caused it. The loss of another rank, or
    /// the deadline, if the call is not done within [`GRACE_PERIOD`] after that.
    fn wait(
        &self,
        call: &str,
        mut is_done: impl FnMut() -> Result<bool, String>,
    ) -> Result<(), CommError> {
        wait_until(
            || {
                // If another rank is to blame, the error names it.
                is_done().map_err(|message| {
                    self.blamed_rank_error()
                        .unwrap_or_else(|| library_error(call, message))
                })
            },
            || self.failure(),
        )
    }
}
