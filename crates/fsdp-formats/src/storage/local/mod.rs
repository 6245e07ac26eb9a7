//! Checkpoints in the file system.

mod leftovers;
mod lock;
mod read;
mod staging;
mod tree;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use self::leftovers::is_being_read;
use self::read::LocalDirectory;
use self::staging::LocalStage;
use super::backend::{EntryKind, Links, ReadDirectory, Stage, Storage, UnusableUrl};
use super::file_system::FileSystem;
use super::fs::{Durable, parent_of, staging_prefix};
use super::os::OperatingSystem;
use crate::error::FileError;

/// A path in a file system.
#[derive(Debug, Clone)]
pub(crate) struct LocalStorage {
    files: Arc<dyn FileSystem>,
    path: PathBuf,
}

impl LocalStorage {
    /// Returns the place of a path in the file system of the operating system.
    pub(crate) fn new(path: PathBuf) -> Self {
        Self::within(Arc::new(OperatingSystem), path)
    }

    /// Returns the place of a path in this file system.
    pub(crate) fn within(files: Arc<dyn FileSystem>, path: PathBuf) -> Self {
        LocalStorage { files, path }
    }
}

/// Returns `true` if an error says that nothing is at a path.
fn is_absence(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

impl Storage for LocalStorage {
    fn name(&self) -> &Path {
        &self.path
    }

    fn local(&self) -> Option<&Path> {
        Some(&self.path)
    }

    fn child(&self, below: &str) -> Result<Arc<dyn Storage>, UnusableUrl> {
        let path = self.path.join(below);
        Ok(Arc::new(Self::within(self.files.clone(), path)))
    }

    fn parent(&self) -> Arc<dyn Storage> {
        let path = parent_of(&self.path).to_owned();
        Arc::new(Self::within(self.files.clone(), path))
    }

    fn exists(&self) -> Result<bool, FileError> {
        match self.files.status(&self.path, Links::Refuse) {
            Ok(_) => Ok(true),
            Err(error) if is_absence(&error) => Ok(false),
            // A path that cannot be looked at may well have a checkpoint.
            Err(error) => Err(FileError::io("inspect", &self.path, error)),
        }
    }

    fn kind(&self) -> Result<Option<EntryKind>, FileError> {
        match self.files.status(&self.path, Links::Follow) {
            Ok(status) => Ok(Some(status.kind)),
            Err(error) if is_absence(&error) => Ok(None),
            Err(error) => Err(FileError::io("inspect", &self.path, error)),
        }
    }

    fn names(&self) -> Result<Vec<String>, FileError> {
        read::names(&*self.files, &self.path)
    }

    fn tree(&self) -> Result<Vec<String>, FileError> {
        tree::tree(&*self.files, &self.path)
    }

    fn open(&self, links: Links) -> Result<Box<dyn ReadDirectory>, FileError> {
        Ok(Box::new(LocalDirectory::open(
            &self.files,
            &self.path,
            links,
        )?))
    }

    fn prepare(&self, durable: &Durable, overwrite: bool) -> Result<Box<dyn Stage>, FileError> {
        Ok(Box::new(LocalStage::prepare(
            &durable.within(&self.files),
            &self.path,
            overwrite,
        )?))
    }

    fn join(&self, durable: &Durable, name: &str) -> Result<Box<dyn Stage>, FileError> {
        Ok(Box::new(LocalStage::join(
            &durable.within(&self.files),
            &self.path,
            name,
        )?))
    }

    fn remove_checkpoint(&self, durable: &Durable) -> Result<bool, FileError> {
        let durable = durable.within(&self.files);
        let directory = self
            .files
            .open_directory(&self.path)
            .map_err(|error| FileError::io("open", &self.path, error))?;
        // Readers hold a shared lock for as long as they have the checkpoint open.
        if is_being_read(&*directory) {
            return Ok(false);
        }
        // Once the checkpoint is gone, an old version beside it would count as what a crash has
        // left, and be put back.
        self.clean_stale(&durable)?;
        if !leftovers::leftovers(&*self.files, &self.path, "old")?.is_empty() {
            return Ok(false);
        }
        // Removing takes many steps. One rename takes the checkpoint away first, to a name that
        // `stale` lists, so that a crash in the middle leaves nothing that looks like a checkpoint.
        let (parent, prefix) = staging_prefix(&self.path)?;
        let doomed = parent.join(format!("{prefix}tmp-{:016x}", self.files.nonce()));
        durable.rename_new(&self.path, &doomed)?;
        durable.sync_directory(&parent)?;
        durable.remove_directory(&doomed)?;
        Ok(true)
    }

    fn stale(&self) -> Result<Vec<PathBuf>, FileError> {
        leftovers::stale(&*self.files, &self.path)
    }

    fn clean_stale(&self, durable: &Durable) -> Result<Vec<PathBuf>, FileError> {
        let durable = durable.within(&self.files);
        let mut removed = Vec::new();
        for path in self.stale()? {
            // The lock is held until the directory is gone, so that a save which has just made it
            // does not go on in it.
            let Some(_lock) = leftovers::lock(&*self.files, &path) else {
                continue;
            };
            durable.remove_directory(&path)?;
            removed.push(path);
        }
        if !removed.is_empty() {
            // Before anything else happens here: an old version that a crash brings back could be
            // taken for the newest.
            durable.sync_directory(parent_of(&self.path))?;
        }
        Ok(removed)
    }

    fn recover(&self, durable: &Durable) -> Result<bool, FileError> {
        leftovers::recover(&durable.within(&self.files), &self.path)
    }
}
