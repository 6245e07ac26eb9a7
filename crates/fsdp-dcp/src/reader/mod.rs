//! Reading a DCP checkpoint: by ranges, in parallel, straight into the destination.

mod read;

use std::collections::HashMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fsdp_layout::PlainValue;

use crate::error::{CheckpointError, FormatError};
use crate::file::CheckedFile;
use crate::integrity::{FileIntegrity, INTEGRITY_FILE, Integrity};
use crate::item::decode_value;
use crate::limits::{MAX_INTEGRITY_BYTES, MAX_OBJECT_BYTES, MAX_PICKLE_BYTES};
use crate::metadata::{Entry, METADATA_FILE, Metadata, StorageInfo, decode};
use crate::paths::Root;
use crate::plan::LoadPlanError;
use crate::source::Window;

pub(crate) use read::default_threads;
pub use read::{Destination, ReadOptions};

/// An open DCP checkpoint. Shared by threads; nothing of it is ever written.
///
/// Data files are opened when they are first needed. Where the checkpoint has an integrity file, every byte read is
/// checked against it.
#[derive(Debug)]
pub struct CheckpointReader {
    root: Root,
    metadata: Metadata,
    integrity: Option<HashMap<String, Arc<FileIntegrity>>>,
    files: Mutex<HashMap<String, Arc<CheckedFile>>>,
    bytes_read: Arc<AtomicU64>,
}

/// How to open a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenOptions {
    /// Whether to check what is read against the integrity file, where there is one.
    pub verify: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions { verify: true }
    }
}

/// How many files are kept open; a load that needs more opens them again.
const OPEN_FILES: usize = 200;

impl CheckpointReader {
    /// Opens the checkpoint in this directory.
    ///
    /// Without `.metadata`, rank-local `__{rank}.metadata` files are taken together (torch's `use_collectives=False`).
    /// Without those either, it is [`CheckpointError::NotCommitted`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        Self::open_with(path, OpenOptions::default())
    }

    /// As [`CheckpointReader::open`], with options.
    pub fn open_with(path: impl AsRef<Path>, options: OpenOptions) -> Result<Self, CheckpointError> {
        let path = path.as_ref();
        let root = match Root::open(path, false) {
            Err(CheckpointError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return Err(not_committed(path, "there is nothing"));
            }
            root => root?,
        };
        let integrity = match options.verify {
            true => read_integrity(&root)?,
            false => None,
        };
        let mut parts = Vec::new();
        for name in metadata_files(&root)? {
            let bytes = read_small(&root, &name, MAX_PICKLE_BYTES)?;
            let file_error = |source| CheckpointError::File { path: path.join(&name), source };
            if let Some(integrity) = &integrity {
                check_small(integrity, &name, &bytes).map_err(file_error)?;
            }
            parts.push(decode(&bytes).map_err(|error| file_error(error.into()))?);
        }
        let metadata = match parts.len() {
            0 => return Err(not_committed(path, missing_metadata(path))),
            1 => parts.swap_remove(0),
            _ => Metadata::merge(parts),
        };
        Ok(CheckpointReader { root, metadata, integrity, files: Mutex::default(), bytes_read: Arc::default() })
    }

    /// What the checkpoint holds.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.root.path()
    }

    /// Whether what is read is checked against an integrity file.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.integrity.is_some()
    }

    /// Bytes read from data files so far.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// A data file, by the relative path that the metadata gives.
    pub fn file(&self, relative: &str) -> Result<Arc<CheckedFile>, CheckpointError> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = files.get(relative) {
            return Ok(file.clone());
        }
        let integrity = match &self.integrity {
            None => None,
            Some(files) => Some(files.get(relative).cloned().ok_or_else(|| CheckpointError::File {
                path: self.path().join(relative),
                source: FormatError::Malformed {
                    what: "integrity file",
                    reason: "it does not list this file".to_owned(),
                },
            })?),
        };
        let file = CheckedFile::new(self.root.file(relative)?, relative, integrity, self.bytes_read.clone())
            .map_err(CheckpointError::io("inspect", self.path().join(relative)))?;
        let file = Arc::new(file);
        if files.len() >= OPEN_FILES {
            files.clear();
        }
        files.insert(relative.to_owned(), file.clone());
        Ok(file)
    }

    /// Reads a non-tensor value.
    pub fn read_value(&self, fqn: &str) -> Result<PlainValue, CheckpointError> {
        let kind = |saved| LoadPlanError::Kind { fqn: fqn.to_owned(), saved, wanted: "value" };
        let stored = match self.metadata.entries.get(fqn) {
            None => return Err(LoadPlanError::Missing { fqn: fqn.to_owned() }.into()),
            Some(Entry::Tensor(_)) => return Err(kind("tensor").into()),
            Some(Entry::Bytes(bytes)) => bytes.stored.as_ref(),
        };
        let stored = stored.ok_or_else(|| CheckpointError::NotStored { fqn: fqn.to_owned() })?;
        let value = self.item_bytes(stored).and_then(|bytes| decode_value(&bytes).map_err(ReadError::Format));
        value.map_err(|error| self.item_error(fqn, stored, error))
    }

    /// All bytes of an item, with its stream transforms undone.
    fn item_bytes(&self, stored: &StorageInfo) -> Result<Vec<u8>, ReadError> {
        let file = self.file(&stored.relative_path)?;
        let item = Window::new(&*file, stored.offset, stored.length)?;
        if stored.length > MAX_OBJECT_BYTES {
            let (value, limit) = (stored.length, MAX_OBJECT_BYTES);
            return Err(FormatError::Limit { what: "item length", value, limit }.into());
        }
        let mut bytes = vec![0; stored.length as usize];
        crate::source::ReadAt::read_exact_at(&item, 0, &mut bytes)?;
        match stored.transforms.as_slice() {
            [] => Ok(bytes),
            [first, ..] => Err(FormatError::Unsupported { what: format!("the stream transform `{first}`") }.into()),
        }
    }

    fn item_error(&self, fqn: &str, stored: &StorageInfo, error: ReadError) -> CheckpointError {
        match error {
            ReadError::Checkpoint(error) => error,
            ReadError::Format(source) => CheckpointError::Item {
                fqn: fqn.to_owned(),
                path: self.path().join(&stored.relative_path),
                offset: stored.offset,
                source,
            },
        }
    }
}

