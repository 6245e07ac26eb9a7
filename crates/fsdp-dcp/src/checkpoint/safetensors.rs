//! safetensors files as checkpoints.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use fsdp_layout::boxes::row_major_strides;
use fsdp_layout::{KeyPath, PlainTensor, PlainValue, TensorBox};
use indexmap::IndexMap;
use serde::Deserialize;

use super::{Checkpoint, Format, file_parts, no_value, tensor_of};
use crate::directory::CheckedDirectory;
use crate::error::{CheckpointError, FormatError};
use crate::limits::{MAX_INDEX_BYTES, MAX_TENSOR_RANK, is_sane_shape};
use crate::metadata::{BytesEntry, Chunk, Entry, Metadata, StorageInfo, TensorEntry, TensorProperties};
use crate::plan::{LoadOptions, LoadRequest, plan_load};
use crate::reader::OpenOptions;
use crate::safetensors::Header;
use crate::source::BlockReader;
use crate::strided::{StridedLayout, read_overlap};
use crate::values;

/// In a directory of safetensors files: the values that safetensors cannot hold.
pub const VALUES_FILE: &str = "values.json";

/// The same for one file `NAME.safetensors`: `NAME.values.json`.
#[must_use]
pub fn values_beside(name: &str) -> String {
    format!("{}.values.json", name.strip_suffix(".safetensors").unwrap_or(name))
}

/// One safetensors file, or a directory of them.
#[derive(Debug)]
pub struct SafetensorsCheckpoint {
    path: PathBuf,
    format: Format,
    directory: CheckedDirectory,
    metadata: Metadata,
    values: HashMap<String, PlainValue>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: IndexMap<String, String>,
}

/// torch's note of where in its tensor a shard lies.
#[derive(Deserialize)]
struct Saved {
    saved_offsets: Vec<usize>,
}

impl SafetensorsCheckpoint {
    /// Opens one file. Values are taken from `NAME.values.json` beside it, if that is there.
    pub fn open_file(path: &Path) -> Result<Self, CheckpointError> {
        let (parent, name) = file_parts(path)?;
        let directory = CheckedDirectory::open(parent, false, true)?;
        let mut opened = SafetensorsCheckpoint {
            path: path.to_owned(),
            format: Format::SafetensorsFile,
            directory,
            metadata: Metadata::default(),
            values: HashMap::new(),
        };
        opened.add_file(name, None)?;
        opened.add_values(&values_beside(name))?;
        Ok(opened)
    }

    /// Opens a directory: the files that its `*.safetensors.index.json` names, or all `*.safetensors`.
    ///
    /// Shards that torch's `HuggingFaceStorageWriter` wrote become chunks of whole tensors. Values are taken from
    /// [`VALUES_FILE`].
    pub fn open_directory(path: &Path, options: OpenOptions) -> Result<Self, CheckpointError> {
        let directory = CheckedDirectory::open(path, options.verify, true)?;
        let names = directory.names()?;
        let mut opened = SafetensorsCheckpoint {
            path: path.to_owned(),
            format: Format::SafetensorsDirectory,
            directory,
            metadata: Metadata::default(),
            values: HashMap::new(),
        };
        match names.iter().find(|name| name.ends_with(".safetensors.index.json")) {
            Some(index) => opened.add_indexed(index)?,
            None => {
                for name in names.iter().filter(|name| name.ends_with(".safetensors")) {
                    opened.add_file(name, None)?;
                }
            }
        }
        opened.add_values(VALUES_FILE)?;
        Ok(opened)
    }

