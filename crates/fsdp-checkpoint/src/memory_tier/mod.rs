//! The memory tier of a run: its newest steps, in the memory of the hosts.
//!
//! In an ordinary save the ranks share the work of writing one checkpoint. In a save to the memory
//! tier each rank writes all that it holds, its *part*, to a directory on its own host that
//! outlives the process (a tmpfs). Another rank, its [buddy](arithmetic::buddies), keeps a copy of
//! the part, on another host if there is one. Nothing is written to the storage of the checkpoints.
//!
//! ```text
//! DIR/<run>/                                                     for this user alone
//! DIR/<run>/host                                                 a random number that identifies the host
//! DIR/<run>/rank-1/step-00000020-<start>-branch-0-rank-1-of-2/   rank 1's own part, as a DCP directory
//! DIR/<run>/rank-1/step-00000020-<start>-branch-0-rank-0-of-2/   the copy of rank 0's part
//! DIR/<run>/step-00000020/                                       all parts, joined when a run resumed from them
//! ```
//!
//! A part gets its final name with one rename, when all of it is written. So a step is whole if the
//! parts of all ranks of one save exist. If a part is damaged, its copy is used.

mod arithmetic;
mod exchange;
mod run_directory;

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fsdp_comm::ProcessGroup;
use fsdp_formats::storage::{Durable, clean_stale};
use fsdp_formats::{Location, parts};
use fsdp_layout::with_causes;
use fsdp_layout::{ErrorKind, Failure as _};
use fsdp_state::{LoadError as _, StateDict};
use tracing::{info_span, warn};

use self::arithmetic::{
    MemoryStep, Part, PartCopy, Transfer, buddies, copies_to_check, group_into_rounds, joined_name,
    missing_ranks, needed_transfers, newest_complete, newest_whole, position_of_joined,
    steps_with_missing_ranks,
};
use self::exchange::exchange;
pub(crate) use self::run_directory::leave_tier;
use self::run_directory::{RunDirectory, forget_left, make_private, name_in_tier};
use crate::catalog::{RunPosition, StepCheckpoint};
use crate::error::CheckpointError;
use crate::local_state::LocalState;
use crate::plan::{PlanCache, Planned};
use crate::progress::SaveProgress;
use crate::save::{SaveOptions, SaveReport};
use crate::save::{save_part, with_storage_deadline};
use crate::threads::{Access, thread_count};

/// The memory tier of a run, as one rank sees it.
#[derive(Debug)]
pub(crate) struct MemoryTier {
    directory: Location,
    run: Location,
    group: ProcessGroup,
    run_directory: Option<RunDirectory>,
    /// The number of this start of the job; `None` before its first save.
    start_number: Option<u64>,
    plans: PlanCache,
}

/// A damaged copy, and the description of the damage.
type DamagedCopy = (PartCopy, String);

impl MemoryTier {
    /// Returns the memory tier of a run. This neither communicates nor opens files.
    pub(crate) fn new(directory: Location, run: Location, group: ProcessGroup) -> Self {
        MemoryTier {
            directory,
            run,
            group,
            run_directory: None,
            start_number: None,
            plans: PlanCache::default(),
        }
    }

    /// Finds the run's directory in the tier for an operation. If it has none yet, `create` makes
    /// one; without `create` this returns `None`. `deadline` is that of the operation.
    fn open(
        &mut self,
        operation: &'static str,
        deadline: Option<Duration>,
        create: bool,
    ) -> Result<Option<RunDirectory>, CheckpointError> {
        let group = with_storage_deadline(&self.group, deadline);
        if let Some(found) = &self.run_directory {
            return Ok(Some(RunDirectory {
                group,
                operation,
                ..found.clone()
            }));
        }
        let mut found = RunDirectory::find(&self.directory, &self.run, group, operation, create)?;
        if let Some(found) = &mut found
            && let Some(left) = found.left.take()
        {
            found.on_each_host(|_| remove(&left))?;
            found.agree(match self.group.rank() {
                0 => forget_left(&self.run),
                _ => Ok(()),
            })?;
        }
        self.run_directory = found;
        Ok(self.run_directory.clone())
    }

    /// Returns the position of a step that [`Self::join_newest`] has joined at this path; `None`
    /// for any other path.
    pub(crate) fn position_of(&self, path: &Location) -> Option<RunPosition> {
        // Other checkpoints may lie in the tier's directory too.
        let joined_in = &self.run_directory.as_ref()?.root;
        let name = path.name().file_name()?.to_str()?;
        if *path != joined_in.join(name) {
            return None;
        }
        position_of_joined(name)
    }

