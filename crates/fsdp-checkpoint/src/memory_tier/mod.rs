//! The memory tier of a run: its newest steps, in the memory of the hosts.
//!
//! In an ordinary save the ranks share the work of writing one checkpoint. In a save to the memory tier each rank
//! writes all that it holds, its *part*, to a directory on its own host that outlives the process (a tmpfs). Another
//! rank, its [buddy](arithmetic::buddies), keeps a copy of the part, on another host if there is one. Nothing is
//! written to the storage of the checkpoints.
//!
//! ```text
//! DIR/<run>/host                                                 a random number that identifies the host
//! DIR/<run>/rank-1/step-00000020-<start>-rank-1-of-2/            rank 1's own part, as a DCP directory
//! DIR/<run>/rank-1/step-00000020-<start>-rank-0-of-2/            the copy of rank 0's part
//! DIR/<run>/step-00000020/                                       all parts, joined when a run resumed from them
//! ```
//!
//! A part gets its final name with one rename, when all of it is written. So a step is whole if the parts of all ranks
//! of one save exist. If a part is damaged, its copy is used.

mod arithmetic;
mod send;

use std::collections::BTreeSet;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::Instant;

use fsdp_comm::ProcessGroup;
use fsdp_dcp::storage::{Durable, clean_stale};
use fsdp_dcp::verify::with_causes;
use fsdp_dcp::{FileError, Location, parts};
use fsdp_state::{LoadError as _, StateDict};
use tracing::{info_span, warn};

use self::arithmetic::{MemoryStep, Part, PartCopy, Transfer, buddies, newest_whole, rounds, share, steps, transfers};
use self::send::send;
use crate::catalog::{StepCheckpoint, latest_checkpoint, step_name};
use crate::save::save_part;
use crate::{CheckpointError, SaveOptions, SaveReport};

/// The name of the file, in the directory of a run's checkpoints, with the number of the run in the memory tier.
const RUN_FILE: &str = ".memory-tier";

/// The name of the file, in the run's directory of the memory tier, with the number of the host.
const HOST_FILE: &str = "host";

/// The length of both files: 16 hexadecimal digits.
const NUMBER_BYTES: u64 = 16;

/// The memory tier of a run, as one rank sees it.
#[derive(Debug)]
pub(crate) struct MemoryTier {
    directory: Location,
    run: Location,
    group: ProcessGroup,
    run_directory: Option<RunDirectory>,
}

/// The directory of a run in the memory tier, and the hosts that have one.
#[derive(Debug, Clone)]
struct RunDirectory {
    /// The run's own directory on this host.
    root: Location,
    /// The lowest rank of each rank's host.
    hosts: Vec<usize>,
    /// The number of this start of the job.
    start: u64,
}

/// A damaged copy, and the description of the damage.
type Damaged = (PartCopy, String);

impl MemoryTier {
    /// Returns the memory tier of a run. This neither communicates nor opens files.
    pub(crate) fn new(directory: Location, run: Location, group: ProcessGroup) -> Self {
        MemoryTier { directory, run, group, run_directory: None }
    }

