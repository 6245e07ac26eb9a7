//! Changes: a view of a checkpoint may show things in another way than the checkpoint has them, or
//! not at all.

use std::collections::HashMap;

use fsdp_layout::{DType, count_text};

use crate::metadata::Metadata;

/// A way in which things differ from what a checkpoint has: it is told to whoever asked for the
/// view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The word for one of the things: `tensor`, `name`.
    pub noun: &'static str,
    /// The end of a sentence that begins with their number: it says what became of them.
    pub what: String,
    /// The things, each by its key; some with more after it.
    pub names: Vec<String>,
}

impl Change {
    /// Makes the change of things of this kind; `None` if there are none.
    #[must_use]
    pub fn new(noun: &'static str, what: impl Into<String>, names: Vec<String>) -> Option<Self> {
        (!names.is_empty()).then(|| Change {
            noun,
            what: what.into(),
            names,
        })
    }

    /// Returns the line that tells it, without the names: `2 tensors became …`.
    #[must_use]
    pub fn line(&self) -> String {
        let count = count_text(self.names.len(), self.noun, &format!("{}s", self.noun));
        format!("{count} {}", self.what)
    }
}

/// Returns the tensors whose elements are those of another tensor, because both are one in the
/// program that saved them (tied weights), each with the first tensor that has these elements.
pub(crate) fn find_shared(metadata: &Metadata) -> HashMap<String, String> {
    let mut first_keys: HashMap<(&str, u64, u64, DType), &str> = HashMap::new();
    let mut shared = HashMap::new();
    for (fqn, tensor) in metadata.tensors() {
        let [chunk] = &tensor.chunks[..] else {
            continue;
        };
        let Some(stored) = chunk.stored.as_ref().filter(|stored| stored.length > 0) else {
            continue;
        };
        let place = (
            stored.relative_path.as_str(),
            stored.offset,
            stored.length,
            tensor.properties.dtype,
        );
        let first_key = *first_keys.entry(place).or_insert(fqn);
        if first_key != fqn {
            shared.insert(fqn.to_owned(), first_key.to_owned());
        }
    }
    shared
}
