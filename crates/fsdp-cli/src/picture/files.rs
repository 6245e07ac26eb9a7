//! The files of a checkpoint, and what each holds.

use std::collections::HashMap;

use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::metadata::{StorageInfo, TensorEntry};
use fsdp_layout::boxes::saturating_bytes;
use fsdp_tools::convert::Rename;
use serde::Serialize;

use super::raster::Raster;
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

/// The selected tensors of a checkpoint, and the files that hold them: the object of `--json`.
#[derive(Serialize)]
pub(super) struct CheckpointFiles<'a> {
    schema: u32,
    pub(super) path: String,
    pub(super) format: &'static str,
    /// The number of tensors.
    tensors: usize,
    /// The bytes of all tensors.
    pub(super) bytes: u64,
    /// By the natural order of files' names.
    pub(super) files: Vec<FileContents>,
    /// The tensors, by the natural order of their names.
    #[serde(skip)]
    pub(super) entries: Vec<(&'a str, &'a TensorEntry)>,
    /// The position of each file in `files`, by its name.
    #[serde(skip)]
    file_positions: HashMap<&'a str, u32>,
}

impl<'a> CheckpointFiles<'a> {
    /// Finds out which file holds how much of the selected tensors. Names are in natural order.
    pub(super) fn new(path: String, source: &'a dyn Checkpoint, keys: &Keys<'_>) -> Self {
        let selected = source
            .metadata()
            .tensors()
            .filter(|(name, _)| keys.rename(name) == Rename::Keep);
        let mut entries: Vec<(&str, &TensorEntry)> = selected.collect();
        entries.sort_by(|a, b| natural::compare(a.0, b.0));
        let mut bytes: u64 = 0;
        // A file may hold parts of many tensors, and a tensor parts in many files.
        let mut contents_by_file: HashMap<&str, FileContents> = HashMap::new();
        for (_, entry) in &entries {
            bytes = bytes.saturating_add(inspect::tensor_bytes(entry));
            for chunk in &entry.chunks {
                // A box that is stored nowhere is damage, which `verify` tells.
                let Some(stored) = &chunk.stored else {
                    continue;
                };
                let file = contents_by_file
                    .entry(&stored.relative_path)
                    .or_insert_with(|| FileContents::new(stored));
                let box_bytes = saturating_bytes(&chunk.bounds.sizes, entry.properties.dtype);
                file.boxes += 1;
                file.bytes = file.bytes.saturating_add(box_bytes);
            }
        }
        let mut named_files: Vec<(&str, FileContents)> = contents_by_file.into_iter().collect();
        // `__10_0.distcp` comes after `__2_0.distcp`, as its rank does.
        named_files.sort_by(|a, b| natural::compare(a.0, b.0));
        let mut files = Vec::with_capacity(named_files.len());
        let mut file_positions = HashMap::with_capacity(named_files.len());
        for (name, file) in named_files {
            file_positions.insert(name, files.len() as u32);
            files.push(file);
        }
        CheckpointFiles {
            schema: SCHEMA,
            path,
            format: source.format().name(),
            tensors: entries.len(),
            bytes,
            files,
            entries,
            file_positions,
        }
    }

    /// Returns the most bytes of any file, at least 1.
    pub(super) fn max_file_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).fold(1, u64::max)
    }

    /// Draws which file holds which part of a tensor.
    pub(super) fn raster(&self, entry: &TensorEntry, columns: usize) -> Raster {
        let mut boxes = Vec::with_capacity(entry.chunks.len());
        for chunk in &entry.chunks {
            if let Some(stored) = &chunk.stored {
                let position = self.file_positions[stored.relative_path.as_str()];
                boxes.push((&chunk.bounds, position));
            }
        }
        Raster::new(&entry.shape, boxes, columns)
    }
}

impl FileContents {
    /// Returns the contents of a file before any box is counted.
    fn new(stored: &StorageInfo) -> Self {
        FileContents {
            file: stored.relative_path.clone(),
            rank: inspect::rank_of_file(stored),
            boxes: 0,
            bytes: 0,
        }
    }

    /// Returns the rank, or a dash where the file's name tells none.
    pub(super) fn rank_text(&self) -> String {
        or_word(self.rank, "–")
    }
}
