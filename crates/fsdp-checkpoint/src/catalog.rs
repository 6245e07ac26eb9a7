//! The checkpoints of a training run: a directory, or a prefix in an object store, with one
//! checkpoint for each saved step.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use fsdp_formats::Location;
use fsdp_formats::metadata::METADATA_FILE;

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

/// Returns the name of a step's checkpoint in its run: `step-00000020`.
#[must_use]
pub fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Lists the committed checkpoints in a run's directory, oldest step first. Unfinished checkpoints
/// that a crash has left are not listed: they have no `step-` name, or no `.metadata`.
///
/// # Errors
/// A directory that cannot be read.
pub fn list_checkpoints(dir: impl Into<Location>) -> Result<Vec<StepCheckpoint>, CheckpointError> {
    Ok(list_steps(&dir.into())?.0)
}

/// Lists the committed checkpoints in a run's directory, and separately the directories that are
/// named like a checkpoint but have no `.metadata`. Both lists have the oldest step first.
pub(crate) fn list_steps(
    dir: &Location,
) -> Result<(Vec<StepCheckpoint>, Vec<StepCheckpoint>), CheckpointError> {
    let mut committed = Vec::new();
    let mut others = Vec::new();
    for name in names(dir)? {
        let Some(step) = step_of(&name) else {
            continue;
        };
        let path = dir.join(&name);
        if path.join(METADATA_FILE).is_file()? {
            committed.push(StepCheckpoint { step, path });
        } else {
            others.push(StepCheckpoint { step, path });
        }
    }
    committed.sort();
    others.sort();
    Ok((committed, others))
}

/// Returns the steps that have hidden files beside their checkpoints: a save in progress, or
/// leftovers of a crash.
pub(crate) fn steps_with_leftovers(dir: &Location) -> Result<BTreeSet<u64>, CheckpointError> {
    Ok(names(dir)?
        .iter()
        .filter_map(|name| step_of_hidden(name))
        .collect())
}

/// Returns the step in the name of a checkpoint.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-").and_then(parse_step)
}

/// Returns the step in the name of a hidden file, e.g. `.step-20.tmp-53f1`.
fn step_of_hidden(name: &str) -> Option<u64> {
    parse_step(name.strip_prefix(".step-")?.split('.').next()?)
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
        other => other.into(),
    })
}

/// Returns the newest committed checkpoint in a run's directory.
///
/// # Errors
/// The same as [`list_checkpoints`].
pub fn latest_checkpoint(
    dir: impl Into<Location>,
) -> Result<Option<StepCheckpoint>, CheckpointError> {
    Ok(list_checkpoints(dir)?.pop())
}
