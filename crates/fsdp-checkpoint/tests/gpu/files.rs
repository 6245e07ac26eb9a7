//! A file system that looks at the memory which bytes are written from and read to, and that may be
//! full.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fsdp_checkpoint::Location;
use fsdp_formats::FormatError;
use fsdp_formats::storage::{
    EntryKind, FileSystem, Identity, Links, LockKind, NewFile, OpenEntry, OpenError,
    OperatingSystem, ReadAt, Status,
};

use crate::counts::is_pinned;

/// The error of a disk that is full.
const NO_SPACE: i32 = 28;

/// The bytes that have gone through a file system.
#[derive(Debug)]
struct Flow {
    /// Bytes that were written from pinned memory, and from other memory.
    written: [AtomicU64; 2],
    /// Bytes that were read to pinned memory, and to other memory.
    read: [AtomicU64; 2],
    /// The bytes that can still be written.
    space: AtomicU64,
}

impl Flow {
    fn count(counts: &[AtomicU64; 2], bytes: &[u8]) {
        counts[usize::from(!is_pinned(bytes))].fetch_add(bytes.len() as u64, Ordering::Relaxed);
    }

    /// Takes and returns what was counted.
    fn take(counts: &[AtomicU64; 2]) -> [u64; 2] {
        [0, 1].map(|index| counts[index].swap(0, Ordering::Relaxed))
    }
}

/// The operating system's files. All calls are passed on to it; files that are written or read
/// count their bytes, and writing fails when there is no space left.
#[derive(Debug, Clone)]
pub(crate) struct WatchedFiles(Arc<Flow>);

impl WatchedFiles {
    pub(crate) fn new() -> Self {
        WatchedFiles(Arc::new(Flow {
            written: Default::default(),
            read: Default::default(),
            space: AtomicU64::new(u64::MAX),
        }))
    }

    /// Returns a place among these files.
    pub(crate) fn location(&self, path: &Path) -> Location {
        Location::within(Arc::new(self.clone()), path)
    }

    /// Returns the bytes that were written since the last call, from pinned memory and from other
    /// memory.
    pub(crate) fn take_written(&self) -> [u64; 2] {
        Flow::take(&self.0.written)
    }

    /// Returns the bytes that were read since the last call, to pinned memory and to other memory.
    pub(crate) fn take_read(&self) -> [u64; 2] {
        Flow::take(&self.0.read)
    }

    /// Leaves space for so many bytes.
    pub(crate) fn set_space(&self, bytes: u64) {
        self.0.space.store(bytes, Ordering::Relaxed);
    }
}

impl FileSystem for WatchedFiles {
    fn status(&self, path: &Path, links: Links) -> io::Result<Status> {
        OperatingSystem.status(path, links)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<(OsString, EntryKind)>> {
        OperatingSystem.list(path)
    }

    fn create_directory(&self, path: &Path) -> io::Result<()> {
        OperatingSystem.create_directory(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn NewFile>> {
        Ok(Box::new(WatchedFile {
            file: OperatingSystem.create_file(path)?,
            flow: Arc::clone(&self.0),
        }))
    }

    fn open_directory(&self, path: &Path) -> io::Result<Box<dyn OpenEntry>> {
        Ok(Box::new(WatchedEntry {
            entry: OperatingSystem.open_directory(path)?,
            flow: Arc::clone(&self.0),
        }))
    }

    fn open_lock(&self, path: &Path) -> io::Result<Box<dyn OpenEntry>> {
        OperatingSystem.open_lock(path)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        OperatingSystem.sync_directory(path)
    }

    fn set_permissions(&self, path: &Path, mode: u32) -> io::Result<()> {
        OperatingSystem.set_permissions(path, mode)
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        OperatingSystem.rename_new(from, to)
    }

    fn rename_over(&self, from: &Path, to: &Path) -> io::Result<()> {
        OperatingSystem.rename_over(from, to)
    }

    fn exchange(&self, first: &Path, second: &Path) -> io::Result<()> {
        OperatingSystem.exchange(first, second)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        OperatingSystem.link(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        OperatingSystem.remove_file(path)
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        OperatingSystem.remove_directory(path)
    }

    fn pause(&self, pause: Duration) {
        OperatingSystem.pause(pause);
    }

    fn nonce(&self) -> u64 {
        OperatingSystem.nonce()
    }
}

/// A file that is being written.
#[derive(Debug)]
struct WatchedFile {
    file: Box<dyn NewFile>,
    flow: Arc<Flow>,
}

impl NewFile for WatchedFile {
    fn allocate(&self, length: u64) -> io::Result<()> {
        self.file.allocate(length)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let len = bytes.len() as u64;
        let space = &self.flow.space;
        space
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(len)
            })
            .map_err(|_| io::Error::from_raw_os_error(NO_SPACE))?;
        Flow::count(&self.flow.written, bytes);
        self.file.write_at(offset, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }
}

/// An open directory.
#[derive(Debug)]
struct WatchedEntry {
    entry: Box<dyn OpenEntry>,
    flow: Arc<Flow>,
}

impl OpenEntry for WatchedEntry {
    fn try_lock(&self, kind: LockKind) -> io::Result<bool> {
        self.entry.try_lock(kind)
    }

    fn lock(&self) -> io::Result<()> {
        self.entry.lock()
    }

    fn identity(&self) -> io::Result<Identity> {
        self.entry.identity()
    }

    fn file(&self, parts: &[&str], links: Links) -> Result<Box<dyn ReadAt>, OpenError> {
        Ok(Box::new(WatchedReader {
            file: self.entry.file(parts, links)?,
            flow: Arc::clone(&self.flow),
        }))
    }
}

/// A file that is being read.
struct WatchedReader {
    file: Box<dyn ReadAt>,
    flow: Arc<Flow>,
}

impl ReadAt for WatchedReader {
    fn len(&self) -> u64 {
        self.file.len()
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        Flow::count(&self.flow.read, dst);
        self.file.read_exact_at(offset, dst)
    }
}
