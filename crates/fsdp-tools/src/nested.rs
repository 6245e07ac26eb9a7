//! Values that one checkpoint holds whole, and another one in parts that have keys of their own.
//! For example, torch's DCP sometimes keeps a list of dicts as one value and sometimes takes it
//! apart, and formats differ in this too.

use std::collections::HashSet;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::Place;
use fsdp_formats::metadata::Metadata;
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
    pub(crate) sequences: Vec<(String, Place<'static>)>,
    /// The keys in the other checkpoint that belong to a whole.
    pub(crate) in_other: HashSet<String>,
}

impl Nested {
    /// Finds the values of `holder` that `other` holds in parts.
    pub(crate) fn find(holder: &dyn Checkpoint, other: &dyn Checkpoint) -> Result<Self, FileError> {
        let mut nested = Nested::default();
        for (fqn, _) in holder.metadata().values() {
            if other.metadata().entries.contains_key(fqn) {
                continue;
            }
            let mut unfolded = Unfolded {
                other: other.metadata(),
                parts: Vec::new(),
                sequences: Vec::new(),
            };
            unfolded.take_apart(holder.describe_value(fqn)?, fqn.to_owned());
            // A value of which the other checkpoint has no part is merely missing there.
            let count_before = nested.in_other.len();
            for (key, _) in &unfolded.parts {
                if other.metadata().entries.contains_key(key) {
                    nested.in_other.insert(key.clone());
                }
            }
            if nested.in_other.len() > count_before {
                nested.parts.insert(fqn.to_owned(), unfolded.parts);
                nested.sequences.extend(unfolded.sequences);
            }
        }
        Ok(nested)
    }
}

/// A value that is taken apart.
struct Unfolded<'o> {
    /// The keys of the other checkpoint.
    other: &'o Metadata,
    parts: Vec<(String, PlainValue)>,
    sequences: Vec<(String, Place<'static>)>,
}

impl Unfolded<'_> {
    /// Adds a value, taken apart down to what the other checkpoint has, or to what holds nothing
    /// more.
    fn take_apart(&mut self, value: PlainValue, key: String) {
        if self.other.entries.contains_key(&key) {
            self.parts.push((key, value));
            return;
        }
        // Containers of other kinds or lengths are differences, even if all of their items are
        // equal.
        let sequence = match &value {
            PlainValue::List(items) => Some(Place::List(items.len())),
            PlainValue::Tuple(items) => Some(Place::Tuple(items.len())),
            _ => None,
        };
        self.sequences
            .extend(sequence.map(|place| (key.clone(), place)));
        match value {
            // The parts of a dict have the texts of its keys.
            PlainValue::Dict(items) if items.iter().all(|(key, _)| key.key_text().is_some()) => {
                for (name, item) in items {
                    let name = name.key_text().expect("all keys have a text");
                    self.take_apart(item, format!("{key}.{name}"));
                }
            }
            PlainValue::List(items) | PlainValue::Tuple(items) if !items.is_empty() => {
                for (index, item) in items.into_iter().enumerate() {
                    self.take_apart(item, format!("{key}.{index}"));
                }
            }
            value => self.parts.push((key, value)),
        }
    }
}
