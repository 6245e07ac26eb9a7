//! Reading local files. Files outside of the directory, and files that are not regular, are
//! refused.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::error::{FileError, IoOutcome as _};
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
                .during("open the directory", path)?;
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
        Ok(list_names(&*self.files, &self.path)?.0)
    }

    fn names_not_utf8(&self) -> Result<Vec<String>, FileError> {
        Ok(list_names(&*self.files, &self.path)?.1)
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

/// Returns the names of the entries of a directory, sorted. The second list has those that are not
/// UTF-8, as messages show them.
pub(super) fn list_names(
    files: &dyn FileSystem,
    path: &Path,
) -> Result<(Vec<String>, Vec<String>), FileError> {
    let mut names = Vec::new();
    let mut not_utf8 = Vec::new();
    for (name, _) in files.list(path).during("list", path)? {
        match name.into_string() {
            Ok(name) => names.push(name),
            Err(name) => not_utf8.push(name.to_string_lossy().into_owned()),
        }
    }
    names.sort();
    not_utf8.sort();
    Ok((names, not_utf8))
}
