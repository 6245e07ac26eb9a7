//! Checkpoints in the file system.

pub(crate) mod leftovers;
mod lock;
mod read;
mod staging;
mod tree;

use std::any::Any;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use self::leftovers::is_being_read;
use self::read::LocalDirectory;
use self::staging::LocalStage;
use super::backend::{EntryKind, Links, ReadDirectory, Stage, Storage};
use super::fs::{Durable, exists, nonce, parent_of, staging_prefix};
use crate::error::FileError;

/// A path in the file system.
#[derive(Debug, Clone)]
pub(crate) struct LocalStorage {
    path: PathBuf,
}

impl LocalStorage {
    pub(crate) fn new(path: PathBuf) -> Self {
        LocalStorage { path }
    }
}

impl Storage for LocalStorage {
    fn name(&self) -> &Path {
        &self.path
    }

    fn local(&self) -> Option<&Path> {
        Some(&self.path)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn child(&self, below: &str) -> Arc<dyn Storage> {
        Arc::new(LocalStorage { path: self.path.join(below) })
    }

    fn parent(&self) -> Arc<dyn Storage> {
        Arc::new(LocalStorage { path: parent_of(&self.path).to_owned() })
    }

    fn exists(&self) -> Result<bool, FileError> {
        Ok(exists(&self.path))
    }

    fn kind(&self) -> Result<Option<EntryKind>, FileError> {
        match self.path.metadata() {
            Ok(metadata) if metadata.is_dir() => Ok(Some(EntryKind::Directory)),
            Ok(metadata) if metadata.is_file() => Ok(Some(EntryKind::File)),
            Ok(_) => Ok(Some(EntryKind::Special)),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
            Err(error) => Err(FileError::io("inspect", &self.path)(error)),
        }
    }

    fn names(&self) -> Result<Vec<String>, FileError> {
        read::names(&self.path)
    }

    fn tree(&self) -> Result<Vec<String>, FileError> {
        tree::tree(&self.path)
    }

    fn open(&self, links: Links) -> Result<Box<dyn ReadDirectory>, FileError> {
        Ok(Box::new(LocalDirectory::open(&self.path, links)?))
    }

    fn prepare(&self, durable: &Durable, overwrite: bool) -> Result<Box<dyn Stage>, FileError> {
        Ok(Box::new(LocalStage::prepare(durable, &self.path, overwrite)?))
    }

    fn join(&self, durable: &Durable, name: &str) -> Result<Box<dyn Stage>, FileError> {
        Ok(Box::new(LocalStage::join(durable, &self.path, name)?))
    }

    fn remove_checkpoint(&self, durable: &Durable) -> Result<bool, FileError> {
        let directory = File::open(&self.path).map_err(FileError::io("open", &self.path))?;
        // Readers hold a shared lock for as long as they have the checkpoint open.
        if is_being_read(&directory) {
            return Ok(false);
        }
        // Removing takes many steps. One rename takes the checkpoint away first, to a name that `stale` lists, so that a
        // crash in the middle leaves nothing that looks like a checkpoint.
        let (parent, prefix) = staging_prefix(&self.path)?;
        let doomed = parent.join(format!("{prefix}tmp-{:016x}", nonce()));
        durable.rename_new(&self.path, &doomed)?;
        durable.sync_directory(&parent)?;
        durable.remove_directory(&doomed)?;
        Ok(true)
    }

    fn remove_uncommitted(&self) -> Result<bool, FileError> {
        // Leftovers of directories lie beside them; `clean_stale` removes those.
        Ok(false)
    }
}
