//! The files of a checkpoint, and what each holds.

use std::collections::HashMap;

use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::metadata::{StorageInfo, TensorEntry};
use fsdp_tools::convert::Rename;
use serde::Serialize;

use super::raster::{Raster, Size};
use crate::inspect;
use crate::keys::Keys;
use crate::natural;
use crate::text::or_word;

/// The version of the JSON's schema.
const SCHEMA: u32 = 1;

/// A file of a checkpoint, and how much of the selected tensors it has.
#[derive(Debug, Serialize)]
pub(super) struct FileContents {
    pub(super) file: String,
    /// The rank that wrote it, from its name.
    pub(super) rank: Option<u64>,
    pub(super) boxes: u64,
    /// The bytes of the tensors' elements in it.
    pub(super) bytes: u64,
}

/// The selected tensors of a checkpoint, and the files that hold them.
pub(super) struct CheckpointFiles<'a> {
    pub(super) path: String,
    pub(super) format: &'static str,
    /// By the natural order of files' names.
    pub(super) files: Vec<FileContents>,
    /// By the natural order of tensors' names.
    tensors: Vec<(&'a str, &'a TensorEntry)>,
    /// The position of each file in `files`, by its name.
    positions: HashMap<&'a str, u32>,
}

#[derive(Debug, Serialize)]
pub(super) struct CheckpointFilesSummary<'a> {
    schema: u32,
    path: &'a str,
    format: &'static str,
    tensors: usize,
    bytes: u64,
    files: &'a [FileContents],
}

impl<'a> CheckpointFiles<'a> {
    /// Finds out which file holds how much of the selected tensors. Names are in natural order.
    pub(super) fn new(path: String, source: &'a dyn Checkpoint, keys: &Keys<'_>) -> Self {
        let selected = source
            .metadata()
            .tensors()
            .filter(|(name, _)| keys.rename(name) == Rename::Keep);
        let mut tensors: Vec<(&str, &TensorEntry)> = selected.collect();
        tensors.sort_by(|a, b| natural::compare(a.0, b.0));
        // A file may hold parts of many tensors, and a tensor parts in many files.
        let mut by_file: HashMap<&str, FileContents> = HashMap::new();
        for (_, entry) in &tensors {
            for chunk in &entry.chunks {
                // A box that is stored nowhere is damage, which `verify` tells.
                let Some(stored) = &chunk.stored else {
                    continue;
                };
                let file = by_file
                    .entry(&stored.relative_path)
                    .or_insert_with(|| FileContents::new(stored));
                let bytes = inspect::bytes_of(entry.properties.dtype, &chunk.bounds.sizes);
                file.boxes += 1;
                file.bytes = file.bytes.saturating_add(bytes);
            }
        }
        let mut named: Vec<(&str, FileContents)> = by_file.into_iter().collect();
        // `__10_0.distcp` comes after `__2_0.distcp`, as its rank does.
        named.sort_by(|a, b| natural::compare(a.0, b.0));
        let mut files = Vec::with_capacity(named.len());
        let mut positions = HashMap::with_capacity(named.len());
        for (name, file) in named {
            positions.insert(name, files.len() as u32);
            files.push(file);
        }
        CheckpointFiles {
            path,
            format: source.format().name(),
            files,
            tensors,
            positions,
        }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    pub(super) fn tensors(&self) -> &[(&'a str, &'a TensorEntry)] {
        &self.tensors
    }

    /// Returns the bytes of all selected tensors.
    pub(super) fn bytes(&self) -> u64 {
        self.tensors.iter().fold(0, |bytes, (_, entry)| {
            bytes.saturating_add(inspect::bytes(entry))
        })
    }

    /// Returns the most bytes of any file, at least 1.
    pub(super) fn max_file_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).fold(1, u64::max)
    }

    /// Returns the object of `--json`.
    pub(super) fn json(&self) -> CheckpointFilesSummary<'_> {
        CheckpointFilesSummary {
            schema: SCHEMA,
            path: &self.path,
            format: self.format,
            tensors: self.tensors.len(),
            bytes: self.bytes(),
            files: &self.files,
        }
    }

    /// Draws which file holds which part of a tensor.
    pub(super) fn raster(&self, entry: &TensorEntry, size: Size) -> Raster {
        let mut boxes = Vec::with_capacity(entry.chunks.len());
        for chunk in &entry.chunks {
            if let Some(stored) = &chunk.stored {
                let position = self.positions[stored.relative_path.as_str()];
                boxes.push((&chunk.bounds, position));
            }
        }
        Raster::new(&entry.shape, boxes, size)
    }
}

impl FileContents {
    fn new(stored: &StorageInfo) -> Self {
        FileContents {
            file: stored.relative_path.clone(),
            rank: inspect::rank(stored),
            boxes: 0,
            bytes: 0,
        }
    }

    /// Returns the rank, or a dash where the file's name tells none.
    pub(super) fn rank_text(&self) -> String {
        or_word(self.rank, "–")
    }
}
