//! Reading local files: none outside the directory, none that is not regular.

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use crate::error::{FileError, FormatError};
use crate::storage::backend::{Links, ReadDirectory};
use crate::storage::paths::relative_parts;
use crate::storage::read_at::ReadAt;

/// The number of attempts to lock a directory, and the time between two of them. A directory is locked against readers
/// for as long as it takes to publish it or to remove it.
const LOCK_ATTEMPTS: u32 = 40;
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// A directory that is held open: files are opened below it, wherever it is moved meanwhile.
#[derive(Debug)]
pub(super) struct LocalDirectory {
    path: PathBuf,
    directory: OwnedFd,
    links: Links,
}

impl LocalDirectory {
    /// Opens a directory, and locks it: whoever removes or replaces checkpoints leaves alone those that are being read.
    pub(super) fn open(path: &Path, links: Links) -> Result<Self, FileError> {
        for _ in 0..LOCK_ATTEMPTS {
            let directory = open_directory(path)?;
            let locked = rustix::fs::flock(&directory, FlockOperation::NonBlockingLockShared);
            match locked {
                // It was locked before it could be replaced.
                Ok(()) if is_at(&directory, path) => {
                    return Ok(LocalDirectory { path: path.to_owned(), directory, links });
                }
                // It was replaced between opening and locking, or somebody is just publishing or removing it. What is at
                // the path a moment later is a checkpoint that stays, or nothing.
                Ok(()) | Err(Errno::WOULDBLOCK) => {
                    drop(directory);
                    thread::sleep(LOCK_PAUSE);
                }
                // Locks do not work here.
                Err(_) => break,
            }
        }
        // Reading without a lock goes on as far as it can.
        Ok(LocalDirectory { path: path.to_owned(), directory: open_directory(path)?, links })
    }

    /// Opens a regular file below the directory. Unless links are followed, no part of the path may be one.
    fn open_regular(&self, relative: &str) -> Result<File, FileError> {
        let parts = relative_parts(&self.path, relative)?;
        let follow = match self.links {
            Links::Follow => OFlags::empty(),
            Links::Refuse => OFlags::NOFOLLOW,
        };
        // One part at a time, each below the one before it: so no link is followed on the way.
        let mut below: Option<OwnedFd> = None;
        for part in &parts[..parts.len() - 1] {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | follow;
            let at = below.as_ref().unwrap_or(&self.directory);
            let next = rustix::fs::openat(at, *part, flags, Mode::empty());
            below = Some(next.map_err(|errno| match errno {
                // A link, or a file, where a directory must be.
                Errno::NOTDIR => self.refused(relative, "it leads through something that is no directory"),
                errno => self.failed(relative, errno),
            })?);
        }
        // NONBLOCK: opening a FIFO must not wait for a writer.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | follow;
        let at = below.as_ref().unwrap_or(&self.directory);
        let file = rustix::fs::openat(at, parts[parts.len() - 1], flags, Mode::empty())
            .map_err(|errno| self.failed(relative, errno))?;
        let stat = rustix::fs::fstat(&file).map_err(|errno| self.failed(relative, errno))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(self.refused(relative, "it is no regular file"));
        }
        Ok(File::from(file))
    }

    fn refused(&self, relative: &str, reason: &'static str) -> FileError {
        FileError::Path { root: self.path.clone(), path: relative.to_owned(), reason }
    }

    fn failed(&self, relative: &str, errno: Errno) -> FileError {
        if errno == Errno::LOOP && self.links == Links::Refuse {
            return self.refused(relative, "a symbolic link is on the way; `cp -rL` makes a copy without links");
        }
        FileError::io("open", self.path.join(relative))(errno.into())
    }
}

fn open_directory(path: &Path) -> Result<OwnedFd, FileError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
        .map_err(|errno| FileError::io("open the directory", path)(errno.into()))
}

/// Returns `true` if an open directory is the one that is at this path.
fn is_at(directory: &OwnedFd, path: &Path) -> bool {
    match (rustix::fs::fstat(directory), rustix::fs::stat(path)) {
        (Ok(open), Ok(there)) => (open.st_dev, open.st_ino) == (there.st_dev, there.st_ino),
        _ => false,
    }
}

impl ReadDirectory for LocalDirectory {
    fn name(&self) -> &Path {
        &self.path
    }

    fn names(&self) -> Result<Vec<String>, FileError> {
        names(&self.path)
    }

    fn file(&self, relative: &str) -> Result<Box<dyn ReadAt>, FileError> {
        let file = self.open_regular(relative)?;
        let length = file.metadata().map_err(FileError::io("inspect", self.path.join(relative)))?.len();
        Ok(Box::new(LocalFile { file, length }))
    }

    fn threads_per_reader(&self) -> usize {
        1
    }

    fn bytes_per_read(&self) -> u64 {
        // What fits a processor's cache, so that hashing does not fetch it again.
        1 << 20
    }
}

/// An open file and its length.
#[derive(Debug)]
struct LocalFile {
    file: File,
    length: u64,
}

impl ReadAt for LocalFile {
    fn len(&self) -> u64 {
        self.length
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        let length = dst.len() as u64;
        self.file.read_exact_at(dst, offset).map_err(|source| FormatError::Read { offset, length, source })
    }

    fn has_hole(&self, range: Range<u64>) -> bool {
        // The position of the file, which this moves, is not used otherwise. There is a hole at the end of every file.
        rustix::fs::seek(&self.file, SeekFrom::Hole(range.start)).is_ok_and(|hole| hole < range.end)
    }
}

/// Returns the names of the entries of a directory, sorted; those that are not UTF-8 are left out.
pub(super) fn names(path: &Path) -> Result<Vec<String>, FileError> {
    let list = std::fs::read_dir(path).map_err(FileError::io("list", path))?;
    let mut names = Vec::new();
    for entry in list {
        let entry = entry.map_err(FileError::io("list", path))?;
        names.extend(entry.file_name().into_string().ok());
    }
    names.sort();
    Ok(names)
}
