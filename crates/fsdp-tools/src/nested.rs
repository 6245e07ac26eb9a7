//! Values that one checkpoint holds whole, and another one in parts that have keys of their own.
//! For example, torch's DCP sometimes keeps a list of dicts as one value and sometimes takes it
//! apart, and formats differ in this too.

use std::collections::HashSet;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_layout::PlainValue;
use indexmap::IndexMap;

/// The values that one checkpoint holds whole and another one holds in parts.
#[derive(Debug, Default)]
pub(crate) struct Nested {
    /// By the key of the whole: its parts, by the keys that they have in the other checkpoint, or
    /// would have there.
    pub(crate) parts: IndexMap<String, Vec<(String, PlainValue)>>,
    /// The lists and tuples that were taken apart, by the keys that they would have in the other
    /// checkpoint.
    pub(crate) sequences: Vec<(String, Sequence)>,
    /// The keys in the other checkpoint that belong to a whole.
    pub(crate) in_other: HashSet<String>,
}

/// A list or a tuple of some length.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sequence {
    /// A list.
    List(usize),
    /// A tuple.
    Tuple(usize),
}

impl Nested {
    /// Finds the values of `from` that `other` holds in parts.
    pub(crate) fn of(from: &dyn Checkpoint, other: &dyn Checkpoint) -> Result<Self, FileError> {
        let there = &other.metadata().entries;
        let mut nested = Nested::default();
        for (fqn, _) in from
            .metadata()
            .values()
            .filter(|(fqn, _)| !there.contains_key(*fqn))
        {
            let mut parts = Vec::new();
            let mut sequences = Vec::new();
            unfold(
                from.describe_value(fqn)?,
                fqn.to_owned(),
                &|key| there.contains_key(key),
                &mut parts,
                &mut sequences,
            );
            let found = parts
                .iter()
                .map(|(key, _)| key)
                .filter(|key| there.contains_key(*key));
            let before = nested.in_other.len();
            nested.in_other.extend(found.cloned());
            if nested.in_other.len() > before {
                nested.parts.insert(fqn.to_owned(), parts);
                nested.sequences.extend(sequences);
            }
        }
        Ok(nested)
    }
}

/// Takes a value apart down to what the other checkpoint has, or to what holds nothing more.
fn unfold(
    value: PlainValue,
    key: String,
    is_there: &dyn Fn(&str) -> bool,
    parts: &mut Vec<(String, PlainValue)>,
    sequences: &mut Vec<(String, Sequence)>,
) {
    if is_there(&key) {
        parts.push((key, value));
        return;
    }
    match &value {
        PlainValue::List(items) => sequences.push((key.clone(), Sequence::List(items.len()))),
        PlainValue::Tuple(items) => sequences.push((key.clone(), Sequence::Tuple(items.len()))),
        _ => {}
    }
    match value {
        PlainValue::Dict(items) if items.iter().all(|(key, _)| key.key_text().is_some()) => {
            for (name, item) in items {
                let key = format!("{key}.{}", name.key_text().unwrap_or_default());
                unfold(item, key, is_there, parts, sequences);
            }
        }
        PlainValue::List(items) | PlainValue::Tuple(items) if !items.is_empty() => {
            for (index, item) in items.into_iter().enumerate() {
                unfold(item, format!("{key}.{index}"), is_there, parts, sequences);
            }
        }
        value => parts.push((key, value)),
    }
}
