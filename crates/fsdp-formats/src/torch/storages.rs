//! The places of storages in a file of `torch.save`, of either kind.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use fsdp_layout::count_text;

use super::Result;
use crate::error::FormatError;
use crate::formats::assembled::StorageStart;
use crate::storage::read_at::ReadAt;
use crate::zip::{Stored, StoredRecords};

/// The storages of a file.
#[derive(Debug, Clone)]
pub(crate) enum Storages {
    /// Records of a zip archive.
    Archive(Arc<StoredRecords>),
    /// Ranges after the pickles, by key: what torch before 1.6 wrote.
    Legacy(HashMap<String, Range<u64>>),
}

impl Storages {
    /// Returns the start of a storage, after checking that it has at least `bytes` bytes. One that
    /// is missing is an error.
    pub(crate) fn find_start(&self, key: &str, bytes: u64) -> Result<StorageStart> {
        let (start, length) = match self {
            Storages::Archive(archive) => {
                let name = format!("data/{key}");
                let storage = archive.directory.records.get_full(&name);
                let (index, _, record) = storage.ok_or(FormatError::MissingRecord { name })?;
                (StorageStart::Record(archive.clone(), index), record.length)
            }
            Storages::Legacy(storages) => {
                let storage = storages.get(key);
                let range = storage.ok_or_else(|| FormatError::MissingRecord {
                    name: key.to_owned(),
                })?;
                (StorageStart::Offset(range.start), range.end - range.start)
            }
        };
        check_storage_length(bytes, length)?;
        Ok(start)
    }

    /// Returns the offset in the file of the first byte of a storage, after checking that it has at
    /// least this many bytes, and the record that it is, if the file has records.
    pub(crate) fn find_data(
        &self,
        file: &dyn ReadAt,
        key: &str,
        bytes: u64,
    ) -> Result<(Option<&Stored>, u64)> {
        match (self, self.find_start(key, bytes)?) {
            (Storages::Archive(archive), StorageStart::Record(_, index)) => {
                let record = archive.get(file, index)?;
                Ok((Some(record), record.start()))
            }
            (
                _,
                StorageStart::Offset(start)
                | StorageStart::Stored(_, start)
                | StorageStart::Deflated(_, start),
            ) => Ok((None, start)),
            (Storages::Legacy(_), StorageStart::Record(..)) => {
                unreachable!("a file of ranges has no records")
            }
        }
    }
}

/// Checks that a storage has as many bytes as its tensor needs.
pub(crate) fn check_storage_length(needed: u64, found: u64) -> Result<()> {
    if found < needed {
        let expected = format!("a storage of {}", count_text(needed, "byte", "bytes"));
        return Err(FormatError::unexpected(expected, format!("one of {found}")));
    }
    Ok(())
}
