//! A lock over a file, for saves that take several steps to replace it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{FileError, IoOutcome as _};
use crate::storage::backend::Links;
use crate::storage::file_system::{FileSystem, OpenEntry};
use crate::storage::fs::staging_path;

/// The lock of a file: another file beside it, `.NAME.lock`, which goes with the lock. That of a
/// killed process stays, and is taken over by the next one.
#[derive(Debug)]
pub(super) struct FileLock {
    files: Arc<dyn FileSystem>,
    path: PathBuf,
    /// Holds the lock until it is closed.
    _file: Box<dyn OpenEntry>,
}

impl FileLock {
    /// Waits until no other process holds the lock of the file at this path, and takes it. The file
    /// need not exist.
    ///
    /// Where the file system has no locks, there is none to wait for.
    pub(super) fn wait(files: &Arc<dyn FileSystem>, target: &Path) -> Result<Self, FileError> {
        let path = staging_path(target, "lock")?;
        loop {
            let file = files.open_lock(&path).during("create", &path)?;
            let locked = file.lock();
            // The last holder may have removed the file meanwhile, and a lock on a removed file
            // keeps nobody away.
            if locked.is_err() || is_at(&**files, &*file, &path).during("inspect", &path)? {
                return Ok(FileLock {
                    files: files.clone(),
                    path,
                    _file: file,
                });
            }
        }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Remove the file before it is closed, which ends the lock. This may fail: the next process
        // takes over a file that is left.
        let _ = self.files.remove_file(&self.path);
    }
}

/// Returns `true` if the file is the one at this path.
fn is_at(files: &dyn FileSystem, file: &dyn OpenEntry, path: &Path) -> io::Result<bool> {
    match files.status(path, Links::Refuse) {
        Ok(there) => Ok(there.identity == file.identity()?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