    /// Returns the newest position of which this host has a part; `None` if it has none, or if the
    /// tier cannot be read, which is only logged. No communication.
    pub(crate) fn newest_on_host(&self) -> Option<RunPosition> {
        let listed = name_in_tier(&self.run).and_then(|name| match name {
            Some(name) => list_copies(&self.directory.join(name), self.group.rank()),
            None => Ok(Vec::new()),
        });
        let copies = listed
            .inspect_err(|error| warn!(%error, "cannot list the memory tier"))
            .ok()?;
        let positions = copies.iter().map(|copy| copy.part.memory_step.position);
        positions.max()
    }

    /// Saves the state of a step. `position` and `left_step`, the newest step of the run that it
    /// leaves with this save, are those of rank 0, but the step is the same on every rank.
    /// Afterwards the tier holds this step and the newest complete one before it.
    ///
    /// # Errors
    /// The same on every rank: state that a checkpoint could not hold either, errors of the
    /// storage. The newest complete step before this one is kept.
    pub(crate) fn save(
        &mut self,
        position: RunPosition,
        left_step: Option<u64>,
        state: Result<StateDict, CheckpointError>,
        options: &SaveOptions,
    ) -> Result<SaveReport, CheckpointError> {
        let start = Instant::now();
        let group = with_storage_deadline(&self.group, options.deadline);
        let rank = group.rank();
        let step = position.step;
        let _span = info_span!("save to memory", rank, step).entered();
        // Step 1: plan a checkpoint of what all ranks hold together. Each rank then writes all that
        // it holds, but this plan finds what no checkpoint could hold. Ranks must agree on the
        // operation, so its name has the step: parts of different steps must not be joined.
        let operation = format!("save step {step} to memory");
        let local = state.and_then(|state| LocalState::new(&state, None, SaveProgress::default()));
        let Planned { local, .. } =
            self.plans
                .plan(&group, &operation, options.deduplicate, local)?;
        let Some(tier) = self.open("save to memory", options.deadline, true)? else {
            unreachable!("a directory that was missing has been made");
        };
        let copies = tier.list()?;
        let (branch, left_step): (u64, Option<u64>) =
            group.broadcast_object(Some(&(position.branch, left_step)), 0)?;
        let this_step = MemoryStep {
            start_number: self.start_number_of_save(&group, step, &copies)?,
            position: RunPosition { branch, step },
            ranks: group.world_size(),
        };
        // Step 2: make room. Of the older steps, only the newest complete one is kept. Steps from
        // this one on are removed too: they are of a save that failed, or the run has gone back
        // behind them and does not continue from them.
        let older: Vec<PartCopy> = copies
            .into_iter()
            .filter(|copy| copy.part.memory_step.position.step < step)
            .collect();
        let kept = newest_complete(&older);
        tier.on_each_host(|root| remove_all_but(root, kept))?;
        // Step 3: write this rank's own part. The run's directory may have been removed since the
        // last save.
        let path = tier.path_of(Part {
            memory_step: this_step,
            rank,
        });
        let is_object_store = path.local().is_none();
        let requested_threads = options.write.threads;
        let threads = thread_count(Access::Write, requested_threads, &group, is_object_store);
        let written =
            make_private(&tier.root).and_then(|()| save_part(&path, &local, rank, threads));
        let rank_bytes = tier.agree(written)?;
        // Step 4: copy each part to the buddy of its rank. From then on the step survives the loss
        // of any one rank's files, or of any one host.
        let mut transfers = Vec::new();
        for (sender, receiver) in buddies(&tier.hosts).into_iter().enumerate() {
            // A rank without another one is its own buddy.
            if sender != receiver {
                let part = Part {
                    memory_step: this_step,
                    rank: sender,
                };
                transfers.push(Transfer {
                    part,
                    sender,
                    receiver,
                });
            }
        }
        for round in group_into_rounds(transfers) {
            tier.transfer(&round, &[])?;
        }
        Ok(SaveReport {
            rank_bytes,
            total_bytes: group.all_gather_object(&rank_bytes)?.into_iter().sum(),
            linked_bytes: 0,
            digest: None,
            duration: start.elapsed(),
            waited: Duration::ZERO,
            left: left_step,
        })
    }

