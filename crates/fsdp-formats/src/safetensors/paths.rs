//! The places of keys in the nested state dict that they came from, as a text in the header of the
//! first file.

use fsdp_layout::{KeyPath, PathPart};
use indexmap::IndexMap;
use serde_json::{Map, Value, json};

use super::header::charge_text;
use crate::error::FormatError;
use crate::metadata::Metadata;

/// The key of the text in the `__metadata__` of a file.
pub const PATHS: &str = "fsdp.paths";

fn malformed(reason: impl ToString) -> FormatError {
    FormatError::Malformed {
        what: "paths of keys",
        reason: reason.to_string(),
    }
}

/// Returns the text for the paths of a checkpoint; `None` if the keys themselves tell them.
pub fn encode_paths(metadata: &Metadata) -> Option<String> {
    let paths = metadata.planner_data.as_ref()?;
    let mut is_told = true;
    let mut object = Map::new();
    for (fqn, path) in paths
        .iter()
        .filter(|(fqn, _)| metadata.entries.contains_key(*fqn))
    {
        is_told = is_told && matches!(path.0.as_slice(), [PathPart::Key(key)] if key == fqn);
        let parts = path.0.iter().map(|part| match part {
            PathPart::Key(key) => json!(key),
            PathPart::Index(index) => json!(index),
        });
        object.insert(fqn.clone(), Value::Array(parts.collect()));
    }
    (!is_told).then(|| Value::Object(object).to_string())
}

/// Reads the text.
pub(super) fn decode(text: &str) -> Result<IndexMap<String, KeyPath>, FormatError> {
    charge_text(text, "memory for paths")?;
    let paths: Map<String, Value> = serde_json::from_str(text).map_err(malformed)?;
    paths
        .iter()
        .map(|(fqn, path)| Ok((fqn.clone(), path_of(path)?)))
        .collect()
}

/// Reads a path from its JSON: a list of texts and positions.
fn path_of(path: &Value) -> Result<KeyPath, FormatError> {
    let parts = path
        .as_array()
        .ok_or_else(|| malformed("a path is no list"))?;
    let parts = parts.iter().map(|part| match (part, part.as_u64()) {
        (Value::String(key), _) => Ok(PathPart::Key(key.clone())),
        (_, Some(index)) => Ok(PathPart::Index(index as usize)),
        _ => Err(malformed("a path's part is neither text nor a position")),
    });
    Ok(KeyPath(parts.collect::<Result<_, FormatError>>()?))
}
