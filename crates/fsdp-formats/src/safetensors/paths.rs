//! The places of keys in the nested state dict that they came from, as a text in the header of the
//! first file.

use fsdp_layout::{KeyPath, PathPart};
use indexmap::IndexMap;
use serde_json::{Map, Value, json};

use super::header::charge_text;
use crate::budget::check_depth;
use crate::error::FormatError;
use crate::metadata::Metadata;

/// The key of the text in the `__metadata__` of a file.
pub const PATHS: &str = "fsdp.paths";

/// Makes the error of a text that is not what it should be.
fn malformed(reason: impl ToString) -> FormatError {
    FormatError::malformed("paths of keys", reason)
}

/// Returns the text for the paths of a checkpoint; `None` if it has no paths, or the keys
/// themselves tell them.
pub fn encode_paths(metadata: &Metadata) -> Option<String> {
    let paths = metadata.planner_data.as_ref()?;
    let mut are_implied = true;
    let mut object = Map::new();
    for (fqn, path) in paths {
        if !metadata.entries.contains_key(fqn) {
            continue;
        }
        // A path that is the key itself is what a reader takes a key without a path for.
        are_implied =
            are_implied && matches!(path.0.as_slice(), [PathPart::Key(key)] if key == fqn);
        let parts = path.0.iter().map(|part| match part {
            PathPart::Key(key) => json!(key),
            PathPart::Index(index) => json!(index),
        });
        object.insert(fqn.clone(), Value::Array(parts.collect()));
    }
    (!are_implied).then(|| Value::Object(object).to_string())
}

/// Decodes the text that [`encode_paths`] returns.
pub(super) fn decode(text: &str) -> Result<IndexMap<String, KeyPath>, FormatError> {
    charge_text(text, "memory for paths")?;
    let paths: Map<String, Value> = serde_json::from_str(text).map_err(malformed)?;
    paths
        .into_iter()
        .map(|(fqn, path)| Ok((fqn, decode_path(path)?)))
        .collect()
}

/// Decodes a path from its JSON: a list of texts and positions.
fn decode_path(path: Value) -> Result<KeyPath, FormatError> {
    let Value::Array(items) = path else {
        return Err(malformed("a path is no list"));
    };
    check_depth(items.len())?;
    let mut parts = Vec::with_capacity(items.len());
    for item in items {
        parts.push(match (item.as_u64(), item) {
            (_, Value::String(key)) => PathPart::Key(key),
            (Some(index), _) => PathPart::Index(index as usize),
            _ => return Err(malformed("a path's part is neither text nor a position")),
        });
    }
    Ok(KeyPath(parts))
}
