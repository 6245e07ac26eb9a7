//! Leftovers of crashed saves beside a directory: staging directories, and old versions that were being replaced.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::error::FileError;
use crate::storage::fs::{Durable, exists, is_nonce, parent_of, staging_prefix};

/// Lists the staging directories of crashed saves to `target`, and the old versions that were replaced but not removed.
pub(crate) fn stale(target: &Path) -> Result<Vec<PathBuf>, FileError> {
    let mut found = leftovers(target, "tmp")?;
    found.retain(|directory| is_unlocked(directory));
    // Without a target the old version is the only one: it is to be put back, not to be removed. A reader may still have
    // it open.
    if exists(target) {
        found.extend(leftovers(target, "old")?.into_iter().filter(|directory| is_unlocked(directory)));
    }
    Ok(found)
}

/// Puts the old version back where a crash in the middle of an overwrite left no target. Returns `true` if it did.
pub(crate) fn recover(durable: &Durable, target: &Path) -> Result<bool, FileError> {
    if exists(target) {
        return Ok(false);
    }
    let old = leftovers(target, "old")?;
    let Some(newest) = old.last() else { return Ok(false) };
    durable.rename_new(newest, target)?;
    durable.sync_directory(parent_of(target))?;
    Ok(true)
}

/// Lists the directories beside `target` that are called `.NAME.<kind>-<nonce>`, sorted.
fn leftovers(target: &Path, kind: &str) -> Result<Vec<PathBuf>, FileError> {
    let (parent, prefix) = staging_prefix(target)?;
    let prefix = format!("{prefix}{kind}-");
    let list = match std::fs::read_dir(&parent) {
        Ok(list) => list,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(FileError::io("list", parent)(error)),
    };
    let mut found = Vec::new();
    for entry in list {
        let entry = entry.map_err(FileError::io("list", &parent))?;
        let name = entry.file_name();
        let is_ours = name.to_str().and_then(|name| name.strip_prefix(&prefix)).is_some_and(is_nonce);
        if is_ours && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// Returns `true` if somebody reads a checkpoint, and locks it against new readers otherwise, for as long as `directory` is
/// open. Where locks do not work, nobody is known to read.
pub(super) fn is_being_read(directory: &File) -> bool {
    rustix::fs::flock(directory, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK)
}

/// Returns `true` if nobody holds the lock of a staging directory. Where locks do not work this is not known, so the
/// answer is `false`.
fn is_unlocked(directory: &Path) -> bool {
    File::open(directory).is_ok_and(|file| rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok())
}
