//! The shared part of all views of checkpoints, which change keys, shapes or dtypes, or show
//! several checkpoints as one.
//!
//! A layer says where the content of each key comes from. All methods of a [`Checkpoint`] follow
//! from that, in the same way for all layers.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;

use fsdp_digest::StateDigest;
use fsdp_layout::{PlainValue, TensorBox};

use super::change::Change;
use super::checkpoint::{Checkpoint, Format, KeyFilter, PartOf};
use super::lookup::lookup_error;
use super::structure::Structure;
use crate::error::FileError;
use crate::metadata::{Metadata, Replica, StorageInfo};
use crate::payload::slot::Slot;
use crate::storage::checked_directory::CheckedDirectory;

/// The origin of the content at a key of a layer.
#[derive(Debug, Clone, Copy)]
pub enum Origin<'o> {
    /// The content that the source at this position has at this key.
    Source(usize, &'o str),
    /// A value that the layer itself holds.
    Value(&'o PlainValue),
    /// A tensor that [`Layer::read_made`] makes.
    Made,
}

/// A checkpoint under a layer.
pub enum LayerSource<'s> {
    /// Somebody else's.
    Lent(&'s dyn Checkpoint),
    /// The layer's own.
    Own(Box<dyn Checkpoint>),
}

impl<'s> std::ops::Deref for LayerSource<'s> {
    type Target = dyn Checkpoint + 's;

    fn deref(&self) -> &Self::Target {
        match self {
            LayerSource::Lent(source) => *source,
            LayerSource::Own(source) => &**source,
        }
    }
}

/// The checkpoints under a layer, and what the layer shows of them.
#[derive(Default)]
pub struct LayerView<'s> {
    /// At least one checkpoint, once the layer is read.
    pub sources: Vec<LayerSource<'s>>,
    /// The tensors and values.
    pub metadata: Metadata,
    /// The nested containers of the keys, where they are known.
    pub structure: Option<Structure>,
    /// The digests of the tensors and values, if some were recorded.
    pub digests: Option<StateDigest>,
}

impl<'s> LayerView<'s> {
    /// Makes the view of a single checkpoint.
    pub fn new(
        source: &'s dyn Checkpoint,
        metadata: Metadata,
        structure: Option<Structure>,
    ) -> Self {
        LayerView {
            sources: vec![LayerSource::Lent(source)],
            metadata,
            structure,
            digests: None,
        }
    }
}

impl fmt::Debug for LayerView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerView")
            .field("metadata", &self.metadata)
            .finish_non_exhaustive()
    }
}

/// A checkpoint that shows one or several others, its sources, in another form.
pub trait Layer: Send + Sync {
    /// Returns its sources, and what it shows of them.
    fn view(&self) -> &LayerView<'_>;

    /// Returns the source at a position.
    fn source(&self, index: usize) -> &dyn Checkpoint {
        &*self.view().sources[index]
    }

    /// Returns the origin of the content at a key, which must be in the metadata.
    fn origin<'o>(&'o self, fqn: &'o str) -> Origin<'o>;

    /// Fills boxes of a tensor whose origin is [`Origin::Made`]. A layer without such tensors need
    /// not implement it.
    fn read_made(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        let _ = slots;
        Err(FileError::not_stored(fqn))
    }

    /// Returns the sources, by position, and the keys that a tensor of [`Origin::Made`] is computed
    /// from. A layer without such tensors need not implement it.
    fn inputs_of_made(&self, fqn: &str) -> Vec<(usize, String)> {
        let _ = fqn;
        Vec::new()
    }

    /// Is called with boxes of a tensor that have been read from a source as they are. By default
    /// it does nothing.
    fn note_read(&self, fqn: &str, slots: &[Slot<'_>]) -> Result<(), FileError> {
        let _ = (fqn, slots);
        Ok(())
    }

    /// Checks the elements that [`Layer::note_read`] has noted; see
    /// [`Checkpoint::check_elements_read`].
    fn check_noted(&self) -> Result<(), FileError> {
        Ok(())
    }

    /// Returns what the layer itself changes; see [`Checkpoint::changes`].
    fn own_changes(&self) -> Vec<Change> {
        Vec::new()
    }

    /// Returns its format.
    fn format(&self) -> Format {
        self.source(0).format()
    }

    /// Returns its place.
    fn path(&self) -> &Path {
        self.source(0).path()
    }

    /// Returns its files.
    fn directory(&self) -> &CheckedDirectory {
        self.source(0).directory()
    }

    /// Returns the parts, if the first source has some.
    fn parts(&self) -> Vec<PartOf<'_>> {
        self.source(0).parts()
    }

