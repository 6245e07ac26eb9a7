//! A checkpoint while it is written: a directory beside the target, or objects without a
//! `.metadata`.

use std::path::Path;

use super::backend::{EntryKind, Stage, StagedFile};
use super::fs::Durable;
use super::integrity::INTEGRITY_FILE;
use super::location::Location;
use super::sidecar::Sidecar;
use crate::error::FileError;

/// A checkpoint that is being written.
///
/// When the one that [`Durable::prepare`] returned is dropped without a commit, it removes what was
/// written.
#[derive(Debug)]
pub struct Staging(Box<dyn Stage>);

impl Durable {
    /// Prepares to write a checkpoint at `target`, a path or a URL. Missing directories are
    /// created.
    ///
    /// # Errors
    /// If something is at the target and `overwrite` is not set, [`FileError::Exists`]. A directory
    /// of an object store cannot be overwritten: [`FileError::Overwrite`].
    pub fn prepare(
        &self,
        target: impl Into<Location>,
        overwrite: bool,
    ) -> Result<Staging, FileError> {
        Ok(Staging(target.into().storage()?.prepare(self, overwrite)?))
    }

    /// Returns what another rank prepared for the same target, by its [`Staging::name`].
    ///
    /// # Errors
    /// A staging directory that is not visible here: [`FileError::TargetMismatch`].
    pub fn join(&self, target: impl Into<Location>, name: &str) -> Result<Staging, FileError> {
        Ok(Staging(target.into().storage()?.join(self, name)?))
    }

    /// Writes a small file whole in the place of whatever file is there. What a killed process has
    /// left of it is removed first.
    ///
    /// # Errors
    /// The errors of the storage.
    pub fn replace_file(&self, target: impl Into<Location>, bytes: &[u8]) -> Result<(), FileError> {
        let target = target.into();
        target.storage()?.clean_stale(self)?;
        let staging = self.prepare(target, true)?;
        let file = staging.create_single(bytes.len() as u64)?;
        file.write_at(0, bytes)?;
        file.finish()?;
        staging.commit_single()
    }
}

impl Staging {
    /// Returns the name by which other ranks [`join`](Durable::join) it.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Returns the target for messages: a path, or a URL.
    #[doc(hidden)]
    pub fn target(&self) -> &Path {
        self.0.target()
    }

    /// Returns the target's own name.
    #[doc(hidden)]
    pub fn target_name(&self) -> &str {
        self.target()
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default()
    }

    /// Returns where files are written for now: the staging directory; in an object store, the
    /// target itself.
    #[doc(hidden)]
    pub fn directory(&self) -> &Path {
        self.0.directory()
    }

    /// Returns the name of a rank's data file of this number: `__0_0.distcp` for the first. In an
    /// object store it is `__0_0-<nonce>.distcp`, since savers of the same target work side by side
    /// there.
    #[must_use]
    pub fn data_file_of(&self, rank: usize, number: usize) -> String {
        match self.0.suffix() {
            None => format!("__{rank}_{number}.distcp"),
            Some(nonce) => format!("__{rank}_{number}-{nonce}.distcp"),
        }
    }

    /// Makes a finished file of another checkpoint a file of this one too: by a hard link, or, in
    /// an object store, by a copy that the store makes. Returns `false` where that cannot be done,
    /// so that the caller writes the file.
    ///
    /// # Errors
    /// A path that leads out of the checkpoint.
    pub(crate) fn link(
        &self,
        checkpoint: &Location,
        name: &str,
        as_name: &str,
    ) -> Result<bool, FileError> {
        self.0.link(checkpoint.storage()?, name, as_name)
    }

    /// Returns the name that a linked file of a rank gets, given the number of files linked before
    /// it. It keeps its name, except in an object store, where the names of each save's files have
    /// its nonce.
    pub(crate) fn linked_name(&self, name: &str, rank: usize, number: usize) -> String {
        if self.0.suffix().is_some() {
            self.data_file_of(rank, number)
        } else {
            name.to_owned()
        }
    }

    /// Returns the name of a DCP checkpoint's integrity file: `.integrity`; in an object store
    /// `.integrity-<nonce>`.
    pub(crate) fn integrity_file(&self) -> String {
        match self.0.suffix() {
            None => INTEGRITY_FILE.to_owned(),
            Some(nonce) => format!("{INTEGRITY_FILE}-{nonce}"),
        }
    }

