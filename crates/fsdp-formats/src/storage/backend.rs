//! The traits that each kind of storage implements: [`Storage`] for a place, [`ReadDirectory`] to
//! read it, and [`Stage`] to write a checkpoint that will be committed there.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) use super::file_system::{EntryKind, Links};
use super::fs::Durable;
use super::read_at::ReadAt;
use super::sidecar::Sidecar;
use crate::error::{FileError, IoOutcome as _, LocationError};

/// A place where a checkpoint, or a directory of checkpoints, can be.
///
/// Making one opens and checks nothing.
pub(crate) trait Storage: Send + Sync {
    /// Returns its name for messages: a path, or a URL without anything secret in it.
    fn name(&self) -> &Path;

    /// Returns the path, if this is a place in the file system.
    fn local(&self) -> Option<&Path> {
        None
    }

    /// Returns itself, if this is a place in an object store.
    #[cfg(feature = "object-store")]
    fn as_object_storage(&self) -> Option<&super::object::address::ObjectStorage> {
        None
    }

    /// Returns the place below this one that has this name; an error where no place can have it.
    fn child(&self, below: &str) -> Result<Arc<dyn Storage>, UnusableUrl>;

    /// Returns the directory or prefix that this place lies in.
    fn parent(&self) -> Arc<dyn Storage>;

    /// Returns `true` if anything is here, a dangling link included.
    fn exists(&self) -> Result<bool, FileError> {
        Ok(self.kind()?.is_some())
    }

    /// Returns the kind of the entry that is here; `None` if there is nothing.
    fn kind(&self) -> Result<Option<EntryKind>, FileError>;

    /// Returns the names of the entries directly below, sorted. Names that are not UTF-8 are left
    /// out.
    fn names(&self) -> Result<Vec<String>, FileError>;

    /// Returns the paths of all files below, at any depth, sorted.
    ///
    /// # Errors
    /// Links, devices and names that are not UTF-8.
    fn files(&self) -> Result<Vec<String>, FileError>;

    /// Opens it as a directory of files to read.
    fn open(&self, links: Links) -> Result<Box<dyn ReadDirectory>, FileError>;

    /// Checks that what is written here can get this name, and that nothing is here that is never
    /// replaced: neither a file nor a directory.
    fn check_target(&self) -> Result<(), FileError> {
        Ok(())
    }

    /// Begins a checkpoint that will be committed here.
    fn prepare(&self, durable: &Durable, overwrite: bool) -> Result<Box<dyn Stage>, FileError>;

    /// Returns what another rank prepared for this place under the name that [`Stage::name`] gave
    /// it.
    fn join(&self, durable: &Durable, name: &str) -> Result<Box<dyn Stage>, FileError>;

    /// Removes the checkpoint that is here. Returns `false`, and removes nothing, if it is known to
    /// be read.
    fn remove_checkpoint(&self, durable: &Durable) -> Result<bool, FileError>;

    /// Removes the objects of a save that was never committed. Returns `true` if there were any.
    /// Leftovers of directories lie beside them: [`Storage::clean_stale`] removes those.
    fn remove_uncommitted(&self) -> Result<bool, FileError> {
        Ok(false)
    }

    /// Returns the paths of what crashed saves to this place left beside it.
    fn list_stale(&self) -> Result<Vec<PathBuf>, FileError> {
        Ok(Vec::new())
    }

    /// Removes what [`Storage::list_stale`] lists, and returns that list.
    fn clean_stale(&self, durable: &Durable) -> Result<Vec<PathBuf>, FileError> {
        let _ = durable;
        Ok(Vec::new())
    }
}

/// A directory or a prefix whose files are being read.
pub(crate) trait ReadDirectory: fmt::Debug + Send + Sync {
    /// Returns its name for messages.
    fn name(&self) -> &Path;

    /// Returns the names of the entries directly in it, sorted. Names that are not UTF-8 are left
    /// out.
    fn names(&self) -> Result<Vec<String>, FileError>;

    /// Returns the names that [`ReadDirectory::names`] leaves out, sorted, as messages show them.
    fn names_not_utf8(&self) -> Result<Vec<String>, FileError> {
        Ok(Vec::new())
    }

    /// Opens a regular file or an object. A path that leads out of the directory is an error.
    fn file(&self, relative: &str) -> Result<Box<dyn ReadAt>, FileError>;

    /// Returns `true` if its files are objects of an object store.
    fn is_object_store(&self) -> bool {
        false
    }

