//! Saves in the background: torch's `async_save`. The state is copied first, and at most one save
//! is in flight. State that nobody changes before the next optimizer step is copied in the
//! background too.

use std::sync::{Arc, mpsc};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use candle_core::Tensor;
use fsdp_comm::ProcessGroup;
use fsdp_flat::storage::{CopiesEnd, HostCopies, HostMemory};
use fsdp_layout::{Failure, KeyPath, PathPart, PlainValue};
use fsdp_state::{
    DeferredCopies, LoadError as _, StateDict, StateError, StateValue, copy_state_dict_deferring,
    create_cpu_state_dict, get_element, iterate_state_dict,
};
use tracing::info_span;

use crate::error::CheckpointError;
use crate::local_state::{LocalState, is_step};
use crate::progress::SaveProgress;
use crate::save::SaveReport;
use crate::save::{SaveRequest, Saver, with_storage_deadline};
use crate::stateful::KeptUnchanged;

/// The results of a background save: its buffers and its plan, to be used again, its outcome, and
/// the state.
///
/// Tensors on GPUs in the state are dropped by the thread that computes, as its work may still use
/// them, and memory that another thread frees does not wait for that.
type Finished = (
    StateDict,
    Saver,
    Result<SaveReport, CheckpointError>,
    StateDict,
);

/// The thread of a save; it returns `None` if it was sent no save.
type SaveThread = JoinHandle<Option<Finished>>;

/// Saves checkpoints of one rank, also in the background.
///
/// [`BackgroundSaver::start`] returns when all that training may change has been copied to buffers,
/// which are allocated once and reused. Writing, hashing and the commit run on a thread, over a
/// separate process group, so that they never mix with the collectives of training. At most one
/// save is in flight.
#[derive(Debug)]
pub(crate) struct BackgroundSaver {
    group: ProcessGroup,
    in_flight: Option<SaveThread>,
    /// The memory of copies of values on the host.
    buffers: StateDict,
    /// The memory of copies of values on GPUs.
    host_memory: HostMemory,
    saver: Saver,
    progress: SaveProgress,
}

/// A save that is ready to run on its thread.
struct BackgroundSave {
    group: ProcessGroup,
    request: SaveRequest,
    saver: Saver,
    staged: Staged,
    guard: Option<KeptUnchanged>,
}

/// The copy of a state.
struct Staged {
    /// The values of the host, without those that are copied later.
    buffers: StateDict,
    deferred_copies: DeferredCopies,
    /// The whole state: the copies of values of the host, and the tensors on GPUs themselves.
    state: StateDict,
    /// The copies of the tensors on GPUs, if there are any.
    copies: Option<HostCopies>,
}

impl BackgroundSaver {
    /// Makes a saver for the ranks of `group`, which pins at most so many bytes of the host's
    /// memory for copies from GPUs. Collective: creates a separate process group for saves.
    ///
    /// # Errors
    /// The errors of that collective.
    pub(crate) fn new(group: &ProcessGroup, pinned_bytes: usize) -> Result<Self, CheckpointError> {
        let ranks: Vec<usize> = (0..group.world_size()).collect();
        let subgroup = group.subgroup(&ranks)?;
        Ok(BackgroundSaver {
            group: subgroup.expect("every rank is in the group of all ranks"),
            in_flight: None,
            buffers: StateDict::new(),
            host_memory: HostMemory::new(pinned_bytes),
            saver: Saver::default(),
            progress: SaveProgress::default(),
        })
    }

    /// Saves like [`save()`](crate::save()), and returns when that is done. No save may be in
    /// flight.
    ///
    /// # Errors
    /// The same as [`save()`](crate::save()).
    pub(crate) fn save(
        &mut self,
        request: &SaveRequest,
        state: Result<&StateDict, CheckpointError>,
    ) -> Result<SaveReport, CheckpointError> {
        self.progress = request.options.progress.clone();
        let local = state.and_then(|state| LocalState::new(state, None, self.progress.clone()));
        self.saver.save(request, local, &self.group)
    }

    /// Starts a save of the values that the state has now. No save may be in flight. Returns when
    /// everything in the host's memory has been copied that the guard does not keep unchanged. The
    /// rest is copied in the background; then the guard is released. GPUs copy their memory by
    /// themselves, beside other work, and nobody waits for that here. The copy takes as much memory
    /// as this rank's values. Later saves of the same layout reuse that memory. Collective: one
    /// agreement.
    ///
    /// # Errors
    /// The same on every rank, and no save is started: the error in `state`, values that cannot be
    /// copied, a thread that cannot be started.
    pub(crate) fn start(
        &mut self,
        request: SaveRequest,
        state: Result<(StateDict, Option<KeptUnchanged>), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let group = with_storage_deadline(&self.group, request.options.deadline);
        let started = state.and_then(|(state, guard)| {
            let _span = info_span!("stage", rank = group.rank()).entered();
            let buffers = std::mem::take(&mut self.buffers);
            let staged = Staged::new(&state, buffers, guard.as_ref(), &self.host_memory)?;
            let guard = match guard {
                Some(guard) if staged.is_given_to_gpus() => {
                    release(guard, staged.end()?);
                    None
                }
                guard => guard,
            };
            Ok((staged, guard, start_thread()?))
        });
        // If one rank cannot copy its values, no rank may start the save: the others would wait for
        // it.
        let (staged, guard, (sender, thread)) =
            CheckpointError::agree(&group, &request.operation(), None, started)?;
        self.progress = request.options.progress.clone();
        // Until the save is planned, these are not the bytes of the one before.
        self.progress.begin_save(0);
        let save = BackgroundSave {
            group,
            request,
            saver: std::mem::take(&mut self.saver),
            staged,
            guard,
        };
        sender.send(save).expect("the thread waits for its save");
        self.in_flight = Some(thread);
        Ok(())
    }

