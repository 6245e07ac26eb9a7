//! The places of storages in a file of `torch.save`, of either kind.

use std::collections::HashMap;
use std::sync::Arc;

use super::tensor_ref::TensorRef;
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
    Legacy(HashMap<String, LegacyStorage>),
}

/// A storage of a legacy file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LegacyStorage {
    /// The first byte of its data.
    pub(crate) data: u64,
    /// Its length in bytes.
    pub(crate) length: u64,
}

/// Returns the name of the record of a storage.
fn record_of(key: &str) -> String {
    format!("data/{key}")
}

impl Storages {
    /// Returns the start of a tensor's storage, including its header if it has one. A storage that
    /// is too short is an error.
    pub(crate) fn start(&self, tensor: &TensorRef) -> Result<u64, FormatError> {
        self.start_of(&tensor.storage, tensor.storage_bytes)
    }

    /// Returns where a storage begins, after checking that it has at least this many bytes.
    fn start_of(&self, key: &str, bytes: u64) -> Result<u64, FormatError> {
        let (start, length) = match self {
            Storages::Archive(archive) => {
                let record = archive.get(&record_of(key))?;
                (record.header, record.length)
            }
            Storages::Legacy(storages) => {
                let missing = || FormatError::MissingRecord {
                    name: key.to_owned(),
                };
                let storage = storages.get(key).ok_or_else(missing)?;
                (storage.data, storage.length)
            }
        };
        if length < bytes {
            let expected = format!("a storage of {bytes} bytes");
            return Err(FormatError::unexpected(
                expected,
                format!("one of {length}"),
            ));
        }
        Ok(start)
    }

    /// Returns the start of the data of a tensor's storage, which the storage's header determines.
    pub(crate) fn data_offset(
        &self,
        source: &dyn ReadAt,
        tensor: &TensorRef,
    ) -> Result<u64, FormatError> {
        self.data_offset_of(source, &tensor.storage, tensor.storage_bytes)
    }

    /// Returns the start of the data of a storage, of which this many bytes must be there.
    pub(crate) fn data_offset_of(
        &self,
        source: &dyn ReadAt,
        key: &str,
        bytes: u64,
    ) -> Result<u64, FormatError> {
        let start = self.start_of(key, bytes)?;
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
    storages: Arc<Storages>,
    key: String,
    bytes: u64,
}

impl InStorage {
    /// Returns the storage of a tensor.
    pub(crate) fn of(storages: &Arc<Storages>, tensor: &TensorRef) -> Self {
        InStorage {
            storages: storages.clone(),
            key: tensor.storage.clone(),
            bytes: tensor.storage_bytes,
        }
    }
}

impl FindStart for InStorage {
    fn find(&self, file: &dyn ReadAt) -> Result<u64, FormatError> {
        self.storages.data_offset_of(file, &self.key, self.bytes)
    }
}
