//! Reading a DCP checkpoint: by ranges, in parallel, straight into the destination.

mod items;
mod read;

use std::path::Path;

use fsdp_layout::PlainValue;

use crate::error::FileError;
use crate::item::decode_value;
use crate::limits::MAX_PICKLE_BYTES;
use crate::metadata::{Entry, METADATA_FILE, Metadata, StorageInfo, decode};
use crate::plan::LoadPlanError;
use crate::storage::backend::Links;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;

use items::ReadError;
pub(crate) use read::default_threads;
pub use read::{Destination, ReadOptions};

/// An open DCP checkpoint. Shared by threads; nothing of it is ever written.
///
/// Data files are opened when they are first needed. Where the checkpoint has an integrity file, every byte read is
/// checked against it.
#[derive(Debug)]
pub struct CheckpointReader {
    directory: CheckedDirectory,
    metadata: Metadata,
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

impl CheckpointReader {
    /// Opens the checkpoint in this directory.
    ///
    /// Without `.metadata`, rank-local `__{rank}.metadata` files are taken together (torch's `use_collectives=False`).
    /// Without those either, it is [`FileError::NotCommitted`].
    pub fn open(location: impl Into<Location>) -> Result<Self, FileError> {
        Self::open_with(location, OpenOptions::default())
    }

    /// As [`CheckpointReader::open`], with options.
    pub fn open_with(location: impl Into<Location>, options: OpenOptions) -> Result<Self, FileError> {
        let location = location.into();
        let path = location.name();
        let not_committed = |reason| FileError::NotCommitted { path: path.to_owned(), reason };
        let directory = match CheckedDirectory::open(&location, options.verify, Links::Refuse) {
            Err(FileError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return Err(not_committed("there is nothing"));
            }
            directory => directory?,
        };
        let mut parts = Vec::new();
        for name in metadata_files(&directory)? {
            let bytes = directory.read_small(&name, MAX_PICKLE_BYTES)?;
            parts.push(decode(&bytes).map_err(|error| directory.file_error(&name, error.into()))?);
        }
        let metadata = match parts.len() {
            0 => return Err(not_committed(missing_metadata(path))),
            1 => parts.swap_remove(0),
            _ => Metadata::merge(parts),
        };
        Ok(CheckpointReader { directory, metadata })
    }

    /// What the checkpoint holds.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Where it is: a path, or a URL.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Its directory, with its files.
    #[must_use]
    pub fn directory(&self) -> &CheckedDirectory {
        &self.directory
    }

    /// Whether what is read is checked against an integrity file.
    #[must_use]
    pub fn has_integrity(&self) -> bool {
        self.directory.has_integrity()
    }

    /// Bytes read from data files so far.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.directory.bytes_read()
    }

    /// Reads a non-tensor value.
    pub fn read_value(&self, fqn: &str) -> Result<PlainValue, FileError> {
        let kind = |saved| LoadPlanError::Kind { fqn: fqn.to_owned(), saved, wanted: "value" };
        let stored = match self.metadata.entries.get(fqn) {
            None => return Err(LoadPlanError::Missing { fqn: fqn.to_owned() }.into()),
            Some(Entry::Tensor(_)) => return Err(kind("tensor").into()),
            Some(Entry::Bytes(bytes)) => bytes.stored.as_ref(),
        };
        let stored = stored.ok_or_else(|| FileError::NotStored { fqn: fqn.to_owned() })?;
        self.read_stored_value(fqn, stored)
    }

    pub(crate) fn read_stored_value(&self, fqn: &str, stored: &StorageInfo) -> Result<PlainValue, FileError> {
        // A compressed value may be a thousand times its length, as long as that is little.
        let expected = stored.length.saturating_mul(1000).max(1 << 20);
        let value = self.item_bytes(stored, expected).and_then(|bytes| decode_value(&bytes).map_err(ReadError::Format));
        value.map_err(|error| self.item_error(fqn, stored, error))
    }
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
pub(crate) fn metadata_files(directory: &CheckedDirectory) -> Result<Vec<String>, FileError> {
    if directory.has(METADATA_FILE)? {
        return Ok(vec![METADATA_FILE.to_owned()]);
    }
    let names = directory.names()?;
    let rank_of = |name: &String| name.strip_prefix("__")?.strip_suffix(".metadata")?.parse::<u32>().ok();
    let mut ranks: Vec<u32> = names.iter().filter_map(rank_of).collect();
    ranks.sort_unstable();
    Ok(ranks.into_iter().map(|rank| format!("__{rank}.metadata")).collect())
}
