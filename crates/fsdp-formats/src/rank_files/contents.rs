//! The content of one file of an item, in any of the formats in which items are stored. Whatever
//! the format is, it is described as a file of torch is.

use std::collections::HashMap;

use fsdp_layout::{KeyPath, PathPart, PlainValue};

use super::names::{FileKind, RankFile};
use super::placements::{Placements, place_tensors};
use crate::budget::Budget;
use crate::error::FileError;
use crate::formats::assembled::Held;
use crate::formats::flat_json::FlatJson;
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
        FileKind::Torch => FlatFile::read(directory, &file.name)?,
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
        structures.push(Structure::Leaf(key.clone()).nested_in(keys.into_iter()));
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

/// Reads a file of JSON: objects are flattened, and arrays that hold objects. Where that is not
/// possible, the whole is one value. A text that is too long is an opaque one.
fn read_json(directory: &CheckedDirectory, name: &str) -> Result<FlatFile, FileError> {
    let length = directory.file(name)?.len();
    if length > MAX_VALUE_BYTES {
        let held = Held::whole_file(format!("JSON text of {length} bytes"), name, length);
        return Ok(one_value(directory, name, held));
    }
    let text = directory.read_checked(name, MAX_VALUE_BYTES)?;
    let value = parse_json(directory, name, &text)?;
    let mut budget = Budget::new(length, PICKLE_FACTOR);
    let flat = FlatJson::new(value, &mut budget).ok();
    Ok(match flat.and_then(into_leaves) {
        Some(content) => FlatFile::of_other_format(directory, name, content, HashMap::new()),
        // Its values were moved, so the text is read again.
        None => one_value(
            directory,
            name,
            Held::Plain(parse_json(directory, name, &text)?),
        ),
    })
}

/// Reads the text of a file of JSON.
fn parse_json(
    directory: &CheckedDirectory,
    name: &str,
    text: &[u8],
) -> Result<PlainValue, FileError> {
    let mut budget = Budget::new(text.len() as u64, PICKLE_FACTOR);
    python_json::parse(text, &mut budget).map_err(|source| directory.file_error(name, source))
}

/// Returns the values of JSON by their flat keys, and the containers around them; `None` if two
/// values would have one flat key.
fn into_leaves(flat: FlatJson) -> Option<(Leaves, Structure)> {
    let mut found = Leaves::new();
    for (path, value) in flat.values {
        let leaf = Leaf::Value(Held::Plain(value));
        if found.insert(path.flat_key(), (path, leaf)).is_some() {
            return None;
        }
    }
    Some((found, flat.structure))
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
