//! The hashed files of a conversion that are no tensors: those of other programs, which are copied
//! beside what it writes, and small ones of its own.

use std::collections::BTreeMap;

use fsdp_formats::FileError;
use fsdp_formats::internals::{FileIntegrity, INTEGRITY_FILE, Integrity, block_length};
use fsdp_formats::storage::{CheckedDirectory, ReadAt as _, Staging};
use twox_hash::XxHash3_64;

/// Copies one file, a block at a time, and returns the hashes of its blocks.
fn copy_file(
    directory: &CheckedDirectory,
    name: &str,
    staging: &Staging,
) -> Result<FileIntegrity, FileError> {
    let file = directory.extra_file(name)?;
    let length = file.len();
    let staged = staging.create(name, length)?;
    let block_bytes = block_length(length);
    // The hashes of the copy are made from what is read, which is checked if the source has hashes.
    let mut hashes = Vec::new();
    let mut buffer = Vec::new();
    for offset in (0..length).step_by(block_bytes as usize) {
        buffer.resize(block_bytes.min(length - offset) as usize, 0);
        file.read_exact_at(offset, &mut buffer)
            .map_err(|source| directory.file_error(name, source))?;
        staged.write_at(offset, &buffer)?;
        hashes.push(XxHash3_64::oneshot(&buffer));
    }
    staged.finish()?;
    let mut integrity = FileIntegrity::default();
    integrity.push(length, block_bytes, hashes);
    Ok(integrity)
}

/// Writes a small file, and returns its hashes.
pub(super) fn write_hashed(
    staging: &Staging,
    name: &str,
    bytes: &[u8],
) -> Result<FileIntegrity, FileError> {
    let mut integrity = FileIntegrity::default();
    integrity.push_bytes(bytes);
    staging.write(name, bytes)?;
    Ok(integrity)
}

/// Commits a directory of which `integrity` has the hashes, as its last file.
pub(super) fn commit_with_hashes(staging: Staging, integrity: &Integrity) -> Result<(), FileError> {
    let bytes = integrity.encode().map_err(|source| FileError::File {
        path: staging.directory().join(INTEGRITY_FILE),
        source,
    })?;
    staging.commit(INTEGRITY_FILE, &bytes)
}

/// The files of other programs that go beside what a conversion writes.
#[derive(Default)]
pub(super) struct CopiedFiles<'c> {
    /// The directory that each comes from, by name.
    pub(super) directories: BTreeMap<String, &'c CheckedDirectory>,
    /// The name and the new contents of the one that is changed on the way.
    pub(super) edited: Option<(String, Vec<u8>)>,
}

impl CopiedFiles<'_> {
    /// Copies the files to where a checkpoint is written, and returns their hashes.
    pub(super) fn copy_to(
        &self,
        staging: &Staging,
    ) -> Result<BTreeMap<String, FileIntegrity>, FileError> {
        let mut hashes = BTreeMap::new();
        for (name, directory) in &self.directories {
            let integrity = match &self.edited {
                Some((edited_name, bytes)) if edited_name == name => {
                    write_hashed(staging, name, bytes)?
                }
                _ => copy_file(directory, name, staging)?,
            };
            hashes.insert(name.clone(), integrity);
        }
        Ok(hashes)
    }
}
