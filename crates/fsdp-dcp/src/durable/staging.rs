//! Where a checkpoint grows before it takes its place: a directory beside the target, or objects without a `.metadata`.

use std::path::Path;

use super::fs::Durable;
use super::local::{Beside, LocalFile, LocalStaging};
#[cfg(feature = "object-store")]
use super::object::ObjectStaging;
#[cfg(feature = "object-store")]
use super::upload::{Upload, WRITERS};
use crate::error::CheckpointError;
use crate::integrity::INTEGRITY_FILE;
use crate::location::{Location, Resolved};

/// A checkpoint that is being written.
///
/// The one that prepared it removes it again when dropped without a commit.
#[derive(Debug)]
pub struct Staging(Kind);

#[derive(Debug)]
enum Kind {
    Local(LocalStaging),
    #[cfg(feature = "object-store")]
    Object(ObjectStaging),
}

/// A file of a checkpoint that is being written, of a length known beforehand.
#[derive(Debug)]
pub struct StagedFile(FileKind);

#[derive(Debug)]
enum FileKind {
    Local(LocalFile),
    #[cfg(feature = "object-store")]
    Object(Upload),
}

impl Durable {
    /// Prepares to write a checkpoint at `target`, a path or a URL. Missing directories are created.
    ///
    /// # Errors
    /// If something is at the target and `overwrite` is not set, [`CheckpointError::Exists`]. A directory of an object
    /// store cannot be overwritten: [`CheckpointError::Overwrite`].
    pub fn prepare(&self, target: impl Into<Location>, overwrite: bool) -> Result<Staging, CheckpointError> {
        let target = target.into();
        Ok(Staging(match target.resolve()? {
            Resolved::Local(path) => Kind::Local(self.prepare_local(path, overwrite)?),
            #[cfg(feature = "object-store")]
            Resolved::Object(prefix) => Kind::Object(ObjectStaging::prepare(&target, prefix, overwrite)?),
        }))
    }

    /// What another rank prepared for the same target, by its [`Staging::name`].
    ///
    /// # Errors
    /// A staging directory that is not visible here.
    pub fn join(&self, target: impl Into<Location>, name: &str) -> Result<Staging, CheckpointError> {
        let target = target.into();
        Ok(Staging(match target.resolve()? {
            Resolved::Local(path) => Kind::Local(self.join_local(path, name)?),
            #[cfg(feature = "object-store")]
            Resolved::Object(prefix) => Kind::Object(ObjectStaging::join(&target, prefix, name)?),
        }))
    }

    /// Writes a small file whole in the place of whatever file is there.
    ///
    /// # Errors
    /// What the storage says.
    pub fn replace_file(&self, target: impl Into<Location>, bytes: &[u8]) -> Result<(), CheckpointError> {
        let staging = self.prepare(target, true)?;
        let file = staging.create_single(bytes.len() as u64)?;
        file.write_at(0, bytes)?;
        file.finish()?;
        staging.commit_single(None)
    }
}

/// The name, in a staging directory, of a file that is a checkpoint by itself.
const SINGLE: &str = "file";

