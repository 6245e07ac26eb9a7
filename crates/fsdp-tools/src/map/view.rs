//! A checkpoint seen through a map.

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::{Layer, LayerView, Origin};
use fsdp_formats::metadata::{Chunk, Entry, Metadata, StorageInfo, TensorEntry, TensorProperties};
use fsdp_formats::reader::Slot;
use fsdp_layout::{DType, KeyPath, TensorBox};
use indexmap::IndexMap;

use super::match_keys::{Matched, matched};
use super::node::Node;
use super::rule::{Map, MapError};

/// A checkpoint with the keys and shapes that a map gives it.
pub struct Mapped<'a> {
    view: LayerView<'a>,
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
        let mut metadata = Metadata {
            planner_data: from.planner_data.as_ref().map(|_| IndexMap::new()),
            version: from.version.clone(),
            ..Metadata::default()
        };
        let mut tensors = IndexMap::new();
        // Step 1: the tensors that are made of others.
        for (fqn, node) in nodes {
            let mut sources = Vec::new();
            node.sources(&mut sources);
            // All sources have one dtype.
            let dtype = sources
                .first()
                .and_then(|first| from.tensor(first))
                .expect("a tensor is made of tensors of the source")
                .properties
                .dtype;
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
        // Step 2: what keeps its content, under its new key.
        for (fqn, old) in &renamed {
            metadata
                .entries
                .insert(fqn.clone(), from.entries[old].clone());
        }
        // Step 3: the paths of the keys in the nested state dict.
        if let (Some(paths), Some(old_paths)) = (&mut metadata.planner_data, &from.planner_data) {
            for fqn in metadata.entries.keys() {
                // A key that changes has no place in the nested state dict of the source.
                let path = match old_paths.get(fqn) {
                    Some(path) if renamed.get(fqn) == Some(fqn) => path.clone(),
                    _ => KeyPath::from_key(fqn),
                };
                paths.insert(fqn.clone(), path);
            }
        }
        Ok(Mapped {
            view: LayerView::new(source, metadata, None),
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
}

/// Returns what the metadata says about the storage of a tensor that is made of others: the place
/// of the first chunk of these sources, with the number of bytes of all their chunks. Returns
/// `None` if none of them is stored.
fn stored(from: &Metadata, sources: &[&str]) -> Option<StorageInfo> {
    let mut places = sources
        .iter()
        .filter_map(|fqn| from.tensor(fqn))
        .flat_map(|tensor| &tensor.chunks)
        .filter_map(|chunk| chunk.stored.as_ref());
    let mut all = places.next()?.clone();
    for place in places {
        all.length = all.length.saturating_add(place.length);
    }
    Some(all)
}

impl Layer for Mapped<'_> {
    fn view(&self) -> &LayerView<'_> {
        &self.view
    }

    fn origin<'o>(&'o self, fqn: &'o str) -> Origin<'o> {
        match self.renamed.get(fqn) {
            Some(old) => Origin::Source(0, old),
            None => Origin::Made,
        }
    }

    fn inputs_of_made(&self, fqn: &str) -> Vec<(usize, String)> {
        let mut sources = Vec::new();
        self.tensors[fqn].0.sources(&mut sources);
        let sources = sources.into_iter();
        sources.map(|name| (0, name.to_owned())).collect()
    }

    fn read_made(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        let (node, dtype) = &self.tensors[fqn];
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
