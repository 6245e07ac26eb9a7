//! [`Checkpointer`]: the checkpoints of a run, saved and loaded with one call each.

use std::ffi::OsStr;
use std::path::{Path, PathBuf, absolute};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use fsdp_comm::ProcessGroup;
use fsdp_digest::StateDigest;
use fsdp_formats::Location;
use fsdp_formats::checkpoint::{list_steps, step_in_name};
use fsdp_formats::lineage::{Branch, DataPosition, Lineage, Parent};
use fsdp_formats::metadata::METADATA_FILE;
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::storage::Durable;
use fsdp_layout::with_causes;
use fsdp_layout::{ErrorKind, Failure as _};
use fsdp_state::{LoadOptions, LoadReport};
use tracing::warn;

use crate::background::BackgroundSaver;
use crate::catalog::{
    CheckpointOnBranch, RunPosition, StepCheckpoint, list_branches, list_with_lost, step_name,
    step_of,
};
use crate::error::{CheckpointError, broadcast_result};
use crate::load::{LOAD, agree_on_load, open};
use crate::memory_tier::{MemoryTier, leave_tier};
use crate::parent::parent_of_step;
use crate::progress::SaveProgress;
use crate::retention::{Retention, prune_up_to};
use crate::save::{SaveOptions, SaveReport};
use crate::save::{SaveRequest, with_storage_deadline};
use crate::stateful::Stateful;

/// The name of a checkpoint: the number of steps done, for one in the run's directory, or a path or
/// URL anywhere.
#[derive(Debug, Clone)]
pub enum CheckpointName {
    /// The checkpoint of a step of the run: `step-00000020` in its directory.
    Step(u64),
    /// A path or a URL.
    At(Location),
}

/// The name in a run's directory of the checkpoint that [`Checkpointer::check_writable`] begins,
/// and never commits.
const WRITE_TEST: &str = "write-test";

/// The facts about a run that its checkpoints record beside their state; see [`Lineage`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunFacts {
    /// A text that identifies the configuration, such as its digest: equal if and only if the
    /// configuration is.
    pub config: Option<String>,
    /// The position up to which the run has read its data.
    pub data: Option<DataPosition>,
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

/// Converts every type that a [`Location`] can be made of to a [`CheckpointName`].
macro_rules! names_from {
    ($($place:ty),*) => {$(
        impl From<$place> for CheckpointName {
            fn from(place: $place) -> Self {
                CheckpointName::At(place.into())
            }
        }
    )*};
}

names_from!(
    Location, &Location, &Path, PathBuf, &PathBuf, &str, String, &String
);

/// The options of a [`Checkpointer`]; the same on every rank.
#[derive(Debug, Clone, Default)]
pub struct CheckpointerOptions {
    /// The rule for which checkpoints of the run are kept when a new one has been saved. By default
    /// all are kept.
    pub retention: Retention,
    /// The options of saves.
    pub save: SaveOptions,
    /// The options of loads.
    pub load: LoadOptions,
    /// The directory of the memory tier, to which [`Checkpointer::save_to_memory`] saves: a
    /// directory on each host whose files outlive the process, usually on a tmpfs. Several runs may
    /// share it.
    pub memory_tier: Option<Location>,
    /// The most bytes of the host's memory that are pinned on this rank for copies of state on
    /// GPUs, which saves in the background make; `None` for as many as the state has. They stay
    /// pinned until the checkpointer is dropped. State that finds no room there is copied more
    /// slowly, to other memory.
    pub pinned_bytes: Option<usize>,
}

/// The checkpoints of a run: saves them, also in the background, loads them, and removes old ones.
///
/// A run's checkpoints are in one directory, or under one prefix of an object store, one for each
/// saved step. A load opens any format. [`TrainState`](crate::TrainState) has an example.
///
/// Every rank of the group has a `Checkpointer`, and all ranks call the same methods in the same
/// order, for the same steps. A save in the background uses a separate process group, so that it
/// never mixes with the collectives of training.
///
/// Errors are the same on every rank, and the checkpointer can be used again after them, unless
/// they end the group ([`CommError`](fsdp_comm::CommError)). Dropping a checkpointer waits for its
/// save in the background, whose error is only logged then, and for the removal of old checkpoints.
#[derive(Debug)]
pub struct Checkpointer {
    run: Location,
    group: ProcessGroup,
    options: CheckpointerOptions,
    saver: BackgroundSaver,
    durable: Durable,
    memory_tier: Option<MemoryTier>,
    /// The thread that removes old checkpoints, on rank 0.
    pruning: Option<JoinHandle<()>>,
    /// The parent of the next checkpoint: the one that was saved or loaded last.
    parent: Option<Parent>,
    /// The place of the checkpoint that was loaded last. If this process has not saved yet, its
    /// first incremental save compares with it.
    loaded: Option<Location>,
    /// The step of the save in the background; `None` if there is none, or if it does not save a
    /// step of the run.
    saving_step: Option<u64>,
    /// The configuration and the position in the data that are recorded with the next checkpoints.
    facts: RunFacts,
    /// `true` if a save ended while old checkpoints were still being removed, so that there may be
    /// more to remove.
    prune_again: bool,
    /// The step of the checkpoint that was saved or loaded last, if it has one.
    current_step: Option<u64>,
    /// The branch of the run that the next checkpoint is on.
    branch: CurrentBranch,
    /// The newest step that the run leaves with its next save, until that is done; on rank 0.
    left_step: Option<u64>,
    /// The damaged checkpoints that saves replace.
    damaged: Vec<Location>,
}

