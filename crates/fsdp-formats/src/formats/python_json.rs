//! JSON as Python writes it: with the words `NaN`, `Infinity` and `-Infinity`, which JSON itself
//! does not have.

use std::fmt;

use fsdp_layout::PlainValue;
use indexmap::IndexMap;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::budget::{Budget, OverBudget};
use crate::error::FormatError;

/// The words, the longer one of two with the same end first, and their values.
const WORDS: [(&[u8], f64); 3] = [
    (b"-Infinity", f64::NEG_INFINITY),
    (b"Infinity", f64::INFINITY),
    (b"NaN", f64::NAN),
];

/// The most markers that are tried.
const MAX_ATTEMPTS: u32 = 16;

/// Reads a text of JSON, in which a number may be one of Python's words. What is built from it is
/// charged to the budget.
///
/// # Errors
/// Any other text; more values than the budget allows.
pub(crate) fn parse(text: &[u8], budget: &mut Budget) -> Result<PlainValue, FormatError> {
    let whole_budget = budget.clone();
    let error = match read(text, None, budget) {
        Ok((value, _)) => return Ok(value),
        Err(error @ FormatError::TooLarge(_)) => return Err(error),
        Err(error) => error,
    };
    // Each word becomes a string that begins with a marker, because strings are what a parser gives
    // back unchanged.
    for attempt in 0..MAX_ATTEMPTS {
        let marker = format!("number {attempt}: ");
        let (marked, word_count) = mark_words(text, &marker);
        if word_count == 0 {
            return Err(error);
        }
        budget.clone_from(&whole_budget);
        let (value, found_count) = read(&marked, Some(&marker), budget)?;
        // A string of the text itself that looks like a marked word would be taken for a number:
        // try another marker.
        if found_count == word_count {
            return Ok(value);
        }
    }
    Err(error)
}

/// Reads a text of JSON, in which strings with a marker are numbers, and returns the number of
/// those too. As a key a word is an error, so keys are not counted.
fn read(
    text: &[u8],
    marker: Option<&str>,
    budget: &mut Budget,
) -> Result<(PlainValue, usize), FormatError> {
    let mut reader = Reader {
        marker,
        found_count: 0,
        budget,
        over_budget: None,
    };
    let mut json = serde_json::Deserializer::from_slice(text);
    let value = ValueSeed(&mut reader)
        .deserialize(&mut json)
        .and_then(|value| json.end().map(|()| value));
    match (value, reader.over_budget) {
        (Ok(value), _) => Ok((value, reader.found_count)),
        (Err(_), Some(over)) => Err(over.into()),
        (Err(error), None) => Err(FormatError::malformed("JSON", error)),
    }
}

/// The state that the readers of all values share.
struct Reader<'r> {
    marker: Option<&'r str>,
    /// The number of marked words so far.
    found_count: usize,
    budget: &'r mut Budget,
    /// The reason why the JSON reader was stopped.
    over_budget: Option<OverBudget>,
}

impl Reader<'_> {
    /// Charges a value with `text_bytes` bytes of text to the budget.
    fn charge<E: Error>(&mut self, text_bytes: usize) -> Result<(), E> {
        /// The bytes of a value, and some of the room that a list has for more of them.
        const VALUE_COST_BYTES: usize = size_of::<PlainValue>() + 8;
        let bytes = (VALUE_COST_BYTES + text_bytes) as u64;
        self.budget
            .charge("memory for values", bytes)
            .map_err(|over| {
                self.over_budget = Some(over);
                E::custom(over)
            })
    }
}

/// Reads one value as Python would hold it.
struct ValueSeed<'s, 'r>(&'s mut Reader<'r>);

