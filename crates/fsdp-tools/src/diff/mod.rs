//! Compares two checkpoints tensor by tensor, by their recorded digests or by reading all elements.

mod tolerance;

use std::collections::HashMap;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, Structure, stream};
use fsdp_formats::internals::{
    Place, default_threads, digest_of_opaque, on_each, quantizer_key, shown,
};
use fsdp_formats::metadata::Entry;
use fsdp_layout::{DType, PlainTensor, PlainValue, TensorBox};
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use self::tolerance::Elements;
use crate::nested::{Nested, Sequence};

pub use self::tolerance::Tolerance;

/// A difference between two checkpoints at one key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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

/// Compares two checkpoints of any format, on the default number of threads, and calls `found` with
/// the key of each difference. Keys come in the order of the first checkpoint; keys that only the
/// second one has follow.
pub fn diff(
    first: &dyn Checkpoint,
    second: &dyn Checkpoint,
    tolerance: Tolerance,
    found: &mut dyn FnMut(&str, Difference),
) -> Result<(), FileError> {
    diff_on_threads(first, second, tolerance, default_threads(), found)
}

/// Does the same as [`diff()`], on this number of threads. The order of the differences does not
/// depend on it.
pub fn diff_on_threads(
    first: &dyn Checkpoint,
    second: &dyn Checkpoint,
    tolerance: Tolerance,
    threads: usize,
    found: &mut dyn FnMut(&str, Difference),
) -> Result<(), FileError> {
    walk(
        first,
        second,
        tolerance,
        threads,
        &|fqn, entry| key(first, second, fqn, entry, tolerance),
        found,
    )
}

/// Compares two checkpoints by their recorded digests, without reading tensors. Returns `false`
/// without comparing if one of them has none. Equal digests mean equal bits. Where digests differ,
/// it is not known by how much.
pub fn diff_digests(
    first: &dyn Checkpoint,
    second: &dyn Checkpoint,
    found: &mut dyn FnMut(&str, Difference),
) -> Result<bool, FileError> {
    let (Some(a), Some(b)) = (first.digests(), second.digests()) else {
        return Ok(false);
    };
    let by_digest = |fqn: &str, entry: &Entry| {
        let other = second.metadata().entries.get(fqn);
        let quantizer = quantizer_key(fqn);
        let is_equal = a.get(fqn) == b.get(fqn)
            && (!is_quantized(entry) || a.get(&quantizer) == b.get(&quantizer));
        Ok(shallow(entry, other).or_else(|| (!is_equal).then_some(Difference::Digest)))
    };
    walk(first, second, Tolerance::default(), 1, &by_digest, found)?;
    Ok(true)
}

/// A comparison of a key of one checkpoint with the other checkpoint.
type CompareKey<'c> = dyn Fn(&str, &Entry) -> Result<Option<Difference>, FileError> + Sync + 'c;

/// Compares two checkpoints key by key. `compare` compares a key of the first one with the second.
/// Keys that only the second one has, values that one holds whole and the other in parts, and
/// containers are compared here.
fn walk(
    first: &dyn Checkpoint,
    second: &dyn Checkpoint,
    tolerance: Tolerance,
    threads: usize,
    compare: &CompareKey<'_>,
    found: &mut dyn FnMut(&str, Difference),
) -> Result<(), FileError> {
    // A value that one checkpoint holds whole and the other in parts is compared part by part.
    let (nested, in_parts) = (Nested::of(first, second)?, Nested::of(second, first)?);
    let entries: Vec<(&String, &Entry)> = first.metadata().entries.iter().collect();
    let compared = on_each(&entries, threads, |(fqn, entry)| {
        match nested.parts.get(*fqn) {
            Some(_) => Ok(None),
            None if in_parts.in_other.contains(*fqn) => Ok(None),
            None => compare(fqn, entry),
        }
    });
    for ((fqn, _), compared) in entries.into_iter().zip(compared) {
        for (key, value) in nested.parts.get(fqn).into_iter().flatten() {
            part(value, second, key, tolerance, false)?
                .into_iter()
                .for_each(|difference| found(key, difference));
        }
        if let Some(difference) = compared? {
            found(fqn, difference);
        }
    }
    // The keys that only the second checkpoint has: a value that is in parts in the first, a part
    // of a value that is whole there, or a key that is missing.
    for fqn in second
        .metadata()
        .entries
        .keys()
        .filter(|fqn| !first.metadata().entries.contains_key(*fqn))
    {
        match in_parts.parts.get(fqn) {
            Some(parts) => {
                for (key, value) in parts {
                    part(value, first, key, tolerance, true)?
                        .into_iter()
                        .for_each(|difference| found(key, difference));
                }
            }
            None if nested.in_other.contains(fqn) => {}
            None => found(fqn, Difference::OnlyInSecond),
        }
    }
    if let (Some(first), Some(second)) = (first.structure(), second.structure()) {
        containers(first, second, found);
    }
    for (key, own, other) in other_sequences(&nested, second) {
        found(
            &key,
            Difference::Container {
                first: own,
                second: other,
            },
        );
    }
    for (key, own, other) in other_sequences(&in_parts, first) {
        found(
            &key,
            Difference::Container {
                first: other,
                second: own,
            },
        );
    }
    Ok(())
}