/// The branch of the run that a checkpointer saves to.
#[derive(Debug)]
enum CurrentBranch {
    /// Rank 0 chooses it with the next save, because nothing was saved since the start or the last
    /// load. This is the branch and the step of the checkpoint of the run that was loaded, if one
    /// was.
    AfterLoad(Option<(Branch, u64)>),
    /// Rank 0 has chosen it.
    Chosen(Branch),
}

impl Checkpointer {
    /// Returns the checkpointer of a run whose checkpoints are in `run`, a directory or a URL,
    /// which need not exist yet. Collective: makes a process group for saves.
    ///
    /// # Errors
    /// The errors of that collective.
    pub fn new(
        run: impl Into<Location>,
        group: &ProcessGroup,
        options: CheckpointerOptions,
    ) -> Result<Self, CheckpointError> {
        let run = run.into();
        let memory_tier = options
            .memory_tier
            .clone()
            .map(|directory| MemoryTier::new(directory, run.clone(), group.clone()));
        let pinned_bytes = options.pinned_bytes.unwrap_or(usize::MAX);
        Ok(Checkpointer {
            run,
            group: group.clone(),
            options,
            saver: BackgroundSaver::new(group, pinned_bytes)?,
            durable: Durable::new(),
            memory_tier,
            pruning: None,
            parent: None,
            loaded: None,
            saving_step: None,
            facts: RunFacts::default(),
            prune_again: false,
            current_step: None,
            branch: CurrentBranch::AfterLoad(None),
            left_step: None,
            damaged: Vec::new(),
        })
    }

    /// Sets the facts about the run, such as digests of its configuration and data, that later
    /// checkpoints record in addition to their step and the digest of their parent. No
    /// communication: rank 0's facts are recorded.
    pub fn set_facts(&mut self, facts: RunFacts) {
        self.facts = facts;
    }

    /// Sets the damaged checkpoints of the run that saves of their steps replace, whether or not
    /// [`SaveOptions::overwrite`] is set; the same on every rank. Each is replaced once. As they do
    /// not stay, a run that goes back to a step before them does not leave them
    /// ([`SaveReport::left`]). No communication.
    pub fn set_damaged(&mut self, damaged: Vec<Location>) {
        self.damaged = damaged;
    }

    /// Replaces the operations that make files durable, by operations that fail in tests.
    #[doc(hidden)]
    #[must_use]
    pub fn with_durable(mut self, durable: Durable) -> Self {
        self.durable = durable;
        self
    }

    /// Chooses the branch of the run that the checkpoint of `step` is on, if that is not known yet:
    /// if the run has a newer checkpoint than the one that it continues from, it is a new branch.
    /// So it is if this checkpointer has saved a later step itself. No communication: rank 0
    /// records it, and the other ranks need not know it.
    ///
    /// # Errors
    /// A directory that cannot be read; [`CheckpointError::BranchWithoutDigests`].
    fn choose_branch(&mut self, step: u64) -> Result<(), CheckpointError> {
        if let CurrentBranch::Chosen(_) = self.branch {
            if self
                .current_step
                .is_none_or(|current_step| step >= current_step)
            {
                return Ok(());
            }
            // The state does not come from the last save, and nobody has told where it comes from.
            self.branch = CurrentBranch::AfterLoad(None);
            self.parent = None;
        }
        let CurrentBranch::AfterLoad(loaded) = &self.branch else {
            return Ok(());
        };
        if self.group.rank() > 0 {
            self.branch = CurrentBranch::Chosen(Branch::default());
            return Ok(());
        }
        if self.memory_tier.is_none() {
            leave_tier(&self.run)?;
        }
        let (branch, left_step) = self.branch_after_load(step, loaded.as_ref())?;
        if let Some(left) = left_step {
            let end = if self.options.save.overwrite {
                "you remove them, or saves of the same steps replace them"
            } else {
                "you remove them"
            };
            warn!(
                run = %self.run,
                step,
                left,
                "the run has gone back: its newest checkpoint is now that of `step`, on a new branch; \
                 those that it has left, up to step `left`, stay until {end}"
            );
        }
        self.branch = CurrentBranch::Chosen(branch);
        self.left_step = left_step;
        Ok(())
    }