    /// Returns the key that the content at a key has in the whole of these parts, if it comes from
    /// there as it is.
    fn key_in_parts<'o>(&'o self, fqn: &'o str) -> Option<&'o str> {
        match self.origin(fqn) {
            Origin::Source(0, name) => self.source(0).key_in_parts(name),
            _ => None,
        }
    }

    /// Turns a place from this layer's metadata into that of a source, whose paths are relative to
    /// the source.
    fn stored_in<'s>(&self, source: usize, stored: &'s StorageInfo) -> Cow<'s, StorageInfo> {
        let _ = source;
        Cow::Borrowed(stored)
    }
}

/// Returns the origin of a key. A key that is not in the metadata is an error.
fn find_origin<'o, L: Layer>(layer: &'o L, fqn: &'o str) -> Result<Origin<'o>, FileError> {
    let metadata = &layer.view().metadata;
    if !metadata.entries.contains_key(fqn) {
        return Err(lookup_error(metadata, fqn, "value"));
    }
    Ok(layer.origin(fqn))
}

/// Returns the position of the source that stores the bytes of a key, and the key there. A key that
/// is not in the metadata, or whose content the layer makes, is an error.
fn find_source<'o, L: Layer>(layer: &'o L, fqn: &'o str) -> Result<(usize, &'o str), FileError> {
    match find_origin(layer, fqn)? {
        Origin::Source(source, name) => Ok((source, name)),
        _ => Err(FileError::not_stored(fqn)),
    }
}

/// Returns the source and the key there of the tensor that a tensor of this shape shows whole, as
/// it is or cast; `None` if it is made of several, or of a part.
fn only_input<L: Layer>(layer: &L, fqn: &str, shape: &[usize]) -> Option<(usize, String)> {
    let (source, name) = match layer.origin(fqn) {
        Origin::Source(source, name) => (source, name.to_owned()),
        Origin::Value(_) => return None,
        Origin::Made => <[(usize, String); 1]>::try_from(layer.inputs_of_made(fqn))
            .ok()
            .map(|[input]| input)?,
    };
    let input = layer.source(source).metadata().tensor(&name)?;
    (input.shape == shape).then_some((source, name))
}

/// Returns a replica with the key and the paths that it has in a source.
fn replica_in<L: Layer>(layer: &L, source: usize, name: &str, replica: &Replica) -> Replica {
    Replica {
        fqn: name.to_owned(),
        bounds: replica.bounds.clone(),
        stored: layer.stored_in(source, &replica.stored).into_owned(),
    }
}

