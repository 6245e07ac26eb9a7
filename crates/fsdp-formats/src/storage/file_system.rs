//! The operations of a file system that checkpoints need: those of the operating system, or those
//! of a test.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::Path;
use std::time::Duration;

use super::read_at::ReadAt;

/// A file system: what holds the directories and files of checkpoints.
///
/// Usually this is the file system of the operating system. A test can use its own, for example one
/// that loses what was not synced.
pub trait FileSystem: fmt::Debug + Send + Sync {
    /// Returns what is at a path. With [`Links::Refuse`] a symbolic link is not followed.
    fn status(&self, path: &Path, links: Links) -> io::Result<Status>;

    /// Returns the names and kinds of the entries of a directory, in any order.
    fn list(&self, path: &Path) -> io::Result<Vec<(OsString, EntryKind)>>;

    /// Creates a directory, whose parent must exist.
    fn create_directory(&self, path: &Path) -> io::Result<()>;

    /// Creates a file, which must not exist, to be written.
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn NewFile>>;

    /// Opens a directory, following links.
    fn open_directory(&self, path: &Path) -> io::Result<Box<dyn OpenEntry>>;

    /// Opens an empty file that serves as a lock; it is created if it is not there.
    fn open_lock(&self, path: &Path) -> io::Result<Box<dyn OpenEntry>>;

    /// Makes the names in a directory durable.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;

    /// Sets the permissions of a file or directory.
    fn set_permissions(&self, path: &Path, mode: u32) -> io::Result<()>;

    /// Renames to a place where nothing is; if something is there, nothing changes.
    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Renames a file over whatever file is there.
    fn rename_over(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Lets two paths change places, or returns the error of an operation that is not supported.
    fn exchange(&self, first: &Path, second: &Path) -> io::Result<()>;

    /// Gives a file one more name.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes a directory with all that it holds.
    fn remove_directory(&self, path: &Path) -> io::Result<()>;

    /// Waits before the next attempt at something that another process is busy with.
    fn pause(&self, pause: Duration);

    /// Returns a number unlike those of other processes and times.
    fn nonce(&self) -> u64;

    /// Returns `true` if anything, a dangling link included, is at this path.
    fn exists(&self, path: &Path) -> bool {
        self.status(path, Links::Refuse).is_ok()
    }

    /// Returns `true` if a directory, or a link to one, is at this path.
    fn is_directory(&self, path: &Path) -> bool {
        self.status(path, Links::Follow)
            .is_ok_and(|status| status.kind == EntryKind::Directory)
    }
}

/// The kind of an entry of a directory, or of a prefix in an object store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file, or an object.
    File,
    /// A directory, or a prefix that other objects share.
    Directory,
    /// Anything else: a device, a pipe, a socket.
    Special,
}

/// The treatment of symbolic links below a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// They are errors: the names come from a file that may be hostile.
    Refuse,
    /// They are followed: the names come from the user, or from the directory itself (Hugging
    /// Face's cache is made of links).
    Follow,
}

/// The facts about an entry of a [`FileSystem`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// The kind of the entry.
    pub kind: EntryKind,
    /// The numbers by which the file system knows it, under whatever name.
    pub identity: Identity,
    /// The permissions.
    pub mode: u32,
}

/// The numbers by which a file system knows a file or directory: of the device, and of the entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity(pub u64, pub u64);

/// A file that is being written.
pub trait NewFile: fmt::Debug + Send + Sync {
    /// Gives the file its full length, so that a full disk is found before the writing.
    fn allocate(&self, length: u64) -> io::Result<()>;

    /// Writes bytes at a position. Several threads may do so at once.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes the file's content durable.
    fn sync(&self) -> io::Result<()>;
}

/// The kind of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// The lock of readers, of which many may hold one at the same time.
    Shared,
    /// The lock that nobody else may hold at the same time.
    Exclusive,
}

/// A directory that is held open, wherever it is moved meanwhile, or a file that serves as a lock.
/// A lock on it is held until it is dropped.
pub trait OpenEntry: fmt::Debug + Send + Sync {
    /// Takes the lock. Returns `false` if somebody else holds it. An error says that locks do not
    /// work here.
    fn try_lock(&self, kind: LockKind) -> io::Result<bool>;

    /// Waits until nobody else holds the lock, and takes it alone. An error says that locks do not
    /// work here.
    fn lock(&self) -> io::Result<()>;

    /// Returns the numbers by which the file system knows it.
    fn identity(&self) -> io::Result<Identity>;

    /// Opens a regular file below the directory, by the parts of its path, none of which leads
    /// upwards.
    fn file(&self, parts: &[&str], links: Links) -> Result<Box<dyn ReadAt>, OpenError>;
}

/// The reason why a file below a directory was not opened.
#[derive(Debug)]
pub enum OpenError {
    /// The path is not one to be followed.
    Refused(&'static str),
    /// The error of the system.
    Io(io::Error),
}
