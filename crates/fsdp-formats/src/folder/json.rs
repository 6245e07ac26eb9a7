//! A file of JSON that a trainer keeps its state in.

use std::sync::Arc;

use fsdp_layout::{KeyPath, PathPart, PlainValue};

use crate::budget::Budget;
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Assembled, Assembler, Held};
use crate::formats::checkpoint::Format;
use crate::formats::python_json;
use crate::formats::read::OpenOptions;
use crate::formats::structure::Structure;
use crate::limits::{MAX_FLAT_VALUES, MAX_INDEX_BYTES, PICKLE_FACTOR};
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;

/// Opens a file of JSON. Objects are flattened, and arrays that hold objects, as a file of torch
/// is; one of very many values, such as a long log, is one value.
pub(super) fn open(location: &Location, options: OpenOptions) -> Result<Assembled, FileError> {
    let (parent, name) = location.split()?;
    let directory = CheckedDirectory::open_beside(&parent, name, options.verify)?;
    let text = directory.read_checked(name, MAX_INDEX_BYTES)?;
    let mut budget = Budget::new(text.len() as u64, PICKLE_FACTOR);
    let value = python_json::parse(&text, &mut budget)
        .map_err(|source| directory.file_error(name, source))?;
    let mut flattener = JsonFlattener {
        assembler: Assembler::new(Format::Folder, location.name(), directory),
        file: Arc::from(name),
        budget,
    };
    let structure = flattener.flatten(value, &KeyPath::default())?;
    Ok(flattener.assembler.finish(Some(structure)))
}

/// Gives every value of a JSON text its flat key.
struct JsonFlattener {
    assembler: Assembler,
    file: Arc<str>,
    budget: Budget,
}

impl JsonFlattener {
    /// Makes the error of this file from the reason.
    fn file_error(&self, source: FormatError) -> FileError {
        self.assembler.directory().file_error(&self.file, source)
    }

    /// Adds what lies at and below a value, whose place is `path`, and returns its containers. Keys
    /// that take more than the memory budget are an error.
    fn flatten(&mut self, value: PlainValue, path: &KeyPath) -> Result<Structure, FileError> {
        // All of the path is copied for whatever lies there.
        let path_bytes: usize = path
            .0
            .iter()
            .map(|part| part.to_string().len() + size_of::<PathPart>())
            .sum();
        let charged = self.budget.charge("memory for keys", 4 * path_bytes as u64);
        charged.map_err(|over| self.file_error(over.into()))?;
        // A file always has flat keys.
        let is_large = !path.0.is_empty() && count_flat_keys(&value) > MAX_FLAT_VALUES;
        match value {
            PlainValue::Dict(items) if !is_large => {
                let mut dict = Vec::with_capacity(items.len());
                for (key, value) in items {
                    let text = key.as_str().expect("the keys of JSON are texts");
                    let child_path = path.child(PathPart::Key(text.to_owned()));
                    let structure = self.flatten(value, &child_path)?;
                    dict.push((key, structure));
                }
                Ok(Structure::Dict(dict))
            }
            PlainValue::List(items) if !is_large && items.iter().any(holds_objects) => {
                let mut list = Vec::with_capacity(items.len());
                for (index, item) in items.into_iter().enumerate() {
                    list.push(self.flatten(item, &path.child(PathPart::Index(index)))?);
                }
                Ok(Structure::List(list))
            }
            value => {
                let fqn = path.flat_key();
                self.assembler
                    .add_value(path, &self.file, Held::Plain(value))?;
                Ok(Structure::Leaf(fqn))
            }
        }
    }
}

/// Returns how many flat keys a value would have, in which a large one counts as one.
fn count_flat_keys(value: &PlainValue) -> usize {
    let count_of_item = |item: &PlainValue| match count_flat_keys(item) {
        count if count > MAX_FLAT_VALUES => 1,
        count => count,
    };
    match value {
        PlainValue::Dict(items) => items.iter().map(|(_, item)| count_of_item(item)).sum(),
        PlainValue::List(items) if items.iter().any(holds_objects) => {
            items.iter().map(count_of_item).sum()
        }
        _ => 1,
    }
}

/// Returns `true` for a dict, and for a list with one in it.
fn holds_objects(value: &PlainValue) -> bool {
    match value {
        PlainValue::Dict(_) => true,
        PlainValue::List(items) => items.iter().any(holds_objects),
        _ => false,
    }
}
