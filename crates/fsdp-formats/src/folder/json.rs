//! A file of JSON that a trainer keeps its state in.

use std::sync::Arc;

use crate::budget::Budget;
use crate::error::FileError;
use crate::formats::assembled::{Assembled, Assembler, Held};
use crate::formats::checkpoint::Format;
use crate::formats::flat_json::FlatJson;
use crate::formats::python_json;
use crate::formats::read::OpenOptions;
use crate::limits::{MAX_INDEX_BYTES, PICKLE_FACTOR};
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;

/// Opens a file of JSON, with the flat keys of [`FlatJson`].
pub(super) fn open(location: &Location, options: OpenOptions) -> Result<Assembled, FileError> {
    let (parent, name) = location.split()?;
    let directory = CheckedDirectory::open_beside(&parent, name, options.verify)?;
    let text = directory.read_checked(name, MAX_INDEX_BYTES)?;
    let mut budget = Budget::new(text.len() as u64, PICKLE_FACTOR);
    let value = python_json::parse(&text, &mut budget)
        .map_err(|source| directory.file_error(name, source))?;
    let FlatJson { values, structure } = FlatJson::new(value, &mut budget)
        .map_err(|over| directory.file_error(name, over.into()))?;
    let file: Arc<str> = Arc::from(name);
    let mut assembler = Assembler::new(Format::Folder, location.name(), directory);
    for (path, value) in values {
        assembler.add_value(&path, &file, Held::Plain(value))?;
    }
    Ok(assembler.finish(Some(structure)))
}
