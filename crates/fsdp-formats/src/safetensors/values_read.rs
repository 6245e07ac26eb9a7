//! Reads a values file: first the places of the values in its text, and a value when it is wanted.
//! An element takes two bytes of text at least, so the text bounds what is built of it.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

use fsdp_layout::{PlainTensor, PlainValue, PythonType};
use indexmap::IndexMap;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::values::{FORMAT, VERSION, malformed};
use crate::budget::{Budget, OverBudget};
use crate::error::FormatError;

/// A values file, whose values are read when they are wanted.
#[derive(Debug)]
pub struct ValuesFile {
    /// The text of the file.
    text: Vec<u8>,
    /// The place of each value in the text, by flat key.
    places: IndexMap<String, Range<usize>>,
}

/// A function that reads the tensor with a given key, for values that contain tensors.
pub(crate) type ReadTensor<'r> = &'r mut dyn FnMut(&str) -> Result<PlainTensor, FormatError>;

/// The parts of a values file, as the text that they are.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile<'t> {
    #[serde(borrow)]
    format: Option<&'t RawValue>,
    #[serde(borrow)]
    version: Option<&'t RawValue>,
    #[serde(borrow)]
    values: Option<&'t RawValue>,
}

impl ValuesFile {
    /// Finds the values in the text of a file.
    ///
    /// # Errors
    /// Text that is not JSON of this form, or is of another format or a later version; more keys
    /// than the memory budget allows.
    pub fn new(text: Vec<u8>) -> Result<Self, FormatError> {
        let raw: RawFile<'_> = serde_json::from_slice(&text).map_err(malformed)?;
        let has_format = raw.format.is_some_and(|format| {
            serde_json::from_str::<String>(format.get()).is_ok_and(|format| format == FORMAT)
        });
        let has_version = raw.version.is_some_and(|version| {
            serde_json::from_str::<i64>(version.get()).is_ok_and(|version| version <= VERSION)
        });
        if !(has_format && has_version) {
            return Err(malformed("it is of another format or a later version"));
        }
        let Some(values) = raw.values else {
            return Err(malformed("it has no `values`"));
        };
        let places = find_places(&text, values)?;
        Ok(ValuesFile { text, places })
    }

    /// Returns the flat keys of the values, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// Returns the text of the file.
    #[must_use]
    pub fn into_text(self) -> Vec<u8> {
        self.text
    }

    /// Returns the length of the file.
    pub(super) fn length(&self) -> u64 {
        self.text.len() as u64
    }

    /// Reads a value; `None` if there is none of this key.
    ///
    /// # Errors
    /// A value that is malformed; errors of `read_tensor`.
    pub fn read(
        &self,
        fqn: &str,
        read_tensor: ReadTensor<'_>,
    ) -> Option<Result<PlainValue, FormatError>> {
        let place = self.places.get(fqn)?;
        Some(decode(&self.text[place.clone()], read_tensor))
    }

    /// Returns those of the keys that `is_tensor` is true for that are named in values: the tensors
    /// inside of them.
    ///
    /// # Errors
    /// Values that are nested too deep.
    pub(super) fn find_inner_tensors(
        &self,
        is_tensor: &dyn Fn(&str) -> bool,
    ) -> Result<HashSet<String>, FormatError> {
        let mut keys = HashSet::new();
        for place in self.places.values() {
            let mut json = serde_json::Deserializer::from_slice(&self.text[place.clone()]);
            let names = TensorNames {
                keys: &mut keys,
                is_tensor,
            };
            names.deserialize(&mut json).map_err(malformed)?;
        }
        Ok(keys)
    }
}

/// Returns the place in the text of a file of each of its values.
fn find_places(
    text: &[u8],
    values: &RawValue,
) -> Result<IndexMap<String, Range<usize>>, FormatError> {
    let mut over_budget = None;
    let mut json = serde_json::Deserializer::from_str(values.get());
    let found = json.deserialize_map(PlacesVisitor {
        text_start: text.as_ptr().addr(),
        budget: Budget::new(text.len() as u64, 1),
        over_budget: &mut over_budget,
    });
    found.map_err(|error| over_budget.map_or_else(|| malformed(error), FormatError::from))
}

/// Collects the places of values in a text.
struct PlacesVisitor<'v> {
    /// The address of the text's first byte.
    text_start: usize,
    budget: Budget,
    /// The reason why the JSON reader was stopped.
    over_budget: &'v mut Option<OverBudget>,
}

impl<'de> Visitor<'de> for PlacesVisitor<'_> {
    type Value = IndexMap<String, Range<usize>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self::Value, A::Error> {
        /// The bytes that an entry takes besides its key.
        const ENTRY_COST_BYTES: u64 = 96;
        let mut places = IndexMap::new();
        while let Some(key) = map.next_key::<String>()? {
            let entry_bytes = ENTRY_COST_BYTES + key.len() as u64;
            if let Err(over) = self.budget.charge("memory for keys of values", entry_bytes) {
                let reader_error = A::Error::custom(over);
                *self.over_budget = Some(over);
                return Err(reader_error);
            }
            // The JSON reader lends the value's own part of the text.
            let value = map.next_value::<&RawValue>()?.get();
            let start = value.as_ptr().addr() - self.text_start;
            places.insert(key, start..start + value.len());
        }
        Ok(places)
    }
}