    /// Returns `true` if a save is in flight that has not ended yet.
    pub(crate) fn is_saving(&self) -> bool {
        self.in_flight
            .as_ref()
            .is_some_and(|save| !save.is_finished())
    }

    /// Returns the progress of the save that was started last.
    pub(crate) const fn progress(&self) -> &SaveProgress {
        &self.progress
    }

    /// Waits for the save in flight, and returns its report; `None` if there is none. Every rank
    /// gets the same error.
    ///
    /// # Errors
    /// The errors of the save in the background, as [`save()`](crate::save()) lists them.
    pub(crate) fn wait(&mut self) -> Result<Option<SaveReport>, CheckpointError> {
        let Some(in_flight) = self.in_flight.take() else {
            return Ok(None);
        };
        let finished = in_flight.join().map_err(|_| {
            // The thread has aborted the group, so that all ranks have this error.
            match self.group.barrier() {
                Err(error) => error.into(),
                Ok(()) => CheckpointError::Background {
                    problem: "its thread panicked".to_owned(),
                },
            }
        })?;
        let (buffers, saver, outcome, _state) = finished.expect("the thread was sent a save");
        self.buffers = buffers;
        self.saver = saver;
        outcome.map(Some)
    }
}

/// Aborts a group if the thread that drops this panics, because the other ranks would wait for it
/// until their deadline.
struct AbortOnPanic(ProcessGroup);

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0
                .abort("the thread of its save in the background panicked");
        }
    }
}

impl BackgroundSave {
    /// Copies what has not been copied yet, and saves.
    fn run(mut self) -> Finished {
        let _abort_on_panic = AbortOnPanic(self.group.clone());
        // Copy the rest before anything else: training may be waiting for it.
        let copied = {
            let _span = info_span!("stage", rank = self.group.rank()).entered();
            self.staged.finish()
        };
        let Staged {
            buffers,
            state,
            copies,
            ..
        } = self.staged;
        let mut waited = Duration::ZERO;
        let local = match copied {
            Ok(end) => {
                if let Some(guard) = self.guard {
                    waited = release(guard, end);
                }
                LocalState::new(&state, copies, self.request.options.progress.clone())
            }
            Err(error) => {
                // Some copies may be under way, and nothing may change before they end: their drop
                // waits. It is no call of `drop`, which lints refuse in builds without GPUs, where
                // there is nothing to drop.
                {
                    let _ended = copies;
                }
                drop(self.guard);
                Err(error.into())
            }
        };
        let mut outcome = self.saver.save(&self.request, local, &self.group);
        if let Ok(report) = &mut outcome {
            report.waited = waited;
        }
        (buffers, self.saver, outcome, state)
    }
}

/// Ends a guard of values that have been copied, or that GPUs copy until `end`. Returns for how
/// long changes have waited.
fn release(guard: KeptUnchanged, end: Option<Arc<CopiesEnd>>) -> Duration {
    match end {
        Some(end) => guard.release_after(&end),
        None => guard.release(),
    }
}

impl Staged {
    /// Copies the values of `state`: those of the host into `buffers`, those of GPUs into
    /// `host_memory`, on the GPUs' own time. Tensors that `guard` keeps unchanged are copied by
    /// [`Self::finish`], unless GPUs can begin with them now.
    ///
    /// # Errors
    /// Values that cannot be copied.
    fn new(
        state: &StateDict,
        buffers: StateDict,
        guard: Option<&KeptUnchanged>,
        host_memory: &HostMemory,
    ) -> Result<Staged, StateError> {
        let mut at_once: Vec<Tensor> = Vec::new();
        let mut kept: Vec<Tensor> = Vec::new();
        // Only the values of the host have to be copied here. An empty value stands for others.
        let mut on_gpus = StateDict::new();
        let mut has_gpu_values = false;
        let on_host = iterate_state_dict(state, |path, value| {
            if !is_copied_by_gpu(path, value) {
                return Ok(value.clone());
            }
            has_gpu_values = true;
            Ok(PlainValue::None.into())
        })?;
        if has_gpu_values {
            on_gpus = iterate_state_dict(state, |path, value| {
                if !is_copied_by_gpu(path, value) {
                    return Ok(value.clone());
                }
                let contiguous = contiguous(value)?;
                let is_kept = matches!(value, StateValue::Sharded(_))
                    && guard.is_some_and(|guard| guard.contains(path));
                let tensors = contiguous.candle_tensors().into_iter().cloned();
                if is_kept {
                    kept.extend(tensors);
                } else {
                    at_once.extend(tensors);
                }
                Ok(contiguous)
            })?;
        }
        let copies = HostCopies::begin(host_memory, &at_once, &kept)?;
        let (buffers, deferred_copies) = stage_on_host(&on_host, buffers, guard)?;
        let state = if has_gpu_values {
            iterate_state_dict(&on_gpus, |path, value| {
                Ok(match get_element(&buffers, path) {
                    Some(copy) if !is_copied_by_gpu(path, value) => copy.clone(),
                    _ => value.clone(),
                })
            })?
        } else {
            buffers.clone()
        };
        Ok(Staged {
            buffers,
            deferred_copies,
            state,
            copies,
        })
    }

