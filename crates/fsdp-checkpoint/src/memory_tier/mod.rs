//! The memory tier of a run: its newest steps, in the memory of the hosts.
//!
//! A save to it is an ordinary save but for this: each rank writes what it holds by itself, to a directory of its host that
//! outlives the process (a tmpfs), and its [buddy](arithmetic::buddies) keeps a copy, on another host where there is one. No
//! rank writes for another one, and nothing goes to the storage of checkpoints.
//!
//! ```text
//! DIR/<run>/host                                                 a number that stands for the host
//! DIR/<run>/rank-1/step-00000020-<start>-rank-1-of-2/            rank 1's own part, as a DCP directory
//! DIR/<run>/rank-1/step-00000020-<start>-rank-0-of-2/            the copy of rank 0's part
//! DIR/<run>/step-00000020/                                       all parts, joined when a run has gone on from them
//! ```
//!
//! A part comes to its place with one rename, when all of it is written. A step is whole if the parts of all ranks of one save
//! are there: then every rank has said that it was done. Where a part is damaged, its copy is taken.

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

/// The name, in a run's directory, of the file that tells its memory tier from those of other runs.
const RUN_FILE: &str = ".memory-tier";

/// The name of the file that tells hosts apart.
const HOST_FILE: &str = "host";

/// The length of both files: 16 hexadecimal digits.
const NUMBER_BYTES: u64 = 16;

/// The memory tier of a run, as one rank sees it.
#[derive(Debug)]
pub(crate) struct MemoryTier {
    directory: Location,
    run: Location,
    group: ProcessGroup,
    place: Option<Place>,
}

/// The place of a run in the memory tier, as all ranks have found it.
#[derive(Debug, Clone)]
struct Place {
    /// The run's own directory on this host.
    root: Location,
    /// The lowest rank of each rank's host.
    hosts: Vec<usize>,
    /// The number of this start of the job.
    start: u64,
}

/// A copy that turned out to be damaged.
type Damaged = (PartCopy, String);

impl MemoryTier {
    /// Returns the memory tier of a run. No communication, and nothing is opened.
    pub(crate) fn new(directory: Location, run: Location, group: ProcessGroup) -> Self {
        MemoryTier { directory, run, group, place: None }
    }

    /// Saves the state of a step. Afterwards the tier has this step and the whole one before it.
    ///
    /// # Errors
    /// The same on every rank: state that cannot be saved, errors of the storage. The newest whole step stays.
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
        let place = self.open(&group, true)?;
        let nowhere = || CheckpointError::NotAMemoryTier { path: self.directory.name().to_owned() };
        let Place { root, hosts, start } = place.ok_or_else(nowhere)?;
        // 1. Make room: only the newest whole step stays beside the new one.
        let kept = newest_whole(&list_all(&group, OPERATION, &root, &hosts)?);
        let removed = if hosts[rank] == rank { remove_all_but(&root, kept) } else { Ok(()) };
        CheckpointError::agree(&group, OPERATION, None, removed)?;
        // 2. Every rank writes its own part.
        let part = Part { of: MemoryStep { step, ranks: group.world_size(), start }, rank };
        let bytes = save_part(&place_of(&root, rank, part), &state, rank, options);
        let rank_bytes = CheckpointError::agree(&group, OPERATION, None, bytes)?;
        // 3. Its buddy gets a copy. When all have theirs, losing any one rank's files, or any one host, loses nothing.
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