impl<'de> DeserializeSeed<'de> for ValueSeed<'_, '_> {
    type Value = PlainValue;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<PlainValue, D::Error> {
        self.0.charge(0)?;
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

    fn visit_i64<E: Error>(self, number: i64) -> Result<PlainValue, E> {
        Ok(PlainValue::Int(number))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<PlainValue, E> {
        Ok(match i64::try_from(number) {
            Ok(number) => PlainValue::Int(number),
            // A big integer is in two's complement, so its sign is a byte of its own.
            Err(_) => PlainValue::BigInt([&number.to_le_bytes()[..], &[0]].concat()),
        })
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<PlainValue, E> {
        Ok(PlainValue::Float(number))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<PlainValue, E> {
        let number = self
            .0
            .marker
            .and_then(|marker| number_of_marked_word(text, marker));
        if let Some(number) = number {
            self.0.found_count += 1;
            return Ok(PlainValue::Float(number));
        }
        self.0.charge(text.len())?;
        Ok(PlainValue::Str(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<PlainValue, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(ValueSeed(self.0))? {
            list.push(item);
        }
        // There may be many short lists, whose room for more items counts.
        list.shrink_to_fit();
        Ok(PlainValue::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<PlainValue, A::Error> {
        let mut dict: IndexMap<String, PlainValue> = IndexMap::new();
        while let Some(key) = map.next_key::<String>()? {
            self.0.charge(key.len())?;
            let value = map.next_value_seed(ValueSeed(self.0))?;
            dict.insert(key, value);
        }
        let entries = dict.into_iter().map(|(key, value)| (key.into(), value));
        Ok(PlainValue::Dict(entries.collect()))
    }
}

/// Returns the text with every word outside of strings as a string, and the number of words.
fn mark_words(text: &[u8], marker: &str) -> (Vec<u8>, usize) {
    let mut marked = Vec::with_capacity(text.len());
    let mut word_count = 0;
    let mut position = 0;
    let mut is_in_string = false;
    while let Some(&byte) = text.get(position) {
        let word = WORDS
            .iter()
            .find(|(word, _)| !is_in_string && text[position..].starts_with(word));
        if let Some((word, _)) = word {
            marked.push(b'"');
            marked.extend_from_slice(marker.as_bytes());
            marked.extend_from_slice(word);
            marked.push(b'"');
            word_count += 1;
            position += word.len();
            continue;
        }
        // A character after a backslash does not end the string.
        let length = if is_in_string && byte == b'\\' {
            2.min(text.len() - position)
        } else {
            1
        };
        is_in_string ^= byte == b'"';
        marked.extend_from_slice(&text[position..position + length]);
        position += length;
    }
    (marked, word_count)
}

/// Returns the value of a marked word; `None` for any other text.
fn number_of_marked_word(text: &str, marker: &str) -> Option<f64> {
    let word = text.strip_prefix(marker)?.as_bytes();
    WORDS
        .iter()
        .find(|(python_word, _)| *python_word == word)
        .map(|(_, value)| *value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &[u8]) -> Result<PlainValue, FormatError> {
        parse(text, &mut Budget::new(0, 1))
    }

    fn shown(text: &str) -> String {
        format!("{:?}", parsed(text.as_bytes()).unwrap())
    }

    #[test]
    fn words_of_python_are_numbers_and_strings_stay() {
        let strict = r#"{"a": [1.5, -2, "NaN", "number 0: NaN"], "b": {"c": null}}"#;
        assert_eq!(shown(strict), shown(strict));
        let value = parsed(
            br#"[NaN, Infinity,-Infinity, "NaN", "a\"NaN", "number 0: NaN", {"Infinity": NaN}]"#,
        )
        .unwrap();
        let PlainValue::List(items) = value else {
            panic!("no list")
        };
        assert!(matches!(items[0], PlainValue::Float(number) if number.is_nan()));
        assert_eq!(items[1], PlainValue::Float(f64::INFINITY));
        assert_eq!(items[2], PlainValue::Float(f64::NEG_INFINITY));
        let text = |text: &str| PlainValue::Str(text.to_owned());
        assert_eq!(
            items[3..6],
            [text("NaN"), text("a\"NaN"), text("number 0: NaN")]
        );
        assert!(
            matches!(&items[6], PlainValue::Dict(items) if matches!(items[0].1, PlainValue::Float(number) if number.is_nan()))
        );
    }

    #[test]
    fn floats_keep_all_bits() {
        let mut bits = 1u64;
        for _ in 0..10_000 {
            bits = bits
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            // Between 1/2 and 1, and any.
            for number in [
                f64::from_bits(bits >> 12 | 1022 << 52),
                f64::from_bits(bits),
            ] {
                if number.is_finite() {
                    assert_eq!(
                        parsed(format!("{number:?}").as_bytes()).unwrap(),
                        PlainValue::Float(number)
                    );
                }
            }
        }
    }

    #[test]
    fn integers_of_64_bits_stay_integers() {
        assert_eq!(
            parsed(b"9223372036854775807").unwrap(),
            PlainValue::Int(i64::MAX)
        );
        let big = PlainValue::BigInt(vec![255, 255, 255, 255, 255, 255, 255, 255, 0]);
        assert_eq!(parsed(b"18446744073709551615").unwrap(), big);
    }

    #[test]
    fn what_is_no_json_is_an_error() {
        for text in [
            "",
            "{",
            "NaN2",
            "Na",
            "\"NaN",
            "[NaN",
            "nan",
            "+Infinity",
            "{NaN: 1}",
            "\"\\",
        ] {
            assert!(parsed(text.as_bytes()).is_err(), "{text}");
        }
    }
}