    /// Adds the tensors that an index names, each from the file that it gives.
    fn add_indexed(&mut self, index: &str) -> Result<(), CheckpointError> {
        let bytes = self.directory.read_small(index, MAX_INDEX_BYTES)?;
        let malformed = |reason: String| FormatError::Malformed { what: "safetensors index", reason };
        let parsed: Index = serde_json::from_slice(&bytes)
            .map_err(|error| self.directory.file_error(index, malformed(error.to_string())))?;
        let mut files: IndexMap<&str, Vec<&str>> = IndexMap::new();
        for (key, file) in &parsed.weight_map {
            files.entry(file).or_default().push(key);
        }
        for (file, keys) in files {
            if file.contains('/') {
                let path = file.to_owned();
                let reason = "an index names files beside it only";
                return Err(CheckpointError::Path { root: self.path.clone(), path, reason });
            }
            self.add_file(file, Some(&keys))?;
        }
        // In the order of the index, which is the model's.
        let position = |key: &String| parsed.weight_map.get_index_of(key).unwrap_or(usize::MAX);
        self.metadata.entries.sort_by_cached_key(|key, _| position(key));
        Ok(())
    }

    /// Adds the tensors of a file: all, or those of the given keys.
    fn add_file(&mut self, name: &str, keys: Option<&[&str]>) -> Result<(), CheckpointError> {
        let file = self.directory.file(name)?;
        let error = |source| self.directory.file_error(name, source);
        let malformed = |reason: String| error(FormatError::Malformed { what: "safetensors header", reason });
        let header = Header::read(&*file).map_err(error)?;
        let sharding: HashMap<String, Saved> = match header.metadata.get("DCP_SHARDING_INFO") {
            Some(text) => serde_json::from_str(text).map_err(|error| malformed(error.to_string()))?,
            None => HashMap::new(),
        };
        if let Some(missing) = keys.iter().copied().flatten().find(|key| !header.tensors.contains_key(**key)) {
            return Err(malformed(format!("it does not hold `{missing}`, which the index looks for here")));
        }
        let keys: Option<std::collections::HashSet<&str>> = keys.map(|keys| keys.iter().copied().collect());
        for (fqn, info) in header.tensors {
            if keys.as_ref().is_some_and(|keys| !keys.contains(fqn.as_str())) {
                continue;
            }
            let offsets = match sharding.get(&fqn) {
                Some(saved) => saved.saved_offsets.clone(),
                None => vec![0; info.shape.len()],
            };
            let ends: Option<Vec<usize>> = match offsets.len() == info.shape.len() && offsets.len() <= MAX_TENSOR_RANK {
                true => offsets.iter().zip(&info.shape).map(|(offset, size)| offset.checked_add(*size)).collect(),
                false => None,
            };
            let ends = ends.ok_or_else(|| malformed(format!("the saved offsets of `{fqn}` make no sense")))?;
            let stored = StorageInfo {
                relative_path: name.to_owned(),
                offset: header.data + info.start,
                length: info.end - info.start,
                transforms: Vec::new(),
            };
            let chunk = Chunk { bounds: TensorBox::new(offsets, info.shape), stored: Some(stored) };
            let entry = self.metadata.entries.entry(fqn.clone()).or_insert_with(|| {
                let properties = TensorProperties::of(info.dtype);
                Entry::Tensor(TensorEntry { properties, shape: ends.clone(), chunks: Vec::new() })
            });
            let Entry::Tensor(tensor) = entry else { continue };
            if tensor.properties.dtype != info.dtype || tensor.shape.len() != ends.len() {
                return Err(malformed(format!("`{fqn}` is another tensor than in the files before")));
            }
            // The global shape is noted nowhere: it is what the shards reach.
            for (size, end) in tensor.shape.iter_mut().zip(ends) {
                *size = (*size).max(end);
            }
            if !is_sane_shape(&tensor.shape) {
                return Err(malformed(format!("the saved offsets of `{fqn}` make no sense")));
            }
            // Replicated tensors are in the file of every rank.
            if !tensor.chunks.iter().any(|there| there.bounds == chunk.bounds) {
                tensor.chunks.push(chunk);
            }
        }
        Ok(())
    }