    /// Saves the state of a step. Afterwards the tier holds this step and the newest whole one before it.
    ///
    /// # Errors
    /// The same on every rank: state that cannot be saved, errors of the storage. The newest whole step is kept.
    pub(crate) fn save(
        &mut self,
        step: u64,
        state: Result<StateDict, CheckpointError>,
        options: &SaveOptions,
    ) -> Result<SaveReport, CheckpointError> {
        const OPERATION: &str = "save to memory";
        let clock = Instant::now();
        let group = self.group.with_deadline_at_least(options.deadline);
        let rank = group.rank();
        let _span = info_span!("save to memory", rank, step).entered();
        let state = CheckpointError::agree(&group, OPERATION, None, state)?;
        let directory = self.open(&group, true)?;
        let nowhere = || CheckpointError::NotAMemoryTier { path: self.directory.name().to_owned() };
        let RunDirectory { root, hosts, start } = directory.ok_or_else(nowhere)?;
        // 1. Make room: of the older steps, only the newest whole one is kept.
        let kept = newest_whole(&list_all(&group, OPERATION, &root, &hosts)?);
        let removed = if hosts[rank] == rank { remove_all_but(&root, kept) } else { Ok(()) };
        CheckpointError::agree(&group, OPERATION, None, removed)?;
        // 2. Every rank writes its own part.
        let part = Part { of: MemoryStep { step, ranks: group.world_size(), start }, rank };
        let bytes = save_part(&place_of(&root, rank, part), &state, rank, options);
        let rank_bytes = CheckpointError::agree(&group, OPERATION, None, bytes)?;
        // 3. Its buddy gets a copy. From then on the step survives the loss of any one rank's files, or of any one
        //    host.
        if group.world_size() > 1 {
            let to_buddy = |(from, to): (usize, usize)| Transfer { part: Part { rank: from, ..part }, from, to };
            let transfers: Vec<Transfer> = buddies(&hosts).into_iter().enumerate().map(to_buddy).collect();
            send(&group, OPERATION, &transfers, |&Transfer { part, from, to }| {
                (place_of(&root, from, part), place_of(&root, to, part))
            })?;
        }
        let total_bytes = group.all_gather_object(&rank_bytes)?.into_iter().sum();
        Ok(SaveReport { rank_bytes, total_bytes, linked_bytes: 0, digest: None, duration: clock.elapsed() })
    }

