//! Reads a values file directly into plain values. Every element is charged to the memory budget
//! before it is built.

use std::fmt;

use fsdp_layout::{KeyPath, PathPart, PlainTensor, PlainValue, PythonType};
use indexmap::IndexMap;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::values::{FORMAT, VERSION, malformed};
use crate::budget::Budget;
use crate::error::FormatError;

/// The content of a values file.
#[derive(Debug, Default)]
pub struct ValuesFile {
    /// The values, by flat key.
    pub values: IndexMap<String, PlainValue>,
    /// The paths of all keys, including those of tensors, in the nested state dict. Only files of
    /// earlier versions have them.
    pub paths: Option<IndexMap<String, KeyPath>>,
}

/// Reads a values file. `read_tensor` reads the tensor with a given key, for values that contain
/// tensors.
///
/// # Errors
/// JSON of another form, or that takes too much memory; another format, or a later version; errors
/// of `read_tensor`.
pub fn decode_values(
    bytes: &[u8],
    read_tensor: &mut dyn FnMut(&str) -> Result<PlainTensor, FormatError>,
) -> Result<ValuesFile, FormatError> {
    let mut context = Context {
        element_budget: Budget::new(0, 1),
        text_budget: Budget::new(bytes.len() as u64, 1),
        read_tensor,
        error: None,
    };
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let seed = ValueSeed {
        context: &mut context,
        depth: 0,
    };
    let parsed = seed
        .deserialize(&mut json)
        .and_then(|file| json.end().map(|()| file));
    // The JSON reader turns an error of these visitors into a text, so the original one is returned
    // instead.
    let file = parsed.map_err(|error| context.error.unwrap_or_else(|| malformed(error)))?;
    let PlainValue::Dict(entries) = file else {
        return Err(malformed("it is no object"));
    };
    let mut values = None;
    let mut paths = None;
    let mut has_format = false;
    let mut has_version = false;
    for entry in entries {
        match (entry.0.as_str(), entry.1) {
            (Some("format"), format) => has_format = format.as_str() == Some(FORMAT),
            (Some("version"), version) => {
                has_version = version.as_int().is_some_and(|version| version <= VERSION);
            }
            (Some("values"), PlainValue::Dict(items)) => values = Some(items),
            (Some("paths"), items) => paths = Some(decode_paths(items)?),
            _ => {}
        }
    }
    if !(has_format && has_version) {
        return Err(malformed("it is of another format or a later version"));
    }
    let Some(items) = values else {
        return Err(malformed("it has no `values`"));
    };
    let mut values = IndexMap::with_capacity(items.len());
    for item in items {
        if let (PlainValue::Str(fqn), value) = item {
            values.insert(fqn, value);
        }
    }
    Ok(ValuesFile { values, paths })
}

/// The state that the readers of the parts share.
struct Context<'c> {
    element_budget: Budget,
    text_budget: Budget,
    read_tensor: &'c mut dyn FnMut(&str) -> Result<PlainTensor, FormatError>,
    /// The first error that is not JSON's.
    error: Option<FormatError>,
}

impl Context<'_> {
    /// Charges an element with `text_bytes` bytes of text to the memory budget.
    fn charge<E: Error>(&mut self, text_bytes: usize) -> Result<(), E> {
        // A list that grows holds its items twice.
        let element_bytes = 2 * size_of::<PlainValue>() as u64;
        self.element_budget
            .charge("memory for values", element_bytes)
            .and_then(|()| {
                self.text_budget
                    .charge("memory for text", text_bytes as u64)
            })
            .map_err(|over| self.fail(over.into()))
    }

    /// Keeps an error to be returned by [`decode_values`], and returns the one that stops the JSON
    /// reader.
    fn fail<E: Error>(&mut self, error: FormatError) -> E {
        let reader_error = E::custom(&error);
        self.error.get_or_insert(error);
        reader_error
    }
}

/// Reads the paths of earlier files: a dict of lists of texts and positions.
fn decode_paths(value: PlainValue) -> Result<IndexMap<String, KeyPath>, FormatError> {
    let PlainValue::Dict(paths) = value else {
        return Err(malformed("the paths are no object"));
    };
    let mut decoded = IndexMap::with_capacity(paths.len());
    for entry in paths {
        let (PlainValue::Str(fqn), PlainValue::List(items)) = entry else {
            return Err(malformed("a path is no list"));
        };
        let mut path = KeyPath::default();
        for item in items {
            path.0.push(match item {
                PlainValue::Str(key) => PathPart::Key(key),
                PlainValue::Int(index) if index >= 0 => PathPart::Index(index as usize),
                _ => return Err(malformed("a path's part is neither text nor a position")),
            });
        }
        decoded.insert(fqn, path);
    }
    Ok(decoded)
}

