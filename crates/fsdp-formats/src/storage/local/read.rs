//! Reading local files. Files outside of the directory, and files that are not regular, are
//! refused.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::error::FileError;
use crate::storage::backend::{Links, ReadDirectory};
use crate::storage::file_system::{FileSystem, LockKind, OpenDirectory, OpenError};
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
    directory: Box<dyn OpenDirectory>,
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
        let (held, to) = (files.clone(), path.to_owned());
        for _ in 0..LOCK_ATTEMPTS {
            let directory = open_directory(&**files, path)?;
            match directory.try_lock(LockKind::Shared) {
                // The directory was locked before anybody replaced it: from here on it stays.
                Ok(true) if is_at(&**files, &*directory, path) => {
                    return Ok(LocalDirectory {
                        files: held,
                        path: to,
                        directory,
                        links,
                    });
                }
                // The directory was replaced between opening and locking, or somebody is just
                // publishing or removing it. A moment later there is a checkpoint that stays at the
                // path, or nothing.
                Ok(_) => {
                    drop(directory);
                    files.pause(LOCK_PAUSE);
                }
                // Locks do not work here.
                Err(_) => break,
            }
        }
        // Reading without a lock goes on as far as it can.
        let directory = open_directory(&**files, path)?;
        Ok(LocalDirectory {
            files: held,
            path: to,
            directory,
            links,
        })
    }
}

fn open_directory(
    files: &dyn FileSystem,
    path: &Path,
) -> Result<Box<dyn OpenDirectory>, FileError> {
    files
        .open_directory(path)
        .map_err(FileError::io("open the directory", path))
}

/// Returns `true` if an open directory is the one that is at this path.
fn is_at(files: &dyn FileSystem, directory: &dyn OpenDirectory, path: &Path) -> bool {
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
                OpenError::Io(error) => FileError::io("open", self.path.join(relative))(error),
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
    let list = files.list(path).map_err(FileError::io("list", path))?;
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
    let list = files.list(path).map_err(FileError::io("list", path))?;
    let names = list
        .into_iter()
        .filter_map(|(name, _)| name.into_string().err());
    let mut names: Vec<String> = names
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    names.sort();
    Ok(names)
}