/// Runs a check on each source, for the keys of the source that the chosen keys of the layer come
/// from.
fn check_sources<L: Layer>(
    layer: &L,
    is_chosen: KeyFilter<'_>,
    check: &dyn Fn(&dyn Checkpoint, KeyFilter<'_>) -> Result<(), FileError>,
) -> Result<(), FileError> {
    let mut names_by_source: Vec<HashSet<String>> =
        vec![HashSet::new(); layer.view().sources.len()];
    let entries = &layer.view().metadata.entries;
    for fqn in entries.keys().filter(|fqn| is_chosen(fqn)) {
        match layer.origin(fqn) {
            Origin::Source(source, name) => drop(names_by_source[source].insert(name.to_owned())),
            Origin::Value(_) => {}
            Origin::Made => {
                for (source, name) in layer.inputs_of_made(fqn) {
                    names_by_source[source].insert(name);
                }
            }
        }
    }
    for (source, names) in layer.view().sources.iter().zip(&names_by_source) {
        check(&**source, &|fqn| names.contains(fqn))?;
    }
    Ok(())
}

impl<L: Layer> Checkpoint for L {
    fn format(&self) -> Format {
        Layer::format(self)
    }

    fn path(&self) -> &Path {
        Layer::path(self)
    }

    fn metadata(&self) -> &Metadata {
        &self.view().metadata
    }

    fn structure(&self) -> Option<&Structure> {
        self.view().structure.as_ref()
    }

    fn directory(&self) -> &CheckedDirectory {
        Layer::directory(self)
    }

    fn parts(&self) -> Vec<PartOf<'_>> {
        Layer::parts(self)
    }

    fn key_in_parts<'c>(&'c self, fqn: &'c str) -> Option<&'c str> {
        Layer::key_in_parts(self, fqn)
    }

    fn digests(&self) -> Option<&StateDigest> {
        self.view().digests.as_ref()
    }

    fn notes(&self) -> Vec<(&str, &str)> {
        self.source(0).notes()
    }

    fn has_stale_digests(&self) -> bool {
        self.source(0).has_stale_digests()
    }

    fn read_boxes(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        match find_origin(self, fqn)? {
            Origin::Source(source, name) => {
                self.source(source).read_boxes(name, slots)?;
                self.note_read(fqn, slots)
            }
            Origin::Made => self.read_made(fqn, slots),
            Origin::Value(_) => Err(FileError::not_stored(fqn)),
        }
    }

    fn read_value(&self, fqn: &str) -> Result<PlainValue, FileError> {
        match find_origin(self, fqn)? {
            Origin::Source(source, name) => self.source(source).read_value(name),
            Origin::Value(value) => Ok(value.clone()),
            Origin::Made => Err(lookup_error(&self.view().metadata, fqn, "value")),
        }
    }

    fn opaque_type(&self, fqn: &str) -> Result<Option<String>, FileError> {
        match find_origin(self, fqn)? {
            Origin::Source(source, name) => self.source(source).opaque_type(name),
            // A tensor that is made of an opaque one cannot be read; the error of that read says
            // so.
            Origin::Value(_) | Origin::Made => Ok(None),
        }
    }

    fn describe_value(&self, fqn: &str) -> Result<PlainValue, FileError> {
        match find_origin(self, fqn)? {
            Origin::Source(source, name) => self.source(source).describe_value(name),
            _ => self.read_value(fqn),
        }
    }

    fn quantizer(&self, fqn: &str) -> Result<Option<PlainValue>, FileError> {
        match find_origin(self, fqn)? {
            Origin::Source(source, name) => self.source(source).quantizer(name),
            _ => Ok(None),
        }
    }

    fn read_item(&self, fqn: &str, stored: &StorageInfo) -> Result<Vec<u8>, FileError> {
        let (source, name) = find_source(self, fqn)?;
        self.source(source)
            .read_item(name, &self.stored_in(source, stored))
    }

    fn read_stored(
        &self,
        fqn: &str,
        stored: &StorageInfo,
        offset: u64,
        dst: &mut [u8],
    ) -> Result<(), FileError> {
        let (source, name) = find_source(self, fqn)?;
        self.source(source)
            .read_stored(name, &self.stored_in(source, stored), offset, dst)
    }

    fn read_replica(
        &self,
        replica: &Replica,
        bounds: &TensorBox,
        dst: &mut [u8],
    ) -> Result<(), FileError> {
        match find_origin(self, &replica.fqn)? {
            Origin::Source(source, name) => self.source(source).read_replica(
                &replica_in(self, source, name, replica),
                bounds,
                dst,
            ),
            _ => self.read_boxes(&replica.fqn, &mut [Slot::new(bounds.clone(), dst)]),
        }
    }

    fn read_value_replica(&self, replica: &Replica) -> Result<PlainValue, FileError> {
        let (source, name) = find_source(self, &replica.fqn)?;
        self.source(source)
            .read_value_replica(&replica_in(self, source, name, replica))
    }

    fn check_stored(&self, keys: KeyFilter<'_>) -> Result<(), FileError> {
        check_sources(self, keys, &|source, keys| source.check_stored(keys))
    }

    fn check_copies(&self, keys: KeyFilter<'_>) -> Result<(), FileError> {
        check_sources(self, keys, &|source, keys| source.check_copies(keys))
    }

    fn check_elements_read(&self) -> Result<(), FileError> {
        for source in &self.view().sources {
            source.check_elements_read()?;
        }
        self.check_noted()
    }

    fn changes(&self) -> Vec<Change> {
        let mut changes = Vec::new();
        for source in &self.view().sources {
            changes.extend(source.changes());
        }
        changes.extend(self.own_changes());
        changes
    }

    fn shared_tensors(&self) -> HashMap<String, String> {
        let shared: Vec<HashMap<String, String>> = self
            .view()
            .sources
            .iter()
            .map(|source| source.shared_tensors())
            .collect();
        if shared.iter().all(HashMap::is_empty) {
            return HashMap::new();
        }
        // The first key here of each tensor that others share in its source.
        let mut first_keys: HashMap<(usize, String), &str> = HashMap::new();
        let mut shared_here = HashMap::new();
        for (fqn, tensor) in self.view().metadata.tensors() {
            let Some((source, name)) = only_input(self, fqn, &tensor.shape) else {
                continue;
            };
            let first_name = shared[source].get(&name).cloned().unwrap_or(name);
            let first_key = *first_keys.entry((source, first_name)).or_insert(fqn);
            if first_key != fqn {
                shared_here.insert(fqn.to_owned(), first_key.to_owned());
            }
        }
        shared_here
    }

    fn bytes_read(&self) -> u64 {
        let sources = self.view().sources.iter();
        sources.map(|source| source.bytes_read()).sum()
    }
}