    /// Returns the newest whole step, if it is newer than the newest checkpoint of the run. Each host then has all of
    /// its parts, joined to an ordinary checkpoint. Newer steps, which are damaged or were never completed, are
    /// removed.
    ///
    /// # Errors
    /// The same on every rank: errors of the storage; with `strict`, a step that was completed and is damaged.
    pub(crate) fn newest(&mut self, strict: bool) -> Result<Option<StepCheckpoint>, CheckpointError> {
        const OPERATION: &str = "look into the memory tier";
        let group = self.group.with_deadline_at_least(crate::save::DEFAULT_DEADLINE);
        let Some(RunDirectory { root, hosts, .. }) = self.open(&group, false)? else { return Ok(None) };
        let durable = if group.rank() == 0 { latest_step(&self.run) } else { Ok(None) };
        let durable = CheckpointError::agree(&group, OPERATION, None, durable)?;
        let durable: Option<u64> = group.broadcast_object(Some(&durable), 0)?;
        // Every rank has the same list of copies, so all of them choose the same step.
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
            let copies: Vec<PartCopy> = copies.iter().filter(|copy| copy.part.of == step).cloned().collect();
            let sound = check(&group, &root, &hosts, &copies)?;
            match steps(&sound).pop() {
                Some((step, missing)) if missing.is_empty() => {
                    found = Some((step, sound));
                    break;
                }
                damaged => {
                    let ranks = damaged.map_or_else(|| (0..step.ranks).collect(), |(_, ranks)| ranks);
                    if strict {
                        return Err(CheckpointError::DamagedMemory { step: step.step, ranks });
                    }
                    if group.rank() == 0 {
                        warn!(step = step.step, ?ranks, "all copies of some parts are damaged; using an older step");
                    }
                }
            }
        }
        // The run continues from this step. Steps after it that were passed over must not be found by a later resume.
        let newest = found.as_ref().map(|(step, _)| step.step).or(durable).unwrap_or(0);
        let is_passed = |copy: &&PartCopy| {
            copy.part.of.step >= newest && found.as_ref().is_none_or(|(step, _)| copy.part.of != *step)
        };
        let passed: BTreeSet<MemoryStep> = copies.iter().filter(is_passed).map(|copy| copy.part.of).collect();
        let leads = hosts[group.rank()] == group.rank();
        let removed = if leads { remove_parts(&root, |part| passed.contains(&part.of)) } else { Ok(()) };
        CheckpointError::agree(&group, OPERATION, None, removed)?;
        let Some((step, copies)) = found else { return Ok(None) };
        Ok(Some(self.join(&group, &root, &hosts, step, &copies)?))
    }

    /// Removes all steps.
    ///
    /// # Errors
    /// The same on every rank: errors of the storage.
    pub(crate) fn clear(&mut self) -> Result<(), CheckpointError> {
        const OPERATION: &str = "clear the memory tier";
        let group = self.group.clone();
        let Some(RunDirectory { root, hosts, .. }) = self.open(&group, false)? else { return Ok(()) };
        let leads = hosts[group.rank()] == group.rank();
        CheckpointError::agree(&group, OPERATION, None, if leads { remove_all_but(&root, None) } else { Ok(()) })
    }

    /// Joins the parts of a step to a checkpoint on every host, after each host has received the parts that it lacks.
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
            let copy = copies.iter().find(|copy| copy.host == host && copy.part == part);
            copy.map(|copy| root.join(&copy.holder).join(part.to_string()))
        };
        // The lowest rank of a host receives the parts that the host lacks, in its own directory.
        let received = |part: Part| place_of(root, hosts[rank], part);
        for round in rounds(transfers(copies, hosts)) {
            // A damaged copy may have the same path as the sound one that replaces it.
            let into = round.iter().find(|transfer| transfer.to == rank).map(|transfer| received(transfer.part));
            let removed = into.as_ref().map_or(Ok(()), remove);
            CheckpointError::agree(group, OPERATION, None, removed)?;
            send(group, OPERATION, &round, |&Transfer { part, from, .. }| {
                (place_on(from, part).unwrap_or_else(|| received(part)), received(part))
            })?;
        }
        let path = root.join(step_name(step.step));
        let joined = if hosts[rank] == rank {
            let place = |rank| Part { of: step, rank };
            let places = (0..step.ranks).map(place).map(|part| place_on(rank, part).unwrap_or_else(|| received(part)));
            parts::join(&path, &places.collect::<Vec<_>>()).map_err(CheckpointError::from)
        } else {
            Ok(())
        };
        CheckpointError::agree(group, OPERATION, None, joined)?;
        Ok(StepCheckpoint { step: step.step, path })
    }

    /// Finds the run's directory in the tier. If it has none yet, `create` makes one; without `create` this returns
    /// `None`.
    fn open(&mut self, group: &ProcessGroup, create: bool) -> Result<Option<RunDirectory>, CheckpointError> {
        const OPERATION: &str = "open the memory tier";
        if self.run_directory.is_some() {
            return Ok(self.run_directory.clone());
        }
        // 1. Rank 0 reads the number of the run, or makes one for a new run.
        let file = self.run.join(RUN_FILE);
        let number = if group.rank() == 0 { number_in(&file, create) } else { Ok(None) };
        let number = CheckpointError::agree(group, OPERATION, None, number)?;
        let agreed = group.broadcast_object(Some(&(number, random())), 0)?;
        let (Some(number), start): (Option<u64>, u64) = agreed else { return Ok(None) };
        // 2. Each rank reads the number of its host. Ranks with the same number see the same directory, so they count
        //    as one
        // host.
        let root = self.directory.join(format!("{number:016x}"));
        let host = number_in(&root.join(HOST_FILE), true);
        let host = CheckpointError::agree(group, OPERATION, None, host)?;
        let numbers: Vec<Option<u64>> = group.all_gather_object(&host)?;
        let lowest = |number: &Option<u64>| numbers.iter().position(|other| other == number).unwrap_or_default();
        let hosts = numbers.iter().map(lowest).collect();
        self.run_directory = Some(RunDirectory { root, hosts, start });
        Ok(self.run_directory.clone())
    }
}

/// Returns the step of the newest checkpoint of a run.
fn latest_step(run: &Location) -> Result<Option<u64>, CheckpointError> {
    let latest = if run.exists()? { latest_checkpoint(run)? } else { None };
    Ok(latest.map(|latest| latest.step))
}

/// Returns the path of a part in the directory of the rank `holder`.
fn place_of(root: &Location, holder: usize, part: Part) -> Location {
    root.join(holder_name(holder)).join(part.to_string())
}

/// Returns the name of the directory with the parts that a rank keeps.
fn holder_name(rank: usize) -> String {
    format!("rank-{rank}")
}

/// Lists the parts on all hosts. Every rank gets the same list. Collective: an agreement and an object all-gather.
fn list_all(
    group: &ProcessGroup,
    operation: &str,
    root: &Location,
    hosts: &[usize],
) -> Result<Vec<PartCopy>, CheckpointError> {
    let rank = group.rank();
    let listed = if hosts[rank] == rank { list(root) } else { Ok(Vec::new()) };
    let listed = CheckpointError::agree(group, operation, None, listed)?;
    let listed = listed.into_iter().map(|(holder, part)| PartCopy { part, host: rank, holder });
    let all = group.all_gather_object(&listed.collect::<Vec<_>>())?;
    Ok(all.into_iter().flatten().collect())
}

