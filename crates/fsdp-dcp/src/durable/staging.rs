//! Staging directories: where a checkpoint grows before it takes its place.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use rustix::fs::FlockOperation;

use super::fs::{Durable, exists};
use super::stale::{beside, recover_with};
use crate::error::CheckpointError;
use crate::paths::check_relative;

/// A checkpoint that is being written.
///
/// The one that prepared it removes it again when dropped without [`Staging::commit`].
#[derive(Debug)]
pub struct Staging {
    durable: Durable,
    target: PathBuf,
    directory: PathBuf,
    name: String,
    overwrite: bool,
    /// Held by the one that prepared.
    lock: Option<File>,
}

/// A file in a staging directory, of a length known beforehand.
#[derive(Debug)]
pub struct StagedFile {
    durable: Durable,
    file: File,
    path: PathBuf,
    length: u64,
}

impl Durable {
    /// Makes a staging directory for a checkpoint at `target`. Missing parents are created.
    ///
    /// If something is at the target and `overwrite` is not set, that is [`CheckpointError::Exists`].
    pub fn prepare(&self, target: &Path, overwrite: bool) -> Result<Staging, CheckpointError> {
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

    /// The staging directory that another rank prepared, by its [`Staging::name`].
    pub fn join(&self, target: &Path, name: &str) -> Result<Staging, CheckpointError> {
        let staging = self.at(target, name.to_owned(), true)?;
        match name.starts_with("tmp-") && !name.contains('/') && staging.directory.is_dir() {
            true => Ok(staging),
            false => Err(CheckpointError::NotCommitted {
                path: staging.directory.clone(),
                reason: "the staging directory that another rank prepared is not visible here",
            }),
        }
    }

    /// Writes a small file whole in the place of whatever file is there.
    pub fn replace_file(&self, path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
        const NAME: &str = "file";
        let staging = self.prepare(path, true)?;
        staging.write(NAME, bytes)?;
        staging.commit_file(NAME)
    }

    fn at(&self, target: &Path, name: String, overwrite: bool) -> Result<Staging, CheckpointError> {
        let (parent, prefix) = beside(target)?;
        let directory = parent.join(format!("{prefix}{name}"));
        Ok(Staging { durable: self.clone(), target: target.to_owned(), directory, name, overwrite, lock: None })
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

impl Staging {
    /// What tells this staging directory from others of the same target; [`Durable::join`] takes it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where the checkpoint will be.
    #[must_use]
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Where it grows.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Creates a file of this length. Subdirectories in `relative` are created.
    pub fn create(&self, relative: &str, length: u64) -> Result<StagedFile, CheckpointError> {
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
        Ok(StagedFile { durable: self.durable.clone(), file, path, length })
    }

    /// Writes a small file whole, and fsyncs it.
    pub fn write(&self, relative: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        let file = self.create(relative, bytes.len() as u64)?;
        file.write_at(0, bytes)?;
        file.finish()
    }

    /// Writes a small file whole beside the target, replacing one that is there: durable before the target is committed.
    pub fn write_beside(&self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        const TEMPORARY: &str = ".beside";
        self.write(TEMPORARY, bytes)?;
        let parent = parent_of(&self.target);
        self.durable.rename_over(&self.directory.join(TEMPORARY), &parent.join(name))?;
        self.durable.sync_directory(parent)
    }

    /// Puts the directory in the target's place. All files must be finished.
    pub fn commit(mut self) -> Result<(), CheckpointError> {
        let durable = self.durable.clone();
        self.sync_directories(&self.directory)?;
        let parent = parent_of(&self.target);
        if self.overwrite && exists(&self.target) {
            if durable.exchange(&self.directory, &self.target)? {
                durable.sync_directory(parent)?;
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

    /// For formats of one file: puts this file of the staging directory in the target's place.
    pub fn commit_file(mut self, relative: &str) -> Result<(), CheckpointError> {
        let durable = self.durable.clone();
        let from = self.directory.join(relative);
        match self.overwrite {
            true => durable.rename_over(&from, &self.target)?,
            false => durable.rename_new(&from, &self.target)?,
        }
        durable.sync_directory(parent_of(&self.target))?;
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

impl Drop for Staging {
    fn drop(&mut self) {
        if self.lock.is_some() {
            // Best effort: what stays is listed as stale.
            let _ = self.durable.remove_directory(&self.directory);
        }
    }
}

impl StagedFile {
    /// Writes bytes at a position; threads may do so at once. Writing beyond the planned length is an error.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), CheckpointError> {
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > self.length) {
            let error = std::io::Error::other("the write reaches beyond the planned length");
            return Err(CheckpointError::io("write", &self.path)(error));
        }
        self.durable.write_at(&self.file, &self.path, offset, bytes)
    }

    /// Makes the file durable.
    pub fn finish(self) -> Result<(), CheckpointError> {
        self.durable.sync_file(&self.file, &self.path)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The directory that a path lies in; the current one for a bare name.
pub(super) fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// A number unlike those of other processes and times. `mkdir` settles what is left to chance.
fn nonce() -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut seed = now.as_nanos().to_le_bytes().to_vec();
    seed.extend(std::process::id().to_le_bytes());
    seed.extend(COUNT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    xxhash_rust::xxh3::xxh3_64(&seed)
}
