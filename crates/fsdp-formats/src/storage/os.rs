//! The file system of the operating system.

use std::ffi::OsString;
use std::fs::{File, FileType, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use rustix::fs::{CWD, FallocateFlags, FlockOperation, Mode, OFlags, RenameFlags, SeekFrom};
use rustix::io::Errno;

use super::file_system::{
    EntryKind, FileSystem, Identity, Links, LockKind, NewFile, OpenEntry, OpenError, Status,
};
use super::read_at::ReadAt;
use crate::error::FormatError;

/// The errors of a file system that does not know an operation.
pub(super) const UNSUPPORTED: [Errno; 3] = [Errno::INVAL, Errno::NOSYS, Errno::OPNOTSUPP];

/// The file system of the operating system.
#[derive(Debug, Clone, Copy)]
pub struct OperatingSystem;

impl FileSystem for OperatingSystem {
    fn status(&self, path: &Path, links: Links) -> io::Result<Status> {
        let metadata = match links {
            Links::Follow => path.metadata()?,
            Links::Refuse => path.symlink_metadata()?,
        };
        Ok(status_of(&metadata))
    }

    fn list(&self, path: &Path) -> io::Result<Vec<(OsString, EntryKind)>> {
        std::fs::read_dir(path)?
            .map(|entry| {
                let entry = entry?;
                // The kind of an entry that has just been removed is not known, and does not
                // matter.
                Ok((
                    entry.file_name(),
                    entry.file_type().map_or(EntryKind::Special, kind_of),
                ))
            })
            .collect()
    }

    fn create_directory(&self, path: &Path) -> io::Result<()> {
        std::fs::create_dir(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn NewFile>> {
        Ok(Box::new(OsFile(
            OpenOptions::new().write(true).create_new(true).open(path)?,
        )))
    }

    fn open_directory(&self, path: &Path) -> io::Result<Box<dyn OpenEntry>> {
        let opened = rustix::fs::open(path, DIRECTORY, Mode::empty())?;
        Ok(Box::new(OsEntry(opened)))
    }

    fn open_lock(&self, path: &Path) -> io::Result<Box<dyn OpenEntry>> {
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        Ok(Box::new(OsEntry(file.into())))
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "this is the module that decides when bytes are durable"
    )]
    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn set_permissions(&self, path: &Path, mode: u32) -> io::Result<()> {
        std::fs::set_permissions(path, Permissions::from_mode(mode))
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(()),
            // A file system without this flag: its plain rename still refuses a directory that
            // holds something.
            Err(errno) if UNSUPPORTED.contains(&errno) => {
                if self.exists(to) {
                    return Err(io::ErrorKind::AlreadyExists.into());
                }
                self.rename_over(from, to)
            }
            Err(errno) => Err(errno.into()),
        }
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the callers sync before and after"
    )]
    fn rename_over(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn exchange(&self, first: &Path, second: &Path) -> io::Result<()> {
        Ok(rustix::fs::renameat_with(
            CWD,
            first,
            CWD,
            second,
            RenameFlags::EXCHANGE,
        )?)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::hard_link(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "only staging directories and replaced checkpoints come here"
    )]
    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_dir_all(path)
    }

    fn pause(&self, pause: Duration) {
        thread::sleep(pause);
    }

    fn nonce(&self) -> u64 {
        nonce()
    }
}

/// Returns the facts about an entry from its metadata.
fn status_of(metadata: &Metadata) -> Status {
    Status {
        kind: kind_of(metadata.file_type()),
        identity: Identity(metadata.dev(), metadata.ino()),
        mode: metadata.mode() & 0o7777,
    }
}

/// Returns the kind of an entry from its type.
fn kind_of(file_type: FileType) -> EntryKind {
    if file_type.is_dir() {
        EntryKind::Directory
    } else if file_type.is_file() {
        EntryKind::File
    } else {
        EntryKind::Special
    }
}

/// A file that is being written.
#[derive(Debug)]
struct OsFile(File);

impl NewFile for OsFile {
    fn allocate(&self, length: u64) -> io::Result<()> {
        // Check the free space first. Some file systems use up all of it before `fallocate` fails.
        // One without any size does not tell its free space: ramfs, and many that programs
        // implement.
        if let Ok(stat) = rustix::fs::fstatvfs(&self.0)
            && stat.f_blocks > 0
            && length > stat.f_bavail.saturating_mul(stat.f_frsize)
        {
            return Err(Errno::NOSPC.into());
        }
        // Memory is given page by page, which takes as long here as while writing, where several
        // threads share the work.
        if is_in_memory(&self.0) {
            return self.0.set_len(length);
        }
        match rustix::fs::fallocate(&self.0, FallocateFlags::empty(), 0, length) {
            Ok(()) => Ok(()),
            Err(errno) if UNSUPPORTED.contains(&errno) => self.0.set_len(length),
            Err(errno) => Err(errno.into()),
        }
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "this is the module that decides when bytes are durable"
    )]
    fn sync(&self) -> io::Result<()> {
        self.0.sync_all()
    }
}

