//! The files of other programs that are copied beside what a conversion writes.

use std::collections::BTreeMap;

use fsdp_formats::FileError;
use fsdp_formats::internals::{FileIntegrity, block_length};
use fsdp_formats::storage::{CheckedDirectory, ReadAt as _, Staging};
use twox_hash::XxHash3_64;

/// Copies one file, a block at a time.
fn copy_file(
    from: &CheckedDirectory,
    name: &str,
    staging: &Staging,
) -> Result<FileIntegrity, FileError> {
    let file = from.extra_file(name)?;
    let length = file.len();
    let staged = staging.create(name, length)?;
    let block = block_length(length);
    // The hashes of the copy are made from what is read, which is checked if the source has hashes.
    let mut hashes = Vec::new();
    let mut buffer = Vec::new();
    for at in (0..length).step_by(block as usize) {
        buffer.resize(block.min(length - at) as usize, 0);
        file.read_exact_at(at, &mut buffer)
            .map_err(|source| from.file_error(name, source))?;
        staged.write_at(at, &buffer)?;
        hashes.push(XxHash3_64::oneshot(&buffer));
    }
    staged.finish()?;
    let mut integrity = FileIntegrity::default();
    integrity.push(length, block, hashes);
    Ok(integrity)
}

/// Files that go with what is written, and the directories that they come from. The last one with a
/// name counts.
#[derive(Default)]
pub(super) struct CopiedFiles<'c> {
    from: BTreeMap<String, &'c CheckedDirectory>,
}

impl<'c> CopiedFiles<'c> {
    /// Adds files of a directory.
    pub(super) fn add(&mut self, files: Vec<String>, from: &'c CheckedDirectory) {
        // A later directory replaces files of the same names.
        self.from.extend(files.into_iter().map(|name| (name, from)));
    }

    /// Returns the names, sorted.
    pub(super) fn names(&self) -> Vec<String> {
        self.from.keys().cloned().collect()
    }

    /// Returns `true` if there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.from.is_empty()
    }

    /// Copies the files to where the checkpoint is written, and returns their hashes.
    pub(super) fn copy(
        &self,
        staging: &Staging,
    ) -> Result<BTreeMap<String, FileIntegrity>, FileError> {
        self.from
            .iter()
            .map(|(name, from)| Ok((name.clone(), copy_file(from, name, staging)?)))
            .collect()
    }
}