    /// Returns the number of this start of the job, for a save of `step`. There is a new one for
    /// the first save, and when the run has gone back behind a step that it had saved. Collective:
    /// an object broadcast for a new number.
    fn start_number_of_save(
        &mut self,
        group: &ProcessGroup,
        step: u64,
        copies: &[PartCopy],
    ) -> Result<u64, CheckpointError> {
        let newest = copies.iter().map(|copy| copy.part.memory_step).max();
        if let Some(start_number) = self.start_number
            && newest.is_none_or(|newest| {
                (newest.start_number, newest.position.step) < (start_number, step)
            })
        {
            return Ok(start_number);
        }
        // The time also exceeds the numbers of starts on other hosts, which cannot be seen now and
        // may come back. A clock that is wrong is no reason not to save: the number then exceeds
        // only those that can be seen.
        let time = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        let next_number = newest.map_or(0, |newest| newest.start_number.saturating_add(1));
        let start_number = group.broadcast_object(Some(&time.max(next_number)), 0)?;
        self.start_number = Some(start_number);
        Ok(start_number)
    }

    /// Joins the parts of the newest whole step on each host to an ordinary checkpoint, and returns
    /// that, if the step is newer than `checkpoint_position`, the position of the newest
    /// checkpoint, which must be the same on every rank; else returns `None`. Newer steps, which
    /// are damaged or were never completed, are removed.
    ///
    /// # Errors
    /// The same on every rank: errors of the storage; with `strict`, a step that was completed and
    /// is damaged.
    pub(crate) fn join_newest(
        &mut self,
        checkpoint_position: Option<RunPosition>,
        strict: bool,
    ) -> Result<Option<StepCheckpoint>, CheckpointError> {
        let Some(tier) = self.open("look into the memory tier", None, false)? else {
            return Ok(None);
        };
        // Step 1: find the newest step of which every part has a copy that is not damaged. Every
        // rank has the same list of copies, so all of them choose the same step.
        let copies = tier.list()?;
        let found = tier.find_sound(&copies, checkpoint_position, strict)?;
        // Step 2: remove the steps that were passed over. The run continues from an older one, so a
        // later resume must not find them.
        let chosen = found.as_ref().map(|(step, _)| *step);
        let newest = chosen.map(|step| step.position).or(checkpoint_position);
        let mut skipped_steps: BTreeSet<MemoryStep> =
            copies.iter().map(|copy| copy.part.memory_step).collect();
        // A step of a later branch may be smaller.
        skipped_steps.retain(|step| {
            Some(*step) != chosen
                && newest.is_none_or(|newest| {
                    step.position >= newest || step.position.step >= newest.step
                })
        });
        tier.on_each_host(|root| {
            remove_parts(root, |part| skipped_steps.contains(&part.memory_step))
        })?;
        // Step 3: give each host the parts that it lacks, and join them.
        let Some((step, copies)) = found else {
            return Ok(None);
        };
        let joined = tier.join(step, &copies);
        if joined.is_err() {
            // Parts that were received for this would leave less space for the next attempt.
            tier.remove_received(&copies);
        }
        joined.map(Some)
    }

    /// Returns the newest step of which all parts exist. They are not read, and nothing is changed.
    ///
    /// # Errors
    /// The same on every rank: errors of the storage.
    pub(crate) fn newest_listed_step(&mut self) -> Result<Option<u64>, CheckpointError> {
        let Some(tier) = self.open("list the memory tier", None, false)? else {
            return Ok(None);
        };
        Ok(newest_whole(&tier.list()?).map(|newest| newest.position.step))
    }

    /// Removes the run's directories from the tier.
    ///
    /// # Errors
    /// The same on every rank: errors of the storage.
    pub(crate) fn clear(&mut self) -> Result<(), CheckpointError> {
        let Some(tier) = self.open("clear the memory tier", None, false)? else {
            return Ok(());
        };
        // The next save makes new directories.
        self.run_directory = None;
        tier.on_each_host(remove)
    }
}

impl RunDirectory {
    /// Turns an error of any rank into an error of every rank. Collective: an agreement.
    fn agree<T>(&self, outcome: Result<T, CheckpointError>) -> Result<T, CheckpointError> {
        CheckpointError::agree(&self.group, self.operation, None, outcome)
    }

    /// Does something with the run's directory on the first rank of each host, because the ranks of
    /// a host share the directory. Returns the default on the other ranks. Collective: an
    /// agreement.
    fn on_each_host<T: Default>(
        &self,
        work: impl FnOnce(&Location) -> Result<T, CheckpointError>,
    ) -> Result<T, CheckpointError> {
        let rank = self.group.rank();
        let outcome = if self.hosts[rank] == rank {
            work(&self.root)
        } else {
            Ok(T::default())
        };
        self.agree(outcome)
    }

    /// Returns the path of a part in the directory of this rank.
    fn path_of(&self, part: Part) -> Location {
        self.root
            .join(format!("rank-{}", self.group.rank()))
            .join(part.to_string())
    }

