//! The checkpoints of a training run: a directory, or a prefix in an object store, with one
//! checkpoint for each saved step.

use std::path::{Path, PathBuf};

use fsdp_formats::Location;
pub use fsdp_formats::checkpoint::step_name;
use fsdp_formats::checkpoint::{has_lost_metadata, step_in_name};
use fsdp_formats::lineage::{Branch, read_branches};
use fsdp_formats::metadata::METADATA_FILE;
use serde::{Deserialize, Serialize};

use crate::error::CheckpointError;

/// A committed checkpoint of a run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct StepCheckpoint {
    /// Steps done when it was saved.
    pub step: u64,
    /// Its directory.
    pub path: Location,
}

/// Returns the path of the checkpoint of a step: `DIR/step-00000020`.
#[must_use]
pub fn step_path(dir: &Path, step: u64) -> PathBuf {
    dir.join(step_name(step))
}

/// The place of a state in its run. The one that the run continues from is the greatest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct RunPosition {
    /// The number of the branch.
    pub(crate) branch: u64,
    pub(crate) step: u64,
}

/// A checkpoint of a run, and the branch of the run that it is on.
#[derive(Debug, Clone)]
pub(crate) struct CheckpointOnBranch {
    pub(crate) branch: Branch,
    pub(crate) checkpoint: StepCheckpoint,
    /// `true` if it has lost its `.metadata` ([`has_lost_metadata`]).
    pub(crate) is_lost: bool,
}

impl CheckpointOnBranch {
    /// Returns the place in the run.
    pub(crate) fn position(&self) -> RunPosition {
        RunPosition {
            branch: self.branch.number,
            step: self.checkpoint.step,
        }
    }
}

/// Lists the committed checkpoints in a run's directory, oldest step first. Unfinished checkpoints
/// that a crash has left are not listed: they have a hidden name, or no `.metadata`.
///
/// # Errors
/// A directory that cannot be read.
pub fn list_checkpoints(dir: impl Into<Location>) -> Result<Vec<StepCheckpoint>, CheckpointError> {
    let (committed, _) = list_steps(&dir.into())?;
    Ok(committed)
}

/// Lists the committed checkpoints in a run's directory in the order in which a run prefers to
/// continue from them, the newest first.
///
/// That is the order of their steps, but where the run has gone back to an older step and saved
/// again, the checkpoints of its new branch come before those that it has left ([`Branch`]),
/// whatever their steps. To know the branches, the lineage of each checkpoint is read.
///
/// # Errors
/// A directory or an integrity file that cannot be read. One that is damaged is no error: its
/// checkpoint counts as one of the newest branch, so that whoever loads it finds the damage.
pub fn list_newest_first(dir: impl Into<Location>) -> Result<Vec<StepCheckpoint>, CheckpointError> {
    let (committed, _) = list_branches(&dir.into())?;
    Ok(committed
        .into_iter()
        .rev()
        .map(|found| found.checkpoint)
        .collect())
}

/// Lists the checkpoints in a run's directory in the order of [`list_newest_first`], for a resume:
/// among them are also those of a [`Checkpointer`](crate::Checkpointer) that have lost their
/// `.metadata` ([`has_lost_metadata`]). A resume that passed over them would go back to an older
/// step without a word, and find them in its way later.
///
/// # Errors
/// The same as [`list_newest_first`]; a checkpoint without `.metadata` that cannot be read.
pub fn list_to_resume(dir: impl Into<Location>) -> Result<Vec<StepCheckpoint>, CheckpointError> {
    let found = list_with_lost(&dir.into())?;
    Ok(found
        .into_iter()
        .rev()
        .map(|found| found.checkpoint)
        .collect())
}