    /// Returns the newest whole step, if it is newer than the newest checkpoint of the run. Its checkpoint lies on each host, and
    /// is an ordinary one. Steps that are newer still are damaged or were never completed; they are removed.
    ///
    /// # Errors
    /// The same on every rank: errors of the storage; with `strict`, a step that was completed and is damaged.
    pub(crate) fn newest(&mut self, strict: bool) -> Result<Option<StepCheckpoint>, CheckpointError> {
        const OPERATION: &str = "look into the memory tier";
        let group = self.group.with_deadline_at_least(crate::save::DEFAULT_DEADLINE);
        let Some(Place { root, hosts, .. }) = self.open(&group, false)? else { return Ok(None) };
        let durable = if group.rank() == 0 { latest_step(&self.run) } else { Ok(None) };
        let durable = CheckpointError::agree(&group, OPERATION, None, durable)?;
        let durable: Option<u64> = group.broadcast_object(Some(&durable), 0)?;
        // All ranks know all copies, and find the same.
        let copies = list_all(&group, OPERATION, &root, &hosts)?;
        let mut found = None;
        for (step, missing) in steps(&copies) {
            if durable.is_some_and(|durable| durable >= step.step) {
                break;
            }
            if !missing.is_empty() {
                if group.rank() == 0 {
                    warn!(step = step.step, ranks = ?missing, "the memory tier lacks parts of a step, and an older one is taken");
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
                        warn!(step = step.step, ?ranks, "all copies of parts are damaged, and an older step is taken");
                    }
                }
            }
        }
        // What is newer than the step that the run goes on from must not be taken for the newest later.
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
        let Some(Place { root, hosts, .. }) = self.open(&group, false)? else { return Ok(()) };
        let leads = hosts[group.rank()] == group.rank();
        CheckpointError::agree(&group, OPERATION, None, if leads { remove_all_but(&root, None) } else { Ok(()) })
    }

    /// Makes a checkpoint of the parts of a step on every host.
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
        // A host gets the parts that only others have beside its own, in the directory of its lowest rank.
        let received = |part: Part| place_of(root, hosts[rank], part);
        for round in rounds(transfers(copies, hosts)) {
            // What a check has found damaged lies where the sound copy goes.
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

    /// Finds the run's place in the tier; `None` if it has none yet and is not to get one.
    fn open(&mut self, group: &ProcessGroup, create: bool) -> Result<Option<Place>, CheckpointError> {
        const OPERATION: &str = "open the memory tier";
        if self.place.is_some() {
            return Ok(self.place.clone());
        }
        // 1. Rank 0 looks up which of the runs in the tier this is. A new run is none of them.
        let file = self.run.join(RUN_FILE);
        let number = if group.rank() == 0 { number_in(&file, create) } else { Ok(None) };
        let number = CheckpointError::agree(group, OPERATION, None, number)?;
        let told = group.broadcast_object(Some(&(number, random())), 0)?;
        let (Some(number), start): (Option<u64>, u64) = told else { return Ok(None) };
        // 2. Ranks that find the same number in the tier share it, so they are on one host.
        let root = self.directory.join(format!("{number:016x}"));
        let host = number_in(&root.join(HOST_FILE), true);
        let host = CheckpointError::agree(group, OPERATION, None, host)?;
        let numbers: Vec<Option<u64>> = group.all_gather_object(&host)?;
        let lowest = |number: &Option<u64>| numbers.iter().position(|other| other == number).unwrap_or_default();
        let hosts = numbers.iter().map(lowest).collect();
        self.place = Some(Place { root, hosts, start });
        Ok(self.place.clone())
    }
}

/// Returns the step of the newest checkpoint of a run.
fn latest_step(run: &Location) -> Result<Option<u64>, CheckpointError> {
    let latest = if run.exists()? { latest_checkpoint(run)? } else { None };
    Ok(latest.map(|latest| latest.step))
}

/// Returns the place of a part in the directory of a rank.
fn place_of(root: &Location, holder: usize, part: Part) -> Location {
    root.join(holder_name(holder)).join(part.to_string())
}

/// Returns the name of the directory of a rank, with the parts that it keeps.
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

/// Checks every byte of these copies, each rank a share of those of its host, and returns the sound ones. Collective: an object
/// all-gather.
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

/// Removes all parts from a run's directory on this host but those of one step, and what else was left there.
fn remove_all_but(root: &Location, kept: Option<MemoryStep>) -> Result<(), CheckpointError> {
    remove_parts(root, |part| Some(part.of) != kept)?;
    // Joined checkpoints: the run has long gone on from them.
    for name in root.names()?.iter().filter(|name| name.starts_with("step-")) {
        remove(&root.join(name))?;
    }
    Ok(())
}

/// Removes parts from a run's directory on this host, and what crashed saves have left.
fn remove_parts(root: &Location, is_old: impl Fn(Part) -> bool) -> Result<(), CheckpointError> {
    for holder in root.names()?.into_iter().filter(|name| name.starts_with("rank-")) {
        let holder = root.join(&holder);
        for name in holder.names()? {
            if Part::from_name(&name).is_some_and(&is_old) {
                remove(&holder.join(&name))?;
            }
            // A staging directory `.NAME.tmp-<nonce>` is removed unless a process that lives has it.
            let target = name.strip_prefix('.').and_then(|name| name.split_once('.')).map(|(target, _)| target);
            if let Some(target) = target {
                clean_stale(holder.join(target))?;
            }
        }
    }
    Ok(())
}

/// Removes a directory of the tier, if it is there and nobody reads it.
fn remove(place: &Location) -> Result<(), CheckpointError> {
    if place.exists()? {
        Durable::new().remove_checkpoint(place)?;
    }
    Ok(())
}

/// Reads the number in a file; `None` if there is no such file. With `create`, the file is made then, of a random number. Of
/// several that make it at once, one does, and all read the same.
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

/// Returns a random number. The standard library seeds its hashers with those of the system.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
