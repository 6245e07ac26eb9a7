//! The content of one file of an item, in any of the formats in which items are stored. Whatever
//! the format is, it is described as a file of torch is.

use std::collections::HashMap;

use fsdp_layout::{KeyPath, PathPart, PlainValue};

use super::names::{FileKind, RankFile};
use super::placements::{Placements, place_tensors};
use crate::budget::Budget;
use crate::error::FileError;
use crate::formats::assembled::Held;
use crate::formats::python_json;
use crate::formats::structure::Structure;
use crate::limits::PICKLE_FACTOR;
use crate::safetensors::header::Header;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::read_at::ReadAt as _;
use crate::torch::flat::{FlatFile, Leaf, Leaves};
use crate::torch::tensor_ref::TensorRef;

/// The length up to which a file of JSON or of raw bytes is read. Its values are held, and those of
/// JSON take many times the memory of their text.
const MAX_VALUE_BYTES: u64 = 16 << 20;

/// Reads one file of an item. `placements` tell where its tensors belong, if they are plain.
pub(super) fn read(
    directory: &CheckedDirectory,
    file: &RankFile,
    placements: Option<&Placements>,
) -> Result<FlatFile, FileError> {
    let mut flat = match file.kind {
        FileKind::Torch => FlatFile::read_selected(directory, &file.name, None, &|_| true)?,
        FileKind::Safetensors => read_safetensors(directory, &file.name, placements)?,
        FileKind::Json => read_json(directory, &file.name)?,
        FileKind::Raw => read_raw(directory, &file.name)?,
    };
    if let Some(placements) = placements {
        place_tensors(&mut flat, placements, file.rank)?;
    }
    Ok(flat)
}

/// Reads a file of safetensors. Its keys are flat: `placements` have their parts, if there are any.
fn read_safetensors(
    directory: &CheckedDirectory,
    name: &str,
    placements: Option<&Placements>,
) -> Result<FlatFile, FileError> {
    let file = directory.file(name)?;
    let header = Header::read(&*file).map_err(|source| directory.file_error(name, source))?;
    let mut found = Leaves::new();
    let mut storages = HashMap::new();
    let mut structures = Vec::new();
    for (key, info) in &header.tensors {
        let keys = placements.and_then(|placements| placements.keys_of(key));
        let keys = keys.map_or_else(|| vec![key.as_str().into()], <[_]>::to_vec);
        let path = KeyPath(
            keys.iter()
                .filter_map(PlainValue::key_text)
                .map(PathPart::Key)
                .collect(),
        );
        structures.push(nested(&keys, key));
        let tensor =
            TensorRef::row_major(key.clone(), info.end - info.start, info.dtype, &info.shape);
        let range = header.data_offset + info.start..header.data_offset + info.end;
        storages.insert(key.clone(), range);
        found.insert(key.clone(), (path, Leaf::Tensor(tensor, None)));
    }
    let content = (found, Structure::merged(structures));
    Ok(FlatFile::of_other_format(
        directory, name, content, storages,
    ))
}

/// Returns a leaf in dicts with these keys, the first of them outermost.
fn nested(keys: &[PlainValue], fqn: &str) -> Structure {
    let leaf = Structure::Leaf(fqn.to_owned());
    keys.iter().rev().fold(leaf, |structure, key| {
        Structure::Dict(vec![(key.clone(), structure)])
    })
}

/// Reads a file of JSON: objects are flattened, and arrays that hold objects. Where that is not
/// possible, the whole is one value. A text that is too long is an opaque one.
fn read_json(directory: &CheckedDirectory, name: &str) -> Result<FlatFile, FileError> {
    let length = directory.file(name)?.len();
    if length > MAX_VALUE_BYTES {
        let held = Held::whole_file(format!("JSON text of {length} bytes"), name, length);
        return Ok(one_value(directory, name, held));
    }
    let bytes = directory.read_checked(name, MAX_VALUE_BYTES)?;
    let mut budget = Budget::new(length, PICKLE_FACTOR);
    let value = python_json::parse(&bytes, &mut budget)
        .map_err(|source| directory.file_error(name, source))?;
    let mut found = Leaves::new();
    let mut key_budget = Budget::new(length, PICKLE_FACTOR);
    let structure = flatten(&value, &KeyPath::default(), &mut found, &mut key_budget);
    Ok(match structure {
        Some(structure) => {
            FlatFile::of_other_format(directory, name, (found, structure), HashMap::new())
        }
        None => one_value(directory, name, Held::Plain(value)),
    })
}

/// Adds what lies at and below a value of JSON, whose place is `path`, and returns its containers;
/// `None` if two values would have one flat key, or if the keys take too much memory.
fn flatten(
    value: &PlainValue,
    path: &KeyPath,
    found: &mut Leaves,
    budget: &mut Budget,
) -> Option<Structure> {
    // All of the path is copied for whatever lies there.
    let path_bytes: usize = path
        .0
        .iter()
        .map(|part| part.to_string().len() + size_of::<PathPart>())
        .sum();
    let charged = budget.charge("memory for keys", 4 * path_bytes as u64);
    charged.ok()?;
    match value {
        PlainValue::Dict(items) => {
            let mut dict = Vec::with_capacity(items.len());
            for (key, value) in items {
                let text = key.as_str().expect("the keys of JSON are texts");
                let child_path = path.child(PathPart::Key(text.to_owned()));
                dict.push((key.clone(), flatten(value, &child_path, found, budget)?));
            }
            Some(Structure::Dict(dict))
        }
        PlainValue::List(items) if items.iter().any(holds_objects) => {
            let mut list = Vec::with_capacity(items.len());
            for (index, item) in items.iter().enumerate() {
                let child_path = path.child(PathPart::Index(index));
                list.push(flatten(item, &child_path, found, budget)?);
            }
            Some(Structure::List(list))
        }
        value => {
            let fqn = path.flat_key();
            let leaf = Leaf::Value(Held::Plain(value.clone()));
            let duplicate = found.insert(fqn.clone(), (path.clone(), leaf));
            duplicate.is_none().then_some(Structure::Leaf(fqn))
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

/// Reads a file of raw bytes, which are one value. Very many are an opaque one.
fn read_raw(directory: &CheckedDirectory, name: &str) -> Result<FlatFile, FileError> {
    let length = directory.file(name)?.len();
    let held = if length > MAX_VALUE_BYTES {
        Held::whole_file(format!("raw bytes, {length} of them"), name, length)
    } else {
        Held::Plain(PlainValue::Bytes(
            directory.read_checked(name, MAX_VALUE_BYTES)?,
        ))
    };
    Ok(one_value(directory, name, held))
}

/// Makes the content of a file that is one value.
fn one_value(directory: &CheckedDirectory, name: &str, value: Held) -> FlatFile {
    let path = KeyPath::default();
    let leaf = (path.clone(), Leaf::Value(value));
    let content = (
        Leaves::from([(path.flat_key(), leaf)]),
        Structure::Leaf(path.flat_key()),
    );
    FlatFile::of_other_format(directory, name, content, HashMap::new())
}
