//! Non-tensor values as JSON, beside formats that cannot hold them.
//!
//! ```text
//! {
//!   "format": "fsdp-values", "version": 1,
//!   "values": { "step": 20, "optim.betas": {"$tuple": [0.9, 0.95]}, "rng": {"$bytes": "00ff"} }
//! }
//! ```
//!
//! Earlier files have the paths of all keys too, which are in the header now: `"paths": {"list.0": ["list", 0], …}`.
//!
//! None, bools, integers, floats, text, lists, and dicts with text keys are plain JSON. What JSON has no form for is an
//! object of one key that starts with `$`: `$tuple`, `$set`, `$bytes` (hexadecimal), `$float` (bits, hexadecimal, for
//! NaN and infinities), `$int` (little-endian two's complement, hexadecimal), `$dict` (pairs), `$tensor` (the key of a
//! tensor among the others).

use fsdp_layout::{KeyPath, PlainTensor, PlainValue};
use indexmap::IndexMap;
use serde_json::{Map, Value, json};

use super::paths;
use crate::error::FormatError;

const FORMAT: &str = "fsdp-values";
const VERSION: u64 = 1;

/// The content of a values file.
#[derive(Debug, Default)]
pub(crate) struct Values {
    /// The values, by flat key.
    pub(crate) values: IndexMap<String, PlainValue>,
    /// The places of all keys, those of tensors too, in the nested state dict, in earlier files.
    pub(crate) paths: Option<IndexMap<String, KeyPath>>,
}

fn malformed(reason: impl ToString) -> FormatError {
    FormatError::Malformed { what: "values file", reason: reason.to_string() }
}

/// Encodes a values file. A tensor inside a value is given to `tensor` with a key by its path (`py.tuple.0`), under
/// which it must be stored among the other tensors.
pub(crate) fn encode<'v>(
    values: &'v IndexMap<String, PlainValue>,
    tensor: &mut dyn FnMut(String, &'v PlainTensor),
) -> Result<Vec<u8>, FormatError> {
    let mut object = Map::new();
    for (fqn, value) in values {
        object.insert(fqn.clone(), to_json(value, fqn, 0, tensor)?);
    }
    let file = json!({ "format": FORMAT, "version": VERSION, "values": object });
    let mut bytes = serde_json::to_vec_pretty(&file).map_err(malformed)?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Reads a values file; `tensor` fetches the tensors inside values by their keys.
pub(crate) fn decode(
    bytes: &[u8],
    tensor: &mut dyn FnMut(&str) -> Result<PlainTensor, FormatError>,
) -> Result<Values, FormatError> {
    let file: Value = serde_json::from_slice(bytes).map_err(malformed)?;
    if file["format"] != FORMAT || file["version"].as_u64().is_none_or(|version| version > VERSION) {
        return Err(malformed("it is of another format or a later version"));
    }
    let object = file["values"].as_object().ok_or_else(|| malformed("it has no `values`"))?;
    let mut values = Values::default();
    for (fqn, value) in object {
        values.values.insert(fqn.clone(), from_json(value, tensor)?);
    }
    values.paths = file.get("paths").map(paths::of_json).transpose()?;
    Ok(values)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(value: &Value) -> Result<Vec<u8>, FormatError> {
    let text = value.as_str().filter(|text| text.len().is_multiple_of(2) && text.is_ascii());
    let text = text.ok_or_else(|| malformed("bytes are not in hexadecimal"))?;
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).map_err(malformed)).collect()
}

