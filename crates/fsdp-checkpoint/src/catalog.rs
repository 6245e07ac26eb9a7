//! The checkpoints of a training run: one directory, one checkpoint a step.

use std::path::{Path, PathBuf};

use fsdp_dcp::metadata::METADATA_FILE;

use crate::CheckpointError;

/// A committed checkpoint of a run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct StepCheckpoint {
    /// Steps done when it was saved.
    pub step: u64,
    /// Its directory.
    pub path: PathBuf,
}

/// Where the checkpoint of a step lies: `DIR/step-00000020`.
#[must_use]
pub fn step_path(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("step-{step:08}"))
}

/// The committed checkpoints in a run's directory, oldest step first. What a crash left half-written is not listed:
/// it never gets a `step-` name.
///
/// # Errors
/// A directory that cannot be read.
pub fn list_checkpoints(dir: &Path) -> Result<Vec<StepCheckpoint>, CheckpointError> {
    let failed = |source| CheckpointError::Directory { path: dir.to_owned(), source };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let step = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("step-"));
        if let Some(step) = step.and_then(|step| step.parse().ok())
            && path.join(METADATA_FILE).is_file()
        {
            found.push(StepCheckpoint { step, path });
        }
    }
    found.sort();
    Ok(found)
}

/// The newest committed checkpoint in a run's directory.
///
/// # Errors
/// As [`list_checkpoints`].
pub fn latest_checkpoint(dir: &Path) -> Result<Option<StepCheckpoint>, CheckpointError> {
    Ok(list_checkpoints(dir)?.pop())
}
