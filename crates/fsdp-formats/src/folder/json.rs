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
use crate::limits::PICKLE_FACTOR;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::storage::read_at::ReadAt as _;

/// The length up to which a file is read. A longer file is an opaque value, because numbers take
/// many times the memory of their text.
const MAX_BYTES: u64 = 1 << 20;

/// Opens a file of JSON. Objects are flattened, and arrays that hold objects, as a file of torch
/// is. A text that is too long becomes one opaque value.
pub(super) fn open(location: &Location, options: OpenOptions) -> Result<Assembled, FileError> {
    let (parent, name) = location.split()?;
    let directory = CheckedDirectory::open_beside(&parent, name, options.verify)?;
    let length = directory.file(name)?.len();
    let assembler = Assembler::new(Format::Folder, location.name(), directory);
    let mut flattener = JsonFlattener {
        assembler,
        file: Arc::from(name),
        budget: Budget::new(length, PICKLE_FACTOR),
    };
    if length > MAX_BYTES {
        let held = Held::whole_file(format!("JSON text of {length} bytes"), name, length);
        flattener
            .assembler
            .add_value(&KeyPath::default(), &flattener.file, held)?;
        return Ok(flattener.assembler.finish(None));
    }
    let bytes = flattener
        .assembler
        .directory()
        .read_checked(name, MAX_BYTES)?;
    let value = python_json::parse(&bytes)
        .map_err(|error| flattener.file_error(FormatError::malformed("JSON", error)))?;
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
        match value {
            PlainValue::Dict(items) => {
                let mut dict = Vec::with_capacity(items.len());
                for (key, value) in items {
                    let text = key.as_str().expect("the keys of JSON are texts");
                    let child_path = path.child(PathPart::Key(text.to_owned()));
                    let structure = self.flatten(value, &child_path)?;
                    dict.push((key, structure));
                }
                Ok(Structure::Dict(dict))
            }
            PlainValue::List(items) if items.iter().any(holds_objects) => {
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

/// Returns `true` for a dict, and for a list with one in it.
fn holds_objects(value: &PlainValue) -> bool {
    match value {
        PlainValue::Dict(_) => true,
        PlainValue::List(items) => items.iter().any(holds_objects),
        _ => false,
    }
}
