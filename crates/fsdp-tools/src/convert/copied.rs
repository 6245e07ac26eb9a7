//! The files of other programs that are copied beside what a conversion writes.

use std::collections::BTreeMap;

use fsdp_formats::FileError;
use fsdp_formats::internals::{FileIntegrity, block_length};
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

/// Copies files, each from its directory, to where a checkpoint is written, and returns their
/// hashes.
pub(super) fn copy_files(
    files: &BTreeMap<String, &CheckedDirectory>,
    staging: &Staging,
) -> Result<BTreeMap<String, FileIntegrity>, FileError> {
    files
        .iter()
        .map(|(name, directory)| Ok((name.clone(), copy_file(directory, name, staging)?)))
        .collect()
}
