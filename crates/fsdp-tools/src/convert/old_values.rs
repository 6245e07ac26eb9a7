//! The values files that are beside a single file before it is written.

use fsdp_formats::checkpoint::values_beside;
use fsdp_formats::internals::{
    Header, MAX_INDEX_BYTES, NEW_VALUES, VALUES_HASH, other_with_values_of, values_hash,
};
use fsdp_formats::storage::{CheckedDirectory, Links};
use fsdp_formats::{FileError, Location};
use fsdp_layout::{ErrorKind, Failure as _};

/// The values files beside a single file that is about to be written.
pub(super) struct OldValues {
    target: Location,
    /// The directory of the file and its values.
    pub(super) folder: Location,
    /// The name of the values file.
    pub(super) name: String,
    /// The only other file that may refer to a values file of this name.
    other_target: Location,
}

impl OldValues {
    /// Finds where the values file of `target` would be, and the other file that could refer to it.
    /// None of them need exist, and nothing is read yet.
    pub(super) fn new(target: &Location) -> Result<Self, FileError> {
        let (folder, name) = target.split()?;
        Ok(OldValues {
            target: target.clone(),
            name: values_beside(name),
            other_target: folder.join(other_with_values_of(name)),
            folder,
        })
    }

    /// Returns `true` if a file of this name is there, and holds values that nothing refers to once
    /// the target is replaced. Returns `false` for what cannot be read, because it may be needed.
    pub(super) fn is_unneeded(&self, name: &str) -> bool {
        let Some(ending) = name.strip_prefix(&self.name) else {
            return false;
        };
        if !ending.is_empty() && !ending.starts_with(NEW_VALUES) {
            return false;
        }
        let Ok(bytes) = self.folder.join(name).read_file(MAX_INDEX_BYTES) else {
            return false;
        };
        let hash = values_hash(&bytes);
        // The values are read first: whoever puts new ones there has put the file before.
        let (Ok(target_hash), Ok(other_hash)) = (
            read_values_hash(&self.target),
            read_values_hash(&self.other_target),
        ) else {
            return false;
        };
        if other_hash.as_ref() == Some(&hash) {
            return false;
        }
        match ending.strip_prefix(NEW_VALUES) {
            // The target may have a later hash than its values: a process was killed before it gave
            // the new values their final name.
            None => target_hash.is_some(),
            // A killed process has left values under their first name. The hash in the name tells
            // that they are values.
            Some(ending) => ending.strip_prefix('-') == Some(hash.as_str()),
        }
    }
}

/// Returns the hash of the values file that a single file refers to; `None` if it refers to none,
/// is no safetensors file, or is not there.
fn read_values_hash(file: &Location) -> Result<Option<String>, FileError> {
    if !file.is_file()? {
        return Ok(None);
    }
    let (folder, name) = file.split()?;
    let directory = CheckedDirectory::open(&folder, false, Links::Follow)?;
    match Header::read(&*directory.file(name)?) {
        Ok(mut header) => Ok(header.metadata.swap_remove(VALUES_HASH)),
        Err(source) if source.kind() == ErrorKind::Io => Err(directory.file_error(name, source)),
        Err(_) => Ok(None),
    }
}
