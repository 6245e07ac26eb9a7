//! A directory of files that belong together: opened safely, counted, and checked where an integrity file covers them.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use twox_hash::XxHash3_64;

use crate::error::{CheckpointError, FormatError};
use crate::file::CheckedFile;
use crate::integrity::{FileIntegrity, INTEGRITY_FILE, Integrity, integrity_beside};
use crate::limits::{MAX_INTEGRITY_BYTES, MAX_PICKLE_BYTES};
use crate::location::Location;
use crate::metadata::METADATA_FILE;
use crate::root::Root;
use crate::source::ReadAt as _;

/// How many files are kept open; a load that needs more opens them again.
const OPEN_FILES: usize = 200;

/// The directory, or the prefix in an object store, of a checkpoint.
#[derive(Debug)]
pub struct CheckedDirectory {
    root: Root,
    integrity: Option<HashMap<String, Arc<FileIntegrity>>>,
    files: Mutex<HashMap<String, Arc<CheckedFile>>>,
    bytes_read: Arc<AtomicU64>,
}

impl CheckedDirectory {
    /// Opens a directory. With `verify`, its integrity file is read, if there is one. With `links`, symbolic links below
    /// it are followed (Hugging Face's cache is made of them).
    pub fn open(location: impl Into<Location>, verify: bool, links: bool) -> Result<Self, CheckpointError> {
        Self::open_with(&location.into(), verify.then_some(INTEGRITY_FILE), links)
    }

    /// Opens the directory of a checkpoint that is one file, whose integrity file has [its name](integrity_beside).
    pub fn open_beside(location: impl Into<Location>, name: &str, verify: bool) -> Result<Self, CheckpointError> {
        Self::open_with(&location.into(), verify.then(|| integrity_beside(name)).as_deref(), true)
    }

    fn open_with(location: &Location, integrity: Option<&str>, links: bool) -> Result<Self, CheckpointError> {
        let root = Root::open(location, links)?;
        let mut directory =
            CheckedDirectory { root, integrity: None, files: Mutex::default(), bytes_read: Arc::default() };
        if let Some(name) = integrity {
            directory.integrity = directory.read_integrity(name)?;
        }
        Ok(directory)
    }

    /// Reads the integrity file. In an object store several saves to one target may have left theirs, each under a name
    /// of its own: it is the one that knows the `.metadata` that was committed.
    fn read_integrity(&self, name: &str) -> Result<Option<HashMap<String, Arc<FileIntegrity>>>, CheckpointError> {
        let names = match self.has(name)? {
            true => vec![name.to_owned()],
            false if name != INTEGRITY_FILE => Vec::new(),
            false => {
                let is_one =
                    |name: &String| name.strip_prefix(INTEGRITY_FILE).is_some_and(|rest| rest.starts_with('-'));
                self.names()?.into_iter().filter(is_one).collect()
            }
        };
        let mut last = None;
        for name in &names {
            let bytes = self.read_small(name, MAX_INTEGRITY_BYTES)?;
            let integrity = Integrity::decode(&bytes).map_err(|source| self.file_error(name, source))?;
            let knows = match integrity.files.get(METADATA_FILE) {
                Some(metadata) if names.len() > 1 => {
                    let bytes = self.read_small(METADATA_FILE, MAX_PICKLE_BYTES)?;
                    check(metadata, METADATA_FILE, &bytes).is_ok()
                }
                _ => true,
            };
            // If none knows it, the last one says what is wrong with it.
            last = Some(integrity);
            if knows {
                break;
            }
        }
        Ok(last.map(|integrity| integrity.files.into_iter().map(|(path, file)| (path, Arc::new(file))).collect()))
    }

    /// How many threads should read where one would do for a disk.
    pub(crate) fn readers(&self) -> usize {
        self.root.readers()
    }

    /// Where it is: a path, or a URL.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.root.path()
    }

    /// Whether an integrity file is there and in use.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.integrity.is_some()
    }

    /// The hashes of a file, if it is covered.
    #[must_use]
    pub fn integrity_of(&self, relative: &str) -> Option<&Arc<FileIntegrity>> {
        self.integrity.as_ref()?.get(relative)
    }

    /// The files that the integrity file covers, sorted.
    #[must_use]
    pub fn covered(&self) -> Vec<String> {
        let mut names: Vec<String> = self.integrity.iter().flat_map(|files| files.keys().cloned()).collect();
        names.sort();
        names
    }

    /// Bytes read from its files so far.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Whether there is a regular file of this name.
    pub fn has(&self, relative: &str) -> Result<bool, CheckpointError> {
        Ok(self.root.find(relative)?.is_some())
    }

    /// The names of the entries directly in it, sorted; those that are not UTF-8 are left out.
    pub fn names(&self) -> Result<Vec<String>, CheckpointError> {
        self.root.names()
    }

    /// A file below the directory. Where there is an integrity file, it must cover this one.
    pub fn file(&self, relative: &str) -> Result<Arc<CheckedFile>, CheckpointError> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = files.get(relative) {
            return Ok(file.clone());
        }
        let opened = self.root.file(relative)?;
        let integrity = match &self.integrity {
            None => None,
            Some(covered) => Some(covered.get(relative).cloned().ok_or_else(|| self.uncovered(relative))?),
        };
        let file = Arc::new(CheckedFile::new(opened, relative, integrity, self.bytes_read.clone()));
        if files.len() >= OPEN_FILES {
            files.clear();
        }
        files.insert(relative.to_owned(), file.clone());
        Ok(file)
    }

    /// Reads a file whole, if it is not longer than `limit`, and checks it.
    pub fn read_small(&self, relative: &str, limit: u64) -> Result<Vec<u8>, CheckpointError> {
        let path = self.path().join(relative);
        let file = self.root.file(relative)?;
        let length = file.len();
        if length > limit {
            let source = FormatError::Limit { what: "file length", value: length, limit };
            return Err(CheckpointError::File { path, source });
        }
        let mut bytes = vec![0; length as usize];
        file.read_exact_at(0, &mut bytes).map_err(|source| CheckpointError::File { path, source })?;
        if let Some(covered) = &self.integrity {
            let integrity = covered.get(relative).ok_or_else(|| self.uncovered(relative))?;
            check(integrity, relative, &bytes).map_err(|source| self.file_error(relative, source))?;
        }
        Ok(bytes)
    }

    /// An error in this file.
    pub fn file_error(&self, relative: &str, source: FormatError) -> CheckpointError {
        CheckpointError::File { path: self.path().join(relative), source }
    }

    fn uncovered(&self, relative: &str) -> CheckpointError {
        let reason = "the integrity file does not list it".to_owned();
        self.file_error(relative, FormatError::Malformed { what: "checkpoint", reason })
    }
}

/// Checks a file that is in memory.
fn check(integrity: &FileIntegrity, name: &str, bytes: &[u8]) -> Result<(), FormatError> {
    let corrupt = |offset, end| FormatError::Corrupt { file: name.to_owned(), offset, end };
    let length = bytes.len() as u64;
    if integrity.length() != length {
        return Err(corrupt(length.min(integrity.length()), length.max(integrity.length())));
    }
    for block in integrity.blocks() {
        let part = &bytes[block.range.start as usize..block.range.end as usize];
        if XxHash3_64::oneshot(part) != block.hash {
            return Err(corrupt(block.range.start, block.range.end));
        }
    }
    Ok(())
}