    /// Returns the path of a part on this host: that of one of these copies, or else in the
    /// directory of this rank.
    fn path_on_host(&self, part: Part, copies: &[PartCopy]) -> Location {
        let rank = self.group.rank();
        match copies
            .iter()
            .find(|copy| copy.host == rank && copy.part == part)
        {
            Some(copy) => copy.path(&self.root),
            None => self.path_of(part),
        }
    }

    /// Makes the transfers of a round. `copies` are the places from which parts are sent, if they
    /// are not in the directories of the ranks that send them. Collectives: those of
    /// [`exchange()`].
    fn transfer(&self, round: &[Transfer], copies: &[PartCopy]) -> Result<(), CheckpointError> {
        let rank = self.group.rank();
        let outgoing = round.iter().find(|transfer| transfer.sender == rank);
        let incoming = round.iter().find(|transfer| transfer.receiver == rank);
        exchange(
            &self.group,
            self.operation,
            outgoing.map(|transfer| (self.path_on_host(transfer.part, copies), transfer.receiver)),
            incoming.map(|transfer| (self.path_of(transfer.part), transfer.sender)),
        )?;
        Ok(())
    }

    /// Lists the parts on all hosts. Every rank gets the same list. Collective: an agreement and an
    /// object all-gather.
    fn list(&self) -> Result<Vec<PartCopy>, CheckpointError> {
        let listed = self.on_each_host(|root| list_copies(root, self.group.rank()))?;
        let lists = self.group.all_gather_object(&listed)?;
        Ok(lists.into_iter().flatten().collect())
    }

    /// Returns the newest step after `checkpoint_position` of which every part has a copy that is
    /// not damaged, with these copies; `None` if there is none. Collectives: an agreement and an
    /// object all-gather for each step that is checked.
    ///
    /// # Errors
    /// The same on every rank: a copy that cannot be read; with `strict`, a step that was completed
    /// and is damaged.
    fn find_sound(
        &self,
        copies: &[PartCopy],
        checkpoint_position: Option<RunPosition>,
        strict: bool,
    ) -> Result<Option<(MemoryStep, Vec<PartCopy>)>, CheckpointError> {
        for (step, missing) in steps_with_missing_ranks(copies) {
            if checkpoint_position.is_some_and(|position| position >= step.position) {
                break;
            }
            if !missing.is_empty() {
                if self.group.rank() == 0 {
                    warn!(
                        step = step.position.step,
                        ranks = ?missing,
                        "the memory tier lacks parts of a step; using an older step"
                    );
                }
                continue;
            }
            let mut sound_copies = copies.to_vec();
            sound_copies.retain(|copy| copy.part.memory_step == step);
            self.retain_sound(&mut sound_copies)?;
            let present: BTreeSet<usize> = sound_copies.iter().map(|copy| copy.part.rank).collect();
            let ranks = missing_ranks(step, &present);
            if ranks.is_empty() {
                return Ok(Some((step, sound_copies)));
            }
            if strict {
                return Err(CheckpointError::DamagedMemory {
                    step: step.position.step,
                    ranks,
                });
            }
            if self.group.rank() == 0 {
                warn!(
                    step = step.position.step,
                    ?ranks,
                    "all copies of some parts are damaged; using an older step"
                );
            }
        }
        Ok(None)
    }

    /// Checks every byte of these copies and retains the sound ones. The ranks of a host share the
    /// checks. Collective: an agreement and an object all-gather.
    ///
    /// # Errors
    /// The same on every rank: a copy that cannot be read.
    fn retain_sound(&self, copies: &mut Vec<PartCopy>) -> Result<(), CheckpointError> {
        // Check this rank's share, and then tell each other which copies are damaged.
        let rank = self.group.rank();
        let checked: Result<Vec<Option<DamagedCopy>>, CheckpointError> =
            copies_to_check(copies, &self.hosts, rank)
                .into_iter()
                .map(|copy| {
                    let damage = damage_of(copy.path(&self.root))?;
                    Ok(damage.map(|problem| (copy.clone(), problem)))
                })
                .collect();
        let damaged_copies: Vec<DamagedCopy> = self.agree(checked)?.into_iter().flatten().collect();
        for (damaged_copy, problem) in self
            .group
            .all_gather_object(&damaged_copies)?
            .into_iter()
            .flatten()
        {
            if rank == 0 {
                warn!(
                    step = damaged_copy.part.memory_step.position.step,
                    rank = damaged_copy.part.rank,
                    holder = damaged_copy.holder,
                    problem,
                    "a part in the memory tier is damaged"
                );
            }
            copies.retain(|copy| *copy != damaged_copy);
        }
        Ok(())
    }

