//! What crashed saves leave behind, and putting things right again.

use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use super::fs::{Durable, exists};
use super::staging::parent_of;
use crate::error::CheckpointError;

/// The directory beside `target`, and the prefix of the names that belong to it: `.NAME.`.
pub(super) fn beside(target: &Path) -> Result<(PathBuf, String), CheckpointError> {
    let name = target.file_name().and_then(|name| name.to_str()).ok_or_else(|| {
        let error = std::io::Error::new(std::io::ErrorKind::InvalidInput, "it has no name in UTF-8");
        CheckpointError::io("write to", target)(error)
    })?;
    Ok((parent_of(target).to_owned(), format!(".{name}.")))
}

/// The directories beside `target` whose names say that they are its old version or a staging directory.
fn leftovers(target: &Path, kind: &str) -> Result<Vec<PathBuf>, CheckpointError> {
    let (parent, prefix) = beside(target)?;
    let prefix = format!("{prefix}{kind}-");
    let list = match std::fs::read_dir(&parent) {
        Ok(list) => list,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(CheckpointError::io("list", parent)(error)),
    };
    let mut found = Vec::new();
    for entry in list {
        let entry = entry.map_err(CheckpointError::io("list", &parent))?;
        let nonce = entry.file_name().to_str().and_then(|name| name.strip_prefix(&prefix)).map(str::to_owned);
        let is_nonce = nonce.is_some_and(|nonce| nonce.len() == 16 && nonce.bytes().all(|b| b.is_ascii_hexdigit()));
        if is_nonce && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// Whether nobody holds the lock of a staging directory. Where locks do not work, that is not known, so: no.
fn is_unlocked(directory: &Path) -> bool {
    File::open(directory).is_ok_and(|file| rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok())
}

/// What crashed saves to `target` left: staging directories that nobody writes to any more, and old versions that were
/// replaced but not removed.
pub fn stale(target: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let mut found: Vec<_> = leftovers(target, "tmp")?.into_iter().filter(|path| is_unlocked(path)).collect();
    if exists(target) {
        found.extend(leftovers(target, "old")?);
    }
    Ok(found)
}

/// Removes what [`stale`] lists, and returns it.
pub fn clean_stale(target: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let durable = Durable::new();
    let found = stale(target)?;
    for path in &found {
        durable.remove_directory(path)?;
    }
    Ok(found)
}

/// Puts the old checkpoint back where a crash in the middle of an overwrite left none: whether it did.
///
/// Only file systems that cannot exchange two directories need this.
pub fn recover(target: &Path) -> Result<bool, CheckpointError> {
    recover_with(&Durable::new(), target)
}

pub(super) fn recover_with(durable: &Durable, target: &Path) -> Result<bool, CheckpointError> {
    if exists(target) {
        return Ok(false);
    }
    match leftovers(target, "old")?.as_slice() {
        [] => Ok(false),
        [.., newest] => {
            durable.rename_new(newest, target)?;
            durable.sync_directory(parent_of(target))?;
            Ok(true)
        }
    }
}