/// Lists the parts in a run's directory of this host, with the directories of the ranks that keep them.
fn list(root: &Location) -> Result<Vec<(String, Part)>, CheckpointError> {
    let mut found = Vec::new();
    for holder in root.names()?.into_iter().filter(|name| name.starts_with("rank-")) {
        let names = root.join(&holder).names()?;
        found.extend(names.iter().filter_map(|name| Some((holder.clone(), Part::from_name(name)?))));
    }
    Ok(found)
}

/// Checks every byte of these copies and returns the sound ones. The ranks of a host share the checks. Collective: an
/// object all-gather.
fn check(
    group: &ProcessGroup,
    root: &Location,
    hosts: &[usize],
    copies: &[PartCopy],
) -> Result<Vec<PartCopy>, CheckpointError> {
    let check_one = |copy: &PartCopy| parts::check(root.join(&copy.holder).join(copy.part.to_string()));
    let own = share(copies, hosts, group.rank()).into_iter();
    let damaged: Vec<Damaged> =
        own.filter_map(|copy| Some((copy.clone(), with_causes(&check_one(copy).err()?)))).collect();
    let damaged: Vec<Damaged> = group.all_gather_object(&damaged)?.into_iter().flatten().collect();
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
    Ok(copies.iter().filter(|copy| damaged.iter().all(|(other, _)| other != *copy)).cloned().collect())
}

/// Removes the parts of all steps but `kept` from a run's directory on this host, and what was left there by crashes
/// and loads.
fn remove_all_but(root: &Location, kept: Option<MemoryStep>) -> Result<(), CheckpointError> {
    remove_parts(root, |part| Some(part.of) != kept)?;
    // Joined checkpoints: a resume made them, and has loaded them by now.
    for name in root.names()?.iter().filter(|name| name.starts_with("step-")) {
        remove(&root.join(name))?;
    }
    Ok(())
}

/// Removes the parts for which `is_old` returns `true` from a run's directory on this host, and what crashed saves left
/// behind.
fn remove_parts(root: &Location, is_old: impl Fn(Part) -> bool) -> Result<(), CheckpointError> {
    for holder in root.names()?.into_iter().filter(|name| name.starts_with("rank-")) {
        let holder = root.join(&holder);
        for name in holder.names()? {
            if Part::from_name(&name).is_some_and(&is_old) {
                remove(&holder.join(&name))?;
            }
            // A staging directory `.NAME.tmp-<nonce>` is removed unless a running process uses it.
            let target = name.strip_prefix('.').and_then(|name| name.split_once('.')).map(|(target, _)| target);
            if let Some(target) = target {
                clean_stale(holder.join(target))?;
            }
        }
    }
    Ok(())
}

/// Removes a directory of the tier if it exists, and nobody reads it.
fn remove(place: &Location) -> Result<(), CheckpointError> {
    if place.exists()? {
        Durable::new().remove_checkpoint(place)?;
    }
    Ok(())
}

/// Reads the number in a file; returns `None` if there is no such file. With `create`, a missing file is created with a
/// random number. If several ranks create it at the same time, one of them succeeds, and all read its number.
fn number_in(file: &Location, create: bool) -> Result<Option<u64>, CheckpointError> {
    if !file.exists()? {
        if !create {
            return Ok(None);
        }
        match make_number(file) {
            Ok(()) | Err(FileError::Exists { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let text = file.read_file(NUMBER_BYTES)?;
    let number = std::str::from_utf8(&text).ok().and_then(|text| u64::from_str_radix(text, 16).ok());
    number.map(Some).ok_or_else(|| CheckpointError::NotAMemoryTier { path: file.name().to_owned() })
}

fn make_number(file: &Location) -> Result<(), FileError> {
    let text = format!("{:016x}", random());
    let staging = Durable::new().prepare(file, false)?;
    let new = staging.create_single(NUMBER_BYTES)?;
    new.write_at(0, text.as_bytes())?;
    new.finish()?;
    staging.commit_single()
}

/// Returns a random number: the standard library seeds its hashers with random numbers of the system.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