    /// Returns the branch for the checkpoint of `step`, after the load of a checkpoint of the run
    /// or of none, and the newest step, of a checkpoint or in the memory tier, if the run leaves
    /// that. Damaged checkpoints that saves replace are not left.
    ///
    /// # Errors
    /// The errors of [`Self::choose_branch`].
    fn branch_after_load(
        &self,
        step: u64,
        loaded: Option<&(Branch, u64)>,
    ) -> Result<(Branch, Option<u64>), CheckpointError> {
        let mut listed = Vec::new();
        if self.run.exists()? {
            listed = list_with_lost(&self.run)?;
        }
        let on_disk = newest_checkpoint_position(&listed);
        let memory_tier = self.memory_tier.as_ref();
        let in_memory = memory_tier.and_then(MemoryTier::newest_on_host);
        let newest = newer_of_disk_and_memory(on_disk.as_ref(), in_memory);
        let Some((newest_branch, newest_step)) = newest else {
            let branch = loaded.map(|(branch, _)| branch.clone());
            return Ok((branch.unwrap_or_default(), None));
        };
        let is_after_all = step > newest_step
            && on_disk
                .as_ref()
                .is_none_or(|(_, disk_step)| step > *disk_step);
        let next_number = newest_branch.number + 1;
        let (branch, is_new) = match loaded {
            // The memory tier had begun this branch, and has lost it since.
            Some((branch, _)) if branch.number > newest_branch.number => (branch.clone(), false),
            Some((branch, loaded_step)) => {
                let is_newest =
                    branch.number == newest_branch.number && *loaded_step >= newest_step;
                if is_newest && step >= *loaded_step {
                    (branch.clone(), false)
                } else {
                    (branch.fork(*loaded_step, next_number), true)
                }
            }
            // This checkpointer has loaded nothing, so the checkpoint that the state comes from is
            // not known: it is taken for the newest one, if all have fewer steps.
            None if is_after_all => match &on_disk {
                Some((branch, disk_step)) if branch.number < newest_branch.number => {
                    (branch.fork(*disk_step, next_number), true)
                }
                _ => (newest_branch.clone(), false),
            },
            None => {
                let branch = Branch {
                    number: next_number,
                    from: Vec::new(),
                };
                (branch, true)
            }
        };
        // Without digests no lineage is recorded.
        if !branch.is_first() && !self.options.save.write.digests {
            return Err(CheckpointError::BranchWithoutDigests {
                step,
                newest: newest_step,
            });
        }
        if !is_new {
            return Ok((branch, None));
        }
        listed.retain(|found| !self.damaged.contains(&found.checkpoint.path));
        let newest_to_stay =
            newer_of_disk_and_memory(newest_checkpoint_position(&listed).as_ref(), in_memory);
        let left = newest_to_stay.filter(|(newest, step)| !branch.continues(newest, *step));
        Ok((branch, left.map(|(_, step)| step)))
    }

    /// Returns the request for a save to a place. That of a step of the run includes the lineage
    /// to record, whose branch has been chosen on rank 0.
    fn save_request(&self, name: CheckpointName, step: Option<u64>) -> SaveRequest {
        let branch = match &self.branch {
            CurrentBranch::Chosen(branch) => branch.clone(),
            CurrentBranch::AfterLoad(_) => Branch::default(),
        };
        let lineage = step.map(|step| Lineage {
            step,
            branch,
            parent: self.parent,
            config: self.facts.config.clone(),
            data: self.facts.data.clone(),
        });
        let path = self.location(name);
        let mut options = self.options.save.clone();
        options.overwrite |= self.damaged.contains(&path);
        SaveRequest {
            path,
            options,
            durable: self.durable.clone(),
            left_step: lineage.as_ref().and(self.left_step),
            lineage,
            parent: self.loaded.clone(),
        }
    }

    /// Makes the checkpoint of `step` that has just been saved the parent of the next one, and
    /// removes old checkpoints. One that is not a step of the run, or that has no digest, becomes
    /// no parent.
    fn record_save(&mut self, step: Option<u64>, report: &SaveReport) {
        if let Some(step) = step {
            self.left_step = None;
            // If it was damaged before, it is whole now.
            let saved = self.location(step);
            self.damaged.retain(|damaged| *damaged != saved);
        }
        self.parent = Parent::new(step, report.digest).or(self.parent);
        self.start_pruning(step);
    }

