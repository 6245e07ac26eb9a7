//! Leftovers of crashed saves, and checkpoints that are not wanted any more.

use std::path::PathBuf;

use super::fs::Durable;
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

impl Durable {
    /// Removes a checkpoint, unless a reader holds its lock. Returns `true` if it was removed.
    ///
    /// A directory disappears in one step; a crash in the middle leaves a part of it under a name
    /// that [`list_stale`] lists. Readers hold a shared lock on the directory; where locks do not work,
    /// nobody is known to read.
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