    /// Returns `true` if nothing is left for [`Self::finish`]: values of the host have been copied,
    /// and GPUs have all that they are to copy.
    fn is_given_to_gpus(&self) -> bool {
        let copies = self.copies.as_ref();
        self.deferred_copies.is_empty() && copies.is_some_and(HostCopies::is_queued)
    }

    /// Returns the end of the copies that GPUs make.
    ///
    /// # Errors
    /// CUDA's.
    fn end(&self) -> Result<Option<Arc<CopiesEnd>>, StateError> {
        let end = self.copies.as_ref().map(HostCopies::end).transpose()?;
        Ok(end.map(Arc::new))
    }

    /// Makes the copies that were left, and returns the end of those that GPUs are still making.
    ///
    /// # Errors
    /// Values that cannot be copied.
    fn finish(&mut self) -> Result<Option<Arc<CopiesEnd>>, StateError> {
        if let Some(copies) = &mut self.copies {
            copies.queue()?;
        }
        std::mem::take(&mut self.deferred_copies).finish()?;
        self.end()
    }
}

/// Returns `true` for a tensor on a GPU that is copied by the GPU. Numbers of steps are not,
/// because they are compared before anything is written; nor are tensors in lists, which may be
/// saved as one object.
fn is_copied_by_gpu(path: &KeyPath, value: &StateValue) -> bool {
    let has_own_key = path.0.iter().all(|part| matches!(part, PathPart::Key(_)));
    let tensors = value.candle_tensors();
    has_own_key
        && !is_step(path)
        && !tensors.is_empty()
        && tensors.iter().all(|tensor| tensor.device().is_cuda())
}

/// Returns the value with tensors that are contiguous.
fn contiguous(value: &StateValue) -> Result<StateValue, StateError> {
    Ok(match value {
        StateValue::Tensor(tensor) => tensor.contiguous()?.into(),
        StateValue::Sharded(tensor) => tensor.map(|part| Ok(part.contiguous()?))?.into(),
        other => other.clone(),
    })
}

/// Starts a thread that carries out the save that it is sent. If it is sent none, it ends.
fn start_thread() -> Result<(mpsc::Sender<BackgroundSave>, SaveThread), StateError> {
    let (sender, receiver) = mpsc::channel::<BackgroundSave>();
    let thread = Builder::new()
        .name("save".to_owned())
        .spawn(move || receiver.recv().ok().map(BackgroundSave::run))
        .map_err(|error| StateError::Other {
            message: format!("failed to start a thread: {error}"),
            kind: Failure::kind(&error),
        })?;
    Ok((sender, thread))
}

/// Copies the values of `state` into `buffers`, and returns the buffers. Allocates new ones if the
/// layout has changed. Tensors that `guard` keeps unchanged are not copied here, but in the
/// background.
fn stage_on_host(
    state: &StateDict,
    mut buffers: StateDict,
    guard: Option<&KeptUnchanged>,
) -> Result<(StateDict, DeferredCopies), StateError> {
    match copy_into(&mut buffers, state, guard) {
        // This is the first save, or the layout has changed since the last one.
        Err(StateError::CompanionMismatch { .. }) => {
            // The old buffers are freed first, so that there is never memory for two copies.
            drop(buffers);
            buffers = create_cpu_state_dict(state)?;
            let deferred_copies = copy_into(&mut buffers, state, guard)?;
            Ok((buffers, deferred_copies))
        }
        deferred_copies => Ok((buffers, deferred_copies?)),
    }
}

/// Copies the values of `state` into `buffers`, except those that `guard` keeps unchanged: the
/// returned copies are made later.
///
/// # Errors
/// [`StateError::CompanionMismatch`] for buffers of another layout; values that cannot be copied.
fn copy_into(
    buffers: &mut StateDict,
    state: &StateDict,
    guard: Option<&KeptUnchanged>,
) -> Result<DeferredCopies, StateError> {
    copy_state_dict_deferring(state, buffers, &|path| {
        guard.is_some_and(|guard| guard.contains(path))
    })
}