    /// Returns the location of a checkpoint, whether or not it exists.
    #[must_use]
    pub fn location(&self, name: impl Into<CheckpointName>) -> Location {
        match name.into() {
            CheckpointName::Step(step) => self.run.join(step_name(step)),
            CheckpointName::At(location) => location,
        }
    }

    /// Checks that every rank can save to the run's directory, which is made if it does not exist.
    /// Each rank writes a small file there, and all of these are removed. Call it before training,
    /// so that steps are not lost because the first save fails. Collectives: a broadcast of a
    /// result and an agreement.
    ///
    /// # Errors
    /// The same on every rank: the errors of the storage.
    pub fn check_writable(&self) -> Result<(), CheckpointError> {
        self.save_request(CheckpointName::At(self.run.join(WRITE_TEST)), None)
            .check_writable(&self.group)
    }

    /// Saves the state of a run as a DCP checkpoint, which `torch.distributed.checkpoint.load`
    /// opens. When it returns, the checkpoint is durable, and old ones of the run are being
    /// removed. A save in the background is waited for first. Collectives: those of
    /// [`save`](crate::save()), and for a path or a URL one broadcast of a result.
    ///
    /// # Errors
    /// The same on every rank: state that cannot be saved, ranks that disagree on the state or the
    /// step, a checkpoint that is there already (unless [`SaveOptions::overwrite`] is set), and
    /// whatever the storage says. Files that were in the storage before are untouched, unless the
    /// error is of the kind [`ErrorKind::AfterCommit`]: then the new checkpoint is in its place,
    /// but may not survive a loss of power. If the save in the background before this one failed,
    /// its error is returned, and the new save is not started.
    pub fn save(
        &mut self,
        name: impl Into<CheckpointName>,
        stateful: &impl Stateful,
    ) -> Result<SaveReport, CheckpointError> {
        self.wait()?;
        let name = name.into();
        let step = self.agreed_step_of_run(&name)?;
        let branch_outcome = step.map_or(Ok(()), |step| self.choose_branch(step));
        let request = self.save_request(name, step);
        // An error of this rank becomes one of every rank in the save.
        let report = match branch_outcome.and_then(|()| stateful.state_to_save()) {
            Ok((state, _guard)) => self.saver.save(&request, Ok(&state)),
            Err(error) => self.saver.save(&request, Err(error)),
        }?;
        self.record_save(step, &report);
        Ok(report)
    }

    /// Starts to save the current state of a run, and goes on with the save in the background:
    /// torch's `async_save`. Returns how long this call took: it waits for the previous save, if
    /// that is still running, and then copies the state. Collectives: one agreement, and for a path
    /// or a URL one broadcast of a result.
    ///
    /// When it returns, the state has been copied, except what the run can keep unchanged
    /// ([`Stateful::state_to_save`]). That is copied during the next forward and backward. An
    /// optimizer step, and anything else that would change it, waits for the copy;
    /// [`SaveReport::waited`] says how long.
    ///
    /// # Errors
    /// The errors of [`Checkpointer::save`]. If the previous save failed, its error is returned,
    /// and the new save is not started.
    pub fn save_async(
        &mut self,
        name: impl Into<CheckpointName>,
        stateful: &impl Stateful,
    ) -> Result<Duration, CheckpointError> {
        let start = Instant::now();
        self.wait()?;
        let name = name.into();
        let step = self.agreed_step_of_run(&name)?;
        let branch_outcome = step.map_or(Ok(()), |step| self.choose_branch(step));
        let request = self.save_request(name, step);
        // From here on, nothing that the guard covers changes until it has been copied.
        let state = branch_outcome.and_then(|()| stateful.state_to_save());
        self.saver.start(request, state)?;
        self.saving_step = step;
        Ok(start.elapsed())
    }

