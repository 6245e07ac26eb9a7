//! Where the files of a checkpoint are, and opening them: none outside, none that is not regular.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, FlockOperation, Mode, OFlags};

use crate::error::{CheckpointError, FormatError};
use crate::location::{Location, Resolved};
#[cfg(feature = "object-store")]
use crate::object::{ObjectFile, Prefix};
use crate::paths::{check_relative, names};
use crate::source::ReadAt;

/// Where the files of a checkpoint are.
#[derive(Debug)]
pub(crate) enum Root {
    /// A directory.
    Local(LocalRoot),
    /// What lies below a prefix of an object store.
    #[cfg(feature = "object-store")]
    Object(Prefix),
}

impl Root {
    pub(crate) fn open(location: &Location, links: bool) -> Result<Self, CheckpointError> {
        Ok(match location.resolve()? {
            Resolved::Local(path) => Root::Local(LocalRoot::open(path, links)?),
            #[cfg(feature = "object-store")]
            Resolved::Object(prefix) => Root::Object(prefix),
        })
    }

    /// The directory, or the URL.
    pub(crate) fn path(&self) -> &Path {
        match self {
            Root::Local(root) => &root.path,
            #[cfg(feature = "object-store")]
            Root::Object(prefix) => prefix.name(),
        }
    }

    /// How many threads should read where one would do for a disk: requests to an object store mostly wait.
    pub(crate) fn readers(&self) -> usize {
        match self {
            Root::Local(_) => 1,
            #[cfg(feature = "object-store")]
            Root::Object(_) => 4,
        }
    }

    /// The names of the entries directly in it, sorted.
    pub(crate) fn names(&self) -> Result<Vec<String>, CheckpointError> {
        match self {
            Root::Local(root) => names(&root.path),
            #[cfg(feature = "object-store")]
            Root::Object(prefix) => prefix.names(),
        }
    }

    /// Opens a regular file or an object. A path that leads out of the checkpoint is refused.
    pub(crate) fn file(&self, relative: &str) -> Result<OpenFile, CheckpointError> {
        match self {
            Root::Local(root) => {
                let file = root.file(relative)?;
                let length = file.metadata().map_err(CheckpointError::io("inspect", root.path.join(relative)))?.len();
                Ok(OpenFile::Local { file, length })
            }
            #[cfg(feature = "object-store")]
            Root::Object(prefix) => {
                check_relative(relative).map_err(|reason| CheckpointError::Path {
                    root: prefix.name().to_owned(),
                    path: relative.to_owned(),
                    reason,
                })?;
                Ok(OpenFile::Object(ObjectFile::open(prefix, relative)?))
            }
        }
    }

    /// As [`Root::file`]; `None` if there is nothing of that name.
    pub(crate) fn find(&self, relative: &str) -> Result<Option<OpenFile>, CheckpointError> {
        match self.file(relative) {
            Ok(file) => Ok(Some(file)),
            Err(CheckpointError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// A file or an object, open for reading.
#[derive(Debug)]
pub(crate) enum OpenFile {
    Local {
        file: File,
        length: u64,
    },
    #[cfg(feature = "object-store")]
    Object(ObjectFile),
}

impl OpenFile {
    /// How much to read before it is hashed: what fits the cache, or what makes a request worth its while.
    pub(crate) fn read_at_once(&self) -> u64 {
        match self {
            OpenFile::Local { .. } => 1 << 20,
            #[cfg(feature = "object-store")]
            OpenFile::Object(_) => 32 << 20,
        }
    }
}

impl ReadAt for OpenFile {
    fn len(&self) -> u64 {
        match self {
            OpenFile::Local { length, .. } => *length,
            #[cfg(feature = "object-store")]
            OpenFile::Object(object) => object.len(),
        }
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        match self {
            OpenFile::Local { file, .. } => {
                let length = dst.len() as u64;
                file.read_exact_at(dst, offset).map_err(|source| FormatError::Read { offset, length, source })
            }
            #[cfg(feature = "object-store")]
            OpenFile::Object(object) => object.read_exact_at(offset, dst),
        }
    }
}

/// A checkpoint's directory, held open: files are opened below it, wherever it is moved meanwhile.
#[derive(Debug)]
pub(crate) struct LocalRoot {
    path: PathBuf,
    directory: OwnedFd,
    /// Whether links are followed; only where file names come from the user's own directory listing.
    links: bool,
}

impl LocalRoot {
    fn open(path: &Path, links: bool) -> Result<Self, CheckpointError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|errno| CheckpointError::io("open the directory", path)(errno.into()))?;
        // Tells `Durable::remove_checkpoint` that it is being read. Where locks do not work, or it is just being
        // removed, reading goes on as far as it can.
        let _ = rustix::fs::flock(&directory, FlockOperation::NonBlockingLockShared);
        Ok(LocalRoot { path: path.to_owned(), directory, links })
    }

    /// Opens a regular file below the directory. No part of the path may be a symbolic link.
    fn file(&self, relative: &str) -> Result<File, CheckpointError> {
        let refused = |reason| CheckpointError::Path { root: self.path.clone(), path: relative.to_owned(), reason };
        let failed = |errno: rustix::io::Errno| match errno {
            rustix::io::Errno::LOOP if !self.links => refused("it is, or leads through, a symbolic link"),
            errno => CheckpointError::io("open", self.path.join(relative))(errno.into()),
        };
        let parts = check_relative(relative).map_err(refused)?;
        let follow = if self.links { OFlags::empty() } else { OFlags::NOFOLLOW };
        let mut below: Option<OwnedFd> = None;
        for part in &parts[..parts.len() - 1] {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | follow;
            let at = below.as_ref().unwrap_or(&self.directory);
            below = Some(rustix::fs::openat(at, *part, flags, Mode::empty()).map_err(|errno| match errno {
                // A link, or a file, where a directory must be.
                rustix::io::Errno::NOTDIR => refused("it leads through something that is no directory"),
                errno => failed(errno),
            })?);
        }
        // NONBLOCK: a FIFO must not make us wait.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | follow;
        let at = below.as_ref().unwrap_or(&self.directory);
        let file = rustix::fs::openat(at, parts[parts.len() - 1], flags, Mode::empty()).map_err(failed)?;
        let stat = rustix::fs::fstat(&file).map_err(failed)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Ok(File::from(file)),
            _ => Err(refused("it is no regular file")),
        }
    }
}
