//! Leftovers of crashed saves, and checkpoints that are not wanted any more.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::fs::{Durable, is_nonce};
use super::location::Location;
use crate::error::FileError;

/// Returns the paths of what crashed saves to `target` left: staging directories that nobody writes
/// to any more, and old versions that were replaced but not removed.
///
/// For an object store the list is empty: leftovers disturb nobody there, and the next save to the
/// same target removes them once it is committed.
///
/// # Errors
/// A directory that cannot be listed.
pub fn list_stale(target: impl Into<Location>) -> Result<Vec<PathBuf>, FileError> {
    target.into().storage()?.list_stale()
}

/// Removes what [`list_stale`] lists, and returns that list.
///
/// # Errors
/// A directory that cannot be listed or removed.
pub fn clean_stale(target: impl Into<Location>) -> Result<Vec<PathBuf>, FileError> {
    target.into().storage()?.clean_stale(&Durable::new())
}

/// Returns the names in a directory of those targets beside which saves or removals have something:
/// `step-20` for `.step-20.tmp-53f1a09be6c02d77`. [`list_stale`] tells for each of them what nobody
/// works on any more.
///
/// For an object store the list is empty, as that of [`list_stale`] is.
///
/// # Errors
/// A directory that cannot be listed.
pub fn targets_with_leftovers(
    directory: impl Into<Location>,
) -> Result<BTreeSet<String>, FileError> {
    let directory = directory.into();
    if directory.local().is_none() {
        return Ok(BTreeSet::new());
    }
    let names = directory.names()?;
    Ok(names
        .iter()
        .filter_map(|name| target_of_leftover(name))
        .map(str::to_owned)
        .collect())
}

/// Returns the name of the target in that of a staging directory or an old version beside it;
/// `None` for any other name.
fn target_of_leftover(name: &str) -> Option<&str> {
    let (target, kind) = name.strip_prefix('.')?.rsplit_once('.')?;
    let nonce = kind
        .strip_prefix("tmp-")
        .or_else(|| kind.strip_prefix("old-"))?;
    is_nonce(nonce).then_some(target)
}

impl Durable {
    /// Removes a checkpoint, unless a reader holds its lock. Returns `true` if it was removed.
    ///
    /// A directory disappears in one step; a crash in the middle leaves a part of it under a name
    /// that [`list_stale`] lists. Readers hold a shared lock on the directory; where locks do not
    /// work, nobody is known to read.
    ///
    /// In an object store `.metadata` goes first. Readers are not known there: they find that the
    /// rest is missing.
    ///
    /// # Errors
    /// The errors of the storage.
    pub fn remove_checkpoint(&self, target: impl Into<Location>) -> Result<bool, FileError> {
        target.into().storage()?.remove_checkpoint(self)
    }

    /// Removes what a crashed save, or a removal that was interrupted, has left of a checkpoint in
    /// an object store. Returns `true` if there was anything.
    ///
    /// Nothing is done where there is a `.metadata`, or an object whose name is not one of a save's
    /// own. Nothing is done in a directory either, whose leftovers lie beside it ([`clean_stale`]).
    /// A save to this very target that is in progress fails after this.
    ///
    /// # Errors
    /// The errors of the store.
    pub fn remove_uncommitted(&self, target: impl Into<Location>) -> Result<bool, FileError> {
        target.into().storage()?.remove_uncommitted()
    }
}
