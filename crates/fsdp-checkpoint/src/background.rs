//! Saves in the background: torch's `async_save`. The state is copied first, and at most one save
//! is in flight. State that nobody changes before the next optimizer step is copied in the
//! background too.

use std::sync::mpsc;
use std::thread::{Builder, JoinHandle};

use fsdp_comm::ProcessGroup;
use fsdp_layout::Failure;
use fsdp_state::{
    DeferredCopies, LoadError as _, StateDict, StateError, copy_state_dict_deferring,
    create_cpu_state_dict,
};
use tracing::info_span;

use crate::error::CheckpointError;
use crate::progress::SaveProgress;
use crate::save::SaveReport;
use crate::save::{SaveRequest, Saver, with_storage_deadline};
use crate::stateful::KeptUnchanged;

/// The results of a background save: its buffers and its plan, to be used again, and its outcome.
type Finished = (StateDict, Saver, Result<SaveReport, CheckpointError>);

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
    buffers: StateDict,
    saver: Saver,
    progress: SaveProgress,
}

/// A save that is ready to run on its thread.
struct BackgroundSave {
    group: ProcessGroup,
    request: SaveRequest,
    saver: Saver,
    /// The copy of the state, without the values that are copied later.
    staged: StateDict,
    deferred_copies: DeferredCopies,
    guard: Option<KeptUnchanged>,
}

impl BackgroundSaver {
    /// Makes a saver for the ranks of `group`. Collective: creates a separate process group for
    /// saves.
    ///
    /// # Errors
    /// The errors of that collective.
    pub(crate) fn new(group: &ProcessGroup) -> Result<Self, CheckpointError> {
        let ranks: Vec<usize> = (0..group.world_size()).collect();
        let subgroup = group.subgroup(&ranks)?;
        Ok(BackgroundSaver {
            group: subgroup.expect("every rank is in the group of all ranks"),
            in_flight: None,
            buffers: StateDict::new(),
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
        self.saver.save(request, state, &self.group)
    }

    /// Starts a save of the values that the state has now. No save may be in flight. Returns when
    /// everything has been copied that the guard does not keep unchanged. The rest is copied in the
    /// background; then the guard is released. The copy takes as much memory as this rank's values.
    /// Later saves of the same layout reuse that memory. Collective: one agreement.
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
            let (staged, deferred_copies) = stage(&state, buffers, guard.as_ref())?;
            Ok((staged, deferred_copies, guard, start_thread()?))
        });
        // If one rank cannot copy its values, no rank may start the save: the others would wait for
        // it.
        let (staged, deferred_copies, guard, (sender, thread)) =
            CheckpointError::agree(&group, &request.operation(), None, started)?;
        self.progress = request.options.progress.clone();
        // Until the save is planned, these are not the bytes of the one before.
        self.progress.begin_save(0);
        let save = BackgroundSave {
            group,
            request,
            saver: std::mem::take(&mut self.saver),
            staged,
            deferred_copies,
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
        let (buffers, saver, outcome) = finished.expect("the thread was sent a save");
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
            self.deferred_copies.finish()
        };
        let waited = self.guard.map(KeptUnchanged::release).unwrap_or_default();
        let state = copied.map(|()| &self.staged).map_err(Into::into);
        let mut outcome = self.saver.save(&self.request, state, &self.group);
        if let Ok(report) = &mut outcome {
            report.waited = waited;
        }
        (self.staged, self.saver, outcome)
    }
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
fn stage(
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