    /// Returns the number of threads that should read in place of each thread that would be enough
    /// for a disk.
    fn threads_per_reader(&self) -> usize;

    /// Returns how many bytes to read at once before they are hashed.
    fn bytes_per_read(&self) -> u64;
}

/// A checkpoint that is being written.
///
/// If the stage that [`Storage::prepare`] returned is dropped without a commit, everything that was
/// written is removed.
pub(crate) trait Stage: fmt::Debug + Send + Sync {
    /// Returns the name by which other ranks join it.
    fn name(&self) -> &str;

    /// Returns the name of the target for messages.
    fn target(&self) -> &Path;

    /// Returns the directory or prefix in which files are written before the commit.
    fn directory(&self) -> &Path;

    /// Returns the suffix that distinguishes this save's files from those of others, if all are
    /// written to the same place.
    fn suffix(&self) -> Option<&str> {
        None
    }

    /// Makes sure that no other save to this target writes files of the same names. There is
    /// nothing to do where every save has a directory of its own.
    fn claim(&self) -> Result<(), FileError> {
        Ok(())
    }

    /// Creates a file of this length. Subdirectories in `relative` are created.
    fn create(&self, relative: &str, length: u64) -> Result<Box<dyn StagedFile>, FileError>;

    /// Writes a small file whole, and makes it durable.
    fn write(&self, relative: &str, bytes: &[u8]) -> Result<(), FileError> {
        let file = self.create(relative, bytes.len() as u64)?;
        file.write_at(0, bytes)?;
        file.finish()
    }

    /// Adds a finished file of another checkpoint to this one, under the name `as_name`, without
    /// moving its bytes through this process. Returns `false` if the storage cannot do that.
    fn link(&self, from: &dyn Storage, name: &str, as_name: &str) -> Result<bool, FileError>;

    /// Creates the file of a checkpoint that is one file.
    fn create_single(&self, length: u64) -> Result<Box<dyn StagedFile>, FileError>;

    /// Returns `true` if nothing is at the target, or something that an entry of this kind
    /// replaces: files replace files, and directories replace directories.
    fn may_be_replaced_by(&self, wanted: EntryKind) -> Result<bool, FileError>;

    /// Checks that no file of this name lies beside the target, unless that may be overwritten.
    fn check_sidecar(&self, name: &str) -> Result<(), FileError>;

    /// Removes a file beside the target, if it is there.
    fn remove_sidecar(&self, name: &str) -> Result<(), FileError>;

    /// Checks that all these files, some of which other ranks wrote, are in the directory that will
    /// be committed.
    fn check_files(&self, files: &mut dyn Iterator<Item = &String>) -> Result<(), FileError>;

    /// Writes the commit marker and publishes the checkpoint.
    fn commit(self: Box<Self>, marker: &str, bytes: &[u8]) -> Result<(), FileError>;

    /// Publishes the file of [`Stage::create_single`], and another one beside it.
    fn commit_single(self: Box<Self>, sidecar: Option<Sidecar<'_>>) -> Result<(), FileError>;
}

/// A file of a checkpoint that is being written, of a length known beforehand.
pub trait StagedFile: fmt::Debug + Send + Sync {
    /// Returns how many of `threads` threads should write it: an upload holds parts in memory for
    /// each.
    fn writers(&self, threads: usize) -> usize {
        threads
    }

    /// Writes bytes at a position. Several threads may do so at once. Writing beyond the planned
    /// length is an error.
    ///
    /// # Errors
    /// The errors of the storage.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), FileError>;

    /// Makes the file durable.
    ///
    /// # Errors
    /// The errors of the storage.
    fn finish(self: Box<Self>) -> Result<(), FileError>;
}

/// Refuses a write that reaches beyond the planned length of a file.
pub(crate) fn check_write(
    path: &Path,
    length: u64,
    offset: u64,
    bytes: &[u8],
) -> Result<(), FileError> {
    if offset
        .checked_add(bytes.len() as u64)
        .is_some_and(|end| end <= length)
    {
        return Ok(());
    }
    Err(std::io::Error::other(
        "the write reaches beyond the planned length",
    ))
    .during("write", path)
}

/// A URL that cannot be used, and the reason.
#[derive(Debug, Clone)]
pub(crate) struct UnusableUrl {
    /// The URL, without parts that may be secret.
    pub(crate) name: PathBuf,
    pub(crate) reason: LocationError,
}
