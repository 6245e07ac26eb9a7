//! Saves in the background: torch's `async_save`. The state is copied first, and at most one save
//! is in flight. State that nobody changes before the next optimizer step is copied in the
//! background too.

use std::time::{Duration, Instant};

use fsdp_comm::ProcessGroup;
use fsdp_formats::Location;
use fsdp_layout::KeyPath;
use fsdp_state::{
    DeferredCopies, StateDict, StateError, copy_state_dict_deferring, create_cpu_state_dict,
};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinHandle;
use tracing::{error, info_span};

use crate::{CheckpointError, KeptUnchanged, SaveOptions, SaveProgress, SaveReport, Saver};

/// The results of a background save: its buffers and its plan, to be used again, and its outcome.
type Finished = (StateDict, Saver, Result<SaveReport, CheckpointError>);

/// Saves checkpoints in the background of one rank: torch's `async_save`.
///
/// [`AsyncSaver::save`] returns when the state has been copied to buffers, which are allocated once
/// and reused. After that the caller may change its tensors. Writing, hashing and the commit run on
/// a background thread, over a separate process group, so that they never mix with the collectives
/// of training. At most one save is in flight: the next one waits for it, and returns its error.
#[derive(Debug)]
pub struct AsyncSaver {
    group: ProcessGroup,
    /// `None` while it is dropped.
    runtime: Option<Runtime>,
    in_flight: Option<JoinHandle<Finished>>,
    buffers: Option<StateDict>,
    saver: Saver,
    progress: SaveProgress,
}

impl AsyncSaver {
    /// Makes a saver for the ranks of `group`. Collective: creates a separate process group for
    /// saves.
    ///
    /// # Errors
    /// The errors of that collective; threads that cannot be started.
    pub fn new(group: &ProcessGroup) -> Result<Self, CheckpointError> {
        let ranks: Vec<usize> = (0..group.world_size()).collect();
        let runtime = Builder::new_current_thread()
            .max_blocking_threads(1)
            .build();
        let runtime = group.agree("async_save", runtime)?;
        let own = group.subgroup(&ranks)?.unwrap_or_else(|| group.clone());
        let (saver, progress) = (Saver::new(), SaveProgress::default());
        Ok(AsyncSaver {
            group: own,
            runtime: Some(runtime),
            in_flight: None,
            buffers: None,
            saver,
            progress,
        })
    }

    /// Starts a [`save()`](crate::save()) of the values that `state` has now. Every rank of the
    /// group must call it.
    ///
    /// Returns how long this rank had to wait: for the previous save, if it was still running, and
    /// for the copy. The copy takes as much memory as this rank's values. Later saves of the same
    /// layout reuse that memory.
    ///
    /// # Errors
    /// The error of the previous save, if it failed; the new save is not started then. Values that
    /// cannot be copied.
    pub fn save(
        &mut self,
        path: impl Into<Location>,
        state: &StateDict,
        options: &SaveOptions,
    ) -> Result<Duration, CheckpointError> {
        self.save_kept(path, state, None, options)
    }

    /// Starts a save like [`AsyncSaver::save`], but copies the tensors that `kept` keeps unchanged
    /// in the background. The guard in it is released when they have been copied.
    ///
    /// # Errors
    /// The errors of [`AsyncSaver::save`].
    pub(crate) fn save_kept(
        &mut self,
        path: impl Into<Location>,
        state: &StateDict,
        kept: Option<KeptUnchanged>,
        options: &SaveOptions,
    ) -> Result<Duration, CheckpointError> {
        let start = Instant::now();
        self.wait()?;
        let group = self.group.with_deadline_at_least(options.deadline);
        let staged = {
            let _span = info_span!("stage", rank = group.rank()).entered();
            stage(
                state,
                self.buffers.take().unwrap_or_default(),
                kept.as_ref(),
            )
        };
        // If one rank cannot copy its values, no rank may start the save: the others would wait for
        // it.
        let (staged, later) = group.agree("async_save", staged)?;
        let (path, options) = (path.into(), options.clone());
        self.progress = options.progress.clone();
        // Until the save is planned, these are not the bytes of the one before.
        self.progress.expect(0);
        let mut saver = std::mem::take(&mut self.saver);
        self.in_flight = self.runtime.as_ref().map(|runtime| {
            runtime.spawn_blocking(move || {
                // Copy the rest before anything else: training may be waiting for it.
                let copied = {
                    let _span = info_span!("stage", rank = group.rank()).entered();
                    later.finish()
                };
                let waited = kept.map(KeptUnchanged::release).unwrap_or_default();
                // All ranks learn of an error of one before they begin to wait for each other.
                let outcome = match group.agree("async_save", copied) {
                    Ok(()) => saver.save(&path, &staged, &group, &options),
                    Err(error) => Err(error.into()),
                };
                (
                    staged,
                    saver,
                    outcome.map(|report| SaveReport { waited, ..report }),
                )
            })
        });
        Ok(start.elapsed())
    }

