//! A directory of files that belong together: opened safely, counted, and checked where an integrity file covers them.

use std::collections::HashMap;
use std::io::Read as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use xxhash_rust::xxh3::xxh3_64;

use crate::error::{CheckpointError, FormatError};
use crate::file::CheckedFile;
use crate::integrity::{FileIntegrity, INTEGRITY_FILE, Integrity};
use crate::limits::MAX_INTEGRITY_BYTES;
use crate::paths::Root;

/// How many files are kept open; a load that needs more opens them again.
const OPEN_FILES: usize = 200;

/// The directory of a checkpoint.
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
    pub fn open(path: &Path, verify: bool, links: bool) -> Result<Self, CheckpointError> {
        let root = Root::open(path, links)?;
        let mut directory =
            CheckedDirectory { root, integrity: None, files: Mutex::default(), bytes_read: Arc::default() };
        if verify && directory.has(INTEGRITY_FILE)? {
            let bytes = directory.read_small(INTEGRITY_FILE, MAX_INTEGRITY_BYTES)?;
            let integrity = Integrity::decode(&bytes).map_err(|source| directory.file_error(INTEGRITY_FILE, source))?;
            directory.integrity =
                Some(integrity.files.into_iter().map(|(path, file)| (path, Arc::new(file))).collect());
        }
        Ok(directory)
    }

    /// Where it is.
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
        let list = std::fs::read_dir(self.path()).map_err(CheckpointError::io("list", self.path()))?;
        let mut names = Vec::new();
        for entry in list {
            let entry = entry.map_err(CheckpointError::io("list", self.path()))?;
            names.extend(entry.file_name().into_string().ok());
        }
        names.sort();
        Ok(names)
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
        let file = CheckedFile::new(opened, relative, integrity, self.bytes_read.clone())
            .map_err(CheckpointError::io("inspect", self.path().join(relative)))?;
        let file = Arc::new(file);
        if files.len() >= OPEN_FILES {
            files.clear();
        }
        files.insert(relative.to_owned(), file.clone());
        Ok(file)
    }

    /// Reads a file whole, if it is not longer than `limit`, and checks it.
    pub fn read_small(&self, relative: &str, limit: u64) -> Result<Vec<u8>, CheckpointError> {
        let path = self.path().join(relative);
        let mut file = self.root.file(relative)?;
        let length = file.metadata().map_err(CheckpointError::io("inspect", &path))?.len();
        if length > limit {
            let source = FormatError::Limit { what: "file length", value: length, limit };
            return Err(CheckpointError::File { path, source });
        }
        let mut bytes = Vec::with_capacity(length as usize);
        file.by_ref().take(limit).read_to_end(&mut bytes).map_err(CheckpointError::io("read", &path))?;
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
        if xxh3_64(part) != block.hash {
            return Err(corrupt(block.range.start, block.range.end));
        }
    }
    Ok(())
}
