//! Compares two checkpoints tensor by tensor, by their recorded digests or by reading all elements.

mod tolerance;

use std::collections::HashMap;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, Structure, stream};
use fsdp_formats::internals::{
    Place, default_threads, digest_of_opaque, on_each, quantizer_key, shown,
};
use fsdp_formats::metadata::{Entry, TensorEntry};
use fsdp_layout::{DType, PlainTensor, PlainValue, TensorBox};
use indexmap::IndexMap;

use self::tolerance::ElementComparison;
use crate::nested::Nested;

pub use self::tolerance::Tolerance;

/// A difference between two checkpoints at one key.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Difference {
    /// Only the first one has it.
    OnlyInFirst,
    /// Only the second one has it.
    OnlyInSecond,
    /// It is a tensor in one checkpoint and a value in the other.
    Kind,
    /// The dtypes differ.
    DType {
        /// In the first one.
        first: DType,
        /// In the second one.
        second: DType,
    },
    /// The shapes differ.
    Shape {
        /// In the first one.
        first: Vec<usize>,
        /// In the second one.
        second: Vec<usize>,
    },
    /// The recorded digests of a tensor or a value differ.
    Digest,
    /// Some elements differ by more than the tolerance.
    Elements {
        /// The number of such elements.
        count: u64,
        /// Position of the first, row-major.
        first: u64,
        /// The largest absolute difference. `None` if the elements are not numbers; NaN if one is
        /// NaN on one side only.
        max_abs: Option<f64>,
    },
    /// The nested containers differ there, though flat keys and values may be equal.
    Container {
        /// In the first one.
        first: String,
        /// In the second one.
        second: String,
    },
    /// The values differ.
    Value {
        /// The value in the first checkpoint, in Python's notation; a long text is cut off.
        first: String,
        /// In the second one.
        second: String,
    },
}

/// The options of a comparison.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DiffOptions {
    /// The differences between elements that are tolerated.
    pub tolerance: Tolerance,
    /// The number of threads that read and compare, on which the order of the differences does not
    /// depend. `None` takes one for each core, up to four.
    pub threads: Option<usize>,
}

/// Compares two checkpoints of any format, and calls `report` with the key of each difference. Keys
/// come in the order of the first checkpoint; keys that only the second one has follow.
pub fn diff(
    first: &dyn Checkpoint,
    second: &dyn Checkpoint,
    options: DiffOptions,
    report: &mut dyn FnMut(&str, Difference),
) -> Result<(), FileError> {
    let comparison = Comparison {
        first,
        second,
        options,
    };
    comparison.compare_all(&|fqn, entry| comparison.compare_key(fqn, entry), report)
}

/// Compares two checkpoints by their recorded digests, without reading tensors. Returns `false`
/// without comparing if one of them has none. Equal digests mean equal bits. Where digests differ,
/// it is not known by how much.
pub fn diff_digests(
    first: &dyn Checkpoint,
    second: &dyn Checkpoint,
    report: &mut dyn FnMut(&str, Difference),
) -> Result<bool, FileError> {
    let (Some(first_digests), Some(second_digests)) = (first.digests(), second.digests()) else {
        return Ok(false);
    };
    // Digests tell whether bits are equal, so there is no tolerance. They are in memory, so one
    // thread compares them soon.
    let comparison = Comparison {
        first,
        second,
        options: DiffOptions {
            threads: Some(1),
            ..DiffOptions::default()
        },
    };
    comparison.compare_all(
        &|fqn, entry| {
            let quantizer = quantizer_key(fqn);
            let is_equal = first_digests.get(fqn) == second_digests.get(fqn)
                && (!is_quantized(entry)
                    || first_digests.get(&quantizer) == second_digests.get(&quantizer));
            let second_entry = second.metadata().entries.get(fqn);
            Ok(match metadata_difference(Some(entry), second_entry) {
                None if !is_equal => Some(Difference::Digest),
                difference => difference,
            })
        },
        report,
    )?;
    Ok(true)
}

/// A comparison of a key of one checkpoint with the other checkpoint.
type CompareKey<'c> = dyn Fn(&str, &Entry) -> Result<Option<Difference>, FileError> + Sync + 'c;

