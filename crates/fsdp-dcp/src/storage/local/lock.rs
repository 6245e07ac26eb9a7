//! A lock over a target, for saves that take several steps to replace it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::error::FileError;
use crate::storage::fs::staging_prefix;

/// The lock of a target: a file beside it, `.NAME.lock`, which goes with the lock. That of a killed process stays, and is
/// taken over by the next one.
#[derive(Debug)]
pub(super) struct TargetLock {
    path: PathBuf,
    /// Holds the lock until it is closed.
    _file: File,
}

impl TargetLock {
    /// Waits until no other process holds the lock of this target, and takes it.
    ///
    /// Where the file system has no locks, there is none to wait for.
    pub(super) fn wait(target: &Path) -> Result<Self, FileError> {
        let (parent, prefix) = staging_prefix(target)?;
        let path = parent.join(format!("{prefix}lock"));
        loop {
            let opened = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
            let file = opened.map_err(FileError::io("create", &path))?;
            let locked = rustix::fs::flock(&file, FlockOperation::LockExclusive);
            // Whoever held it before may have removed the file meanwhile: a lock on it would keep nobody away.
            if locked.is_err() || is_at(&file, &path).map_err(FileError::io("inspect", &path))? {
                return Ok(TargetLock { path, _file: file });
            }
        }
    }
}

impl Drop for TargetLock {
    fn drop(&mut self) {
        // Removed before the file is closed, and with it the lock. Best effort: the next one takes over what stays.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Returns `true` if the file is the one at this path.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    match path.symlink_metadata() {
        Ok(there) => Ok((there.dev(), there.ino()) == (own.dev(), own.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
