//! [`View`]: a checkpoint with some keys left out or renamed, and its floating-point tensors cast.

use fsdp_digest::StateDigest;
use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, stream};
use fsdp_formats::internals::{KeyChange, KeyMove, Layer, LayerView, Origin, tensor_of};
use fsdp_formats::metadata::{Entry, Metadata};
use fsdp_formats::reader::Slot;
use fsdp_layout::{KeyPath, PathPart};
use indexmap::IndexMap;

use super::cast::{CASTABLE, Cast, Optimizers, cast_elements};
use super::output::unsupported;

/// A decision over a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rename {
    /// Leave it as it is.
    Keep,
    /// Leave it out.
    Drop,
    /// Rename it to this. The parts of its path in the nested state dict that the new key does not
    /// change stay, and one key replaces the others: {`opt`: {`lr`: …}} with `opt.lr` renamed to
    /// `optimizer.lr` is {`optimizer`: {`lr`: …}}.
    To(String),
}

/// A checkpoint with some keys left out or renamed, and its floating-point tensors cast.
#[derive(Debug)]
pub struct View<'a> {
    view: LayerView<'a>,
    /// The source's key for each new one.
    names: IndexMap<String, String>,
}

impl<'a> View<'a> {
    /// Makes a view in which `rename` decides about each key, and `cast` about the dtype of tensors
    /// of `f64`, `f32`, `f16` and `bf16`.
    pub fn new(
        source: &'a dyn Checkpoint,
        rename: impl Fn(&str) -> Rename,
        cast: Option<Cast>,
    ) -> Result<Self, FileError> {
        if let Some(cast) = cast.filter(|cast| !CASTABLE.contains(&cast.dtype)) {
            return Err(unsupported("", format!("casting to `{}`", cast.dtype)));
        }
        let source_metadata = source.metadata();
        // Step 1: decide about each key. The metadata, the paths and the digests must agree, so all
        // three are made here.
        let optimizers = Optimizers::new(source_metadata);
        let mut names = IndexMap::new();
        let mut digests = source.digests().map(|_| StateDigest::default());
        let mut metadata = Metadata {
            planner_data: source_metadata
                .planner_data
                .as_ref()
                .map(|_| IndexMap::new()),
            version: source_metadata.version.clone(),
            ..Metadata::default()
        };
        for (fqn, entry) in &source_metadata.entries {
            let path = source_metadata
                .planner_data
                .as_ref()
                .and_then(|paths| paths.get(fqn));
            let (name, path) = match rename(fqn) {
                Rename::Drop => continue,
                Rename::Keep => (fqn.clone(), path.cloned()),
                Rename::To(name) => {
                    let path = path.map(|path| {
                        let change = KeyMove::new(path, &name);
                        KeyPath(change.apply(&path.0, |key| PathPart::Key(key.to_owned())))
                    });
                    (name, path)
                }
            };
            // The chunks of a tensor that is cast stay: only its elements change.
            let mut entry = entry.clone();
            if let (Entry::Tensor(tensor), Some(cast)) = (&mut entry, cast)
                && cast.changes(fqn, tensor, &optimizers)
                // An opaque tensor is copied as it is, or left out.
                && source.opaque_type(fqn)?.is_none()
            {
                tensor.properties.dtype = cast.dtype;
                digests = None;
            }
            if let (Some(paths), Some(path)) = (&mut metadata.planner_data, path) {
                paths.insert(name.clone(), path);
            }
            // A renamed tensor has the same digest.
            if let (Some(digests), Some(digest)) = (
                &mut digests,
                source.digests().and_then(|recorded| recorded.get(fqn)),
            ) {
                digests.insert(&name, digest);
            }
            metadata.entries.insert(name.clone(), entry);
            if let Some(other_key) = names.insert(name.clone(), fqn.clone()) {
                return Err(unsupported(
                    &name,
                    format!("one name for both `{other_key}` and `{fqn}`"),
                ));
            }
        }
        // Step 2: move the keys in the nested state dict in the same way, for formats that write
        // it.
        let structure = match source.structure() {
            Some(structure) => Some(structure.rebuilt(&mut |fqn, path| match rename(fqn) {
                Rename::Keep => KeyChange::Keep,
                Rename::Drop => KeyChange::Remove,
                Rename::To(name) => {
                    let change = KeyMove::new(path, &name);
                    KeyChange::Move(name, change)
                }
            })?),
            None => None,
        };
        Ok(View {
            // The digests are the source's, unless something is cast.
            view: LayerView {
                digests,
                ..LayerView::new(source, metadata, structure)
            },
            names,
        })
    }

    /// Returns the source's name of a key.
    fn source_name<'n>(&'n self, fqn: &'n str) -> &'n str {
        self.names.get(fqn).map_or(fqn, String::as_str)
    }
}

impl Layer for View<'_> {
    fn view(&self) -> &LayerView<'_> {
        &self.view
    }

    fn origin<'o>(&'o self, fqn: &'o str) -> Origin<'o> {
        let name = self.source_name(fqn);
        let tensor = self.view.metadata.tensor(fqn);
        let source_tensor = self.source(0).metadata().tensor(name);
        match (tensor, source_tensor) {
            (Some(tensor), Some(source_tensor))
                if tensor.properties.dtype != source_tensor.properties.dtype =>
            {
                Origin::Made
            }
            _ => Origin::Source(0, name),
        }
    }

    fn inputs_of_made(&self, fqn: &str) -> Vec<(usize, String)> {
        vec![(0, self.source_name(fqn).to_owned())]
    }

    /// Casts boxes of a tensor.
    fn read_made(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        let target_dtype = tensor_of(&self.view.metadata, fqn)?.properties.dtype;
        let name = self.source_name(fqn);
        let source_dtype = tensor_of(self.source(0).metadata(), name)?.properties.dtype;
        for slot in slots {
            // Read in pieces, because the source's elements may be larger than those of the slot.
            let range = 0..slot.bounds.numel() as u64 * source_dtype.size_in_bytes();
            let mut start = 0;
            stream::<FileError>(self.source(0), name, &slot.bounds, range, &mut |bytes| {
                let elements = bytes.len() / source_dtype.size_in_bytes() as usize;
                let end = start + elements * target_dtype.size_in_bytes() as usize;
                cast_elements(
                    bytes,
                    source_dtype,
                    &mut slot.bytes[start..end],
                    target_dtype,
                );
                start = end;
                Ok(())
            })?;
            slot.filled(0..slot.bytes.len());
        }
        Ok(())
    }
}
