//! [`Checkpointer`]: the checkpoints of a run, saved and loaded with one call each.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use fsdp_comm::ProcessGroup;
use fsdp_dcp::Location;
use fsdp_dcp::lineage::{DataPosition, Lineage, Parent};
use fsdp_dcp::storage::clean_stale;
use fsdp_digest::StateDigest;
use fsdp_state::{LoadError as _, LoadOptions, LoadReport};
use tracing::warn;

use crate::catalog::{StepCheckpoint, latest_checkpoint, step_name};
use crate::load::{LOAD, open};
use crate::retention::{Retention, prune};
use crate::{AsyncSaver, CheckpointError, SaveOptions, SaveProgress, SaveReport, Stateful};

/// The name of a checkpoint: the number of steps done, for one in the run's directory, or a path or URL anywhere.
#[derive(Debug, Clone)]
pub enum CheckpointName {
    /// The checkpoint of a step of the run: `step-00000020` in its directory.
    Step(u64),
    /// A path or a URL.
    At(Location),
}

/// The facts about a run that its checkpoints record beside their state; see [`Lineage`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunFacts {
    /// A text that stands for the configuration: the same for the same configuration.
    pub config: Option<String>,
    /// How far the run has read its data.
    pub data: Option<DataPosition>,
}

impl CheckpointName {
    /// Returns the step of a checkpoint of the run.
    fn step(&self) -> Option<u64> {
        match self {
            CheckpointName::Step(step) => Some(*step),
            CheckpointName::At(_) => None,
        }
    }
}

impl From<u64> for CheckpointName {
    fn from(step: u64) -> Self {
        CheckpointName::Step(step)
    }
}

impl From<&StepCheckpoint> for CheckpointName {
    fn from(checkpoint: &StepCheckpoint) -> Self {
        CheckpointName::At(checkpoint.path.clone())
    }
}

/// Makes names of the types that a [`Location`] is made of.
macro_rules! names_from {
    ($($place:ty),*) => {$(
        impl From<$place> for CheckpointName {
            fn from(place: $place) -> Self {
                CheckpointName::At(place.into())
            }
        }
    )*};
}

names_from!(Location, &Location, &Path, PathBuf, &PathBuf, &str, String, &String);

/// The options of a [`Checkpointer`]; the same on every rank.
#[derive(Debug, Clone, Default)]
pub struct CheckpointerOptions {
    /// The checkpoints of the run that stay when a new one has been saved. By default all do.
    pub retention: Retention,
    /// The options of saves.
    pub save: SaveOptions,
    /// The options of loads.
    pub load: LoadOptions,
}

/// The checkpoints of a run, as one rank sees them: saves, also in the background, loads, and the removal of old ones.
///
/// A run's checkpoints lie in one directory, or under one prefix of an object store, one for each step that was saved.
/// A load opens any format. [`TrainState`](crate::TrainState) has an example.
///
/// Every rank of the group has one, and all call the same methods in the same order. A save in the background runs over a
/// process group of its own, so that it never mixes with the collectives of training.
pub struct Checkpointer {
    run: Location,
    group: ProcessGroup,
    options: CheckpointerOptions,
    saver: AsyncSaver,
    /// Removes old checkpoints, on rank 0.
    pruning: Option<JoinHandle<()>>,
    /// The parent of the next checkpoint: the one that was saved or loaded last.
    parent: Mutex<Option<Parent>>,
    /// The place of the checkpoint that was loaded last.
    loaded: Mutex<Option<Location>>,
    /// The step of the save in the background, if it is of the run.
    saving: Option<u64>,
    /// The configuration and the position in the data that are recorded with the next checkpoints.
    facts: RunFacts,
    /// `true` if a save ended while old checkpoints were still being removed, so that there may be more to remove.
    prune_again: bool,
}

impl fmt::Debug for Checkpointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpointer").field("run", &self.run.to_string()).finish_non_exhaustive()
    }
}

impl Checkpointer {
    /// Returns the checkpointer of a run whose checkpoints lie in `run`, a directory or a URL, which need not exist yet.
    /// Collective: makes a group for saves.
    ///
    /// # Errors
    /// The collective's; threads that cannot be started.
    pub fn new(
        run: impl Into<Location>,
        group: &ProcessGroup,
        options: CheckpointerOptions,
    ) -> Result<Self, CheckpointError> {
        let saver = AsyncSaver::new(group)?;
        Ok(Checkpointer {
            run: run.into(),
            group: group.clone(),
            options,
            saver,
            pruning: None,
            parent: Mutex::default(),
            loaded: Mutex::default(),
            saving: None,
            facts: RunFacts::default(),
            prune_again: false,
        })
    }

    /// Sets what the next checkpoints record of the run, beside their steps and the digest of the checkpoint that they grew out
    /// of. No communication; rank 0's counts.
    pub fn set_facts(&mut self, facts: RunFacts) {
        self.facts = facts;
    }