/// The depth of the values in a file: they are in an object that is in another one. The keys above
/// them may be any text, and are no tags.
const VALUES_DEPTH: usize = 2;

/// Reads one value.
struct ValueSeed<'s, 'c> {
    context: &'s mut Context<'c>,
    /// The number of lists and objects around it.
    depth: usize,
}

impl<'c> ValueSeed<'_, 'c> {
    /// Returns the reader of an item of this value.
    fn item_seed(&mut self) -> ValueSeed<'_, 'c> {
        ValueSeed {
            context: self.context,
            depth: self.depth + 1,
        }
    }
}

impl<'de> DeserializeSeed<'de> for ValueSeed<'_, '_> {
    type Value = PlainValue;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<PlainValue, D::Error> {
        self.context.charge(0)?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueSeed<'_, '_> {
    type Value = PlainValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: Error>(self) -> Result<PlainValue, E> {
        Ok(PlainValue::None)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<PlainValue, E> {
        Ok(PlainValue::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<PlainValue, E> {
        Ok(PlainValue::Int(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<PlainValue, E> {
        Ok(i64::try_from(value).map_or(PlainValue::Float(value as f64), PlainValue::Int))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<PlainValue, E> {
        Ok(PlainValue::Float(value))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<PlainValue, E> {
        self.context.charge(text.len())?;
        Ok(PlainValue::Str(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<PlainValue, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self.item_seed())? {
            list.push(item);
        }
        Ok(PlainValue::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<PlainValue, A::Error> {
        let mut entries: Vec<(PlainValue, PlainValue)> = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            self.context.charge(key.len())?;
            let value = map.next_value_seed(self.item_seed())?;
            if self.depth >= VALUES_DEPTH && entries.is_empty() && key.starts_with('$') {
                let converted = match map.next_key::<IgnoredAny>()? {
                    Some(_) => Err(malformed("an object with a tag holds more than that")),
                    None => convert_tagged(self.context, &key, value),
                };
                return converted.map_err(|error| self.context.fail(error));
            }
            entries.push((key.into(), value));
        }
        Ok(PlainValue::Dict(entries))
    }
}

/// Returns the value of an object with a tag, such as a tuple for `{"$tuple": [1, 2]}`. `value` is
/// what stands behind the tag. The documentation of `values.rs` lists the tags.
fn convert_tagged(
    context: &mut Context<'_>,
    tag: &str,
    value: PlainValue,
) -> Result<PlainValue, FormatError> {
    Ok(match (tag, value) {
        ("$tuple", PlainValue::List(items)) => PlainValue::Tuple(items),
        ("$set", PlainValue::List(items)) => PlainValue::Set(items),
        ("$tuple" | "$set", _) => return Err(malformed("a tagged value is no list")),
        ("$bytes", PlainValue::Str(text)) => PlainValue::Bytes(decode_hexadecimal(&text)?),
        ("$int", PlainValue::Str(text)) => PlainValue::BigInt(decode_hexadecimal(&text)?),
        ("$bytes" | "$int", _) => return Err(malformed("bytes are not in hexadecimal")),
        ("$float", PlainValue::Str(text)) if is_hexadecimal(&text) => PlainValue::Float(
            f64::from_bits(u64::from_str_radix(&text, 16).map_err(malformed)?),
        ),
        ("$float", _) => return Err(malformed("the bits of a float are not in hexadecimal")),
        ("$dict", PlainValue::List(pairs)) => {
            let pairs: Option<Vec<_>> = pairs.into_iter().map(into_pair).collect();
            PlainValue::Dict(pairs.ok_or_else(|| malformed("a dict is no list of pairs"))?)
        }
        ("$dict", _) => return Err(malformed("a dict is no list of pairs")),
        ("$tensor", PlainValue::Str(key)) => PlainValue::Tensor((context.read_tensor)(&key)?),
        ("$tensor", _) => return Err(malformed("a tensor's key is no text")),
        (tag, value) => match tag.strip_prefix('$').and_then(PythonType::from_name) {
            Some(python_type) if python_type.fits(&value) => PlainValue::typed(python_type, value),
            Some(python_type) => {
                return Err(malformed(format!(
                    "a `{}` from a value of type `{}`",
                    python_type.name(),
                    value.type_name()
                )));
            }
            None => return Err(malformed(format!("unknown tag `{tag}`"))),
        },
    })
}

/// Returns the key and the value in a list of two; `None` for any other value.
fn into_pair(pair: PlainValue) -> Option<(PlainValue, PlainValue)> {
    let PlainValue::List(pair) = pair else {
        return None;
    };
    let [key, value] = pair.try_into().ok()?;
    Some((key, value))
}

/// Returns `true` if the text consists of hexadecimal digits. (Rust's parsers also accept a sign.)
fn is_hexadecimal(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Decodes bytes in hexadecimal.
fn decode_hexadecimal(text: &str) -> Result<Vec<u8>, FormatError> {
    base16ct::mixed::decode_vec(text).map_err(|_| malformed("bytes are not in hexadecimal"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::safetensors::values::encode_values;
    use fsdp_layout::DType;

    fn no_tensor(_: &str) -> Result<PlainTensor, FormatError> {
        Err(malformed("no tensor"))
    }

    #[test]
    fn values_survive() {
        let tensor = PlainTensor {
            dtype: DType::U8,
            shape: vec![1],
            data: vec![9],
        };
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
            PlainValue::Dict(vec![
                ("a".into(), PlainValue::Int(1)),
                ("a".into(), PlainValue::Int(2)),
            ]),
            PlainValue::Dict(vec![("$tuple".into(), PlainValue::None)]),
            PlainValue::Dict(vec![
                (PlainValue::Int(1), PlainValue::None),
                ("x".into(), 2.5.into()),
            ]),
            PlainValue::Tuple(vec![PlainValue::Tensor(tensor.clone())]),
            PlainValue::typed(PythonType::DType, "torch.bfloat16"),
            PlainValue::typed(
                PythonType::Size,
                PlainValue::Tuple(vec![PlainValue::Int(3)]),
            ),
        ]);
        let values = IndexMap::from([("a.0".to_owned(), value.clone())]);
        let mut keys = Vec::new();
        let mut store = |key: String, _: &PlainTensor| {
            keys.push(key.clone());
            key
        };
        let bytes = encode_values(&values, &mut store).unwrap();
        assert_eq!(keys, ["a.0.18.0"]);
        let mut load = |key: &str| {
            assert_eq!(key, "a.0.18.0");
            Ok(tensor.clone())
        };
        let decoded = decode_values(&bytes, &mut load).unwrap();
        assert!(
            decoded.values["a.0"].same_bits(&value),
            "{:?}",
            decoded.values["a.0"]
        );
    }

    #[test]
    fn broken_files_are_errors() {
        let values = IndexMap::from([("a".to_owned(), PlainValue::Tuple(vec![1.5.into()]))]);
        let bytes = encode_values(&values, &mut |key, _| key).unwrap();
        for end in 0..bytes.len() - 2 {
            assert!(decode_values(&bytes[..end], &mut no_tensor).is_err());
        }
        for text in [
            r#"{"format":"fsdp-values","version":2,"values":{}}"#,
            r#"{"values":{}}"#,
            "[]",
        ] {
            assert!(decode_values(text.as_bytes(), &mut no_tensor).is_err());
        }
        let tagged = |inner: &str| {
            format!(r#"{{"format":"fsdp-values","version":1,"values":{{"a":{inner}}}}}"#)
        };
        for inner in [
            r#"{"$x":1}"#,
            r#"{"$bytes":"0"}"#,
            r#"{"$bytes":"zz"}"#,
            r#"{"$bytes":"+f"}"#,
            r#"{"$float":"+3ff0000000000000"}"#,
            r#"{"$tuple":1}"#,
            r#"{"$dict":[[1]]}"#,
            r#"{"$float":"x"}"#,
            r#"{"$torch.dtype":1}"#,
            r#"{"$torch.Size":{"$tuple":["a"]}}"#,
        ] {
            assert!(
                decode_values(tagged(inner).as_bytes(), &mut no_tensor).is_err(),
                "{inner}"
            );
        }
    }
}