/// The two checkpoints that are compared.
#[derive(Clone, Copy)]
struct Comparison<'c> {
    first: &'c dyn Checkpoint,
    second: &'c dyn Checkpoint,
    options: DiffOptions,
}

/// One of the two checkpoints.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    First,
    Second,
}

impl Comparison<'_> {
    /// Compares two checkpoints key by key. `compare` compares a key of the first one with the
    /// second, and `report` gets each difference. Keys that only the second one has, values that
    /// one holds whole and the other in parts, and containers are compared here.
    fn compare_all(
        self,
        compare: &CompareKey<'_>,
        report: &mut dyn FnMut(&str, Difference),
    ) -> Result<(), FileError> {
        // A value that one checkpoint holds whole and the other in parts is compared part by part.
        let nested_in_first = Nested::find(self.first, self.second)?;
        let nested_in_second = Nested::find(self.second, self.first)?;
        let entries: Vec<(&String, &Entry)> = self.first.metadata().entries.iter().collect();
        let threads = self.options.threads.unwrap_or_else(default_threads);
        let compared = on_each(&entries, threads, |(fqn, entry)| {
            if nested_in_first.parts.contains_key(*fqn) || nested_in_second.in_other.contains(*fqn)
            {
                return Ok(None);
            }
            compare(fqn, entry)
        });
        for ((fqn, _), compared) in entries.into_iter().zip(compared) {
            for (key, value) in nested_in_first.parts.get(fqn).into_iter().flatten() {
                if let Some(difference) = self.compare_part(value, key, Side::First)? {
                    report(key, difference);
                }
            }
            if let Some(difference) = compared? {
                report(fqn, difference);
            }
        }
        // A key that only the second checkpoint has is a value that is in parts in the first, a
        // part of a value that is whole there, or a key that is missing.
        for fqn in self.second.metadata().entries.keys() {
            if self.first.metadata().entries.contains_key(fqn) {
                continue;
            }
            if let Some(parts) = nested_in_second.parts.get(fqn) {
                for (key, value) in parts {
                    if let Some(difference) = self.compare_part(value, key, Side::Second)? {
                        report(key, difference);
                    }
                }
            } else if !nested_in_first.in_other.contains(fqn) {
                report(fqn, Difference::OnlyInSecond);
            }
        }
        // Equal keys and values may still come from other containers.
        if let (Some(first), Some(second)) = (self.first.structure(), self.second.structure()) {
            compare_containers(first, second, report);
        }
        for (key, first, second) in find_other_sequences(&nested_in_first, self.second) {
            report(&key, Difference::Container { first, second });
        }
        for (key, second, first) in find_other_sequences(&nested_in_second, self.first) {
            report(&key, Difference::Container { first, second });
        }
        Ok(())
    }

    /// Returns the difference of what the checkpoints have at a key of the first one, if there is
    /// one.
    fn compare_key(self, fqn: &str, entry: &Entry) -> Result<Option<Difference>, FileError> {
        let Comparison { first, second, .. } = self;
        // Compare the metadata first: if it differs, no data has to be read.
        let second_entry = second.metadata().entries.get(fqn);
        if let Some(difference) = metadata_difference(Some(entry), second_entry) {
            return Ok(Some(difference));
        }
        let Entry::Tensor(tensor) = entry else {
            return Ok(
                self.compare_values(&first.describe_value(fqn)?, &second.describe_value(fqn)?)
            );
        };
        // The elements of an opaque tensor cannot be read, but its stored bytes can be compared.
        let types = [first.opaque_type(fqn)?, second.opaque_type(fqn)?];
        if types.iter().any(Option::is_some) {
            return self.compare_opaque(fqn, types);
        }
        let difference = self.compare_elements(fqn, tensor)?;
        if difference.is_none() && is_quantized(entry) {
            // The integers are equal, but they may mean something else.
            let [first, second] = [first.quantizer(fqn)?, second.quantizer(fqn)?]
                .map(|quantizer| quantizer.unwrap_or(PlainValue::None));
            return Ok(self.compare_values(&first, &second));
        }
        Ok(difference)
    }

    /// Returns the difference of two values; `None` if the tolerance allows it.
    fn compare_values(self, first: &PlainValue, second: &PlainValue) -> Option<Difference> {
        if self.options.tolerance.allows(first, second) {
            return None;
        }
        Some(Difference::Value {
            first: shown(first),
            second: shown(second),
        })
    }

    /// Returns the difference of a part of a value that the checkpoint on one side holds whole, and
    /// the value of the other checkpoint at the part's key, if there is one.
    fn compare_part(
        self,
        value: &PlainValue,
        fqn: &str,
        side: Side,
    ) -> Result<Option<Difference>, FileError> {
        let (other_checkpoint, only_on_side) = match side {
            Side::First => (self.second, Difference::OnlyInFirst),
            Side::Second => (self.first, Difference::OnlyInSecond),
        };
        let other_value = match (other_checkpoint.metadata().entries.get(fqn), value) {
            (None, _) => return Ok(Some(only_on_side)),
            (Some(Entry::Bytes(_)), _) => other_checkpoint.describe_value(fqn)?,
            // A tensor inside of a value is small, so it is read whole.
            (Some(Entry::Tensor(tensor)), PlainValue::Tensor(part))
                if part.shape == tensor.shape && part.dtype == tensor.properties.dtype =>
            {
                let mut data = vec![0; part.data.len()];
                other_checkpoint.read_box(fqn, &TensorBox::whole(&tensor.shape), &mut data)?;
                PlainValue::Tensor(PlainTensor {
                    data,
                    ..part.clone()
                })
            }
            (Some(Entry::Tensor(_)), _) => return Ok(Some(Difference::Kind)),
        };
        Ok(match side {
            Side::First => self.compare_values(value, &other_value),
            Side::Second => self.compare_values(&other_value, value),
        })
    }

    /// Returns the difference of a tensor that is opaque in one of the checkpoints: of its type, or
    /// of its bytes as they are stored.
    fn compare_opaque(
        self,
        fqn: &str,
        types: [Option<String>; 2],
    ) -> Result<Option<Difference>, FileError> {
        if types[0] == types[1]
            && digest_of_opaque(self.first, fqn)? == digest_of_opaque(self.second, fqn)?
        {
            return Ok(None);
        }
        let [first, second] = types.map(|object_type| match object_type {
            Some(object_type) => format!("a {object_type}"),
            None => "a plain tensor".to_owned(),
        });
        Ok(Some(Difference::Value { first, second }))
    }

    /// Returns the difference of the elements of a tensor that both have, in the same dtype and
    /// shape; `None` if the tolerance allows it.
    fn compare_elements(
        self,
        fqn: &str,
        tensor: &TensorEntry,
    ) -> Result<Option<Difference>, FileError> {
        let dtype = tensor.properties.dtype;
        let whole = TensorBox::whole(&tensor.shape);
        let length = whole.numel() as u64 * dtype.size_in_bytes();
        let mut elements = ElementComparison::new(dtype, self.options.tolerance);
        let mut offset = 0u64;
        // Each piece of the first is compared with the same bytes of the second.
        stream::<FileError>(self.first, fqn, &whole, 0..length, &mut |piece| {
            let range = offset..offset + piece.len() as u64;
            let mut compared = 0;
            stream::<FileError>(self.second, fqn, &whole, range, &mut |second_bytes| {
                let first_bytes = &piece[compared..compared + second_bytes.len()];
                elements.compare(offset + compared as u64, first_bytes, second_bytes);
                compared += second_bytes.len();
                Ok(())
            })?;
            offset += piece.len() as u64;
            Ok(())
        })?;
        Ok((elements.count > 0).then_some(Difference::Elements {
            count: elements.count,
            first: elements.first_position,
            max_abs: elements.max_abs,
        }))
    }
}