    /// Saves the state of the run `stateful` at `step` to the memory tier
    /// ([`CheckpointerOptions::memory_tier`]), like the local checkpoints of Orbax's emergency
    /// checkpointing. This is faster than a checkpoint and needs none of its storage. Each rank
    /// writes what it holds to its own host, and another rank keeps a copy, on another host if
    /// there is one. `step` and the newest complete step before it are kept. Steps after it, from
    /// which the run has gone back, are removed.
    ///
    /// The tier survives the end of the processes, and the loss of any one rank's files or of any
    /// one host, but not the loss of all hosts. So save checkpoints too, though less often.
    /// Collectives: agreements, object all-gathers, and an all-to-all for each 8 MiB of the largest
    /// part.
    ///
    /// # Errors
    /// The same on every rank: state that [`Checkpointer::save`] would not save either, no memory
    /// tier, a full one. The newest complete step before this one is kept.
    pub fn save_to_memory(
        &mut self,
        step: u64,
        stateful: &impl Stateful,
    ) -> Result<SaveReport, CheckpointError> {
        // A rank that has no state takes part too, as `save` makes its error every rank's. The
        // guard of the values is for saves in the background: this one returns when all is written.
        let branch_outcome = self.choose_branch(step);
        let state = branch_outcome.and_then(|()| Ok(stateful.state_to_save()?.0));
        let branch = match &self.branch {
            CurrentBranch::Chosen(branch) => branch.number,
            CurrentBranch::AfterLoad(_) => 0,
        };
        let position = RunPosition { branch, step };
        let tier = self
            .memory_tier
            .as_mut()
            .ok_or(CheckpointError::NoMemoryTier)?;
        let report = tier.save(position, self.left_step, state, &self.options.save)?;
        self.left_step = None;
        Ok(report)
    }

    /// Returns the newest complete step of the memory tier; `None` if it is not newer than `after`,
    /// the newest checkpoint of the run that can be used. What rank 0 passes counts. The step is an
    /// ordinary checkpoint, and each host has one of its own. [`Checkpointer::load_latest`]
    /// calls this.
    ///
    /// Every copy is checked, and a damaged one is not used. A copy that cannot be read is an
    /// error. A step that lacks parts, or has parts of which all copies are damaged, is skipped
    /// with a warning and removed. With `strict`, such damage is an error. Collectives: agreements;
    /// object all-gathers and broadcasts; an all-to-all for each 8 MiB of a part that a host lacks.
    /// There are none without a memory tier.
    ///
    /// # Errors
    /// The same on every rank: files that cannot be read or written,
    /// [`CheckpointError::DamagedMemory`].
    pub fn latest_in_memory(
        &mut self,
        after: Option<&StepCheckpoint>,
        strict: bool,
    ) -> Result<Option<StepCheckpoint>, CheckpointError> {
        let Some(tier) = &mut self.memory_tier else {
            return Ok(None);
        };
        let mut position = Ok(None);
        if self.group.rank() == 0
            && let Some(after) = after
        {
            // A checkpoint that was removed since it was listed counts as on the oldest branch, so
            // that it hides no step of a later one.
            position = list_with_lost(&self.run).map(|listed| {
                let mut position = RunPosition {
                    branch: 0,
                    step: after.step,
                };
                for found in listed.iter().filter(|found| found.checkpoint == *after) {
                    position = found.position();
                }
                Some(position)
            });
        }
        let after = broadcast_result(
            &self.group,
            "look into the memory tier",
            position.map(Some),
            0,
        )?;
        tier.join_newest(after, strict)
    }

    /// Returns the newest step of which the memory tier has all parts. They are not read, and
    /// nothing is changed. Collectives: agreements and object all-gathers.
    ///
    /// # Errors
    /// The same on every rank: directories that cannot be read.
    pub fn step_in_memory(&mut self) -> Result<Option<u64>, CheckpointError> {
        match &mut self.memory_tier {
            Some(tier) => tier.newest_listed_step(),
            None => Ok(None),
        }
    }

