//! What crashed saves leave behind, putting things right again, and removing checkpoints that are not wanted any more.

use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::fs::{Durable, beside, exists, is_nonce, nonce, parent_of};
use crate::error::CheckpointError;
use crate::location::{Location, Resolved};
#[cfg(feature = "object-store")]
use crate::metadata::METADATA_FILE;

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
        let name = entry.file_name();
        if name.to_str().and_then(|name| name.strip_prefix(&prefix)).is_some_and(is_nonce)
            && entry.file_type().is_ok_and(|kind| kind.is_dir())
        {
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
///
/// In an object store it is always nothing: leftovers are in nobody's way there, and the next save to the same target
/// removes them once it is committed.
pub fn stale(target: impl Into<Location>) -> Result<Vec<PathBuf>, CheckpointError> {
    let target = target.into();
    let Some(target) = target.local() else { return Ok(Vec::new()) };
    let mut found: Vec<_> = leftovers(target, "tmp")?.into_iter().filter(|path| is_unlocked(path)).collect();
    if exists(target) {
        found.extend(leftovers(target, "old")?);
    }
    Ok(found)
}

/// Removes what [`stale`] lists, and returns it.
pub fn clean_stale(target: impl Into<Location>) -> Result<Vec<PathBuf>, CheckpointError> {
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

impl Durable {
    /// Removes a checkpoint directory, unless somebody reads it: whether it did.
    ///
    /// It disappears in one step; a crash in the middle leaves a part of it that [`stale`] lists. Readers hold a shared
    /// lock on the directory; where locks do not work, nobody is known to read.
    ///
    /// In an object store `.metadata` goes first, and readers are not known: they find that the rest is missing.
    pub fn remove_checkpoint(&self, target: impl Into<Location>) -> Result<bool, CheckpointError> {
        let target = target.into();
        match target.resolve()? {
            Resolved::Local(path) => self.remove_directory_checkpoint(path),
            #[cfg(feature = "object-store")]
            Resolved::Object(prefix) => {
                let all = prefix.all()?.into_iter();
                let (first, rest): (Vec<_>, Vec<_>) = all.partition(|name| name.ends_with(METADATA_FILE));
                first.iter().chain(&rest).try_for_each(|name| prefix.delete(name))?;
                Ok(true)
            }
        }
    }

    /// Removes what a crashed save, or a removal that broke off, has left of a checkpoint in an object store: whether
    /// there was anything. Nothing is done where there is a `.metadata`, or an object whose name is not one of a save's
    /// own; nor in a directory, whose leftovers lie beside it ([`clean_stale`]).
    ///
    /// A save to this very target that is in progress fails then.
    ///
    /// # Errors
    /// What the store says.
    pub fn remove_uncommitted(&self, target: impl Into<Location>) -> Result<bool, CheckpointError> {
        match target.into().resolve()? {
            Resolved::Local(_) => Ok(false),
            #[cfg(feature = "object-store")]
            Resolved::Object(prefix) => {
                let all = prefix.all()?;
                if all.is_empty() || all.iter().any(|name| super::object::nonce_of(name).is_none()) {
                    return Ok(false);
                }
                all.iter().try_for_each(|name| prefix.delete(name))?;
                Ok(true)
            }
        }
    }

    fn remove_directory_checkpoint(&self, target: &Path) -> Result<bool, CheckpointError> {
        let directory = File::open(target).map_err(CheckpointError::io("open", target))?;
        if rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
            return Ok(false);
        }
        let (parent, prefix) = beside(target)?;
        let doomed = parent.join(format!("{prefix}tmp-{:016x}", nonce()));
        self.rename_new(target, &doomed)?;
        self.sync_directory(&parent)?;
        self.remove_directory(&doomed)?;
        Ok(true)
    }
}