impl Staging {
    /// What tells it from others of the same target; [`Durable::join`] takes it.
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.0 {
            Kind::Local(local) => local.name(),
            #[cfg(feature = "object-store")]
            Kind::Object(object) => object.name(),
        }
    }

    /// Where the checkpoint will be: a path, or a URL.
    #[must_use]
    pub fn target(&self) -> &Path {
        match &self.0 {
            Kind::Local(local) => local.target(),
            #[cfg(feature = "object-store")]
            Kind::Object(object) => object.target(),
        }
    }

    /// Where it grows: a directory beside the target; in an object store, the target itself.
    #[must_use]
    pub fn directory(&self) -> &Path {
        match &self.0 {
            Kind::Local(local) => local.directory(),
            #[cfg(feature = "object-store")]
            Kind::Object(object) => object.target(),
        }
    }

    /// The name of a rank's data file: `__0_0.distcp`. In an object store `__0_0-<nonce>.distcp`, since savers of the
    /// same target work side by side there.
    #[must_use]
    pub fn data_file(&self, rank: usize) -> String {
        match &self.0 {
            Kind::Local(_) => format!("__{rank}_0.distcp"),
            #[cfg(feature = "object-store")]
            Kind::Object(object) => format!("__{rank}_0-{}.distcp", object.nonce()),
        }
    }

    /// The name of a DCP checkpoint's integrity file: `.integrity`; in an object store `.integrity-<nonce>`.
    #[must_use]
    pub fn integrity_file(&self) -> String {
        match &self.0 {
            Kind::Local(_) => INTEGRITY_FILE.to_owned(),
            #[cfg(feature = "object-store")]
            Kind::Object(object) => format!("{INTEGRITY_FILE}-{}", object.nonce()),
        }
    }

    /// To be called before files are written whose names other savers of the same target would choose too: in an object
    /// store, only one may.
    ///
    /// # Errors
    /// [`CheckpointError::Exists`]: somebody else is at it, or was.
    pub fn claim(&self) -> Result<(), CheckpointError> {
        match &self.0 {
            Kind::Local(_) => Ok(()),
            #[cfg(feature = "object-store")]
            Kind::Object(object) => object.claim(),
        }
    }

    /// Creates a file of this length. Subdirectories in `relative` are created.
    ///
    /// # Errors
    /// What the storage says; a path that leads out of the checkpoint.
    pub fn create(&self, relative: &str, length: u64) -> Result<StagedFile, CheckpointError> {
        Ok(StagedFile(match &self.0 {
            Kind::Local(local) => FileKind::Local(local.create(relative, length)?),
            #[cfg(feature = "object-store")]
            Kind::Object(object) => FileKind::Object(object.create(relative, length)?),
        }))
    }

    /// Creates the file of a checkpoint that is one file; [`Staging::commit_single`] puts it in its place.
    ///
    /// # Errors
    /// What the storage says.
    pub fn create_single(&self, length: u64) -> Result<StagedFile, CheckpointError> {
        Ok(StagedFile(match &self.0 {
            Kind::Local(local) => FileKind::Local(local.create(SINGLE, length)?),
            #[cfg(feature = "object-store")]
            Kind::Object(object) => FileKind::Object(object.create_single(length)?),
        }))
    }

    /// Writes a small file whole, and makes it durable.
    ///
    /// # Errors
    /// As [`Staging::create`].
    pub fn write(&self, relative: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        let file = self.create(relative, bytes.len() as u64)?;
        file.write_at(0, bytes)?;
        file.finish()
    }

    /// The target's own name.
    #[must_use]
    pub fn target_name(&self) -> &str {
        self.target().file_name().and_then(|name| name.to_str()).unwrap_or_default()
    }

    /// Checks that what is at the target, if anything, is of the kind that will be put there: a directory, or a file.
    ///
    /// # Errors
    /// [`CheckpointError::NotReplaceable`].
    pub fn check_kind(&self, directory: bool) -> Result<(), CheckpointError> {
        match &self.0 {
            Kind::Local(local) => local.check_kind(directory),
            #[cfg(feature = "object-store")]
            Kind::Object(object) => object.check_kind(directory),
        }
    }

    /// Checks that nothing of this name is beside the target, unless that may be overwritten.
    ///
    /// # Errors
    /// [`CheckpointError::Exists`].
    pub fn check_beside(&self, name: &str) -> Result<(), CheckpointError> {
        match &self.0 {
            Kind::Local(local) => local.check_beside(name),
            #[cfg(feature = "object-store")]
            Kind::Object(object) => object.check_beside(name),
        }
    }

    /// Removes a file beside the target, if it is there: durably, before the target is committed.
    ///
    /// # Errors
    /// What the storage says.
    pub fn remove_beside(&self, name: &str) -> Result<(), CheckpointError> {
        match &self.0 {
            Kind::Local(local) => local.remove_beside(name),
            #[cfg(feature = "object-store")]
            Kind::Object(object) => object.remove_beside(name),
        }
    }

    /// Checks that these files, of which other ranks have written some, are all where the checkpoint will be committed.
    /// In a directory they are: who joins finds it, or fails.
    ///
    /// # Errors
    /// [`CheckpointError::Elsewhere`].
    pub(crate) fn check_files<'f>(&self, files: impl Iterator<Item = &'f String>) -> Result<(), CheckpointError> {
        match &self.0 {
            Kind::Local(_) => {
                drop(files);
                Ok(())
            }
            #[cfg(feature = "object-store")]
            Kind::Object(object) => object.check_files(files),
        }
    }

    /// Writes the last file, without which the checkpoint is none, and puts it all in the target's place. All other
    /// files must be finished.
    ///
    /// # Errors
    /// What the storage says. [`CheckpointError::Exists`]: another save to the same target was faster.
    /// [`CheckpointError::CommitUnknown`]: the object store does not say whether it was done.
    pub fn commit(self, last: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        match self.0 {
            Kind::Local(local) => local.write(last, bytes).and_then(|()| local.commit()),
            #[cfg(feature = "object-store")]
            Kind::Object(object) => object.commit(last, bytes),
        }
    }

    /// For formats of one file: puts the finished file of [`Staging::create_single`] in the target's place, and another
    /// beside it.
    ///
    /// The target's own step is the commit: before it, the target and what lies beside it are as they were; after it, what
    /// belongs beside it is there under one of its two names.
    ///
    /// # Errors
    /// As [`Staging::commit`].
    pub fn commit_single(self, beside: Option<Beside<'_>>) -> Result<(), CheckpointError> {
        match self.0 {
            Kind::Local(local) => local.commit_file(SINGLE, beside),
            #[cfg(feature = "object-store")]
            Kind::Object(object) => object.commit_single(beside),
        }
    }
}

impl StagedFile {
    /// How many of so many threads should write it: who uploads holds parts in memory, and mostly waits.
    pub(crate) fn writers(&self, threads: usize) -> usize {
        match &self.0 {
            FileKind::Local(_) => threads,
            #[cfg(feature = "object-store")]
            FileKind::Object(_) => threads.min(WRITERS),
        }
    }

    /// Writes bytes at a position; threads may do so at once. Writing beyond the planned length is an error.
    ///
    /// # Errors
    /// What the storage says.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), CheckpointError> {
        match &self.0 {
            FileKind::Local(file) => file.write_at(offset, bytes),
            #[cfg(feature = "object-store")]
            FileKind::Object(upload) => upload.write_at(offset, bytes),
        }
    }

    /// Makes the file durable.
    ///
    /// # Errors
    /// What the storage says.
    pub fn finish(self) -> Result<(), CheckpointError> {
        match self.0 {
            FileKind::Local(file) => file.finish(),
            #[cfg(feature = "object-store")]
            FileKind::Object(upload) => upload.finish(),
        }
    }
}