    /// Removes the steps of the run from the memory tier, if there is one. Call it at the end of a
    /// run, when the last checkpoint is durable. Collectives: agreements, and an object all-gather.
    ///
    /// # Errors
    /// The same on every rank: files that cannot be removed.
    pub fn clear_memory(&mut self) -> Result<(), CheckpointError> {
        match &mut self.memory_tier {
            Some(tier) => tier.clear(),
            None => Ok(()),
        }
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

    /// Waits for the save in the background, and returns its report; `None` if there is none. Every
    /// rank gets the same error. Call it at the end of a run: dropping the checkpointer waits too,
    /// but can only log the error. No communication.
    ///
    /// # Errors
    /// The errors of the save in the background, as [`Checkpointer::save`] lists them.
    pub fn wait(&mut self) -> Result<Option<SaveReport>, CheckpointError> {
        let step = self.saving_step.take();
        let report = self.saver.wait()?;
        if let Some(report) = &report {
            self.record_save(step, report);
        }
        Ok(report)
    }

    /// Loads a checkpoint of any format into the run `stateful`: by its step, or from a path or a
    /// URL. Every rank reads only what it needs, directly into the live tensors. The checkpoint may
    /// have been saved on any number of ranks. Its path may be another one on each host, but a
    /// checkpoint without digests must have the same name there. A save in the background is waited
    /// for first. Collectives: one agreement, those of the run's [`Stateful::load_state_dict`], one
    /// more agreement, and for a step of the memory tier an object broadcast.
    ///
    /// # Errors
    /// The same on every rank. If there is no such checkpoint, or it does not fit
    /// ([`StateError::Incompatible`](fsdp_state::StateError::Incompatible)), or the save in the
    /// background failed, nothing has changed. Damage inside a file, which only reading can find,
    /// is [`StateError::PartlyLoaded`](fsdp_state::StateError::PartlyLoaded), unless the load is
    /// [`staged`](LoadOptions::staged).
    pub fn load(
        &mut self,
        name: impl Into<CheckpointName>,
        stateful: &mut impl Stateful,
    ) -> Result<LoadReport, CheckpointError> {
        // Finish the save in the background first. At its end it makes its checkpoint the parent of
        // the next one, which it must not do after this load has set another parent.
        self.wait()?;
        let name = name.into();
        let named_step = self.step_of_run(&name);
        let path = self.location(name);
        let group = with_storage_deadline(&self.group, self.options.load.deadline);
        let checkpoint = open(LOAD, &path, &group, &self.options.load)?;
        let loaded = stateful.load_state_dict(&*checkpoint, &group, &self.options.load);
        let report = agree_on_load(&group, loaded)?;
        let memory_position = self.position_in_memory(&path);
        let lineage = checkpoint.lineage();
        let recorded_step = lineage.map(|lineage| lineage.step);
        let loaded_branch;
        (self.parent, self.loaded, loaded_branch) = match memory_position {
            // A step in the memory tier is not in the chain of checkpoints. So the next checkpoint
            // continues the newest checkpoint before that step.
            Some(position) => match parent_of_step(&self.run, position, &group)? {
                Some((name, branch, parent)) => (
                    parent,
                    Some(self.run.join(&name)),
                    Some((branch, position.step)),
                ),
                None => {
                    let branch = Branch {
                        number: position.branch,
                        from: Vec::new(),
                    };
                    (None, None, Some((branch, position.step)))
                }
            },
            // A checkpoint of another program has no lineage, and then the next checkpoint has no
            // parent: what this run saved or loaded before is not its parent, because the state now
            // comes from elsewhere.
            None => {
                let branch = lineage.map_or_else(Branch::default, |lineage| lineage.branch.clone());
                let is_own = self.is_own(&path);
                let step = named_step
                    .or(recorded_step)
                    .or_else(|| step_in_name(path.name().file_name()?.to_str()?));
                (
                    Parent::new(recorded_step, checkpoint.digests().map(StateDigest::root)),
                    Some(path),
                    step.filter(|_| is_own).map(|step| (branch, step)),
                )
            }
        };
        self.branch = CurrentBranch::AfterLoad(loaded_branch);
        let memory_step = memory_position.map(|position| position.step);
        self.current_step = named_step
            .or(memory_step)
            .or(recorded_step)
            .or(self.current_step);
        Ok(report)
    }

    /// Returns `true` if the checkpoint at `path` is in the directory of this run, which may have
    /// several paths.
    fn is_own(&self, path: &Location) -> bool {
        if path.name().parent() == Some(self.run.name()) {
            return true;
        }
        let (Some(path), Some(run)) = (path.local(), self.run.local()) else {
            return false;
        };
        let folder = path.parent().filter(|folder| *folder != Path::new(""));
        let folder = folder.unwrap_or(Path::new("."));
        // Links can be followed only once the run's directory exists.
        matches!((absolute(folder), absolute(run)), (Ok(folder), Ok(run)) if folder == run)
            || matches!(
                (folder.canonicalize(), run.canonicalize()),
                (Ok(folder), Ok(run)) if folder == run
            )
    }

    /// Returns the step of the run that a name stands for on rank 0, as the paths of other hosts
    /// may be other ones. Collective for a path or a URL: one broadcast of a result.
    fn agreed_step_of_run(&self, name: &CheckpointName) -> Result<Option<u64>, CheckpointError> {
        if let CheckpointName::Step(step) = name {
            return Ok(Some(*step));
        }
        let own_step = (self.group.rank() == 0).then(|| self.step_of_run(name));
        broadcast_result(&self.group, "step of a checkpoint", Ok(own_step), 0)
    }

    /// Returns the step of the run that a name stands for: a step, or the path of its checkpoint.
    /// Returns `None` for any other place.
    fn step_of_run(&self, name: &CheckpointName) -> Option<u64> {
        let location = match name {
            CheckpointName::Step(step) => return Some(*step),
            CheckpointName::At(location) => location,
        };
        let file_name = location.name().file_name()?.to_str()?;
        let step = step_of(file_name)?;
        (file_name == step_name(step) && self.is_own(location)).then_some(step)
    }

    /// Returns the position of a step that [`Checkpointer::latest_in_memory`] has found; `None` for
    /// any other checkpoint.
    fn position_in_memory(&self, path: &Location) -> Option<RunPosition> {
        // The run's own checkpoints may lie below the tier's directory too.
        if self.is_own(path) {
            return None;
        }
        self.memory_tier.as_ref()?.position_of(path)
    }

    /// Loads the newest state of the run, from a checkpoint or from the memory tier. Returns the
    /// checkpoint and the report, or `None` if the run has no checkpoint yet. A save in the
    /// background is waited for first, so its checkpoint may be the newest. A memory tier that
    /// cannot be used is left out, with a warning. Collectives: those of
    /// [`Checkpointer::latest_in_memory`], [`Checkpointer::latest`] and [`Checkpointer::load`].
    ///
    /// # Errors
    /// The same as [`Checkpointer::load`]; a directory that cannot be read.
    pub fn load_latest(
        &mut self,
        stateful: &mut impl Stateful,
    ) -> Result<Option<(StepCheckpoint, LoadReport)>, CheckpointError> {
        self.wait()?;
        let (latest, position) = self.latest_on_branch()?.unzip();
        let newer = match &mut self.memory_tier {
            None => Ok(None),
            Some(tier) => tier.join_newest(position, false),
        };
        let newer = match newer {
            // Every rank has this error, so all of them continue from the checkpoint.
            Err(error) if error.kind() != ErrorKind::RankLost => {
                if self.group.rank() == 0 {
                    warn!(
                        error = with_causes(&error),
                        "the memory tier cannot be used: using the newest checkpoint"
                    );
                }
                None
            }
            newer => newer?,
        };
        let Some(latest) = newer.or(latest) else {
            if self.group.rank() == 0 {
                self.warn_of_other_checkpoints();
            }
            return Ok(None);
        };
        let report = self.load(&latest.path, stateful)?;
        Ok(Some((latest, report)))
    }

    /// Returns the newest checkpoint of the run. It is the same on every rank. Collective: one
    /// broadcast of a result.
    ///
    /// # Errors
    /// The same on every rank: a directory that cannot be read.
    pub fn latest(&self) -> Result<Option<StepCheckpoint>, CheckpointError> {
        let found = self.latest_on_branch()?;
        Ok(found.map(|(latest, _)| latest))
    }

    /// Returns the checkpoint that [`Self::latest`] returns, with its place in the run.
    ///
    /// # Errors
    /// The errors of [`Self::latest`].
    fn latest_on_branch(&self) -> Result<Option<(StepCheckpoint, RunPosition)>, CheckpointError> {
        // Listing may take long: an object store is asked about each checkpoint.
        let group = with_storage_deadline(&self.group, self.options.load.deadline);
        // Only rank 0 lists the directory. If every rank did, a checkpoint that is saved or removed
        // meanwhile could make their answers differ.
        let mut listed = Ok(None);
        if group.rank() == 0 {
            listed = self.list_run().map(|mut committed| {
                let latest = committed.pop();
                Some(latest.map(|found| (step_and_name(&found.checkpoint), found.position())))
            });
        }
        let found: Option<((u64, String), RunPosition)> =
            broadcast_result(&group, "latest checkpoint", listed, 0)?;
        Ok(found.map(|(found, position)| (self.checkpoint_of(found), position)))
    }

    /// Lists the checkpoints of the run that this rank finds, the newest last, without
    /// communication. There are none if the run's directory does not exist yet.
    fn list_run(&self) -> Result<Vec<CheckpointOnBranch>, CheckpointError> {
        if !self.run.exists()? {
            return Ok(Vec::new());
        }
        let (committed, _) = list_branches(&self.run)?;
        Ok(committed)
    }

    /// Warns if the run's directory has no checkpoint of the run, but is one itself, or has those
    /// of another program: a run that begins anew may not be what its user wants. No communication.
    fn warn_of_other_checkpoints(&self) {
        let is_checkpoint = self.run.join(METADATA_FILE).is_file().unwrap_or(false);
        let others = list_steps(&self.run).unwrap_or_default();
        let mut whole = others.iter().rev().filter(|found| {
            fsdp_formats::checkpoint::open(&found.path, OpenOptions::default()).is_ok()
        });
        let found = match whole.next() {
            _ if is_checkpoint => &self.run,
            Some(newest) => &newest.path,
            None => return,
        };
        warn!(
            run = %self.run,
            %found,
            "the run has no checkpoint in its directory and begins anew; `Checkpointer::load` takes \
             the path of another one, such as `found`"
        );
    }

    /// Removes the checkpoints of the run that need not be kept, and returns them. Removes the
    /// leftovers of crashed saves too; see [`prune`](crate::prune). Saves do this automatically. If
    /// the run has gone back to an older step, later checkpoints neither count nor are removed.
    /// Collective: one broadcast of a result.
    ///
    /// # Errors
    /// The same on every rank: a directory that cannot be read, files that cannot be removed.
    pub fn prune(&self) -> Result<Vec<StepCheckpoint>, CheckpointError> {
        let group = with_storage_deadline(&self.group, self.options.save.deadline);
        let mut outcome = Ok(None);
        if group.rank() == 0 {
            outcome = prune_up_to(&self.run, &self.options.retention, self.current_step)
                .map(|removed| Some(removed.iter().map(step_and_name).collect()));
        }
        let removed: Vec<(u64, String)> = broadcast_result(&group, "prune", outcome, 0)?;
        Ok(removed
            .into_iter()
            .map(|removed| self.checkpoint_of(removed))
            .collect())
    }

    /// Returns the checkpoint of a step by its name in the run, of which `step-20` and
    /// `step-00000020` are both names.
    fn checkpoint_of(&self, (step, name): (u64, String)) -> StepCheckpoint {
        StepCheckpoint {
            step,
            path: self.run.join(&name),
        }
    }

    /// Starts a thread on rank 0 that removes old checkpoints after the save of `step`. Training
    /// does not wait for the thread, and a failure of it does not end training. If the thread of an
    /// earlier save is still running, the removal is left to the next save or to the drop.
    fn start_pruning(&mut self, step: Option<u64>) {
        self.current_step = step.or(self.current_step);
        if self.group.rank() > 0 || self.options.retention.keep_last.is_none() {
            return;
        }
        self.prune_again = self
            .pruning
            .as_ref()
            .is_some_and(|pruning| !pruning.is_finished());
        if self.prune_again {
            return;
        }
        let run = self.run.clone();
        let retention = self.options.retention;
        let step = self.current_step;
        self.pruning = Builder::new()
            .name("prune".to_owned())
            .spawn(move || prune_and_log(&run, &retention, step))
            .ok();
        // If no thread can be started, old checkpoints are removed when the checkpointer is
        // dropped.
        self.prune_again = self.pruning.is_none();
    }

    /// Waits for the thread that removes old checkpoints, and removes those that have become old
    /// since it began.
    fn end_pruning(&mut self) {
        if let Some(pruning) = self.pruning.take() {
            // The thread logs its own errors.
            pruning.join().ok();
        }
        if self.prune_again {
            prune_and_log(&self.run, &self.options.retention, self.current_step);
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

/// Returns the branch and the step of the newest of a run's checkpoints, which are sorted, the
/// newest last; `None` if there is none.
///
/// A checkpoint that has lost its `.metadata` counts only if its branch is later than those of all
/// others. Otherwise the run stays on the branch of the others, and gets to that step again.
fn newest_checkpoint_position(listed: &[CheckpointOnBranch]) -> Option<(Branch, u64)> {
    let committed = listed.iter().rev().find(|found| !found.is_lost)?;
    let newest = listed
        .iter()
        .rev()
        .find(|found| !found.is_lost || found.branch.number > committed.branch.number)?;
    Some((newest.branch.clone(), newest.checkpoint.step))
}

/// Returns the branch and the step of the newer one of two states of a run: its newest checkpoint,
/// and its newest step in the memory tier.
fn newer_of_disk_and_memory(
    on_disk: Option<&(Branch, u64)>,
    in_memory: Option<RunPosition>,
) -> Option<(Branch, u64)> {
    match (on_disk, in_memory) {
        (Some((branch, disk_step)), Some(position)) if branch.number == position.branch => {
            Some((branch.clone(), position.step.max(*disk_step)))
        }
        // The memory tier records only the number of a branch, and not what it continues.
        (on_disk, Some(position))
            if on_disk.is_none_or(|(branch, _)| branch.number < position.branch) =>
        {
            let number = position.branch;
            let from = Vec::new();
            Some((Branch { number, from }, position.step))
        }
        (on_disk, _) => on_disk.cloned(),
    }
}

/// Returns the step of a checkpoint, and its name in the run, which is what ranks send to each
/// other.
fn step_and_name(checkpoint: &StepCheckpoint) -> (u64, String) {
    let name = checkpoint
        .path
        .name()
        .file_name()
        .and_then(OsStr::to_str)
        .expect("a checkpoint was found by its name in the run");
    (checkpoint.step, name.to_owned())
}

/// Removes old checkpoints of a run that is at `step`; `None` if that is not known. A failure is
/// only logged, because a run can continue with too many checkpoints.
fn prune_and_log(run: &Location, retention: &Retention, step: Option<u64>) {
    if let Err(error) = prune_up_to(run, retention, step) {
        warn!(path = %run, %error, "failed to remove old checkpoints");
    }
}
