//! A checkpoint seen through a map.

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Change, Checkpoint, Structure};
use fsdp_formats::internals::{Layer, LayerView, Origin};
use fsdp_formats::metadata::{Chunk, Entry, Metadata, StorageInfo, TensorEntry, TensorProperties};
use fsdp_formats::reader::Slot;
use fsdp_layout::{KeyPath, PlainValue, TensorBox, with_causes};
use indexmap::IndexMap;

use super::match_keys::{NewKeys, match_keys};
use super::rule::{Map, MapError};
use crate::convert::{NamesInValues, NewKeysOf};

/// A checkpoint with the keys and shapes that a map gives it.
#[derive(Debug)]
pub struct Mapped<'a> {
    view: LayerView<'a>,
    new_keys: NewKeys,
    /// The values in which names of parameters were renamed, by their new keys.
    values: IndexMap<String, PlainValue>,
    changes: Vec<Change>,
}

impl<'a> Mapped<'a> {
    /// Makes the view of a checkpoint.
    ///
    /// # Errors
    /// A rule that matches no key, or whose tensors do not have the shapes that it needs; a value
    /// with names of parameters that cannot be read.
    pub fn new(source: &'a dyn Checkpoint, map: &Map) -> Result<Self, MapError> {
        let source_metadata = source.metadata();
        let new_keys = match_keys(map, source_metadata)?;
        let mut metadata = Metadata {
            planner_data: source_metadata
                .planner_data
                .as_ref()
                .map(|_| IndexMap::new()),
            version: source_metadata.version.clone(),
            ..Metadata::default()
        };
        // Step 1: the tensors that are made of others.
        for (fqn, node) in &new_keys.tensors {
            let entry = TensorEntry {
                properties: TensorProperties::new(node.dtype),
                shape: node.shape.clone(),
                chunks: vec![Chunk {
                    bounds: TensorBox::whole(&node.shape),
                    stored: combined_storage(source_metadata, &node.sources()),
                }],
            };
            metadata.entries.insert(fqn.clone(), Entry::Tensor(entry));
        }
        // Step 2: what keeps its content, under its new key.
        for (fqn, old_key) in &new_keys.renamed {
            metadata
                .entries
                .insert(fqn.clone(), source_metadata.entries[old_key].clone());
        }
        // Step 3: the paths of the keys in the nested state dict.
        if let (Some(paths), Some(old_paths)) =
            (&mut metadata.planner_data, &source_metadata.planner_data)
        {
            for fqn in metadata.entries.keys() {
                // A key that changes has no place in the nested state dict of the source.
                let path = match old_paths.get(fqn) {
                    Some(path) if new_keys.renamed.get(fqn) == Some(fqn) => path.clone(),
                    _ => KeyPath::from_key(fqn),
                };
                paths.insert(fqn.clone(), path);
            }
        }
        // Step 4: names of parameters in values follow the keys.
        let names = rename_in_values(source, &new_keys)?;
        let mut values = IndexMap::new();
        for (fqn, old_key) in &new_keys.renamed {
            if let Some(value) = names.values.get(old_key) {
                values.insert(fqn.clone(), value.clone());
            }
        }
        let mut changes = names.changes;
        // Keys and their paths are all that is left of the containers.
        let untold = source.structure().map(Structure::describe_untold);
        changes.extend(Change::new(
            "place",
            "of the state dict lost its kind by the map (keys became text, tuples lists, empty dicts went)",
            untold.unwrap_or_default(),
        ));
        changes.extend(Change::new(
            "key",
            "matched no rule of the map, and stayed the same",
            new_keys.unmatched.clone(),
        ));
        Ok(Mapped {
            view: LayerView::new(source, metadata, None),
            new_keys,
            values,
            changes,
        })
    }
}

/// Renames parameters in the values of a checkpoint as the keys are renamed.
fn rename_in_values(
    source: &dyn Checkpoint,
    new_keys: &NewKeys,
) -> Result<NamesInValues, MapError> {
    let mut keys_by_old = NewKeysOf::new();
    for fqn in source.metadata().entries.keys() {
        keys_by_old.insert(fqn, Vec::new());
    }
    for (fqn, old_key) in &new_keys.renamed {
        keys_by_old.entry(old_key).or_default().push(fqn);
    }
    for (fqn, node) in &new_keys.tensors {
        for old_key in node.sources() {
            keys_by_old.entry(old_key).or_default().push(fqn);
        }
    }
    NamesInValues::find(source, &keys_by_old).map_err(|error| MapError::Value {
        reason: with_causes(&error),
    })
}

/// Returns what the metadata says about the storage of a tensor that is made of others: the place
/// of the first chunk of these sources, with the number of bytes of all their chunks. Returns
/// `None` if none of them is stored.
fn combined_storage(metadata: &Metadata, sources: &[&str]) -> Option<StorageInfo> {
    let mut stored = sources
        .iter()
        .filter_map(|fqn| metadata.tensor(fqn))
        .flat_map(|tensor| &tensor.chunks)
        .filter_map(|chunk| chunk.stored.as_ref());
    let mut combined = stored.next()?.clone();
    for chunk in stored {
        combined.length = combined.length.saturating_add(chunk.length);
    }
    Some(combined)
}

impl Layer for Mapped<'_> {
    fn view(&self) -> &LayerView<'_> {
        &self.view
    }

    fn own_changes(&self) -> Vec<Change> {
        self.changes.clone()
    }

    fn origin<'o>(&'o self, fqn: &'o str) -> Origin<'o> {
        if let Some(value) = self.values.get(fqn) {
            return Origin::Value(value);
        }
        match self.new_keys.renamed.get(fqn) {
            Some(old_key) => Origin::Source(0, old_key),
            None => Origin::Made,
        }
    }

    fn inputs_of_made(&self, fqn: &str) -> Vec<(usize, String)> {
        let sources = self.new_keys.tensors[fqn].sources().into_iter();
        sources.map(|name| (0, name.to_owned())).collect()
    }

    fn read_made(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        let node = &self.new_keys.tensors[fqn];
        for slot in slots {
            node.read(self.source(0), &slot.bounds, slot.bytes)?;
            slot.filled(0..slot.bytes.len());
        }
        Ok(())
    }
}
