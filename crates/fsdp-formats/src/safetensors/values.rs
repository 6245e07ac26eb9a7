//! Non-tensor values as JSON, beside formats that cannot hold them.
//!
//! ```text
//! {
//!   "format": "fsdp-values", "version": 1,
//!   "values": { "step": 20, "optim.betas": {"$tuple": [0.9, 0.95]}, "rng": {"$bytes": "00ff"} }
//! }
//! ```
//!
//! None, bools, integers, floats, text, lists, and dicts with text keys are plain JSON. Other
//! values are objects with a single key that starts with `$`: `$tuple`, `$set`, `$bytes`
//! (hexadecimal), `$float` (bits, hexadecimal, for NaN and infinities), `$int` (little-endian two's
//! complement, hexadecimal), `$dict` (pairs), `$tensor` (the key of a tensor among the others), and
//! the names of the types of [`PythonType`](fsdp_layout::PythonType), such as `$torch.dtype`, with
//! the value that describes the object.

use std::collections::HashSet;

use fsdp_layout::{PlainTensor, PlainValue};
use indexmap::IndexMap;
use serde_json::{Map, Value, json};

use crate::error::FormatError;
use crate::limits::check_limit;

/// The text under `format`.
pub(super) const FORMAT: &str = "fsdp-values";
/// The version of the format.
pub(super) const VERSION: i64 = 1;

/// Makes the error of a values file that is not what it should be.
pub(super) fn malformed(reason: impl ToString) -> FormatError {
    FormatError::malformed("values file", reason)
}

/// A function that stores a tensor that was inside a value among the other tensors, and returns the
/// key that it has got. Its argument is a key by the tensor's path (`py.tuple.0`); tensors in one
/// value may have the same one.
type StoreTensor<'f, 'v> = dyn FnMut(String, &'v PlainTensor) -> String + 'f;

/// Encodes a values file. An error comes with the key of the value that cannot be written.
pub fn encode_values<'v>(
    values: &'v IndexMap<String, PlainValue>,
    store_tensor: &mut StoreTensor<'_, 'v>,
) -> Result<Vec<u8>, (String, FormatError)> {
    // Each value gets a line, and only its JSON is in memory besides the text.
    let mut bytes =
        format!("{{\n  \"format\": \"{FORMAT}\",\n  \"version\": {VERSION},\n  \"values\": {{")
            .into_bytes();
    for (index, (fqn, value)) in values.iter().enumerate() {
        let json = to_json(value, fqn, 0, store_tensor).map_err(|error| (fqn.clone(), error))?;
        bytes.extend_from_slice(if index > 0 { b",\n    " } else { b"\n    " });
        bytes.extend_from_slice(Value::from(fqn.as_str()).to_string().as_bytes());
        bytes.extend_from_slice(b": ");
        serde_json::to_writer(&mut bytes, &json)
            .map_err(|error| (fqn.clone(), malformed(error)))?;
    }
    bytes.extend_from_slice(b"\n  }\n}\n");
    Ok(bytes)
}

/// Returns a value as JSON, in the form that the module describes. `path` is the key of tensors in
/// it. A value that is nested too deep, or is of a type without such a form, is an error.
fn to_json<'v>(
    value: &'v PlainValue,
    path: &str,
    depth: u64,
    store_tensor: &mut StoreTensor<'_, 'v>,
) -> Result<Value, FormatError> {
    // The JSON reader accepts 128 levels of nesting, and a dict with a tag takes three of them.
    const DEEPEST: u64 = 39;
    check_limit("nesting of a value in JSON", depth, DEEPEST)?;
    Ok(match value {
        PlainValue::None => Value::Null,
        PlainValue::Bool(value) => json!(value),
        PlainValue::Int(value) => json!(value),
        PlainValue::BigInt(bytes) => json!({ "$int": base16ct::lower::encode_string(bytes) }),
        PlainValue::Float(value) => {
            // A decimal number, if reading it returns the same bits.
            let decimal = json!(value);
            let parsed = serde_json::from_str::<f64>(&decimal.to_string());
            if parsed.is_ok_and(|parsed| parsed.to_bits() == value.to_bits()) {
                decimal
            } else {
                json!({ "$float": format!("{:016x}", value.to_bits()) })
            }
        }
        PlainValue::Str(text) => json!(text),
        PlainValue::Bytes(bytes) => json!({ "$bytes": base16ct::lower::encode_string(bytes) }),
        PlainValue::List(items) => items_to_json(items, path, depth, store_tensor)?,
        PlainValue::Tuple(items) => {
            json!({ "$tuple": items_to_json(items, path, depth, store_tensor)? })
        }
        PlainValue::Set(items) => {
            json!({ "$set": items_to_json(items, path, depth, store_tensor)? })
        }
        PlainValue::Dict(entries) => {
            // The keys of a JSON object are texts that differ, and `$` begins a tag. Any other dict
            // becomes a list of pairs.
            let texts: HashSet<&str> = entries.iter().filter_map(|(key, _)| key.as_str()).collect();
            let is_plain =
                texts.len() == entries.len() && !texts.iter().any(|text| text.starts_with('$'));
            let mut object = Map::new();
            let mut pairs = Vec::new();
            for (key, value) in entries {
                let json_key = to_json(key, path, depth + 1, store_tensor)?;
                let name = json_key
                    .as_str()
                    .map_or_else(|| json_key.to_string(), str::to_owned);
                let value = to_json(value, &format!("{path}.{name}"), depth + 1, store_tensor)?;
                if is_plain {
                    object.insert(name, value);
                } else {
                    pairs.push(json!([json_key, value]));
                }
            }
            if is_plain {
                Value::Object(object)
            } else {
                json!({ "$dict": pairs })
            }
        }
        PlainValue::Tensor(tensor) => {
            json!({ "$tensor": store_tensor(path.to_owned(), tensor) })
        }
        PlainValue::Typed(python_type, description) => {
            let tag = format!("${}", python_type.name());
            json!({ tag: to_json(description, path, depth + 1, store_tensor)? })
        }
        unknown => {
            let what = format!("a value of type `{}` in JSON", unknown.type_name());
            return Err(FormatError::unsupported(what));
        }
    })
}

/// Returns the items of a list, a tuple or a set at this depth as a JSON array.
fn items_to_json<'v>(
    items: &'v [PlainValue],
    path: &str,
    depth: u64,
    store_tensor: &mut StoreTensor<'_, 'v>,
) -> Result<Value, FormatError> {
    let mut array = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        array.push(to_json(
            item,
            &format!("{path}.{index}"),
            depth + 1,
            store_tensor,
        )?);
    }
    Ok(Value::Array(array))
}
