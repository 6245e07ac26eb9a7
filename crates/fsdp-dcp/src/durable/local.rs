//! Staging directories of the file system.

use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use super::fs::{Durable, beside, exists, nonce, parent_of};
use super::stale::recover_with;
use crate::error::CheckpointError;
use crate::paths::check_relative;

/// A small file that belongs beside a target that is one file.
#[derive(Debug, Clone, Copy)]
pub struct Beside<'b> {
    /// Its name.
    pub name: &'b str,
    /// Its name until the target is in its place.
    pub new_name: &'b str,
    /// What it holds; if nothing, what is there is removed after the commit.
    pub bytes: Option<&'b [u8]>,
}

/// A directory beside its target.
#[derive(Debug)]
pub(super) struct LocalStaging {
    durable: Durable,
    target: PathBuf,
    directory: PathBuf,
    name: String,
    overwrite: bool,
    /// Held by the one that prepared.
    lock: Option<File>,
}

/// A file in it.
#[derive(Debug)]
pub(super) struct LocalFile {
    durable: Durable,
    file: File,
    path: PathBuf,
    length: u64,
}

impl Durable {
    /// Makes a staging directory. Missing parents are created.
    pub(super) fn prepare_local(&self, target: &Path, overwrite: bool) -> Result<LocalStaging, CheckpointError> {
        let (parent, _) = beside(target)?;
        self.create_parents(&parent)?;
        recover_with(self, target)?;
        if !overwrite && exists(target) {
            return Err(CheckpointError::Exists { path: target.to_owned() });
        }
        loop {
            let nonce = nonce();
            let mut staging = self.at(target, format!("tmp-{nonce:016x}"), overwrite)?;
            if self.create_directory(&staging.directory)? {
                let lock = File::open(&staging.directory).map_err(CheckpointError::io("open", &staging.directory))?;
                // Where locks do not work, nobody takes the directory for stale either.
                let _ = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive);
                staging.lock = Some(lock);
                return Ok(staging);
            }
        }
    }

    /// The staging directory that another process prepared.
    pub(super) fn join_local(&self, target: &Path, name: &str) -> Result<LocalStaging, CheckpointError> {
        let staging = self.at(target, name.to_owned(), true)?;
        match name.starts_with("tmp-") && !name.contains('/') && staging.directory.is_dir() {
            true => Ok(staging),
            false => Err(CheckpointError::NotCommitted {
                path: staging.directory.clone(),
                reason: "the staging directory that another rank prepared is not visible here",
            }),
        }
    }

    fn at(&self, target: &Path, name: String, overwrite: bool) -> Result<LocalStaging, CheckpointError> {
        let (parent, prefix) = beside(target)?;
        let directory = parent.join(format!("{prefix}{name}"));
        Ok(LocalStaging { durable: self.clone(), target: target.to_owned(), directory, name, overwrite, lock: None })
    }

    fn create_parents(&self, path: &Path) -> Result<(), CheckpointError> {
        if path.as_os_str().is_empty() || path.is_dir() {
            return Ok(());
        }
        if let Some(parent) = path.parent() {
            self.create_parents(parent)?;
        }
        self.create_directory(path)?;
        self.sync_directory(parent_of(path))
    }
}

impl LocalStaging {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn target(&self) -> &Path {
        &self.target
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Creates a file of this length. Subdirectories in `relative` are created.
    pub(super) fn create(&self, relative: &str, length: u64) -> Result<LocalFile, CheckpointError> {
        let parts = check_relative(relative).map_err(|reason| CheckpointError::Path {
            root: self.target.clone(),
            path: relative.to_owned(),
            reason,
        })?;
        let mut path = self.directory.clone();
        for part in &parts[..parts.len() - 1] {
            path.push(part);
            self.durable.create_directory(&path)?;
        }
        path.push(parts[parts.len() - 1]);
        let file = self.durable.create_file(&path)?;
        self.durable.preallocate(&file, &path, length)?;
        Ok(LocalFile { durable: self.durable.clone(), file, path, length })
    }

    /// Writes a small file whole, and fsyncs it.
    pub(super) fn write(&self, relative: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        let file = self.create(relative, bytes.len() as u64)?;
        file.write_at(0, bytes)?;
        file.finish()
    }

    /// Checks that what is at the target, if anything, is of the kind that will be put there: a directory, or a file.
    pub(super) fn check_kind(&self, directory: bool) -> Result<(), CheckpointError> {
        let (path, wanted) = (self.target.clone(), if directory { "directory" } else { "file" });
        match exists(&path) && path.is_dir() != directory {
            true => Err(CheckpointError::NotReplaceable { path, wanted }),
            false => Ok(()),
        }
    }