    /// Claims the target for files whose names other savers of the same target would choose too: in
    /// an object store, only one saver may write those. To be called before the first of them is
    /// written.
    ///
    /// # Errors
    /// [`FileError::Exists`]: another save is at it, or was.
    #[doc(hidden)]
    pub fn claim(&self) -> Result<(), FileError> {
        self.0.claim()
    }

    /// Creates a file of this length. Subdirectories in `relative` are created.
    ///
    /// # Errors
    /// The errors of the storage; a path that leads out of the checkpoint.
    pub fn create(&self, relative: &str, length: u64) -> Result<Box<dyn StagedFile>, FileError> {
        self.0.create(relative, length)
    }

    /// Creates the file of a checkpoint that is one file; [`Staging::commit_single`] puts it in its
    /// place.
    ///
    /// # Errors
    /// The errors of the storage.
    pub fn create_single(&self, length: u64) -> Result<Box<dyn StagedFile>, FileError> {
        self.0.create_single(length)
    }

    /// Writes a small file whole, and makes it durable.
    ///
    /// # Errors
    /// The errors of [`Staging::create`].
    #[doc(hidden)]
    pub fn write(&self, relative: &str, bytes: &[u8]) -> Result<(), FileError> {
        self.0.write(relative, bytes)
    }

    /// Checks that a directory can be published at the target: nothing is there, or a directory.
    ///
    /// # Errors
    /// [`FileError::NotReplaceable`].
    pub fn check_replaces_directory(&self) -> Result<(), FileError> {
        self.check_replaces(EntryKind::Directory, "directory")
    }

    /// Checks that a single file can be published at the target: nothing is there, or a file.
    ///
    /// # Errors
    /// [`FileError::NotReplaceable`].
    #[doc(hidden)]
    pub fn check_replaces_file(&self) -> Result<(), FileError> {
        self.check_replaces(EntryKind::File, "file")
    }

    /// Checks that an entry of this kind can be published at the target. `wanted` is the kind in
    /// words.
    fn check_replaces(&self, kind: EntryKind, wanted: &'static str) -> Result<(), FileError> {
        if self.0.may_be_replaced_by(kind)? {
            return Ok(());
        }
        Err(FileError::NotReplaceable {
            path: self.target().to_owned(),
            wanted,
        })
    }

    /// Checks that no file of this name lies beside the target, unless that may be overwritten.
    ///
    /// # Errors
    /// [`FileError::Exists`].
    #[doc(hidden)]
    pub fn check_sidecar(&self, name: &str) -> Result<(), FileError> {
        self.0.check_sidecar(name)
    }

    /// Removes a file beside the target, if it is there: durably, before the target is committed.
    ///
    /// # Errors
    /// The errors of the storage.
    #[doc(hidden)]
    pub fn remove_sidecar(&self, name: &str) -> Result<(), FileError> {
        self.0.remove_sidecar(name)
    }

    /// Checks that these files, some of which other ranks wrote, are all where the checkpoint will
    /// be committed.
    ///
    /// # Errors
    /// [`FileError::TargetMismatch`].
    pub(crate) fn check_files<'f>(
        &self,
        mut files: impl Iterator<Item = &'f String>,
    ) -> Result<(), FileError> {
        self.0.check_files(&mut files)
    }

    /// Writes the commit marker and publishes the checkpoint; before that, the target is not a
    /// checkpoint. All other files must be finished.
    ///
    /// # Errors
    /// The errors of the storage. [`FileError::Exists`]: another save to the same target was
    /// faster.
    /// [`FileError::CommitUnknown`]: the object store does not say whether it was done.
    pub fn commit(self, marker: &str, bytes: &[u8]) -> Result<(), FileError> {
        self.0.commit(marker, bytes)
    }

    /// Publishes the finished file of [`Staging::create_single`].
    ///
    /// # Errors
    /// The errors of [`Staging::commit`].
    pub fn commit_single(self) -> Result<(), FileError> {
        self.0.commit_single(None)
    }

    /// Publishes the finished file of [`Staging::create_single`], and a sidecar.
    ///
    /// The step that publishes the file is the commit. Before it, the target and its sidecar are as
    /// they were; after it, the new sidecar is there under one of its two names.
    ///
    /// # Errors
    /// The errors of [`Staging::commit`].
    #[doc(hidden)]
    pub fn commit_single_with(self, sidecar: Sidecar<'_>) -> Result<(), FileError> {
        self.0.commit_single(Some(sidecar))
    }
}
