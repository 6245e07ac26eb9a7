//! The places of storages in a file of `torch.save`, of either kind.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::Result;
use super::zip::Directory;
use crate::error::FormatError;
use crate::formats::assembled::FindStart;
use crate::storage::read_at::ReadAt;

/// The storages of a file.
#[derive(Debug, Clone)]
pub(crate) enum Storages {
    /// Records of a zip archive.
    Archive(Directory),
    /// Ranges after the pickles, by key: what torch before 1.6 wrote.
    Legacy(HashMap<String, Range<u64>>),
}

/// Returns the name of the record of a storage.
fn record_of(key: &str) -> String {
    format!("data/{key}")
}

impl Storages {
    /// Returns where a storage begins, including its header if it has one, after checking that it
    /// has at least this many bytes.
    pub(crate) fn start(&self, key: &str, bytes: u64) -> Result<u64> {
        let (start, length) = match self {
            Storages::Archive(archive) => {
                let record = archive.get(&record_of(key))?;
                (record.header, record.length)
            }
            Storages::Legacy(storages) => {
                let storage = storages
                    .get(key)
                    .ok_or_else(|| FormatError::MissingRecord {
                        name: key.to_owned(),
                    })?;
                (storage.start, storage.end - storage.start)
            }
        };
        if length < bytes {
            let expected = format!("a storage of {bytes} bytes");
            let found = format!("one of {length}");
            return Err(FormatError::unexpected(expected, found));
        }
        Ok(start)
    }

    /// Returns the start of the data of a storage, of which this many bytes must be there. The
    /// storage's header determines it.
    pub(crate) fn data_offset(&self, source: &dyn ReadAt, key: &str, bytes: u64) -> Result<u64> {
        let start = self.start(key, bytes)?;
        match self {
            Storages::Archive(archive) => {
                let name = record_of(key);
                archive.data_offset(source, &name, archive.get(&name)?)
            }
            Storages::Legacy(_) => Ok(start),
        }
    }
}

/// The storage of one tensor, in a file whose storages are known.
#[derive(Debug)]
pub(crate) struct InStorage {
    pub(crate) storages: Arc<Storages>,
    pub(crate) key: String,
    pub(crate) bytes: u64,
}

impl FindStart for InStorage {
    fn find(&self, file: &dyn ReadAt) -> Result<u64> {
        self.storages.data_offset(file, &self.key, self.bytes)
    }
}
