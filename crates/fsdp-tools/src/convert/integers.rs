//! A checkpoint seen with its quantized tensors as the integers that they are made of: no format's
//! plain tensors are quantized, and what they mean (scheme, scale, zero point) becomes a value
//! `KEY.quantizer`.

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::{Layer, LayerView, Origin, quantizer_key};
use fsdp_formats::metadata::{BytesEntry, Entry};
use fsdp_layout::{DType, KeyPath, PathPart, PlainValue};
use indexmap::IndexMap;

use super::output::unsupported;

/// A checkpoint whose quantized tensors are integers.
pub(super) struct IntegerView<'a> {
    view: LayerView<'a>,
    /// The keys of the quantized tensors.
    pub(super) quantized: Vec<String>,
    /// The values that say what their integers mean.
    quantizers: IndexMap<String, PlainValue>,
}

/// Returns the type of the integers that elements of a quantized type are; `None` for other types.
fn integer_dtype(dtype: DType) -> Option<DType> {
    match dtype {
        DType::QInt8 => Some(DType::I8),
        DType::QUInt8 => Some(DType::U8),
        DType::QInt32 => Some(DType::I32),
        _ => None,
    }
}

impl<'a> IntegerView<'a> {
    /// Makes the view of a checkpoint; `None` if nothing in it is quantized.
    pub(super) fn new(source: &'a dyn Checkpoint) -> Result<Option<Self>, FileError> {
        let source_metadata = source.metadata();
        let mut quantized = Vec::new();
        for (fqn, tensor) in source_metadata.tensors() {
            if let Some(dtype) = integer_dtype(tensor.properties.dtype) {
                quantized.push((fqn, tensor, dtype));
            }
        }
        if quantized.is_empty() {
            return Ok(None);
        }
        let mut metadata = source_metadata.clone();
        let mut quantizers = IndexMap::new();
        // The keys of the quantizers, by those of their tensors.
        let mut siblings = IndexMap::new();
        for (fqn, tensor, dtype) in quantized {
            let quantizer = source.quantizer(fqn)?.ok_or_else(|| {
                unsupported(fqn, "a quantized tensor without its scale and zero point")
            })?;
            let mut entry = tensor.clone();
            entry.properties.dtype = dtype;
            metadata
                .entries
                .insert(fqn.to_owned(), Entry::Tensor(entry));
            // The quantizer, which gives the integers their meaning, becomes a value of its own.
            let key = quantizer_key(fqn);
            let value = Entry::Bytes(BytesEntry::default());
            if metadata.entries.insert(key.clone(), value).is_some() {
                let what = format!("a quantized tensor beside a value `{key}`");
                return Err(unsupported(fqn, what));
            }
            if let Some(paths) = &mut metadata.planner_data {
                // In the same dict as the tensor; at the top, if that is in a list.
                let mut path = match paths.get(fqn) {
                    Some(path) => path.clone(),
                    None => KeyPath::default(),
                };
                match path.0.last_mut() {
                    Some(PathPart::Key(last_key)) => last_key.push_str(".quantizer"),
                    _ => path = KeyPath::from_key(&key),
                }
                paths.insert(key.clone(), path);
            }
            siblings.insert(fqn.to_owned(), key.clone());
            quantizers.insert(key, quantizer);
        }
        // The nested state dict gets the values as siblings of their tensors.
        let mut structure = source.structure().cloned();
        if let Some(structure) = &mut structure {
            structure
                .add_siblings(&siblings, ".quantizer")
                .map_err(|fqn| {
                    unsupported(&fqn, "a quantized tensor in a state dict that is no dict")
                })?;
        }
        Ok(Some(IntegerView {
            view: LayerView::new(source, metadata, structure),
            quantized: siblings.into_keys().collect(),
            quantizers,
        }))
    }
}

impl Layer for IntegerView<'_> {
    fn view(&self) -> &LayerView<'_> {
        &self.view
    }

    fn origin<'o>(&'o self, fqn: &'o str) -> Origin<'o> {
        // The bytes of a quantized tensor are those of its integers.
        self.quantizers
            .get(fqn)
            .map_or(Origin::Source(0, fqn), Origin::Value)
    }
}