    /// Joins the parts of a step to a checkpoint on every host, after each host has received the
    /// parts that it lacks. If this fails, parts that were received stay.
    fn join(
        &self,
        step: MemoryStep,
        copies: &[PartCopy],
    ) -> Result<StepCheckpoint, CheckpointError> {
        let rank = self.group.rank();
        for round in group_into_rounds(needed_transfers(copies, &self.hosts)) {
            // A damaged copy may have the same path as the sound one that replaces it.
            let removed = match round.iter().find(|transfer| transfer.receiver == rank) {
                Some(transfer) => remove(&self.path_of(transfer.part)),
                None => Ok(()),
            };
            self.agree(removed)?;
            self.transfer(&round, copies)?;
        }
        let path = self.root.join(joined_name(step.position));
        self.on_each_host(|_| {
            let part_paths: Vec<Location> = (0..step.ranks)
                .map(|rank| {
                    self.path_on_host(
                        Part {
                            memory_step: step,
                            rank,
                        },
                        copies,
                    )
                })
                .collect();
            Ok(parts::join(&path, &part_paths)?)
        })?;
        Ok(StepCheckpoint {
            step: step.position.step,
            path,
        })
    }

    /// Removes the parts that this rank has received so that its host has all parts of a step. A
    /// failure is only logged.
    fn remove_received(&self, copies: &[PartCopy]) {
        for transfer in needed_transfers(copies, &self.hosts) {
            let path = self.path_of(transfer.part);
            if transfer.receiver == self.group.rank()
                && let Err(error) = remove(&path)
            {
                warn!(%path, %error, "failed to remove a part that was received");
            }
        }
    }
}

/// Lists the parts in a run's directory of this host, whose first rank is `host`.
fn list_copies(root: &Location, host: usize) -> Result<Vec<PartCopy>, CheckpointError> {
    let mut found = Vec::new();
    for holder in names_in(root, "rank-")? {
        for name in root.join(&holder).names()? {
            found.extend(Part::from_name(&name).map(|part| PartCopy {
                part,
                host,
                holder: holder.clone(),
            }));
        }
    }
    Ok(found)
}

/// Returns the names in a run's directory that begin with `prefix`; no names if the directory was
/// removed meanwhile.
fn names_in(root: &Location, prefix: &str) -> Result<Vec<String>, CheckpointError> {
    if !root.exists()? {
        return Ok(Vec::new());
    }
    let mut names = root.names()?;
    names.retain(|name| name.starts_with(prefix));
    Ok(names)
}

/// Returns the damage of a part; `None` if it is undamaged.
///
/// # Errors
/// The part cannot be read, so that nothing is known about it.
fn damage_of(part: Location) -> Result<Option<String>, CheckpointError> {
    match parts::check(part) {
        Ok(()) => Ok(None),
        Err(error) if matches!(error.kind(), ErrorKind::Io | ErrorKind::NoSpace) => {
            Err(error.into())
        }
        Err(error) => Ok(Some(with_causes(&error))),
    }
}

/// Removes the parts of all steps but `kept` from a run's directory on this host, and what was left
/// there by crashes and loads.
fn remove_all_but(root: &Location, kept: Option<MemoryStep>) -> Result<(), CheckpointError> {
    remove_parts(root, |part| Some(part.memory_step) != kept)?;
    // Remove the joined checkpoints too. A resume made them, and has loaded them by now.
    for name in names_in(root, "step-")? {
        remove(&root.join(name))?;
    }
    Ok(())
}

/// Removes the parts for which `is_old` returns `true` from a run's directory on this host, and
/// what crashed saves left behind.
fn remove_parts(root: &Location, is_old: impl Fn(Part) -> bool) -> Result<(), CheckpointError> {
    for holder in names_in(root, "rank-")? {
        let holder = root.join(&holder);
        for name in holder.names()? {
            if Part::from_name(&name).is_some_and(&is_old) {
                remove(&holder.join(&name))?;
            }
            // A staging directory `.NAME.tmp-<nonce>` is removed unless a running process uses it.
            if let Some((target, _)) = name.strip_prefix('.').and_then(|name| name.split_once('.'))
            {
                clean_stale(holder.join(target))?;
            }
        }
    }
    Ok(())
}

/// Removes a directory of the tier if it exists. One that a process reads is left with a warning:
/// if it is of an abandoned step, saves of later starts are preferred to it.
fn remove(path: &Location) -> Result<(), CheckpointError> {
    if path.exists()? && !Durable::new().remove_checkpoint(path)? {
        warn!(%path, "not removed, because a process reads it");
    }
    Ok(())
}
