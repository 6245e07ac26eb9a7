//! Paths that a checkpoint's metadata names: they must stay inside its directory, and lead to regular files.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};

use crate::error::CheckpointError;

/// Longest path that a checkpoint may name.
const MAX_PATH: usize = 4096;

/// The parts of a relative path, if it is plain: no `..`, not absolute, no other system's separators.
pub(crate) fn check_relative(path: &str) -> Result<Vec<&str>, &'static str> {
    if path.is_empty() || path.len() > MAX_PATH {
        return Err("it is empty or too long");
    }
    if path.starts_with('/') {
        return Err("it is absolute");
    }
    if path.contains(['\\', '\0']) {
        return Err("it holds a character that no checkpoint's file has");
    }
    let parts: Vec<&str> = path.split('/').collect();
    match parts.iter().any(|part| matches!(*part, "" | "." | "..")) {
        true => Err("it has an empty, `.` or `..` part"),
        false => Ok(parts),
    }
}

/// A checkpoint's directory, held open: files are opened below it, wherever it is moved meanwhile.
#[derive(Debug)]
pub(crate) struct Root {
    path: PathBuf,
    directory: OwnedFd,
    /// Whether links are followed; only where file names come from the user's own directory listing.
    links: bool,
}

impl Root {
    pub(crate) fn open(path: &Path, links: bool) -> Result<Self, CheckpointError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|errno| CheckpointError::io("open the directory", path)(errno.into()))?;
        Ok(Root { path: path.to_owned(), directory, links })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a regular file below the directory. No part of the path may be a symbolic link.
    pub(crate) fn file(&self, relative: &str) -> Result<File, CheckpointError> {
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

    /// As [`Root::file`]; `None` if there is nothing of that name.
    pub(crate) fn find(&self, relative: &str) -> Result<Option<File>, CheckpointError> {
        match self.file(relative) {
            Ok(file) => Ok(Some(file)),
            Err(CheckpointError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}