/// Compares what both checkpoints have at a key of the first one.
fn key(
    first: &dyn Checkpoint,
    second: &dyn Checkpoint,
    fqn: &str,
    entry: &Entry,
    tolerance: Tolerance,
) -> Result<Option<Difference>, FileError> {
    if let Some(difference) = shallow(entry, second.metadata().entries.get(fqn)) {
        return Ok(Some(difference));
    }
    match entry {
        Entry::Bytes(_) => {
            let (a, b) = (first.describe_value(fqn)?, second.describe_value(fqn)?);
            let differ = !tolerance.allows(&a, &b);
            Ok(differ.then(|| Difference::Value {
                first: shown(&a),
                second: shown(&b),
            }))
        }
        Entry::Tensor(_)
            if first.opaque_type(fqn)?.is_some() || second.opaque_type(fqn)?.is_some() =>
        {
            opaque_tensors(first, second, fqn)
        }
        Entry::Tensor(tensor) => {
            let found = tensors(
                first,
                second,
                fqn,
                tensor.properties.dtype,
                &tensor.shape,
                tolerance,
            )?;
            match found {
                None if is_quantized(entry) => quantizers(first, second, fqn, tolerance),
                found => Ok(found),
            }
        }
    }
}

/// Returns `true` for a tensor whose elements are integers that a quantizer gives a meaning.
fn is_quantized(entry: &Entry) -> bool {
    matches!(entry, Entry::Tensor(tensor) if tensor.properties.dtype.is_quantized())
}

/// Compares what the equal integers of a quantized tensor mean in two checkpoints.
fn quantizers(
    first: &dyn Checkpoint,
    second: &dyn Checkpoint,
    fqn: &str,
    tolerance: Tolerance,
) -> Result<Option<Difference>, FileError> {
    let [a, b] = [first, second]
        .map(|of| Ok::<_, FileError>(of.quantizer(fqn)?.unwrap_or(PlainValue::None)));
    let (a, b) = (a?, b?);
    Ok((!tolerance.allows(&a, &b)).then(|| Difference::Value {
        first: shown(&a),
        second: shown(&b),
    }))
}

/// Returns a difference that shows in the metadata of a key; `None` if only the data can tell.
fn shallow(first: &Entry, second: Option<&Entry>) -> Option<Difference> {
    match (first, second) {
        (_, None) => Some(Difference::OnlyInFirst),
        (Entry::Bytes(_), Some(Entry::Bytes(_))) => None,
        (Entry::Tensor(a), Some(Entry::Tensor(b))) if a.shape != b.shape => {
            Some(Difference::Shape {
                first: a.shape.clone(),
                second: b.shape.clone(),
            })
        }
        (Entry::Tensor(a), Some(Entry::Tensor(b))) => {
            let (first, second) = (a.properties.dtype, b.properties.dtype);
            (first != second).then_some(Difference::DType { first, second })
        }
        _ => Some(Difference::Kind),
    }
}

/// Compares a part of a value that one checkpoint holds whole with the other checkpoint's value at
/// the part's key. `is_second` is `true` if the second checkpoint holds the whole.
fn part(
    value: &PlainValue,
    other: &dyn Checkpoint,
    fqn: &str,
    tolerance: Tolerance,
    is_second: bool,
) -> Result<Option<Difference>, FileError> {
    let theirs = match other.metadata().entries.get(fqn) {
        None if is_second => return Ok(Some(Difference::OnlyInSecond)),
        None => return Ok(Some(Difference::OnlyInFirst)),
        Some(Entry::Bytes(_)) => other.describe_value(fqn)?,
        Some(Entry::Tensor(tensor)) => {
            let PlainValue::Tensor(own) = value else {
                return Ok(Some(Difference::Kind));
            };
            if own.shape != tensor.shape || own.dtype != tensor.properties.dtype {
                return Ok(Some(Difference::Kind));
            }
            let mut data = vec![0; own.data.len()];
            other.read_box(fqn, &TensorBox::whole(&tensor.shape), &mut data)?;
            PlainValue::Tensor(PlainTensor {
                data,
                ..own.clone()
            })
        }
    };
    let (first, second) = if is_second {
        (&theirs, value)
    } else {
        (value, &theirs)
    };
    if tolerance.allows(first, second) {
        return Ok(None);
    }
    Ok(Some(Difference::Value {
        first: shown(first),
        second: shown(second),
    }))
}