    fn add_values(&mut self, name: &str) -> Result<(), CheckpointError> {
        if !self.directory.has(name)? {
            return Ok(());
        }
        let bytes = self.directory.read_small(name, MAX_INDEX_BYTES)?;
        // Tensors inside values lie among the others, under keys of their own; here they belong to their value again.
        let mut inside = Vec::new();
        let mut load = |key: &str| -> Result<PlainTensor, FormatError> {
            let missing = || FormatError::Malformed { what: "values file", reason: format!("no tensor `{key}`") };
            let tensor = self.metadata.tensor(key).ok_or_else(missing)?;
            let stored: u64 = tensor.chunks.iter().filter_map(|chunk| Some(chunk.stored.as_ref()?.length)).sum();
            let bounds = TensorBox::whole(&tensor.shape);
            let mut data = vec![0; stored as usize];
            self.read_box(key, &bounds, &mut data).map_err(|_| missing())?;
            inside.push(key.to_owned());
            Ok(PlainTensor { dtype: tensor.properties.dtype, shape: bounds.sizes, data })
        };
        let side = values::decode(&bytes, &mut load).map_err(|error| self.directory.file_error(name, error))?;
        for key in inside {
            self.metadata.entries.shift_remove(&key);
        }
        for (fqn, value) in side.values {
            let stored = StorageInfo {
                relative_path: name.to_owned(),
                offset: 0,
                length: bytes.len() as u64,
                transforms: Vec::new(),
            };
            self.metadata.entries.insert(fqn.clone(), Entry::Bytes(BytesEntry { stored: Some(stored) }));
            self.values.insert(fqn, value);
        }
        // The paths of all keys, if the checkpoint that this came from was a nested state dict.
        let complete =
            |paths: &IndexMap<String, KeyPath>| self.metadata.entries.keys().all(|key| paths.contains_key(key));
        self.metadata.planner_data = side.paths.filter(complete);
        Ok(())
    }
}

impl Checkpoint for SafetensorsCheckpoint {
    fn format(&self) -> Format {
        self.format
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn directory(&self) -> &CheckedDirectory {
        &self.directory
    }

    fn read_box(&self, fqn: &str, bounds: &TensorBox, dst: &mut [u8]) -> Result<(), CheckpointError> {
        let tensor = tensor_of(&self.metadata, fqn)?;
        let dtype = tensor.properties.dtype;
        let request =
            LoadRequest { fqn: fqn.to_owned(), dtype, shape: tensor.shape.clone(), boxes: vec![bounds.clone()] };
        let plan = plan_load(&self.metadata, &[request], LoadOptions::default())?;
        check_length(fqn, bounds, dtype.size_in_bytes(), dst)?;
        for read in plan.reads {
            let chunk = &tensor.chunks[read.chunk];
            let Some(stored) = &chunk.stored else { continue };
            let file = self.directory.file(&stored.relative_path)?;
            let strides = row_major_strides(&chunk.bounds.sizes);
            let layout = StridedLayout { bounds: chunk.bounds.clone(), offset: 0, strides };
            let element = dtype.size_in_bytes() as usize;
            let mut reader = BlockReader::new(&*file);
            read_overlap(&mut reader, stored.offset, element, &layout, &read.overlap, bounds, dst).map_err(
                |source| {
                    let path = self.directory.path().join(&stored.relative_path);
                    CheckpointError::Item { fqn: fqn.to_owned(), path, offset: stored.offset, source }
                },
            )?;
        }
        Ok(())
    }

    fn read_value(&self, fqn: &str) -> Result<PlainValue, CheckpointError> {
        self.values.get(fqn).cloned().ok_or_else(|| no_value(&self.metadata, fqn))
    }
}

/// Checks that a destination holds exactly the box.
pub(super) fn check_length(fqn: &str, bounds: &TensorBox, element: u64, dst: &[u8]) -> Result<(), CheckpointError> {
    let planned = bounds.numel() as u64 * element;
    match dst.len() as u64 == planned {
        true => Ok(()),
        false => Err(CheckpointError::PayloadLength { fqn: fqn.to_owned(), given: dst.len() as u64, planned }),
    }
}