    /// Checks that nothing of this name is beside the target, unless that may be overwritten.
    pub(super) fn check_beside(&self, name: &str) -> Result<(), CheckpointError> {
        let path = parent_of(&self.target).join(name);
        match exists(&path) && !self.overwrite {
            true => Err(CheckpointError::Exists { path }),
            false => Ok(()),
        }
    }

    /// Removes a file beside the target, if it is there: durably, before the target is committed.
    pub(super) fn remove_beside(&self, name: &str) -> Result<(), CheckpointError> {
        let parent = parent_of(&self.target);
        let path = parent.join(name);
        if !exists(&path) {
            return Ok(());
        }
        self.durable.remove_file(&path)?;
        self.durable.sync_directory(parent)
    }

    /// Puts the directory in the target's place. All files must be finished.
    pub(super) fn commit(mut self) -> Result<(), CheckpointError> {
        let durable = self.durable.clone();
        self.sync_directories(&self.directory)?;
        let parent = parent_of(&self.target);
        if self.overwrite && exists(&self.target) {
            if durable.exchange(&self.directory, &self.target)? {
                if let Err(error) = durable.sync_directory(parent) {
                    // Back to what was there. Where that cannot be had either, nothing may be removed.
                    if !matches!(durable.exchange(&self.directory, &self.target), Ok(true)) {
                        self.lock = None;
                    }
                    return Err(error);
                }
            } else {
                let (_, prefix) = beside(&self.target)?;
                let old = parent.join(format!("{prefix}old-{}", self.name.trim_start_matches("tmp-")));
                let replaced = durable
                    .rename_new(&self.target, &old)
                    .and_then(|()| durable.rename_new(&self.directory, &self.target));
                if let Err(error) = replaced {
                    let _ = recover_with(&durable, &self.target);
                    return Err(error);
                }
                durable.sync_directory(parent)?;
                self.directory = old;
            }
            // What is there now is the old checkpoint.
            self.lock = None;
            return durable.remove_directory(&self.directory);
        }
        durable.rename_new(&self.directory, &self.target)?;
        self.lock = None;
        durable.sync_directory(parent)
    }

    /// For formats of one file: puts this file of the staging directory in the target's place, and another beside it.
    ///
    /// The target's rename is the commit: before it, the target and what lies beside it are as they were; after it, what
    /// belongs beside it is there under one of its two names.
    pub(super) fn commit_file(mut self, relative: &str, beside: Option<Beside<'_>>) -> Result<(), CheckpointError> {
        const TEMPORARY: &str = ".beside";
        let durable = self.durable.clone();
        let parent = parent_of(&self.target).to_owned();
        let new = beside.and_then(|beside| Some((parent.join(beside.new_name), beside.bytes?)));
        if let Some((path, bytes)) = &new {
            self.write(TEMPORARY, bytes)?;
            durable.rename_over(&self.directory.join(TEMPORARY), path)?;
            durable.sync_directory(&parent)?;
        }
        let from = self.directory.join(relative);
        let renamed = match self.overwrite {
            true => durable.rename_over(&from, &self.target),
            false => durable.rename_new(&from, &self.target),
        };
        if let Err(error) = renamed {
            // Not if the file has gone to its place all the same.
            if let Some((path, _)) = new.as_ref().filter(|_| exists(&from)) {
                let _ = durable.remove_file(path);
            }
            return Err(error);
        }
        durable.sync_directory(&parent)?;
        if let Some(Beside { name, new_name, .. }) = beside {
            match &new {
                Some((path, _)) => {
                    durable.rename_over(path, &parent.join(name))?;
                    durable.sync_directory(&parent)?;
                }
                // What the target had before.
                None => [name, new_name].into_iter().try_for_each(|name| self.remove_beside(name))?,
            }
        }
        self.lock = None;
        durable.remove_directory(&self.directory)
    }

    fn sync_directories(&self, directory: &Path) -> Result<(), CheckpointError> {
        let list = std::fs::read_dir(directory).map_err(CheckpointError::io("list", directory))?;
        for entry in list {
            let entry = entry.map_err(CheckpointError::io("list", directory))?;
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                self.sync_directories(&entry.path())?;
            }
        }
        self.durable.sync_directory(directory)
    }
}

impl Drop for LocalStaging {
    fn drop(&mut self) {
        if self.lock.is_some() {
            // Best effort: what stays is listed as stale.
            let _ = self.durable.remove_directory(&self.directory);
        }
    }
}

impl LocalFile {
    /// Writes bytes at a position; threads may do so at once. Writing beyond the planned length is an error.
    pub(super) fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), CheckpointError> {
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > self.length) {
            let error = std::io::Error::other("the write reaches beyond the planned length");
            return Err(CheckpointError::io("write", &self.path)(error));
        }
        self.durable.write_at(&self.file, &self.path, offset, bytes)
    }

    /// Makes the file durable.
    pub(super) fn finish(self) -> Result<(), CheckpointError> {
        self.durable.sync_file(&self.file, &self.path)
    }
}
