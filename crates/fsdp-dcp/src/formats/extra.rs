//! Files that other programs put beside a checkpoint's own: the state of a trainer's loop, a model's configuration, a
//! tokenizer.

use std::collections::{BTreeMap, HashSet};

use twox_hash::XxHash3_64;

use super::checkpoint::{Checkpoint, Format};
use crate::error::FileError;
use crate::storage::Staging;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::integrity::{FileIntegrity, INTEGRITY_FILE, block_length};
use crate::storage::names::{CLAIM_FILE, METADATA_FILE, VALUES_FILE};
use crate::storage::read_at::ReadAt as _;

/// The files beside a checkpoint's own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExtraFiles {
    /// The regular files that belong to the checkpoint's framework, sorted: a copy of the checkpoint needs them.
    pub files: Vec<String>,
    /// All else, sorted: directories, links that lead out, the same weights in other formats, data files of other saves.
    pub others: Vec<String>,
}

impl ExtraFiles {
    /// Lists them. A checkpoint that is one file has none.
    pub fn of(checkpoint: &dyn Checkpoint) -> Result<Self, FileError> {
        let directory = checkpoint.directory();
        let is_own: &dyn Fn(&str) -> bool = match checkpoint.format() {
            format if format.is_file() => return Ok(ExtraFiles::default()),
            Format::SafetensorsDirectory => &is_own_of_safetensors,
            Format::Dcp => &is_own_of_dcp,
            _ => &is_own_of_torch,
        };
        let stored: HashSet<&str> =
            checkpoint.metadata().stored().map(|(_, _, stored)| stored.relative_path.as_str()).collect();
        let mut found = ExtraFiles::default();
        for name in directory.names()? {
            if is_own(&name) || name == CLAIM_FILE || stored.contains(name.as_str()) {
                continue;
            }
            let is_file = match directory.has(&name) {
                Err(FileError::Path { .. }) => false,
                is_file => is_file?,
            };
            if is_file && !is_other_data(&name) { found.files.push(name) } else { found.others.push(name) }
        }
        Ok(found)
    }

    /// Copies the files to where a checkpoint of the same framework is written, and returns their hashes.
    pub(crate) fn copy(
        &self,
        from: &CheckedDirectory,
        staging: &Staging,
    ) -> Result<BTreeMap<String, FileIntegrity>, FileError> {
        let mut copied = BTreeMap::new();
        for name in &self.files {
            copied.insert(name.clone(), copy_file(from, name, staging)?);
        }
        Ok(copied)
    }
}

fn is_own_of_dcp(name: &str) -> bool {
    name.starts_with(METADATA_FILE) || name.starts_with(INTEGRITY_FILE) || name.ends_with(METADATA_FILE)
}

fn is_own_of_safetensors(name: &str) -> bool {
    name.starts_with(INTEGRITY_FILE) || name == VALUES_FILE || name.ends_with(".safetensors.index.json")
}

fn is_own_of_torch(name: &str) -> bool {
    name.starts_with(INTEGRITY_FILE) || name.ends_with(".bin.index.json") || name == "metadata.pkl"
}

/// Returns `true` for data files of another save, for weights in another format, which a copy would make stale, and for
/// signatures, which are of the original's bytes.
fn is_other_data(name: &str) -> bool {
    let weights = name.starts_with("pytorch_model") || name.starts_with("tf_model") || name.starts_with("flax_model");
    weights || [".distcp", ".safetensors", ".gguf", ".onnx", ".sig"].iter().any(|end| name.ends_with(end))
}

/// Copies one file, a block at a time.
fn copy_file(from: &CheckedDirectory, name: &str, staging: &Staging) -> Result<FileIntegrity, FileError> {
    let file = from.extra_file(name)?;
    let length = file.len();
    let staged = staging.create(name, length)?;
    let block = block_length(length);
    let (mut hashes, mut buffer) = (Vec::new(), Vec::new());
    for at in (0..length).step_by(block as usize) {
        buffer.resize(block.min(length - at) as usize, 0);
        file.read_exact_at(at, &mut buffer).map_err(|source| from.file_error(name, source))?;
        staged.write_at(at, &buffer)?;
        hashes.push(XxHash3_64::oneshot(&buffer));
    }
    staged.finish()?;
    let mut integrity = FileIntegrity::default();
    integrity.push(length, block, hashes);
    Ok(integrity)
}