/// Returns a value as JSON, in the form that the module describes.
fn to_json<'v>(
    value: &'v PlainValue,
    path: &str,
    depth: usize,
    tensor: &mut dyn FnMut(String, &'v PlainTensor),
) -> Result<Value, FormatError> {
    // JSON readers stop at a nesting of 128; a tagged dict takes three levels.
    const DEEPEST: usize = 40;
    if depth >= DEEPEST {
        return Err(FormatError::Limit {
            what: "nesting of a value in JSON",
            value: depth as u64,
            limit: DEEPEST as u64,
        });
    }
    let mut all = |items: &'v [PlainValue]| -> Result<Value, FormatError> {
        let items = items.iter().enumerate();
        let items = items.map(|(index, item)| to_json(item, &format!("{path}.{index}"), depth + 1, tensor));
        Ok(Value::Array(items.collect::<Result<_, _>>()?))
    };
    Ok(match value {
        PlainValue::None => Value::Null,
        PlainValue::Bool(value) => json!(value),
        PlainValue::Int(value) => json!(value),
        PlainValue::BigInt(bytes) => json!({ "$int": hex(bytes) }),
        PlainValue::Float(value) => {
            // JSON's decimal form, where it leads back to the same bits.
            let plain = json!(value);
            let back = serde_json::from_str::<f64>(&plain.to_string());
            if back.is_ok_and(|back| back.to_bits() == value.to_bits()) {
                plain
            } else {
                json!({ "$float": format!("{:016x}", value.to_bits()) })
            }
        }
        PlainValue::Str(text) => json!(text),
        PlainValue::Bytes(bytes) => json!({ "$bytes": hex(bytes) }),
        PlainValue::List(items) => all(items)?,
        PlainValue::Tuple(items) => json!({ "$tuple": all(items)? }),
        PlainValue::Set(items) => json!({ "$set": all(items)? }),
        PlainValue::Dict(entries) => {
            let plain = entries.iter().all(|(key, _)| key.as_str().is_some_and(|key| !key.starts_with('$')));
            let mut object = Map::new();
            let mut pairs = Vec::new();
            for (key, value) in entries {
                let json_key = to_json(key, path, depth + 1, tensor)?;
                let name = json_key.as_str().map_or_else(|| json_key.to_string(), str::to_owned);
                let value = to_json(value, &format!("{path}.{name}"), depth + 1, tensor)?;
                match (plain, key.as_str()) {
                    (true, Some(key)) => {
                        object.insert(key.to_owned(), value);
                    }
                    _ => pairs.push(json!([json_key, value])),
                }
            }
            if plain && object.len() == entries.len() { Value::Object(object) } else { json!({ "$dict": pairs }) }
        }
        PlainValue::Tensor(inside) => {
            tensor(path.to_owned(), inside);
            json!({ "$tensor": path })
        }
        other => {
            return Err(FormatError::Unsupported { what: format!("a value of type `{}` in JSON", other.type_name()) });
        }
    })
}