/// Walks through a value, and collects the keys of the tensors in it.
struct TensorNames<'k> {
    keys: &'k mut HashSet<String>,
    /// Returns `true` for a key that counts.
    is_tensor: &'k dyn Fn(&str) -> bool,
}

impl TensorNames<'_> {
    /// Returns the visitor of an item of this value.
    fn of_item(&mut self) -> TensorNames<'_> {
        TensorNames {
            keys: self.keys,
            is_tensor: self.is_tensor,
        }
    }
}

impl<'de> DeserializeSeed<'de> for TensorNames<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for TensorNames<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(self.of_item())?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        let mut is_first = true;
        while let Some(key) = map.next_key::<String>()? {
            if is_first && key == TENSOR_TAG {
                let name = serde_json::from_str::<String>(map.next_value::<&RawValue>()?.get());
                self.keys
                    .extend(name.ok().filter(|name| (self.is_tensor)(name)));
            } else {
                map.next_value_seed(self.of_item())?;
            }
            is_first = false;
        }
        Ok(())
    }
}

/// Reads a value from its text.
fn decode(text: &[u8], read_tensor: ReadTensor<'_>) -> Result<PlainValue, FormatError> {
    let mut context = Context {
        read_tensor,
        error: None,
    };
    let mut json = serde_json::Deserializer::from_slice(text);
    let seed = ValueSeed {
        context: &mut context,
        depth: VALUES_DEPTH,
    };
    // The JSON reader turns an error of these visitors into a text, so the original one is returned
    // instead.
    seed.deserialize(&mut json)
        .map_err(|error| context.error.unwrap_or_else(|| malformed(error)))
}

/// The state that the readers of the parts share.
struct Context<'c> {
    read_tensor: ReadTensor<'c>,
    /// The first error that is not JSON's.
    error: Option<FormatError>,
}

impl Context<'_> {
    /// Keeps an error to be returned by [`decode`], and returns the one that stops the JSON reader.
    fn fail<E: Error>(&mut self, error: FormatError) -> E {
        let reader_error = E::custom(&error);
        self.error.get_or_insert(error);
        reader_error
    }
}

/// The depth of the values in a file: they are in an object that is in another one. The keys above
/// them may be any text, and are no tags.
const VALUES_DEPTH: usize = 2;

/// The tag of a tensor inside a value.
const TENSOR_TAG: &str = "$tensor";

/// The number of items up to which the room for more of them is given back. There may be many
/// lists that are as short.
const FEW_ITEMS: usize = 16;

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
        Ok(PlainValue::unsigned(value))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<PlainValue, E> {
        Ok(PlainValue::Float(value))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<PlainValue, E> {
        Ok(PlainValue::Str(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<PlainValue, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self.item_seed())? {
            list.push(item);
        }
        if list.len() <= FEW_ITEMS {
            list.shrink_to_fit();
        }
        Ok(PlainValue::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<PlainValue, A::Error> {
        let mut entries: Vec<(PlainValue, PlainValue)> = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
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
        if entries.len() <= FEW_ITEMS {
            entries.shrink_to_fit();
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
        (TENSOR_TAG, PlainValue::Str(key)) => PlainValue::Tensor((context.read_tensor)(&key)?),
        (TENSOR_TAG, _) => return Err(malformed("a tensor's key is no text")),
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
        let file = ValuesFile::new(bytes).unwrap();
        assert_eq!(file.keys().collect::<Vec<_>>(), ["a.0"]);
        let decoded = file.read("a.0", &mut load).unwrap().unwrap();
        assert!(decoded.same_bits(&value), "{decoded:?}");
        let inner = file.find_inner_tensors(&|_| true).unwrap();
        assert_eq!(inner, HashSet::from(["a.0.18.0".to_owned()]));
    }

    #[test]
    fn broken_files_are_errors() {
        let values = IndexMap::from([("a".to_owned(), PlainValue::Tuple(vec![1.5.into()]))]);
        let bytes = encode_values(&values, &mut |key, _| key).unwrap();
        for end in 0..bytes.len() - 2 {
            assert!(ValuesFile::new(bytes[..end].to_vec()).is_err());
        }
        for text in [
            r#"{"format":"fsdp-values","version":2,"values":{}}"#,
            r#"{"values":{}}"#,
            "[]",
        ] {
            assert!(ValuesFile::new(text.into()).is_err());
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
            let file = ValuesFile::new(tagged(inner).into()).unwrap();
            assert!(file.read("a", &mut no_tensor).unwrap().is_err(), "{inner}");
        }
    }
}
