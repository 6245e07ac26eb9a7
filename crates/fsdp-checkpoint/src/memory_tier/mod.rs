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
//! DIR/<run>/rank-1/step-00000020-<start>-rank-1-of-2/            rank 1's own part, as a DCP directory
//! DIR/<run>/rank-1/step-00000020-<start>-rank-0-of-2/            the copy of rank 0's part
//! DIR/<run>/step-00000020/                                       all parts, joined when a run resumed from them
//! ```
//!
//! A part gets its final name with one rename, when all of it is written. So a step is whole if the
//! parts of all ranks of one save exist. If a part is damaged, its copy is used.

mod arithmetic;
mod run_directory;
mod send;

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fsdp_comm::ProcessGroup;
use fsdp_dcp::storage::{Durable, clean_stale};
use fsdp_dcp::verify::with_causes;
use fsdp_dcp::{Location, parts};
use fsdp_layout::{ErrorKind, Failure as _};
use fsdp_state::{LoadError as _, StateDict};
use tracing::{info_span, warn};

use self::arithmetic::{
    MemoryStep, Part, PartCopy, Transfer, buddies, missing_ranks, newest_complete, newest_whole,
    rounds, share, steps, transfers,
};
use self::run_directory::{RunDirectory, make_private};
use self::send::send;
use crate::catalog::{StepCheckpoint, step_name};
use crate::local_state::LocalState;
use crate::plan::{PlanCache, Planned};
use crate::save::{save_part, with_storage_deadline};
use crate::threads::{Access, threads};
use crate::{CheckpointError, SaveOptions, SaveProgress, SaveReport};

/// The memory tier of a run, as one rank sees it.
#[derive(Debug)]
pub(crate) struct MemoryTier {
    directory: Location,
    run: Location,
    group: ProcessGroup,
    run_directory: Option<RunDirectory>,
    /// The number of this start of the job; `None` before its first save.
    start: Option<u64>,
    plans: PlanCache,
}

/// A damaged copy, and the description of the damage.
type Damaged = (PartCopy, String);

impl MemoryTier {
    /// Returns the memory tier of a run. This neither communicates nor opens files.
    pub(crate) fn new(directory: Location, run: Location, group: ProcessGroup) -> Self {
        MemoryTier {
            directory,
            run,
            group,
            run_directory: None,
            start: None,
            plans: PlanCache::default(),
        }
    }

    /// Saves the state of a step. Afterwards the tier holds this step and the newest whole one
    /// before it.
    ///
    /// # Errors
    /// The same on every rank: state that a checkpoint could not hold either, errors of the
    /// storage. The newest whole step before this one is kept.
    pub(crate) fn save(
        &mut self,
        step: u64,
        state: Result<StateDict, CheckpointError>,
        options: &SaveOptions,
    ) -> Result<SaveReport, CheckpointError> {
        const OPERATION: &str = "save to memory";
        let clock = Instant::now();
        let group = with_storage_deadline(&self.group, options.deadline);
        let rank = group.rank();
        let _span = info_span!("save to memory", rank, step).entered();
        // Step 1: plan a checkpoint of what all ranks hold together. Each rank then writes all that
        // it holds, but this plan finds what no checkpoint could hold. Ranks must agree on the
        // operation, so its name has the step: parts of different steps must not be joined.
        let operation = format!("save step {step} to memory");
        let local = state.and_then(|state| LocalState::new(&state, SaveProgress::default()));
        let Planned { local, .. } =
            self.plans
                .plan(&group, &operation, options.deduplicate, local)?;
        let Some(RunDirectory { root, hosts }) = self.open(&group, true)? else {
            return Err(CheckpointError::NotAMemoryTier {
                path: self.directory.name().to_owned(),
            });
        };
        let copies = list_all(&group, OPERATION, &root, &hosts)?;
        let start = self.start_of_save(&group, step, &copies)?;
        let this_step = MemoryStep {
            start,
            step,
            ranks: group.world_size(),
        };
        // Step 2: make room. Of the older steps, only the newest complete one is kept. Steps from
        // this one on are removed too: they are of a save that failed, or the run has gone back
        // behind them and does not continue from them. Ranks of one host share a directory, so only
        // the first of them removes.
        let older: Vec<PartCopy> = copies
            .into_iter()
            .filter(|copy| copy.part.of.step < step)
            .collect();
        let kept = newest_complete(&older);
        let removed = if hosts[rank] == rank {
            remove_all_but(&root, kept)
        } else {
            Ok(())
        };
        CheckpointError::agree(&group, OPERATION, None, removed)?;
        // Step 3: write this rank's own part. The run's directory may have been removed since the
        // last save.
        let part = Part {
            of: this_step,
            rank,
        };
        let own = place_of(&root, rank, part);
        let is_object_store = own.local().is_none();
        let threads = threads(
            Access::Write,
            options.write.threads,
            &group,
            is_object_store,
        );
        let bytes = make_private(&root).and_then(|()| save_part(&own, &local, rank, threads));
        let rank_bytes = CheckpointError::agree(&group, OPERATION, None, bytes)?;
        // Step 4: copy each part to the buddy of its rank. From then on the step survives the loss
        // of any one rank's files, or of any one host.
        let mut transfers = Vec::new();
        for (from, to) in buddies(&hosts).into_iter().enumerate() {
            // A rank without another one is its own buddy.
            if from != to {
                transfers.push(Transfer {
                    part: Part {
                        of: this_step,
                        rank: from,
                    },
                    from,
                    to,
                });
            }
        }
        for round in rounds(transfers) {
            send(&group, OPERATION, &round, |&Transfer { part, from, to }| {
                (place_of(&root, from, part), place_of(&root, to, part))
            })?;
        }
        let total_bytes = group.all_gather_object(&rank_bytes)?.into_iter().sum();
        Ok(SaveReport {
            rank_bytes,
            total_bytes,
            linked_bytes: 0,
            digest: None,
            duration: clock.elapsed(),
            waited: Duration::ZERO,
        })
    }