    /// Returns the options of a save; one of a step of the run records its lineage.
    fn save_options(&self, step: Option<u64>) -> SaveOptions {
        let RunFacts { config, data } = self.facts.clone();
        let parent = *self.parent.lock().unwrap_or_else(PoisonError::into_inner);
        let lineage = step.map(|step| Lineage { step, parent, config, data });
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner).clone();
        SaveOptions { lineage, parent: loaded, ..self.options.save.clone() }
    }

    /// Notes the checkpoint that the next one grows out of, if the one that has been saved is a step of the run.
    fn set_parent(&self, parent: Option<Parent>) {
        if let Some(parent) = parent {
            *self.parent.lock().unwrap_or_else(PoisonError::into_inner) = Some(parent);
        }
    }

    /// Returns the place of a checkpoint.
    #[must_use]
    pub fn location(&self, name: impl Into<CheckpointName>) -> Location {
        match name.into() {
            CheckpointName::Step(step) => self.run.join(step_name(step)),
            CheckpointName::At(location) => location,
        }
    }

    /// Saves the state of a run as a DCP checkpoint, which `torch.distributed.checkpoint.load` opens. When it returns, the
    /// checkpoint is durable, and old ones of the run are being removed. A save in the background is waited for first.
    /// Collectives: those of [`save`](crate::save()).
    ///
    /// # Errors
    /// The same on every rank: state that cannot be saved, ranks that disagree, a checkpoint that is there already, and
    /// whatever the storage says. Files that were in the storage before are untouched.
    pub fn save(
        &mut self,
        name: impl Into<CheckpointName>,
        run: &impl Stateful,
    ) -> Result<SaveReport, CheckpointError> {
        self.wait()?;
        let name = name.into();
        let step = name.step();
        let path = self.prepare(name)?;
        let state = CheckpointError::agree(&self.group, "save", None, run.state_dict())?;
        let report = self.saver.save_now(path, &state, &self.save_options(step))?;
        self.set_parent(Parent::of(step, report.digest));
        self.start_pruning();
        Ok(report)
    }

    /// Starts to save the state that a run has now, and returns when it has been copied, while the rest goes on in the
    /// background: torch's `async_save`. Returns how long this rank was held up: by the save before, if that still ran, and
    /// by the copy. Collectives: agreements.
    ///
    /// # Errors
    /// The same as [`Checkpointer::save`]; that of the save before, if it failed: the new one is not started then.
    pub fn save_async(
        &mut self,
        name: impl Into<CheckpointName>,
        run: &impl Stateful,
    ) -> Result<Duration, CheckpointError> {
        self.wait()?;
        let name = name.into();
        let step = name.step();
        let path = self.prepare(name)?;
        let state = CheckpointError::agree(&self.group, "save", None, run.state_dict())?;
        let options = self.save_options(step);
        let stall = self.saver.save(path, &state, &options)?;
        self.saving = step;
        Ok(stall)
    }

    /// Removes what a killed run has left of a save to the same place, and returns the place. Collective: one
    /// agreement.
    fn prepare(&self, name: CheckpointName) -> Result<Location, CheckpointError> {
        let path = self.location(name);
        let cleaned = if self.group.rank() == 0 { clean_stale(&path).map(|_| ()) } else { Ok(()) };
        CheckpointError::agree(&self.group, "save", None, cleaned.map_err(CheckpointError::from))?;
        Ok(path)
    }

    /// Returns `true` if a save in the background has not ended yet.
    #[must_use]
    pub fn is_saving(&self) -> bool {
        self.saver.is_saving()
    }

    /// Returns the progress of the save that was started last.
    #[must_use]
    pub const fn progress(&self) -> &SaveProgress {
        self.saver.progress()
    }

    /// Waits for the save in the background; `None` if there is none. Every rank gets the same error. Call it before the
    /// end: dropping waits too, but can only log the error. No communication.
    ///
    /// # Errors
    /// The errors of the save in the background, as [`Checkpointer::save`] lists them.
    pub fn wait(&mut self) -> Result<Option<SaveReport>, CheckpointError> {
        let step = self.saving.take();
        let report = self.saver.wait()?;
        if let Some(report) = &report {
            self.set_parent(Parent::of(step, report.digest));
            self.start_pruning();
        }
        Ok(report)
    }

    /// Loads a checkpoint of any format into a run: by the number of its steps, or from a path or a URL. Every rank reads
    /// what it needs, to where it belongs, at whatever number of ranks the checkpoint was saved. Collectives: agreements.
    ///
    /// # Errors
    /// The same on every rank. There is no such checkpoint, or it does not fit
    /// ([`StateError::Incompatible`](fsdp_state::StateError::Incompatible)): nothing has changed. Damage inside a file, which
    /// only reading shows, is [`StateError::PartlyLoaded`](fsdp_state::StateError::PartlyLoaded), unless the load is
    /// [`staged`](LoadOptions::staged).
    pub fn load(
        &self,
        name: impl Into<CheckpointName>,
        run: &mut impl Stateful,
    ) -> Result<LoadReport, CheckpointError> {
        let path = self.location(name);
        let (group, checkpoint) = open(LOAD, &path, &self.group, &self.options.load)?;
        let report = run.load_state_dict(&*checkpoint, &group, &self.options.load)?;
        let step = checkpoint.lineage().map(|lineage| lineage.step);
        // A checkpoint of another program is no parent, and neither is the one that this run saved or loaded before.
        let parent = Parent::of(step, checkpoint.digests().map(StateDigest::root));
        *self.parent.lock().unwrap_or_else(PoisonError::into_inner) = parent;
        *self.loaded.lock().unwrap_or_else(PoisonError::into_inner) = Some(path);
        Ok(report)
    }

    /// Loads the newest checkpoint of the run; returns it and the report, or `None` if there is none yet. Collectives: one
    /// object broadcast, and those of [`Checkpointer::load`].
    ///
    /// # Errors
    /// The same as [`Checkpointer::load`]; a directory that cannot be read.
    pub fn load_latest(
        &self,
        run: &mut impl Stateful,
    ) -> Result<Option<(StepCheckpoint, LoadReport)>, CheckpointError> {
        let Some(latest) = self.latest()? else { return Ok(None) };
        let report = self.load(&latest.path, run)?;
        Ok(Some((latest, report)))
    }

    /// Returns the newest checkpoint of the run. It is the same on every rank. Collective: one agreement and one object
    /// broadcast.
    ///
    /// # Errors
    /// The same on every rank: a directory that cannot be read.
    pub fn latest(&self) -> Result<Option<StepCheckpoint>, CheckpointError> {
        // Only rank 0 lists the directory. If every rank did, a checkpoint that is saved or removed meanwhile could
        // make their answers differ.
        let found = if self.group.rank() == 0 { self.latest_here() } else { Ok(None) };
        let found = CheckpointError::agree(&self.group, "latest checkpoint", None, found)?;
        let found: Option<(u64, String)> = self.group.broadcast_object(Some(&found.as_ref().and_then(named)), 0)?;
        Ok(found.map(|found| self.checkpoint_of(found)))
    }

    /// Returns the newest checkpoint that this rank sees, or `None` if the run's directory does not exist yet.
    fn latest_here(&self) -> Result<Option<StepCheckpoint>, CheckpointError> {
        if self.run.exists()? { latest_checkpoint(&self.run) } else { Ok(None) }
    }

    /// Removes the checkpoints of the run that need not stay, and returns them; saves do so by themselves. Collective: one
    /// agreement and one object broadcast.
    ///
    /// # Errors
    /// The same on every rank: a directory that cannot be read, files that cannot be removed.
    pub fn prune(&self) -> Result<Vec<StepCheckpoint>, CheckpointError> {
        let removed = if self.group.rank() == 0 { prune(&self.run, &self.options.retention) } else { Ok(Vec::new()) };
        let removed = CheckpointError::agree(&self.group, "prune", None, removed)?;
        let removed: Vec<(u64, String)> = removed.iter().filter_map(named).collect();
        let removed: Vec<(u64, String)> = self.group.broadcast_object(Some(&removed), 0)?;
        Ok(removed.into_iter().map(|removed| self.checkpoint_of(removed)).collect())
    }

    /// Returns the checkpoint of a step by its name in the run, of which `step-20` and `step-00000020` are both names.
    fn checkpoint_of(&self, (step, name): (u64, String)) -> StepCheckpoint {
        StepCheckpoint { step, path: self.run.join(&name) }
    }

    /// Starts to remove old checkpoints, on rank 0. Training does not wait for it, and a failure is no reason to end it.
    fn start_pruning(&mut self) {
        if self.group.rank() > 0 || self.options.retention.keep_last.is_none() {
            return;
        }
        self.prune_again = self.pruning.as_ref().is_some_and(|pruning| !pruning.is_finished());
        if self.prune_again {
            return;
        }
        let (run, retention) = (self.run.clone(), self.options.retention);
        let thread = Builder::new().name("prune".to_owned());
        self.pruning = thread.spawn(move || prune_and_log(&run, &retention)).ok();
        // If no thread can be started, old checkpoints are removed when the checkpointer is dropped.
        self.prune_again = self.pruning.is_none();
    }

    /// Waits for the thread that removes old checkpoints, and removes those that have become old since it began.
    fn end_pruning(&mut self) {
        if let Some(pruning) = self.pruning.take() {
            // The thread logs its own errors.
            pruning.join().ok();
        }
        if self.prune_again {
            prune_and_log(&self.run, &self.options.retention);
        }
    }
}

impl Drop for Checkpointer {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::error!(rank = self.group.rank(), %error, "the last checkpoint was not saved");
        }
        self.end_pruning();
    }
}

/// Returns the step of a checkpoint, and its name in the run.
fn named(checkpoint: &StepCheckpoint) -> Option<(u64, String)> {
    Some((checkpoint.step, checkpoint.path.name().file_name()?.to_str()?.to_owned()))
}

/// Removes old checkpoints, and logs a failure: it is no reason to end a run.
fn prune_and_log(run: &Location, retention: &Retention) {
    if let Err(error) = prune(run, retention) {
        warn!(path = %run, %error, "failed to remove old checkpoints");
    }
}