/// Lists the committed checkpoints in a run's directory, and separately the directories that are
/// named like a checkpoint of a [`Checkpointer`](crate::Checkpointer) but have no `.metadata`. Both
/// lists have the oldest step first. DCP directories of other programs whose names say that they
/// count steps, such as `step_20`, are checkpoints of the run too.
fn list_steps(
    dir: &Location,
) -> Result<(Vec<StepCheckpoint>, Vec<StepCheckpoint>), CheckpointError> {
    let mut committed = Vec::new();
    let mut uncommitted = Vec::new();
    for name in names(dir)? {
        let Some(step) = step_in_name(&name) else {
            continue;
        };
        let path = dir.join(&name);
        if path.join(METADATA_FILE).is_file()? {
            committed.push(StepCheckpoint { step, path });
        } else if step_of(&name).is_some() {
            uncommitted.push(StepCheckpoint { step, path });
        }
    }
    committed.sort();
    uncommitted.sort();
    Ok((committed, uncommitted))
}

/// Lists the committed checkpoints in a run's directory with their branches, the newest last, and
/// separately the directories that are named like a checkpoint but have no `.metadata`, the oldest
/// step first.
pub(crate) fn list_branches(
    dir: &Location,
) -> Result<(Vec<CheckpointOnBranch>, Vec<StepCheckpoint>), CheckpointError> {
    let (committed, uncommitted) = list_steps(dir)?;
    Ok((find_branches(committed, &[])?, uncommitted))
}

/// Lists the committed checkpoints in a run's directory, and those that have lost their
/// `.metadata`, with their branches, the newest last.
pub(crate) fn list_with_lost(dir: &Location) -> Result<Vec<CheckpointOnBranch>, CheckpointError> {
    let (mut checkpoints, uncommitted) = list_steps(dir)?;
    let mut lost = Vec::new();
    for checkpoint in uncommitted {
        if has_lost_metadata(&checkpoint.path)? {
            lost.push(checkpoint);
        }
    }
    checkpoints.extend(lost.iter().cloned());
    checkpoints.sort();
    find_branches(checkpoints, &lost)
}

/// Finds the branches of checkpoints whose order is that of their steps, and sorts them, the newest
/// last. `lost` are those among them that have lost their `.metadata`.
fn find_branches(
    checkpoints: Vec<StepCheckpoint>,
    lost: &[StepCheckpoint],
) -> Result<Vec<CheckpointOnBranch>, CheckpointError> {
    let paths: Vec<&Location> = checkpoints
        .iter()
        .map(|checkpoint| &checkpoint.path)
        .collect();
    let branches = read_branches(&paths)?;
    let mut found: Vec<CheckpointOnBranch> = checkpoints
        .into_iter()
        .zip(branches)
        .filter_map(|(checkpoint, branch)| {
            Some(CheckpointOnBranch {
                branch: branch?,
                is_lost: lost.contains(&checkpoint),
                checkpoint,
            })
        })
        .collect();
    // The sort keeps the order of two names of one step.
    found.sort_by_key(CheckpointOnBranch::position);
    Ok(found)
}

/// Returns the step in the name of a checkpoint of a [`Checkpointer`](crate::Checkpointer); `None`
/// for any other name.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-").and_then(parse_step)
}

/// Parses the digits of a step; returns `None` for any other text. (Rust's own parser accepts `+5`
/// too.)
fn parse_step(digits: &str) -> Option<u64> {
    if digits.bytes().all(|byte| byte.is_ascii_digit()) {
        digits.parse().ok()
    } else {
        None
    }
}

/// Returns the names in a directory. Names that are not UTF-8 cannot be checkpoints, and are left
/// out.
fn names(dir: &Location) -> Result<Vec<String>, CheckpointError> {
    dir.names().map_err(|error| match error {
        fsdp_formats::FileError::Io { source, .. } => CheckpointError::Directory {
            path: dir.name().to_owned(),
            source,
        },
        error => error.into(),
    })
}

/// Returns the newest committed checkpoint in a run's directory: the first of
/// [`list_newest_first`].
///
/// # Errors
/// The same as [`list_newest_first`].
pub fn latest_checkpoint(
    dir: impl Into<Location>,
) -> Result<Option<StepCheckpoint>, CheckpointError> {
    let (mut committed, _) = list_branches(&dir.into())?;
    Ok(committed.pop().map(|newest| newest.checkpoint))
}
