//! The rule that decides which checkpoints of a run are kept.

use std::io::ErrorKind;
use std::num::{NonZeroU64, NonZeroUsize};

use fsdp_formats::checkpoint::{self, LinksInFolder, check_replaceable};
use fsdp_formats::complete::is_complete;
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::storage::{Durable, clean_stale, targets_with_leftovers};
use fsdp_formats::{FileError, Location};
use tracing::{info, info_span, warn};

use crate::catalog::{CheckpointOnBranch, StepCheckpoint, list_branches, step_of};
use crate::error::CheckpointError;

/// The rule for which checkpoints of a run are kept when a new one has been saved. Without
/// `keep_last`, all are. Only those with names that [`step_path`](crate::step_path) gives count and
/// are removed (`step-00000020`); others, such as `step_20`, stay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retention {
    /// The number of newest checkpoints to keep.
    pub keep_last: Option<NonZeroUsize>,
    /// A number of steps. Checkpoints whose step is a multiple of it are kept too, however old they
    /// are.
    pub keep_every: Option<NonZeroU64>,
}

impl Retention {
    /// Returns the checkpoints that need not be kept. `checkpoints` must be sorted, oldest first.
    ///
    /// ```
    /// use fsdp_checkpoint::{Retention, StepCheckpoint, step_path};
    /// let dir = std::path::Path::new("run");
    /// let saved = |step| StepCheckpoint { step, path: step_path(dir, step).into() };
    /// let all: Vec<_> = (1..=6).map(|index| saved(index * 10)).collect();
    /// let retention = Retention { keep_last: 2.try_into().ok(), keep_every: 30.try_into().ok() };
    /// let steps: Vec<_> = retention.expired(&all).iter().map(|checkpoint| checkpoint.step).collect();
    /// assert_eq!(steps, [10, 20, 40]);
    /// ```
    #[must_use]
    pub fn expired<'c>(&self, checkpoints: &'c [StepCheckpoint]) -> Vec<&'c StepCheckpoint> {
        let Some(keep_last) = self.keep_last else {
            return Vec::new();
        };
        let old = &checkpoints[..checkpoints.len().saturating_sub(keep_last.get())];
        let Some(keep_every) = self.keep_every else {
            return old.iter().collect();
        };
        old.iter()
            .filter(|checkpoint| !checkpoint.step.is_multiple_of(keep_every.get()))
            .collect()
    }
}

/// Removes the checkpoints in a run's directory that `retention` does not keep, and returns them.
/// No communication: one rank calls it, after a save.
///
/// If the run has gone back to an older step and saved again, the checkpoints that it has left
/// neither count nor are removed.
///
/// No checkpoint is removed unless at least one of those that are kept is whole: its structure and
/// the sizes of its files are checked. A checkpoint that another process is reading is kept until a
/// later call. So is one to which a symbolic link in the same directory leads, such as `best`, and
/// one whose directory has files of other programs, which would be lost.
///
/// Leftovers of crashed saves and removals are removed too, up to the newest checkpoint's step.
/// Without `keep_last` nothing is removed, and the directory is not listed.
///
/// # Errors
/// A directory that cannot be read, files that cannot be removed.
pub fn prune(
    dir: impl Into<Location>,
    retention: &Retention,
) -> Result<Vec<StepCheckpoint>, CheckpointError> {
    prune_up_to(&dir.into(), retention, None)
}

/// Removes checkpoints like [`prune`], for a run that is at `step`, if that is known. Checkpoints
/// of later steps are damaged, or the run has gone back behind them: they neither count nor are
/// removed.
pub(crate) fn prune_up_to(
    dir: &Location,
    retention: &Retention,
    step: Option<u64>,
) -> Result<Vec<StepCheckpoint>, CheckpointError> {
    if retention.keep_last.is_none() {
        return Ok(Vec::new());
    }
    let _span = info_span!("prune", path = %dir).entered();
    let (mut listed, uncommitted) = list_branches(dir)?;
    listed.retain(|found| step.is_none_or(|step| found.checkpoint.step <= step));
    // Only names that this program gives are removed: other programs may have saved the rest.
    listed.retain(|found| {
        let name = found.checkpoint.path.name().file_name();
        name.and_then(|name| step_of(name.to_str()?)).is_some()
    });
    let Some(CheckpointOnBranch {
        branch,
        checkpoint: newest,
        ..
    }) = listed.last()
    else {
        return Ok(Vec::new());
    };
    let mut counted = Vec::new();
    for found in &listed {
        if branch.continues(&found.branch, found.checkpoint.step) {
            counted.push(found.checkpoint.clone());
        }
    }
    // A save that is in progress has a later step than the newest of these checkpoints, so what
    // belongs to earlier steps was left by a crash. In a file system it lies beside the
    // checkpoint's directory.
    for name in targets_with_leftovers(dir)? {
        if step_of(&name).is_some_and(|step| step <= newest.step) {
            clean_stale(dir.join(&name))?;
        }
    }
    // In an object store it lies where the checkpoint would be.
    for checkpoint in uncommitted
        .iter()
        .filter(|checkpoint| checkpoint.step < newest.step)
    {
        Durable::new().remove_uncommitted(&checkpoint.path)?;
    }
    let expired = retention.expired(&counted);
    let Some(oldest) = expired.first() else {
        return Ok(Vec::new());
    };
    let links = LinksInFolder::beside(&oldest.path)?;
    // If a crash of the machine has damaged the newer checkpoints, the old ones are all that the
    // run has.
    let mut kept = counted
        .iter()
        .rev()
        .filter(|checkpoint| !expired.contains(checkpoint));
    if !kept.any(|checkpoint| is_whole(&checkpoint.path)) {
        warn!(path = %dir, "no newer checkpoint is whole: the old ones stay");
        return Ok(Vec::new());
    }
    let mut removed = Vec::new();
    for checkpoint in expired {
        if let Some(link) = links.leading_to(&checkpoint.path) {
            info!(path = %checkpoint.path, link, "a link leads to it: it stays");
            continue;
        }
        if let Err(error) = check_replaceable(&checkpoint.path) {
            info!(path = %checkpoint.path, %error, "it stays");
            continue;
        }
        match Durable::new().remove_checkpoint(&checkpoint.path) {
            Ok(true) => removed.push(checkpoint.clone()),
            Ok(false) => info!(path = %checkpoint.path, "somebody reads it: it stays for now"),
            // Another process has removed it since it was listed.
            Err(FileError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(removed)
}

/// Returns `true` if a checkpoint can be opened, and all its files are there with the right sizes.
fn is_whole(path: &Location) -> bool {
    let complete = checkpoint::open(path, OpenOptions::default())
        // One thread, as training goes on at the same time.
        .and_then(|checkpoint| is_complete(&*checkpoint, 1));
    complete.unwrap_or(false)
}
