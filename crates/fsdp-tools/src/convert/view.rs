//! [`View`]: a checkpoint with some keys left out or renamed, and its floating-point tensors cast.

use fsdp_digest::{Digest, StateDigest};
use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Change, Checkpoint, stream};
use fsdp_formats::internals::{KeyChange, KeyMove, Layer, LayerView, Origin, tensor_of};
use fsdp_formats::metadata::{Entry, Metadata};
use fsdp_formats::reader::Slot;
use fsdp_layout::{KeyPath, PathPart, PlainValue};
use indexmap::IndexMap;

use super::cast::{CASTABLE, Cast, CastOutcome, Losses, LostElements, Roles, cast_elements};
use super::names::{NamesInValues, NewKeysOf};
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
    /// The values in which names of parameters were renamed, by their new keys.
    values: IndexMap<String, PlainValue>,
    /// The changes that are known before elements are read.
    changes: Vec<Change>,
    losses: Losses,
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
        let roles = Roles::new(source_metadata);
        let mut kept = KeptTypes::default();
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
            if let (Entry::Tensor(tensor), Some(cast)) = (&mut entry, cast) {
                match cast.outcome(fqn, tensor, &roles) {
                    CastOutcome::Same => {}
                    CastOutcome::OptimizerState => kept.optimizer_state.push(name.clone()),
                    CastOutcome::Constant => kept.constants.push(name.clone()),
                    // An opaque tensor is copied as it is, or left out.
                    CastOutcome::Cast if source.opaque_type(fqn)?.is_none() => {
                        tensor.properties.dtype = cast.dtype;
                        digests = None;
                    }
                    CastOutcome::Cast | CastOutcome::Uncastable => {
                        kept.others
                            .push(format!("{name}: {}", tensor.properties.dtype));
                    }
                }
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
        // Step 2: names of parameters in values follow the keys.
        let NamesInValues {
            values: values_by_key,
            mut changes,
        } = rename_in_values(source, &names)?;
        let mut values = IndexMap::new();
        for (name, fqn) in &names {
            if let Some(value) = values_by_key.get(fqn) {
                if let Some(digests) = &mut digests {
                    digests.insert(name, Digest::of_value(value));
                }
                values.insert(name.clone(), value.clone());
            }
        }
        changes.extend(kept.into_changes());
        // Step 3: move the keys in the nested state dict in the same way, for formats that write
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
            values,
            changes,
            losses: Losses::default(),
        })
    }

    /// Returns the source's name of a key.
    fn source_name<'n>(&'n self, fqn: &'n str) -> &'n str {
        self.names.get(fqn).map_or(fqn, String::as_str)
    }
}

/// The tensors whose types a cast leaves as they are, though they are numbers.
#[derive(Default)]
struct KeptTypes {
    /// State of optimizers.
    optimizer_state: Vec<String>,
    /// Hyperparameters, counts and scales.
    constants: Vec<String>,
    /// Tensors of types that cannot be cast, each with its type.
    others: Vec<String>,
}

impl KeptTypes {
    /// Returns the lines that tell them.
    fn into_changes(self) -> impl Iterator<Item = Change> {
        let optimizer_state = "kept the dtype, as state of an optimizer by the key \
                               (`--cast-optimizer` casts it too)";
        let constants = "kept the dtype, as hyperparameters, counts or scales are never cast";
        let others = "kept the dtype, which `--dtype` does not cast (`--dequantize` computes \
                      8-bit weights from their scales)";
        let optimizer_state = Change::new("tensor", optimizer_state, self.optimizer_state);
        let constants = Change::new("tensor", constants, self.constants);
        let others = Change::new("tensor", others, self.others);
        optimizer_state.into_iter().chain(constants).chain(others)
    }
}

/// Renames parameters in the values of a checkpoint whose keys are renamed; `names` has the old key
/// of each new one.
fn rename_in_values(
    source: &dyn Checkpoint,
    names: &IndexMap<String, String>,
) -> Result<NamesInValues, FileError> {
    if names.iter().all(|(name, fqn)| name == fqn) {
        return Ok(NamesInValues::default());
    }
    let mut new_keys = NewKeysOf::new();
    for fqn in source.metadata().entries.keys() {
        new_keys.insert(fqn, Vec::new());
    }
    for (name, fqn) in names {
        new_keys.entry(fqn).or_default().push(name);
    }
    NamesInValues::find(source, &new_keys)
}

impl Layer for View<'_> {
    fn view(&self) -> &LayerView<'_> {
        &self.view
    }

    fn own_changes(&self) -> Vec<Change> {
        let mut changes = self.changes.clone();
        changes.extend(self.losses.changes());
        changes
    }

    fn origin<'o>(&'o self, fqn: &'o str) -> Origin<'o> {
        if let Some(value) = self.values.get(fqn) {
            return Origin::Value(value);
        }
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
            let mut lost = LostElements::default();
            stream::<FileError>(self.source(0), name, &slot.bounds, range, &mut |bytes| {
                let elements = bytes.len() / source_dtype.size_in_bytes() as usize;
                let end = start + elements * target_dtype.size_in_bytes() as usize;
                lost += cast_elements(
                    bytes,
                    source_dtype,
                    &mut slot.bytes[start..end],
                    target_dtype,
                );
                start = end;
                Ok(())
            })?;
            self.losses.note(fqn, &slot.bounds, lost);
            slot.filled(0..slot.bytes.len());
        }
        Ok(())
    }
}
