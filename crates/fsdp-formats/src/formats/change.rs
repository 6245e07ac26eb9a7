//! Changes: a view of a checkpoint may show things in another way than the checkpoint has them, or
//! not at all.

use std::collections::HashMap;

use fsdp_layout::boxes::checked_numel;
use fsdp_layout::count_text;

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

/// The place of the bytes from a tensor's first element to its last one.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Place<'m> {
    file: &'m str,
    start: u64,
    end: u64,
    /// `true` if elements of other tensors may lie between its own, as those of a column do.
    has_gaps: bool,
}

/// Returns the tensors that have elements of another tensor, because both are one in the program
/// that saved them (tied weights, views), each with a tensor that has these elements too.
pub(crate) fn find_shared(metadata: &Metadata) -> HashMap<String, String> {
    let mut tensors = Vec::new();
    for (fqn, tensor) in metadata.tensors() {
        let [chunk] = &tensor.chunks[..] else {
            continue;
        };
        let Some(stored) = chunk.stored.as_ref().filter(|stored| stored.length > 0) else {
            continue;
        };
        let element_count = checked_numel(&tensor.shape).unwrap_or(usize::MAX) as u64;
        let dense_bytes = element_count.saturating_mul(tensor.properties.dtype.size_in_bytes());
        let place = Place {
            file: &stored.relative_path,
            start: stored.offset,
            end: stored.offset.saturating_add(stored.length),
            has_gaps: stored.transforms.is_empty() && stored.length > dense_bytes,
        };
        tensors.push((place, fqn));
    }
    // Sort by the first byte. Where several tensors have the same one, the longest comes first.
    tensors.sort_by(|(first, _), (second, _)| {
        let ends = second.end.cmp(&first.end);
        (first.file, first.start)
            .cmp(&(second.file, second.start))
            .then(ends)
    });
    let mut shared = HashMap::new();
    let mut previous: Option<&(Place<'_>, &str)> = None;
    // The one of those so far that reaches farthest.
    let mut farthest: Option<&(Place<'_>, &str)> = None;
    for tensor in &tensors {
        let (place, fqn) = tensor;
        if let Some((other, other_key)) = previous
            && other == place
        {
            shared.insert((*fqn).to_owned(), (*other_key).to_owned());
            continue;
        }
        previous = Some(tensor);
        match farthest {
            Some((other, other_key)) if other.file == place.file && place.start < other.end => {
                // One that begins between the elements of another one may have none of them.
                if !other.has_gaps {
                    shared.insert((*fqn).to_owned(), (*other_key).to_owned());
                }
                if place.end > other.end {
                    farthest = Some(tensor);
                }
            }
            _ => farthest = Some(tensor),
        }
    }
    shared
}

#[cfg(test)]
mod tests {
    use fsdp_layout::{DType, TensorBox};

    use super::*;
    use crate::metadata::{Chunk, Entry, StorageInfo, TensorEntry, TensorProperties};

    /// Returns a tensor of bytes that is stored in a range of a file.
    fn tensor(elements: usize, range: std::ops::Range<u64>) -> Entry {
        Entry::Tensor(TensorEntry {
            properties: TensorProperties::new(DType::U8),
            shape: vec![elements],
            chunks: vec![Chunk {
                bounds: TensorBox::whole(&[elements]),
                stored: Some(StorageInfo {
                    relative_path: "data".to_owned(),
                    offset: range.start,
                    length: range.end - range.start,
                    transforms: Vec::new(),
                }),
            }],
        })
    }

    #[test]
    fn tensors_share_elements_where_they_overlap_but_not_between_those_of_a_column() {
        let entries = [
            ("column", tensor(10, 0..100)),
            ("tied", tensor(10, 20..30)),
            ("tied.again", tensor(10, 20..30)),
            ("whole", tensor(100, 200..300)),
            ("part", tensor(10, 250..260)),
            ("other", tensor(10, 300..310)),
        ];
        let metadata = Metadata {
            entries: entries.map(|(key, entry)| (key.to_owned(), entry)).into(),
            ..Metadata::default()
        };
        let shared = find_shared(&metadata);
        let expected = [("tied.again", "tied"), ("part", "whole")];
        let expected = expected.map(|(key, other)| (key.to_owned(), other.to_owned()));
        assert_eq!(shared, HashMap::from(expected));
    }
}