/// Returns `true` for a tensor whose elements are integers, to which a quantizer gives a meaning.
fn is_quantized(entry: &Entry) -> bool {
    matches!(entry, Entry::Tensor(tensor) if tensor.properties.dtype.is_quantized())
}

/// Returns a difference that shows in the metadata of a key; `None` if only the data can tell.
pub(crate) fn metadata_difference(
    first: Option<&Entry>,
    second: Option<&Entry>,
) -> Option<Difference> {
    match (first, second) {
        (None, _) => Some(Difference::OnlyInSecond),
        (_, None) => Some(Difference::OnlyInFirst),
        (Some(Entry::Bytes(_)), Some(Entry::Bytes(_))) => None,
        (Some(Entry::Tensor(first_tensor)), Some(Entry::Tensor(second_tensor)))
            if first_tensor.shape != second_tensor.shape =>
        {
            Some(Difference::Shape {
                first: first_tensor.shape.clone(),
                second: second_tensor.shape.clone(),
            })
        }
        (Some(Entry::Tensor(first_tensor)), Some(Entry::Tensor(second_tensor))) => {
            let (first, second) = (
                first_tensor.properties.dtype,
                second_tensor.properties.dtype,
            );
            (first != second).then_some(Difference::DType { first, second })
        }
        _ => Some(Difference::Kind),
    }
}

