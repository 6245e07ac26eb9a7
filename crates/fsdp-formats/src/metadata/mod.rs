//! The content of `.metadata`: which tensors and objects a checkpoint holds, in which chunks,
//! stored where.
//!
//! torch keeps three dicts (what there is, where it sits in the state dict, where it is stored).
//! Here each chunk knows its own storage, so that there is one place to look. [`decode()`] reads
//! torch's pickle, [`encode()`] writes it: protocol 4, the same bytes for the same metadata.

mod decode;
mod encode;

use std::collections::{HashMap, HashSet};

use fsdp_layout::{DType, KeyPath, TensorBox};
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

pub use decode::decode;
pub use encode::{encode, encode_in_pieces};

/// The name of the metadata file in a checkpoint's directory: its presence is what makes the
/// directory a checkpoint.
pub const METADATA_FILE: &str = ".metadata";

/// The version that torch writes.
pub(crate) const VERSION: &str = "1.0.0";

/// torch's `Metadata`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Metadata {
    /// The tensors and values, by flat key, in the order of the state dict.
    pub entries: IndexMap<String, Entry>,
    /// The place of each flat key in the nested state dict; `None` if the writer did not flatten.
    pub planner_data: Option<IndexMap<String, KeyPath>>,
    /// A note of its writer; older versions have none.
    pub storage_meta: Option<StorageMeta>,
    /// The format's version, where given.
    pub version: Option<String>,
    /// Copies beyond the first, in the files of other ranks than the one that `entries` names. Only
    /// `verify` of `fsdp-tools` reads them; torch's metadata has no word for them.
    #[serde(default)]
    pub replicas: Vec<Replica>,
}

/// A chunk or value that is stored once more.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Replica {
    /// The flat key.
    pub fqn: String,
    /// The box of a tensor; none for a value.
    pub bounds: Option<TensorBox>,
    /// The place of this copy.
    pub stored: StorageInfo,
}

/// One flat key: a tensor or a non-tensor value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Entry {
    /// A tensor, cut in chunks.
    Tensor(TensorEntry),
    /// Anything else, stored whole.
    Bytes(BytesEntry),
}

/// torch's `TensorStorageMetadata`, with the storage of each chunk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Element type and what else torch notes.
    pub properties: TensorProperties,
    /// Global shape.
    pub shape: Vec<usize>,
    /// The boxes that were saved.
    pub chunks: Vec<Chunk>,
}

/// torch's `BytesStorageMetadata`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BytesEntry {
    /// The place where it is stored.
    pub stored: Option<StorageInfo>,
}

/// torch's `ChunkStorageMetadata`: one box of a tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Chunk {
    /// The box.
    pub bounds: TensorBox,
    /// The place where it is stored; empty chunks may be stored nowhere.
    pub stored: Option<StorageInfo>,
}

/// torch's `_StorageInfo`: a byte range of a file.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StorageInfo {
    /// The file, relative to the checkpoint's directory.
    pub relative_path: String,
    /// First byte of the item.
    pub offset: u64,
    /// Bytes of the item as stored.
    pub length: u64,
    /// Stream transforms that were applied, in order, e.g. `stream.zstd/1`. Usually none.
    pub transforms: Vec<String>,
}

/// torch's `TensorProperties`. Loaders use the dtype only.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorProperties {
    /// Element type.
    pub dtype: DType,
    /// `true` if the saved object required a gradient.
    pub requires_grad: bool,
    /// Memory format of the saved object.
    pub memory_format: MemoryFormat,
    /// `true` if the saved object lay in pinned memory.
    pub pin_memory: bool,
}

/// torch's memory formats.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MemoryFormat {
    /// Row-major.
    #[default]
    Contiguous,
    /// Channels innermost.
    ChannelsLast,
    /// The format that the object had.
    Preserve,
}

/// torch's `StorageMeta`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageMeta {
    /// The place that the checkpoint was written to, as its writer called it.
    pub checkpoint_id: Option<String>,
    /// Identifies the save.
    pub save_id: Option<String>,
    /// Identifies a load.
    pub load_id: Option<String>,
}

impl StorageInfo {
    /// Makes the place of an item that is stored without a transform.
    #[must_use]
    pub fn new(relative_path: impl Into<String>, offset: u64, length: u64) -> Self {
        StorageInfo {
            relative_path: relative_path.into(),
            offset,
            length,
            transforms: Vec::new(),
        }
    }
}

impl Entry {
    /// Returns the box (none for a value) and the place of each item of the entry.
    #[doc(hidden)]
    pub fn items(&self) -> impl Iterator<Item = (Option<&TensorBox>, Option<&StorageInfo>)> {
        let (chunks, value) = match self {
            Entry::Tensor(tensor) => (&tensor.chunks[..], None),
            Entry::Bytes(bytes) => (&[][..], Some(bytes.stored.as_ref())),
        };
        chunks
            .iter()
            .map(|chunk| (Some(&chunk.bounds), chunk.stored.as_ref()))
            .chain(value.map(|stored| (None, stored)))
    }
}

impl TensorProperties {
    /// Makes the properties of a plain, contiguous tensor of this type.
    #[must_use]
    pub const fn new(dtype: DType) -> Self {
        TensorProperties {
            dtype,
            requires_grad: false,
            memory_format: MemoryFormat::Contiguous,
            pin_memory: false,
        }
    }
}