    /// Returns the number of this start of the job, for a save of `step`. There is a new one for
    /// the first save, and when the run has gone back behind a step that it had saved. Collective:
    /// an object broadcast for a new number.
    fn start_of_save(
        &mut self,
        group: &ProcessGroup,
        step: u64,
        copies: &[PartCopy],
    ) -> Result<u64, CheckpointError> {
        let newest = copies.iter().map(|copy| copy.part.of).max();
        if let Some(start) = self.start
            && newest.is_none_or(|newest| (newest.start, newest.step) < (start, step))
        {
            return Ok(start);
        }
        // The time also exceeds the numbers of starts on other hosts, which cannot be seen now and
        // may come back.
        let time = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let time = u64::try_from(time.as_nanos()).unwrap_or_default();
        let next = newest.map_or(0, |newest| newest.start.saturating_add(1));
        let start = group.broadcast_object(Some(&time.max(next)), 0)?;
        self.start = Some(start);
        Ok(start)
    }

    /// Returns the newest whole step, if it is newer than `durable`, the step of the newest
    /// checkpoint; the `durable` that rank 0 passes counts. Each host then has all parts of the
    /// step, joined to an ordinary checkpoint. Newer steps, which are damaged or were never
    /// completed, are removed.
    ///
    /// # Errors
    /// The same on every rank: errors of the storage; with `strict`, a step that was completed and
    /// is damaged.
    pub(crate) fn newest(
        &mut self,
        durable: Option<u64>,
        strict: bool,
    ) -> Result<Option<StepCheckpoint>, CheckpointError> {
        const OPERATION: &str = "look into the memory tier";
        let group = with_storage_deadline(&self.group, None);
        let Some(RunDirectory { root, hosts }) = self.open(&group, false)? else {
            return Ok(None);
        };
        let durable: Option<u64> = group.broadcast_object(Some(&durable), 0)?;
        // Step 1: find the newest step of which every part has a copy that is not damaged. Every
        // rank has the same list of copies, so all of them choose the same step.
        let copies = list_all(&group, OPERATION, &root, &hosts)?;
        let mut found = None;
        for (step, missing) in steps(&copies) {
            if durable.is_some_and(|durable| durable >= step.step) {
                break;
            }
            if !missing.is_empty() {
                if group.rank() == 0 {
                    warn!(step = step.step, ranks = ?missing, "the memory tier lacks parts of a step; using an older step");
                }
                continue;
            }
            let copies: Vec<PartCopy> = copies
                .iter()
                .filter(|copy| copy.part.of == step)
                .cloned()
                .collect();
            let sound = check(&group, &root, &hosts, &copies)?;
            match steps(&sound).pop() {
                Some((step, missing)) if missing.is_empty() => {
                    found = Some((step, sound));
                    break;
                }
                damaged => {
                    // If no copy of any part is sound, the list is empty, and the parts of all
                    // ranks are missing.
                    let ranks = damaged
                        .map_or_else(|| missing_ranks(step, &BTreeSet::new()), |(_, ranks)| ranks);
                    if strict {
                        return Err(CheckpointError::DamagedMemory {
                            step: step.step,
                            ranks,
                        });
                    }
                    if group.rank() == 0 {
                        warn!(
                            step = step.step,
                            ?ranks,
                            "all copies of some parts are damaged; using an older step"
                        );
                    }
                }
            }
        }
        // Step 2: remove the steps that were passed over. The run continues from an older one, so a
        // later resume must not find them.
        let found_step = found.as_ref().map(|(step, _)| *step);
        let newest = found_step.map(|step| step.step).or(durable).unwrap_or(0);
        let mut passed: BTreeSet<MemoryStep> = copies.iter().map(|copy| copy.part.of).collect();
        passed.retain(|step| step.step >= newest && Some(*step) != found_step);
        let leads = hosts[group.rank()] == group.rank();
        let removed = if leads {
            remove_parts(&root, |part| passed.contains(&part.of))
        } else {
            Ok(())
        };
        CheckpointError::agree(&group, OPERATION, None, removed)?;
        // Step 3: give each host the parts that it lacks, and join them.
        let Some((step, copies)) = found else {
            return Ok(None);
        };
        let joined = self.join(&group, &root, &hosts, step, &copies);
        if joined.is_err() {
            // Parts that were received for this would leave less space for the next attempt.
            remove_received(&root, &hosts, &copies, group.rank());
        }
        joined.map(Some)
    }

