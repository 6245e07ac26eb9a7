//! The places of storages in a file of `torch.save`, of either kind.

use std::collections::HashMap;

use super::tensor_ref::TensorRef;
use super::zip::Directory;
use crate::error::FormatError;
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
    /// Its bytes.
    pub(crate) length: u64,
}

/// Returns the name of the record of a tensor's storage.
fn record_of(tensor: &TensorRef) -> String {
    format!("data/{}", tensor.storage)
}

impl Storages {
    /// Returns where the storage of a tensor begins, with its header if it has one. One that is too short is an error.
    pub(crate) fn start(&self, tensor: &TensorRef) -> Result<u64, FormatError> {
        let (start, length) = match self {
            Storages::Archive(archive) => {
                let record = archive.get(&record_of(tensor))?;
                (record.header, record.length)
            }
            Storages::Legacy(storages) => {
                let missing = || FormatError::MissingRecord { name: tensor.storage.clone() };
                let storage = storages.get(&tensor.storage).ok_or_else(missing)?;
                (storage.data, storage.length)
            }
        };
        if length < tensor.storage_bytes {
            let expected = format!("a storage of {} bytes", tensor.storage_bytes);
            return Err(FormatError::unexpected(expected, format!("one of {length}")));
        }
        Ok(start)
    }

    /// Returns where the data of a tensor's storage begins.
    pub(crate) fn data_offset(&self, source: &dyn ReadAt, tensor: &TensorRef) -> Result<u64, FormatError> {
        let start = self.start(tensor)?;
        match self {
            Storages::Archive(archive) => {
                let name = record_of(tensor);
                archive.data_offset(source, &name, archive.get(&name)?)
            }
            Storages::Legacy(_) => Ok(start),
        }
    }
}