fn from_json(
    value: &Value,
    tensor: &mut dyn FnMut(&str) -> Result<PlainTensor, FormatError>,
) -> Result<PlainValue, FormatError> {
    let mut all = |items: &Value| -> Result<Vec<PlainValue>, FormatError> {
        let items = items.as_array().ok_or_else(|| malformed("a tagged value is no list"))?;
        items.iter().map(|item| from_json(item, tensor)).collect()
    };
    Ok(match value {
        Value::Null => PlainValue::None,
        Value::Bool(value) => PlainValue::Bool(*value),
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(value), _) => PlainValue::Int(value),
            (None, Some(value)) => PlainValue::Float(value),
            (None, None) => return Err(malformed("a number out of range")),
        },
        Value::String(text) => PlainValue::Str(text.clone()),
        Value::Array(_) => PlainValue::List(all(value)?),
        Value::Object(object) => match object.iter().next() {
            Some((tag, inner)) if object.len() == 1 && tag.starts_with('$') => match tag.as_str() {
                "$tuple" => PlainValue::Tuple(all(inner)?),
                "$set" => PlainValue::Set(all(inner)?),
                "$bytes" => PlainValue::Bytes(unhex(inner)?),
                "$int" => PlainValue::BigInt(unhex(inner)?),
                "$float" => {
                    let bits = inner.as_str().and_then(|digits| u64::from_str_radix(digits, 16).ok());
                    PlainValue::Float(f64::from_bits(bits.ok_or_else(|| malformed("a float's bits"))?))
                }
                "$dict" => {
                    let pairs = inner.as_array().ok_or_else(|| malformed("a dict is no list of pairs"))?;
                    let mut pair = |pair: &Value| match pair.as_array().map(Vec::as_slice) {
                        Some([key, value]) => Ok((from_json(key, tensor)?, from_json(value, tensor)?)),
                        _ => Err(malformed("a dict is no list of pairs")),
                    };
                    PlainValue::Dict(pairs.iter().map(&mut pair).collect::<Result<_, _>>()?)
                }
                "$tensor" => {
                    let key = inner.as_str().ok_or_else(|| malformed("a tensor's key is no text"))?;
                    PlainValue::Tensor(tensor(key)?)
                }
                tag => return Err(malformed(format!("unknown tag `{tag}`"))),
            },
            _ => {
                let entries =
                    object.iter().map(|(key, value)| Ok((PlainValue::Str(key.clone()), from_json(value, tensor)?)));
                PlainValue::Dict(entries.collect::<Result<_, FormatError>>()?)
            }
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fsdp_layout::DType;

    fn no_tensor(_: &str) -> Result<PlainTensor, FormatError> {
        Err(malformed("no tensor"))
    }

    #[test]
    fn values_survive() {
        let tensor = PlainTensor { dtype: DType::U8, shape: vec![1], data: vec![9] };
        let value = PlainValue::List(vec![
            PlainValue::None,
            PlainValue::Bool(true),
            PlainValue::Int(i64::MIN),
            PlainValue::BigInt(vec![1, 2, 3, 4, 5, 6, 7, 8, 9]),
            0.1.into(),
            1.0.into(),
            f64::NAN.into(),
            f64::NEG_INFINITY.into(),
            (-0.0).into(),
            5e-324.into(),
            1.7976931348623157e308.into(),
            "naïve ☃".into(),
            PlainValue::Bytes(vec![0, 255]),
            PlainValue::Tuple(vec![PlainValue::Set(vec![PlainValue::Int(1)])]),
            PlainValue::Dict(vec![("a".into(), PlainValue::None)]),
            PlainValue::Dict(vec![("$tuple".into(), PlainValue::None)]),
            PlainValue::Dict(vec![(PlainValue::Int(1), PlainValue::None), ("x".into(), 2.5.into())]),
            PlainValue::Tuple(vec![PlainValue::Tensor(tensor.clone())]),
        ]);
        let values = IndexMap::from([("a.0".to_owned(), value.clone())]);
        let mut keys = Vec::new();
        let bytes = encode(&values, &mut |key, _| keys.push(key)).unwrap();
        assert_eq!(keys, ["a.0.17.0"]);
        let mut load = |key: &str| {
            assert_eq!(key, "a.0.17.0");
            Ok(tensor.clone())
        };
        let read = decode(&bytes, &mut load).unwrap();
        assert!(read.values["a.0"].same_bits(&value), "{:?}", read.values["a.0"]);
    }

    #[test]
    fn broken_files_are_errors() {
        let values = IndexMap::from([("a".to_owned(), PlainValue::Tuple(vec![1.5.into()]))]);
        let bytes = encode(&values, &mut |_, _| {}).unwrap();
        for end in 0..bytes.len() - 2 {
            assert!(decode(&bytes[..end], &mut no_tensor).is_err());
        }
        for text in [r#"{"format":"fsdp-values","version":2,"values":{}}"#, r#"{"values":{}}"#, "[]"] {
            assert!(decode(text.as_bytes(), &mut no_tensor).is_err());
        }
        let tagged = |inner: &str| format!(r#"{{"format":"fsdp-values","version":1,"values":{{"a":{inner}}}}}"#);
        for inner in [
            r#"{"$x":1}"#,
            r#"{"$bytes":"0"}"#,
            r#"{"$bytes":"zz"}"#,
            r#"{"$tuple":1}"#,
            r#"{"$dict":[[1]]}"#,
            r#"{"$float":"x"}"#,
        ] {
            assert!(decode(tagged(inner).as_bytes(), &mut no_tensor).is_err(), "{inner}");
        }
    }
}
