//! Checkpoints in the file system.

mod leftovers;
mod lock;
mod read;
mod staging;
mod tree;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use self::leftovers::{is_being_read, new_staging_name};
use self::read::LocalDirectory;
use self::staging::LocalStage;
use super::backend::{EntryKind, Links, ReadDirectory, Stage, Storage, UnusableUrl};
use super::file_system::{FileSystem, Status};
use super::fs::{Durable, parent_of, staging_path};
use super::os::OperatingSystem;
use crate::error::{FileError, IoOutcome as _};

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

    /// Returns what is at the path; `None` if there is nothing.
    fn status(&self, links: Links) -> Result<Option<Status>, FileError> {
        match self
            .files
            .status(&self.path, links)
            .during("inspect", &self.path)
        {
            // A path that cannot be looked at may well have a checkpoint: that stays an error.
            Err(error) if error.is_absence() => Ok(None),
            status => status.map(Some),
        }
    }
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
        Ok(self.status(Links::Refuse)?.is_some())
    }

    fn kind(&self) -> Result<Option<EntryKind>, FileError> {
        Ok(self.status(Links::Follow)?.map(|status| status.kind))
    }

    fn names(&self) -> Result<Vec<String>, FileError> {
        Ok(read::list_names(&*self.files, &self.path)?.0)
    }

    fn files(&self) -> Result<Vec<String>, FileError> {
        tree::list_files(&*self.files, &self.path)
    }

    fn open(&self, links: Links) -> Result<Box<dyn ReadDirectory>, FileError> {
        let directory = LocalDirectory::open(&self.files, &self.path, links)?;
        Ok(Box::new(directory))
    }

    fn check_target(&self) -> Result<(), FileError> {
        // With a slash at its end the path would be that of what a link leads to. It is the link
        // that would be replaced.
        let path = self.path.components().as_path();
        let found = match self.files.status(path, Links::Refuse) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::InvalidFilename => {
                return Err(error).during("write to", &self.path);
            }
            // Nothing is there; or it is not known what is, which whoever uses the place tells.
            Err(_) => return Ok(()),
        };
        if found.kind != EntryKind::Special {
            return Ok(());
        }
        let what = match self.files.status(path, Links::Follow) {
            Ok(behind) if behind.kind == EntryKind::Special => "a device, a pipe or a socket",
            // It leads to a file or a directory, or nowhere.
            _ => "a symbolic link",
        };
        Err(FileError::Irreplaceable {
            path: self.path.clone(),
            what,
        })
    }

    fn prepare(&self, durable: &Durable, overwrite: bool) -> Result<Box<dyn Stage>, FileError> {
        self.check_target()?;
        let durable = durable.within(&self.files);
        let stage = LocalStage::prepare(&durable, &self.path, overwrite)?;
        Ok(Box::new(stage))
    }

    fn join(&self, durable: &Durable, name: &str) -> Result<Box<dyn Stage>, FileError> {
        let durable = durable.within(&self.files);
        Ok(Box::new(LocalStage::join(&durable, &self.path, name)?))
    }

    fn remove_checkpoint(&self, durable: &Durable) -> Result<bool, FileError> {
        let durable = durable.within(&self.files);
        let directory = self
            .files
            .open_directory(&self.path)
            .during("open", &self.path)?;
        // Readers hold a shared lock for as long as they have the checkpoint open.
        if is_being_read(&*directory) {
            return Ok(false);
        }
        // Once the checkpoint is gone, an old version beside it would count as what a crash has
        // left, and be put back.
        self.clean_stale(&durable)?;
        if !leftovers::list_leftovers(&*self.files, &self.path, "old")?.is_empty() {
            return Ok(false);
        }
        // Removing takes many steps. One rename takes the checkpoint away first, to a name that
        // `list_stale` lists, so that a crash in the middle leaves nothing that looks like a
        // checkpoint.
        let doomed = staging_path(&self.path, &new_staging_name(&*self.files))?;
        durable.rename_new(&self.path, &doomed)?;
        durable.sync_directory(parent_of(&self.path))?;
        durable.remove_directory(&doomed)?;
        Ok(true)
    }

    fn list_stale(&self) -> Result<Vec<PathBuf>, FileError> {
        leftovers::list_stale(&*self.files, &self.path)
    }

    fn clean_stale(&self, durable: &Durable) -> Result<Vec<PathBuf>, FileError> {
        let durable = durable.within(&self.files);
        let mut removed = Vec::new();
        for path in self.list_stale()? {
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
}