/// Compares the nested containers that the keys of two checkpoints came from, and calls `report`
/// with the differences. A value that one checkpoint holds whole and the other in parts is compared
/// elsewhere, together with its containers.
fn compare_containers(
    first: &Structure,
    second: &Structure,
    report: &mut dyn FnMut(&str, Difference),
) {
    let first = first.places();
    let second = second.places();
    for (key, place) in &first {
        match second.get(key) {
            // Keys are compared elsewhere.
            None if *place == Place::Leaf || is_in_leaf(key, &second) => {}
            None => report(key, Difference::OnlyInFirst),
            Some(second_place) if is_same_container(place, second_place) => {}
            Some(second_place) if *place == Place::Leaf || *second_place == Place::Leaf => {}
            Some(second_place) => report(
                key,
                Difference::Container {
                    first: place.to_string(),
                    second: second_place.to_string(),
                },
            ),
        }
    }
    // The loop above has visited the first one's keys. These are in the second one only.
    for (key, place) in &second {
        if !first.contains_key(key) && *place != Place::Leaf && !is_in_leaf(key, &first) {
            report(key, Difference::OnlyInSecond);
        }
    }
}

/// Returns the lists and tuples that `nested` holds as values, and that are a container of another
/// kind or length in the `other` checkpoint, which holds them in parts: the key, and both
/// containers.
fn find_other_sequences(nested: &Nested, other: &dyn Checkpoint) -> Vec<(String, String, String)> {
    let Some(structure) = other.structure().filter(|_| !nested.sequences.is_empty()) else {
        return Vec::new();
    };
    let places = structure.places();
    let mut differing = Vec::new();
    for (key, sequence) in &nested.sequences {
        // An empty dict at the end has no part, so the lengths may differ too.
        if let Some(other_sequence @ (Place::List(_) | Place::Tuple(_))) = places.get(key)
            && other_sequence != sequence
        {
            differing.push((
                key.clone(),
                sequence.to_string(),
                other_sequence.to_string(),
            ));
        }
    }
    differing
}

/// Returns `true` if a key lies below that of a leaf.
fn is_in_leaf(key: &str, places: &IndexMap<String, Place<'_>>) -> bool {
    key.match_indices('.')
        .any(|(end, _)| places.get(&key[..end]) == Some(&Place::Leaf))
}

/// Returns `true` if two places are containers of one kind, whose keys, where both have them, are
/// of one type. What only one of them holds is a difference at its own place.
fn is_same_container(first: &Place<'_>, second: &Place<'_>) -> bool {
    match (first, second) {
        (Place::Leaf, Place::Leaf) | (Place::List(_), Place::List(_)) => true,
        (Place::Tuple(length), Place::Tuple(second_length)) => length == second_length,
        (Place::Dict(first_keys), Place::Dict(second_keys)) => {
            // Keys of several types may have the same text.
            let mut types: HashMap<Option<String>, Vec<&str>> = HashMap::new();
            for key in first_keys {
                types
                    .entry(key.key_text())
                    .or_default()
                    .push(key.type_name());
            }
            second_keys.iter().all(|key| {
                types
                    .get(&key.key_text())
                    .is_none_or(|type_names| type_names.contains(&key.type_name()))
            })
        }
        _ => false,
    }
}