/// Compares the nested containers that the keys came from, if both checkpoints store them. A value
/// that one checkpoint holds whole and the other in parts is compared elsewhere, together with its
/// containers.
fn containers(first: &Structure, second: &Structure, found: &mut dyn FnMut(&str, Difference)) {
    let (first, second) = (first.places(), second.places());
    for (key, place) in &first {
        match second.get(key) {
            // Keys are compared elsewhere.
            None if *place == Place::Leaf || is_in_leaf(key, &second) => {}
            None => found(key, Difference::OnlyInFirst),
            Some(other) if same_container(place, other) => {}
            Some(other) if *place == Place::Leaf || *other == Place::Leaf => {}
            Some(other) => found(
                key,
                Difference::Container {
                    first: place.to_string(),
                    second: other.to_string(),
                },
            ),
        }
    }
    let more = second
        .iter()
        .filter(|(key, place)| !first.contains_key(*key) && **place != Place::Leaf);
    more.filter(|(key, _)| !is_in_leaf(key, &first))
        .for_each(|(key, _)| found(key, Difference::OnlyInSecond));
}

/// Returns the lists and tuples that `nested` holds as values, and that are a container of another
/// kind or length in the `other` checkpoint, which holds them in parts: the key, and both
/// containers.
fn other_sequences(nested: &Nested, other: &dyn Checkpoint) -> Vec<(String, String, String)> {
    let Some(structure) = other.structure().filter(|_| !nested.sequences.is_empty()) else {
        return Vec::new();
    };
    let places = structure.places();
    let mut differ = Vec::new();
    for (key, sequence) in &nested.sequences {
        let (own, theirs) = match (*sequence, places.get(key)) {
            (Sequence::List(length), Some(theirs @ Place::Tuple(_))) => {
                (Place::List(length), theirs)
            }
            (Sequence::Tuple(length), Some(theirs @ Place::List(_))) => {
                (Place::Tuple(length), theirs)
            }
            // An empty dict at the end has no part.
            (Sequence::List(length), Some(theirs @ Place::List(other))) if length != *other => {
                (Place::List(length), theirs)
            }
            (Sequence::Tuple(length), Some(theirs @ Place::Tuple(other))) if length != *other => {
                (Place::Tuple(length), theirs)
            }
            _ => continue,
        };
        differ.push((key.clone(), own.to_string(), theirs.to_string()));
    }
    differ
}

/// Returns `true` if a key lies below that of a leaf.
fn is_in_leaf(key: &str, places: &IndexMap<String, Place<'_>>) -> bool {
    key.match_indices('.')
        .any(|(end, _)| places.get(&key[..end]) == Some(&Place::Leaf))
}

/// Returns `true` if two places are containers of one kind, whose keys, where both have them, are
/// of one type. What only one of them holds is a difference at its own place.
fn same_container(first: &Place<'_>, second: &Place<'_>) -> bool {
    match (first, second) {
        (Place::Leaf, Place::Leaf) | (Place::List(_), Place::List(_)) => true,
        (Place::Tuple(a), Place::Tuple(b)) => a == b,
        (Place::Dict(a), Place::Dict(b)) => {
            // Keys of several types may have the same text.
            let mut types: HashMap<Option<String>, Vec<&str>> = HashMap::new();
            for key in a {
                types
                    .entry(key.key_text())
                    .or_default()
                    .push(key.type_name());
            }
            b.iter().all(|key| {
                types
                    .get(&key.key_text())
                    .is_none_or(|of| of.contains(&key.type_name()))
            })
        }
        _ => false,
    }
}

/// Compares a tensor that is opaque in one of two checkpoints: its type, and its bytes as they are
/// stored.
fn opaque_tensors(
    first: &dyn Checkpoint,
    second: &dyn Checkpoint,
    fqn: &str,
) -> Result<Option<Difference>, FileError> {
    let (a, b) = (first.opaque_type(fqn)?, second.opaque_type(fqn)?);
    if a == b && digest_of_opaque(first, fqn)? == digest_of_opaque(second, fqn)? {
        return Ok(None);
    }
    let [first, second] =
        [a, b].map(|of| of.map_or_else(|| "a plain tensor".to_owned(), |of| format!("a {of}")));
    Ok(Some(Difference::Value { first, second }))
}

/// Compares the elements of a tensor that both have, in the same dtype and shape.
fn tensors(
    first: &dyn Checkpoint,
    second: &dyn Checkpoint,
    fqn: &str,
    dtype: DType,
    shape: &[usize],
    tolerance: Tolerance,
) -> Result<Option<Difference>, FileError> {
    let whole = TensorBox::whole(shape);
    let length = whole.numel() as u64 * dtype.size_in_bytes();
    let mut elements = Elements::new(dtype, tolerance);
    let mut at = 0u64;
    stream::<FileError>(first, fqn, dtype, &whole, 0..length, &mut |bytes| {
        let mut compared = 0;
        stream::<FileError>(
            second,
            fqn,
            dtype,
            &whole,
            at..at + bytes.len() as u64,
            &mut |theirs| {
                let ours = &bytes[compared..compared + theirs.len()];
                elements.compare(at + compared as u64, ours, theirs);
                compared += theirs.len();
                Ok(())
            },
        )?;
        at += bytes.len() as u64;
        Ok(())
    })?;
    let Elements {
        count,
        first,
        max_abs,
        ..
    } = elements;
    Ok((count > 0).then_some(Difference::Elements {
        count,
        first,
        max_abs,
    }))
}
