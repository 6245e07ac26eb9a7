//! Reading local files. Files outside of the directory, and files that are not regular, are
//! refused.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::error::FileError;
use crate::storage::backend::{Links, ReadDirectory};
use crate::storage::file_system::{FileSystem, LockKind, OpenEntry, OpenError};
use crate::storage::paths::relative_parts;
use crate::storage::read_at::ReadAt;

/// The number of attempts to lock a directory, and the time between two of them. A directory is
/// locked against readers for as long as it takes to publish it or to remove it.
const LOCK_ATTEMPTS: u32 = 40;
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// A directory that is held open: files are opened below it, wherever it is moved meanwhile.
#[derive(Debug)]
pub(super) struct LocalDirectory {
    files: Arc<dyn FileSystem>,
    path: PathBuf,
    directory: Box<dyn OpenEntry>,
    links: Links,
}

impl LocalDirectory {
    /// Opens a directory, and locks it: whoever removes or replaces checkpoints leaves alone those
    /// that are being read.
    pub(super) fn open(
        files: &Arc<dyn FileSystem>,
        path: &Path,
        links: Links,
    ) -> Result<Self, FileError> {
        let mut attempts = 0;
        let directory = loop {
            let directory = files
                .open_directory(path)
                .map_err(|error| FileError::io("open the directory", path, error))?;
            if attempts == LOCK_ATTEMPTS {
                break directory;
            }
            attempts += 1;
            match directory.try_lock(LockKind::Shared) {
                // The directory was locked before anybody replaced it: from here on it stays.
                Ok(true) if is_at(&**files, &*directory, path) => break directory,
                // The directory was replaced between opening and locking, or somebody is just
                // publishing or removing it. A moment later there is a checkpoint that stays at the
                // path, or nothing.
                Ok(_) => {
                    drop(directory);
                    files.pause(LOCK_PAUSE);
                }
                // Locks do not work here: read without one.
                Err(_) => break directory,
            }
        };
        Ok(LocalDirectory {
            files: files.clone(),
            path: path.to_owned(),
            directory,
            links,
        })
    }
}

/// Returns `true` if an open directory is the one that is at this path.
fn is_at(files: &dyn FileSystem, directory: &dyn OpenEntry, path: &Path) -> bool {
    match (directory.identity(), files.status(path, Links::Follow)) {
        (Ok(open), Ok(there)) => open == there.identity,
        _ => false,
    }
}

impl ReadDirectory for LocalDirectory {
    fn name(&self) -> &Path {
        &self.path
    }

    fn names(&self) -> Result<Vec<String>, FileError> {
        names(&*self.files, &self.path)
    }

    fn names_not_utf8(&self) -> Result<Vec<String>, FileError> {
        names_not_utf8(&*self.files, &self.path)
    }

    /// Opens a regular file below the directory. Unless links are followed, no part of the path may
    /// be one.
    fn file(&self, relative: &str) -> Result<Box<dyn ReadAt>, FileError> {
        let parts = relative_parts(&self.path, relative)?;
        self.directory
            .file(&parts, self.links)
            .map_err(|error| match error {
                OpenError::Refused(reason) => FileError::Path {
                    root: self.path.clone(),
                    path: relative.to_owned(),
                    reason,
                },
                OpenError::Io(error) => FileError::io("open", self.path.join(relative), error),
            })
    }

    fn threads_per_reader(&self) -> usize {
        1
    }

    fn bytes_per_read(&self) -> u64 {
        // Small enough to be in the cache of one core still, with the bytes that it was copied
        // from, when it is hashed.
        256 << 10
    }
}

/// Returns the names of the entries of a directory, sorted; those that are not UTF-8 are left out.
pub(super) fn names(files: &dyn FileSystem, path: &Path) -> Result<Vec<String>, FileError> {
    let list = files
        .list(path)
        .map_err(|error| FileError::io("list", path, error))?;
    let mut names: Vec<String> = list
        .into_iter()
        .filter_map(|(name, _)| name.into_string().ok())
        .collect();
    names.sort();
    Ok(names)
}

/// Returns the names that [`names`] leaves out, sorted. What is not UTF-8 in them is replaced.
pub(super) fn names_not_utf8(
    files: &dyn FileSystem,
    path: &Path,
) -> Result<Vec<String>, FileError> {
    let list = files
        .list(path)
        .map_err(|error| FileError::io("list", path, error))?;
    let mut names: Vec<String> = list
        .into_iter()
        .filter_map(|(name, _)| name.into_string().err())
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    names.sort();
    Ok(names)
}