/// An error inside an item (to be told with its key and place), or one that says all itself.
#[derive(Debug)]
enum ReadError {
    Format(FormatError),
    Checkpoint(CheckpointError),
}

impl From<FormatError> for ReadError {
    fn from(error: FormatError) -> Self {
        ReadError::Format(error)
    }
}

impl From<CheckpointError> for ReadError {
    fn from(error: CheckpointError) -> Self {
        ReadError::Checkpoint(error)
    }
}

fn not_committed(path: &Path, reason: &'static str) -> CheckpointError {
    CheckpointError::NotCommitted { path: path.to_owned(), reason }
}

/// Says why there is no metadata, as well as can be told from outside.
fn missing_metadata(path: &Path) -> &'static str {
    let is_staging = path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.contains(".tmp-"));
    match is_staging {
        true => "it is a staging directory of a save that did not finish",
        false => "it has no `.metadata`",
    }
}

/// The names of the metadata files: `.metadata`, or those of the ranks in order.
fn metadata_files(root: &Root) -> Result<Vec<String>, CheckpointError> {
    if root.find(METADATA_FILE)?.is_some() {
        return Ok(vec![METADATA_FILE.to_owned()]);
    }
    let list = std::fs::read_dir(root.path()).map_err(CheckpointError::io("list", root.path()))?;
    let mut ranks: Vec<u32> = Vec::new();
    for entry in list {
        let entry = entry.map_err(CheckpointError::io("list", root.path()))?;
        let rank: Option<u32> = entry
            .file_name()
            .to_str()
            .and_then(|name| name.strip_prefix("__")?.strip_suffix(".metadata")?.parse().ok());
        ranks.extend(rank);
    }
    ranks.sort_unstable();
    Ok(ranks.into_iter().map(|rank| format!("__{rank}.metadata")).collect())
}

/// Reads a file whole, if it is not longer than `limit`.
fn read_small(root: &Root, name: &str, limit: u64) -> Result<Vec<u8>, CheckpointError> {
    let path: PathBuf = root.path().join(name);
    let mut file = root.file(name)?;
    let length = file.metadata().map_err(CheckpointError::io("inspect", &path))?.len();
    if length > limit {
        let source = FormatError::Limit { what: "file length", value: length, limit };
        return Err(CheckpointError::File { path, source });
    }
    let mut bytes = Vec::with_capacity(length as usize);
    file.by_ref().take(limit).read_to_end(&mut bytes).map_err(CheckpointError::io("read", &path))?;
    Ok(bytes)
}

fn read_integrity(root: &Root) -> Result<Option<HashMap<String, Arc<FileIntegrity>>>, CheckpointError> {
    if root.find(INTEGRITY_FILE)?.is_none() {
        return Ok(None);
    }
    let bytes = read_small(root, INTEGRITY_FILE, MAX_INTEGRITY_BYTES)?;
    let integrity = Integrity::decode(&bytes)
        .map_err(|source| CheckpointError::File { path: root.path().join(INTEGRITY_FILE), source })?;
    Ok(Some(integrity.files.into_iter().map(|(path, file)| (path, Arc::new(file))).collect()))
}

/// Checks a file that is in memory.
fn check_small(integrity: &HashMap<String, Arc<FileIntegrity>>, name: &str, bytes: &[u8]) -> Result<(), FormatError> {
    let corrupt = |offset, end| FormatError::Corrupt { file: name.to_owned(), offset, end };
    let length = bytes.len() as u64;
    let Some(file) = integrity.get(name) else {
        let reason = format!("it does not list `{name}`");
        return Err(FormatError::Malformed { what: "integrity file", reason });
    };
    if file.length() != length {
        return Err(corrupt(length.min(file.length()), length.max(file.length())));
    }
    for block in file.blocks() {
        let part = &bytes[block.range.start as usize..block.range.end as usize];
        if xxhash_rust::xxh3::xxh3_64(part) != block.hash {
            return Err(corrupt(block.range.start, block.range.end));
        }
    }
    Ok(())
}