    /// Returns the newest step of which all parts exist. They are not read, and nothing is changed.
    ///
    /// # Errors
    /// The same on every rank: errors of the storage.
    pub(crate) fn newest_listed(&mut self) -> Result<Option<u64>, CheckpointError> {
        let group = with_storage_deadline(&self.group, None);
        let Some(RunDirectory { root, hosts }) = self.open(&group, false)? else {
            return Ok(None);
        };
        let copies = list_all(&group, "list the memory tier", &root, &hosts)?;
        Ok(newest_whole(&copies).map(|newest| newest.step))
    }

    /// Removes the run's directories from the tier.
    ///
    /// # Errors
    /// The same on every rank: errors of the storage.
    pub(crate) fn clear(&mut self) -> Result<(), CheckpointError> {
        const OPERATION: &str = "clear the memory tier";
        let group = with_storage_deadline(&self.group, None);
        let Some(RunDirectory { root, hosts }) = self.open(&group, false)? else {
            return Ok(());
        };
        // The next save makes new directories.
        self.run_directory = None;
        // The ranks of a host share its directory, so only the first of them removes it.
        let removed = if hosts[group.rank()] == group.rank() {
            remove(&root)
        } else {
            Ok(())
        };
        CheckpointError::agree(&group, OPERATION, None, removed)
    }

    /// Joins the parts of a step to a checkpoint on every host, after each host has received the
    /// parts that it lacks. If this fails, parts that were received stay.
    fn join(
        &self,
        group: &ProcessGroup,
        root: &Location,
        hosts: &[usize],
        step: MemoryStep,
        copies: &[PartCopy],
    ) -> Result<StepCheckpoint, CheckpointError> {
        const OPERATION: &str = "load from memory";
        let rank = group.rank();
        let place_on = |host: usize, part: Part| {
            let copy = copies
                .iter()
                .find(|copy| copy.host == host && copy.part == part);
            copy.map(|copy| root.join(&copy.holder).join(part.to_string()))
        };
        // The lowest rank of a host receives the parts that the host lacks, in its own directory.
        let received = |part: Part| place_of(root, hosts[rank], part);
        for round in rounds(transfers(copies, hosts)) {
            // A damaged copy may have the same path as the sound one that replaces it.
            let into = round
                .iter()
                .find(|transfer| transfer.to == rank)
                .map(|transfer| received(transfer.part));
            let removed = into.as_ref().map_or(Ok(()), remove);
            CheckpointError::agree(group, OPERATION, None, removed)?;
            send(
                group,
                OPERATION,
                &round,
                |&Transfer { part, from, .. }| {
                    (
                        place_on(from, part).unwrap_or_else(|| received(part)),
                        received(part),
                    )
                },
            )?;
        }
        let path = root.join(step_name(step.step));
        let joined = if hosts[rank] == rank {
            let place = |rank| Part { of: step, rank };
            let places = (0..step.ranks)
                .map(place)
                .map(|part| place_on(rank, part).unwrap_or_else(|| received(part)));
            parts::join(&path, &places.collect::<Vec<_>>()).map_err(CheckpointError::from)
        } else {
            Ok(())
        };
        CheckpointError::agree(group, OPERATION, None, joined)?;
        Ok(StepCheckpoint {
            step: step.step,
            path,
        })
    }

    /// Finds the run's directory in the tier. If it has none yet, `create` makes one; without
    /// `create` this returns `None`.
    fn open(
        &mut self,
        group: &ProcessGroup,
        create: bool,
    ) -> Result<Option<RunDirectory>, CheckpointError> {
        if self.run_directory.is_none() {
            self.run_directory = RunDirectory::find(&self.directory, &self.run, group, create)?;
        }
        Ok(self.run_directory.clone())
    }
}

