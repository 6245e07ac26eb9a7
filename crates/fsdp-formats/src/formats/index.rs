//! The JSON index of a model in several files: `model.safetensors.index.json`,
//! `pytorch_model.bin.index.json`.

use indexmap::IndexMap;
use serde::Deserialize;

use crate::budget::Budget;
use crate::error::{FileError, FormatError};
use crate::limits::MAX_INDEX_BYTES;
use crate::metadata::Metadata;
use crate::storage::checked_directory::CheckedDirectory;

/// The content of an index.
#[derive(Debug, Deserialize)]
pub(crate) struct Index {
    /// The file of each key, in the model's order.
    pub(crate) weight_map: IndexMap<String, String>,
}

impl Index {
    /// Reads an index. One that is too large, or is not JSON of this form, is an error.
    pub(crate) fn read(directory: &CheckedDirectory, name: &str) -> Result<Self, FileError> {
        let bytes = directory.read_checked(name, MAX_INDEX_BYTES)?;
        Budget::new(bytes.len() as u64, 1)
            .charge_json("memory for the index", &bytes)
            .map_err(|over| directory.file_error(name, over.into()))?;
        serde_json::from_slice(&bytes)
            .map_err(|error| directory.file_error(name, FormatError::malformed("index", error)))
    }

    /// Returns `true` if the index says that a key is in another file. Keys that the index does not
    /// list are read from the file in which they are found, because libraries load everything in
    /// the files.
    pub(crate) fn is_elsewhere(&self, key: &str, file: &str) -> bool {
        self.weight_map
            .get(key)
            .is_some_and(|listed_file| listed_file != file)
    }

    /// Sorts keys in the order of the index, which is the model's. Keys that it does not list come
    /// last.
    pub(crate) fn sort(&self, metadata: &mut Metadata) {
        let entries = &mut metadata.entries;
        entries
            .sort_by_cached_key(|key, _| self.weight_map.get_index_of(key).unwrap_or(usize::MAX));
    }

    /// Returns the keys of each file.
    ///
    /// # Errors
    /// Files that are missing, or that are not in the directory of the index.
    pub(crate) fn keys_by_file(
        &self,
        directory: &CheckedDirectory,
    ) -> Result<IndexMap<&str, Vec<&str>>, FileError> {
        let mut keys_by_file: IndexMap<&str, Vec<&str>> = IndexMap::new();
        for (key, file) in &self.weight_map {
            keys_by_file.entry(file).or_default().push(key);
        }
        let mut missing = Vec::new();
        for file in keys_by_file.keys() {
            if file.contains('/') {
                return Err(FileError::Path {
                    root: directory.path().to_owned(),
                    path: (*file).to_owned(),
                    reason: "an index names files beside it only",
                });
            }
            if !directory.has(file)? {
                missing.push((*file).to_owned());
            }
        }
        missing.sort_unstable();
        directory.check_missing(missing)?;
        Ok(keys_by_file)
    }
}