    /// Waits for the save in the background, then saves like [`save()`](crate::save()), and returns
    /// when that is done.
    ///
    /// # Errors
    /// The same as [`save()`](crate::save()), and the error of the previous save if that one
    /// failed.
    pub(crate) fn save_now(
        &mut self,
        path: impl Into<Location>,
        state: &StateDict,
        options: &SaveOptions,
    ) -> Result<SaveReport, CheckpointError> {
        self.wait()?;
        self.progress = options.progress.clone();
        self.saver.save(path, state, &self.group, options)
    }

    /// Returns `true` if a save is in flight that has not ended yet.
    #[must_use]
    pub fn is_saving(&self) -> bool {
        self.in_flight
            .as_ref()
            .is_some_and(|save| !save.is_finished())
    }

    /// Returns the progress of the save that was started last.
    #[must_use]
    pub const fn progress(&self) -> &SaveProgress {
        &self.progress
    }

    /// Waits for the save in flight, and returns its report; `None` if there is none. Every rank
    /// gets the same error. Call it before the saver is dropped: dropping the saver waits too, but
    /// can only log the error.
    ///
    /// # Errors
    /// The errors of the save in the background, as [`save()`](crate::save()) lists them.
    pub fn wait(&mut self) -> Result<Option<SaveReport>, CheckpointError> {
        let (Some(in_flight), Some(runtime)) = (self.in_flight.take(), &self.runtime) else {
            return Ok(None);
        };
        let ended = match Handle::try_current() {
            Err(_) => runtime.block_on(in_flight),
            // A thread of another runtime must not block on one.
            Ok(_) => std::thread::scope(|scope| {
                let waiter = scope.spawn(|| runtime.block_on(in_flight));
                waiter
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            }),
        };
        let (buffers, saver, outcome) = ended.map_err(|problem| CheckpointError::Background {
            problem: problem.to_string(),
        })?;
        self.buffers = Some(buffers);
        self.saver = saver;
        outcome.map(Some)
    }
}

impl Drop for AsyncSaver {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            error!(rank = self.group.rank(), %error, "the last checkpoint was not saved");
        }
        if let Some(runtime) = self.runtime.take() {
            // Nothing runs on it any more. A plain drop would wait, and a thread of another runtime
            // must not do that.
            runtime.shutdown_background();
        }
    }
}

/// Copies the values of `state` into `buffers`, and returns the buffers. Allocates new ones if the
/// layout has changed. Tensors that `kept` keeps unchanged are not copied here, but in the
/// background.
fn stage(
    state: &StateDict,
    mut buffers: StateDict,
    kept: Option<&KeptUnchanged>,
) -> Result<(StateDict, DeferredCopies), StateError> {
    let can_wait = |path: &KeyPath| kept.is_some_and(|kept| kept.contains(path));
    match copy_state_dict_deferring(state, &mut buffers, &can_wait) {
        // This is the first save, or the layout has changed since the last one.
        Err(StateError::CompanionMismatch { .. }) => {
            // The old buffers are freed first, so that there is never memory for two copies.
            drop(buffers);
            buffers = create_cpu_state_dict(state)?;
            let later = copy_state_dict_deferring(state, &mut buffers, &can_wait)?;
            Ok((buffers, later))
        }
        later => Ok((buffers, later?)),
    }
}