impl Metadata {
    /// Returns the entry of this flat key, if it is a tensor.
    #[must_use]
    pub fn tensor(&self, fqn: &str) -> Option<&TensorEntry> {
        match self.entries.get(fqn) {
            Some(Entry::Tensor(tensor)) => Some(tensor),
            _ => None,
        }
    }

    /// Returns all tensors, in order.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorEntry)> {
        self.entries.iter().filter_map(|(fqn, entry)| match entry {
            Entry::Tensor(tensor) => Some((fqn.as_str(), tensor)),
            Entry::Bytes(_) => None,
        })
    }

    /// Returns all non-tensor values, in order.
    pub fn values(&self) -> impl Iterator<Item = (&str, &BytesEntry)> {
        self.entries.iter().filter_map(|(fqn, entry)| match entry {
            Entry::Tensor(_) => None,
            Entry::Bytes(bytes) => Some((fqn.as_str(), bytes)),
        })
    }

    /// Returns every stored item, replicas last: flat key, box (none for a value), place.
    pub fn stored(&self) -> impl Iterator<Item = (&str, Option<&TensorBox>, &StorageInfo)> {
        let entry_items = self.entries.iter().flat_map(|(fqn, entry)| {
            entry
                .items()
                .filter_map(move |(bounds, stored)| Some((fqn.as_str(), bounds, stored?)))
        });
        entry_items.chain(self.replicas.iter().map(|replica| {
            (
                replica.fqn.as_str(),
                replica.bounds.as_ref(),
                &replica.stored,
            )
        }))
    }

    /// Returns the metadata of a checkpoint from those of its parts, such as the ones that each
    /// rank has written (`__{rank}.metadata`). Where they overlap, the first one counts: a chunk or
    /// value that several hold is taken once, and its other copies are noted as
    /// [`Metadata::replicas`].
    ///
    /// # Errors
    /// The reason: a tensor that has another dtype or shape in another part.
    pub fn merge(parts: impl IntoIterator<Item = Metadata>) -> Result<Metadata, String> {
        let mut merged = Metadata::default();
        // The boxes of each tensor that are there already.
        let mut known_boxes: HashMap<String, HashSet<TensorBox>> = HashMap::new();
        for part in parts {
            for (fqn, entry) in part.entries {
                merged.merge_entry(fqn, entry, &mut known_boxes)?;
            }
            if let Some(paths) = part.planner_data {
                let merged_paths = merged.planner_data.get_or_insert_default();
                for (fqn, path) in paths {
                    merged_paths.entry(fqn).or_insert(path);
                }
            }
            merged.storage_meta = merged.storage_meta.or(part.storage_meta);
            merged.version = merged.version.or(part.version);
        }
        Ok(merged)
    }

    /// Adds one entry of another metadata: whole if the key is new, and otherwise the chunks whose
    /// boxes are not in `known_boxes`. All else becomes a replica.
    fn merge_entry(
        &mut self,
        fqn: String,
        entry: Entry,
        known_boxes: &mut HashMap<String, HashSet<TensorBox>>,
    ) -> Result<(), String> {
        let Some(merged) = self.entries.get_mut(&fqn) else {
            self.entries.insert(fqn, entry);
            return Ok(());
        };
        let other_tensor = match entry {
            Entry::Tensor(other_tensor) => other_tensor,
            // Copies are kept also where a name is a tensor in one part and a value in another.
            // The comparison of copies finds such a name.
            Entry::Bytes(BytesEntry { stored }) => {
                self.replicas.extend(stored.map(|stored| Replica {
                    fqn,
                    bounds: None,
                    stored,
                }));
                return Ok(());
            }
        };
        if let Entry::Tensor(merged) = &*merged {
            check_same_tensor(&fqn, merged, &other_tensor)?;
        }
        let mut added_boxes = Vec::new();
        let known_boxes = known_boxes.entry(fqn.clone()).or_default();
        if let Entry::Tensor(merged) = &*merged
            && known_boxes.is_empty()
        {
            known_boxes.extend(merged.chunks.iter().map(|chunk| chunk.bounds.clone()));
        }
        for chunk in other_tensor.chunks {
            match merged {
                Entry::Tensor(merged) if !known_boxes.contains(&chunk.bounds) => {
                    added_boxes.push(chunk.bounds.clone());
                    merged.chunks.push(chunk);
                }
                _ => self.replicas.extend(chunk.stored.map(|stored| Replica {
                    fqn: fqn.clone(),
                    bounds: Some(chunk.bounds),
                    stored,
                })),
            }
        }
        // The boxes of this part become known only now. If the part itself holds a box twice, both
        // stay, and a later check finds that error.
        known_boxes.extend(added_boxes);
        Ok(())
    }
}

/// Checks that a tensor has the same dtype and shape in two parts of a metadata.
fn check_same_tensor(fqn: &str, first: &TensorEntry, second: &TensorEntry) -> Result<(), String> {
    let [first, second] = [first, second].map(|tensor| (tensor.properties.dtype, &tensor.shape));
    if first == second {
        return Ok(());
    }
    Err(format!(
        "`{fqn}` is a `{}` tensor of shape {:?} on one rank, and a `{}` tensor of shape {:?} on another",
        first.0, first.1, second.0, second.1
    ))
}