/// Returns `true` if a file is in a file system that is only in memory.
#[cfg(target_os = "linux")]
fn is_in_memory(file: &File) -> bool {
    /// The kernel's number of tmpfs.
    const TMPFS: u64 = 0x0102_1994;
    rustix::fs::fstatfs(file)
        .is_ok_and(|found| u64::try_from(found.f_type).is_ok_and(|kind| kind == TMPFS))
}

#[cfg(not(target_os = "linux"))]
fn is_in_memory(_: &File) -> bool {
    false
}

/// An open directory, or a file that serves as a lock.
#[derive(Debug)]
struct OsEntry(OwnedFd);

/// The flags by which a directory is opened.
const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);

impl OpenEntry for OsEntry {
    fn try_lock(&self, kind: LockKind) -> io::Result<bool> {
        let operation = match kind {
            LockKind::Shared => FlockOperation::NonBlockingLockShared,
            LockKind::Exclusive => FlockOperation::NonBlockingLockExclusive,
        };
        match rustix::fs::flock(&self.0, operation) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn lock(&self) -> io::Result<()> {
        Ok(rustix::fs::flock(&self.0, FlockOperation::LockExclusive)?)
    }

    fn identity(&self) -> io::Result<Identity> {
        let stat = rustix::fs::fstat(&self.0)?;
        Ok(Identity(stat.st_dev, stat.st_ino))
    }

    fn file(&self, parts: &[&str], links: Links) -> Result<Box<dyn ReadAt>, OpenError> {
        let link_flag = match links {
            Links::Follow => OFlags::empty(),
            Links::Refuse => OFlags::NOFOLLOW,
        };
        let Some((name, directories)) = parts.split_last() else {
            return Err(OpenError::Io(Errno::ISDIR.into()));
        };
        // Open one directory after the other, each relative to the one before it, so that no link
        // is followed on the way.
        let mut subdirectory: Option<OwnedFd> = None;
        for part in directories {
            let directory = subdirectory.as_ref().unwrap_or(&self.0).as_fd();
            let opened = rustix::fs::openat(directory, *part, DIRECTORY | link_flag, Mode::empty());
            subdirectory = Some(opened.map_err(|errno| match errno {
                // A link, or a file, where a directory must be.
                Errno::NOTDIR => {
                    OpenError::Refused("it leads through something that is no directory")
                }
                errno => open_error(errno, links),
            })?);
        }
        // NONBLOCK: opening a FIFO must not wait for a writer.
        let flags =
            OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | link_flag;
        let directory = subdirectory.as_ref().unwrap_or(&self.0).as_fd();
        let opened = rustix::fs::openat(directory, *name, flags, Mode::empty())
            .map_err(|errno| open_error(errno, links))?;
        let file = File::from(opened);
        let metadata = file.metadata().map_err(OpenError::Io)?;
        if !metadata.is_file() {
            return Err(OpenError::Refused("it is no regular file"));
        }
        Ok(Box::new(OsReadFile {
            length: metadata.len(),
            file,
        }))
    }
}

/// Turns an error of opening a file into an [`OpenError`]; a link that must not be followed gets an
/// explanation.
fn open_error(errno: Errno, links: Links) -> OpenError {
    if errno == Errno::LOOP && links == Links::Refuse {
        return OpenError::Refused(
            "a symbolic link is on the way; `cp -rL` makes a copy without links",
        );
    }
    OpenError::Io(errno.into())
}

/// An open file and its length.
#[derive(Debug)]
struct OsReadFile {
    file: File,
    length: u64,
}

impl ReadAt for OsReadFile {
    fn len(&self) -> u64 {
        self.length
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        let length = dst.len() as u64;
        self.file
            .read_exact_at(dst, offset)
            .map_err(|source| FormatError::Read {
                offset,
                length,
                source,
            })
    }

    fn find_hole(&self, offset: u64) -> Option<u64> {
        // This moves the position of the file, which nothing else uses. If there is no hole, the
        // system returns the end of the file.
        rustix::fs::seek(&self.file, SeekFrom::Hole(offset)).ok()
    }
}

/// Returns a number that is different for each call, in this process and in others: a hash of the
/// time, the process and the number of calls so far. Names of temporary files and directories
/// contain it.
pub(super) fn nonce() -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or(Duration::ZERO);
    let mut seed = now.as_nanos().to_le_bytes().to_vec();
    seed.extend(std::process::id().to_le_bytes());
    seed.extend(COUNT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    twox_hash::XxHash3_64::oneshot(&seed)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_that_does_not_tell_its_size_is_not_full() {
        // The file system of such files has no size, like ramfs.
        let memory = rustix::fs::memfd_create("sizeless", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        OsFile(memory.into()).allocate(4096).unwrap();
    }
}