/// Removes the parts that a rank receives so that its host has all parts of a step. A failure is
/// only logged.
fn remove_received(root: &Location, hosts: &[usize], copies: &[PartCopy], rank: usize) {
    for transfer in transfers(copies, hosts)
        .iter()
        .filter(|transfer| transfer.to == rank)
    {
        let place = place_of(root, rank, transfer.part);
        if let Err(error) = remove(&place) {
            warn!(path = %place, %error, "failed to remove a part that was received");
        }
    }
}

/// Returns the path of a part in the directory of the rank `holder`.
fn place_of(root: &Location, holder: usize, part: Part) -> Location {
    root.join(holder_name(holder)).join(part.to_string())
}

/// Returns the name of the directory with the parts that a rank keeps.
fn holder_name(rank: usize) -> String {
    format!("rank-{rank}")
}

/// Lists the parts on all hosts. Every rank gets the same list. Collective: an agreement and an
/// object all-gather.
fn list_all(
    group: &ProcessGroup,
    operation: &str,
    root: &Location,
    hosts: &[usize],
) -> Result<Vec<PartCopy>, CheckpointError> {
    let rank = group.rank();
    let listed = if hosts[rank] == rank {
        list(root)
    } else {
        Ok(Vec::new())
    };
    let listed = CheckpointError::agree(group, operation, None, listed)?;
    let listed = listed.into_iter().map(|(holder, part)| PartCopy {
        part,
        host: rank,
        holder,
    });
    let all = group.all_gather_object(&listed.collect::<Vec<_>>())?;
    Ok(all.into_iter().flatten().collect())
}

/// Lists the parts in a run's directory of this host, with the directories of the ranks that keep
/// them.
fn list(root: &Location) -> Result<Vec<(String, Part)>, CheckpointError> {
    let mut found = Vec::new();
    for holder in names_in(root, "rank-")? {
        let names = root.join(&holder).names()?;
        found.extend(
            names
                .iter()
                .filter_map(|name| Some((holder.clone(), Part::from_name(name)?))),
        );
    }
    Ok(found)
}

/// Returns the names in a run's directory that begin with `prefix`; no names if the directory was
/// removed meanwhile.
fn names_in(root: &Location, prefix: &str) -> Result<Vec<String>, CheckpointError> {
    let mut names = if root.exists()? {
        root.names()?
    } else {
        Vec::new()
    };
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

/// Checks every byte of these copies and returns the sound ones. The ranks of a host share the
/// checks. Collective: an agreement and an object all-gather.
///
/// # Errors
/// The same on every rank: a copy that cannot be read.
fn check(
    group: &ProcessGroup,
    root: &Location,
    hosts: &[usize],
    copies: &[PartCopy],
) -> Result<Vec<PartCopy>, CheckpointError> {
    // Check this rank's share, and then tell each other which copies are damaged.
    let own = share(copies, hosts, group.rank()).into_iter();
    let damaged = own.map(|copy| {
        let damage = damage_of(root.join(&copy.holder).join(copy.part.to_string()))?;
        Ok(damage.map(|damage| (copy.clone(), damage)))
    });
    let damaged: Result<Vec<Option<Damaged>>, CheckpointError> = damaged.collect();
    let damaged = CheckpointError::agree(group, "check the memory tier", None, damaged)?;
    let damaged: Vec<Damaged> = damaged.into_iter().flatten().collect();
    let damaged: Vec<Damaged> = group
        .all_gather_object(&damaged)?
        .into_iter()
        .flatten()
        .collect();
    if group.rank() == 0 {
        for (copy, problem) in &damaged {
            warn!(
                step = copy.part.of.step,
                rank = copy.part.rank,
                holder = copy.holder,
                problem,
                "a part in the memory tier is damaged"
            );
        }
    }
    Ok(copies
        .iter()
        .filter(|copy| damaged.iter().all(|(other, _)| other != *copy))
        .cloned()
        .collect())
}

/// Removes the parts of all steps but `kept` from a run's directory on this host, and what was left
/// there by crashes and loads.
fn remove_all_but(root: &Location, kept: Option<MemoryStep>) -> Result<(), CheckpointError> {
    remove_parts(root, |part| Some(part.of) != kept)?;
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
            let target = name
                .strip_prefix('.')
                .and_then(|name| name.split_once('.'))
                .map(|(target, _)| target);
            if let Some(target) = target {
                clean_stale(holder.join(target))?;
            }
        }
    }
    Ok(())
}

/// Removes a directory of the tier if it exists. One that a process reads is left with a warning:
/// if it is of an abandoned step, saves of later starts are preferred to it.
fn remove(place: &Location) -> Result<(), CheckpointError> {
    if place.exists()? && !Durable::new().remove_checkpoint(place)? {
        warn!(path = %place, "not removed, because a process reads it");
    }
    Ok(())
}
