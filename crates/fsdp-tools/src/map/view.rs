//! A checkpoint seen through a map.

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::{Layer, Origin, Seen, no_value};
use fsdp_formats::metadata::{Chunk, Entry, Metadata, StorageInfo, TensorEntry, TensorProperties};
use fsdp_formats::reader::Slot;
use fsdp_layout::{DType, KeyPath, PathPart, TensorBox};
use indexmap::IndexMap;

use super::match_keys::{Matched, matched};
use super::node::Node;
use super::rule::{Map, MapError};

/// A checkpoint with the keys and shapes that a map gives it.
pub struct Mapped<'a> {
    seen: Seen<'a>,
    tensors: IndexMap<String, (Node, DType)>,
    renamed: IndexMap<String, String>,
    unmatched: Vec<String>,
}

impl std::fmt::Debug for Mapped<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapped")
            .field("tensors", &self.tensors.len())
            .finish_non_exhaustive()
    }
}

impl<'a> Mapped<'a> {
    /// Makes the view of a checkpoint.
    ///
    /// # Errors
    /// A rule that matches no key, or whose tensors do not have the shapes that it needs.
    pub fn new(source: &'a dyn Checkpoint, map: &Map) -> Result<Self, MapError> {
        let from = source.metadata();
        let Matched {
            tensors: nodes,
            renamed,
            unmatched,
        } = matched(map, from)?;
        let paths = from.planner_data.as_ref().map(|_| IndexMap::new());
        let mut metadata = Metadata {
            planner_data: paths,
            version: from.version.clone(),
            ..Metadata::default()
        };
        let mut tensors = IndexMap::new();
        for (fqn, node) in nodes {
            let mut sources = Vec::new();
            node.sources(&mut sources);
            let tensor = sources.first().and_then(|first| from.tensor(first));
            let dtype = tensor.map_or(DType::F32, |tensor| tensor.properties.dtype);
            let chunks = vec![Chunk {
                bounds: TensorBox::whole(&node.shape),
                stored: stored(from, &sources),
            }];
            let entry = TensorEntry {
                properties: TensorProperties::new(dtype),
                shape: node.shape.clone(),
                chunks,
            };
            metadata.entries.insert(fqn.clone(), Entry::Tensor(entry));
            tensors.insert(fqn, (node, dtype));
        }
        for (fqn, old) in &renamed {
            if let Some(entry) = from.entries.get(old) {
                metadata.entries.insert(fqn.clone(), entry.clone());
            }
        }
        if let (Some(paths), Some(old_paths)) = (&mut metadata.planner_data, &from.planner_data) {
            for fqn in metadata.entries.keys() {
                let kept = renamed
                    .get(fqn)
                    .filter(|old| *old == fqn)
                    .and_then(|old| old_paths.get(old));
                let path = kept
                    .cloned()
                    .unwrap_or_else(|| KeyPath(vec![PathPart::Key(fqn.clone())]));
                paths.insert(fqn.clone(), path);
            }
        }
        Ok(Mapped {
            seen: Seen::of(source, metadata, None),
            tensors,
            renamed,
            unmatched,
        })
    }

    /// Returns the keys that no rule matches. They stay as they are.
    #[must_use]
    pub fn unmatched(&self) -> &[String] {
        &self.unmatched
    }

    /// Returns the key that a tensor or value has in the source, for a key whose content the map
    /// does not change.
    fn old<'n>(&'n self, fqn: &'n str) -> &'n str {
        self.renamed.get(fqn).map_or(fqn, String::as_str)
    }
}

/// Returns what the metadata says about the storage of a tensor that is made of others: the place
/// of the first chunk of these sources, with the number of bytes of all their chunks. Returns
/// `None` if none of them is stored.
fn stored(from: &Metadata, sources: &[&str]) -> Option<StorageInfo> {
    let chunks = sources
        .iter()
        .filter_map(|fqn| from.tensor(fqn))
        .flat_map(|tensor| &tensor.chunks);
    let places: Vec<&StorageInfo> = chunks.filter_map(|chunk| chunk.stored.as_ref()).collect();
    let first = (*places.first()?).clone();
    let length = places
        .iter()
        .fold(0u64, |sum, place| sum.saturating_add(place.length));
    Some(StorageInfo { length, ..first })
}

impl Layer for Mapped<'_> {
    fn seen(&self) -> &Seen<'_> {
        &self.seen
    }

    fn origin<'o>(&'o self, fqn: &'o str) -> Origin<'o> {
        if self.tensors.contains_key(fqn) {
            Origin::Made
        } else {
            Origin::Source(0, self.old(fqn))
        }
    }

    fn inputs_of_made(&self, fqn: &str, inputs: &mut Vec<(usize, String)>) {
        let mut sources = Vec::new();
        if let Some((node, _)) = self.tensors.get(fqn) {
            node.sources(&mut sources);
        }
        inputs.extend(sources.into_iter().map(|name| (0, name.to_owned())));
    }

    fn read_made(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        let Some((node, dtype)) = self.tensors.get(fqn) else {
            return Err(no_value(&self.seen.metadata, fqn));
        };
        for slot in slots {
            node.read(
                self.source(0),
                dtype.size_in_bytes() as usize,
                &slot.bounds,
                slot.bytes,
            )?;
            slot.filled(0..slot.bytes.len());
        }
        Ok(())
    }
}
