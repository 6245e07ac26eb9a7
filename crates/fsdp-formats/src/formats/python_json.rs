//! JSON as Python writes it: with the words `NaN`, `Infinity` and `-Infinity`, which JSON itself
//! does not have, and with integers of any length, such as the 128 bits of NumPy's generators.

use std::fmt;
use std::ops::RangeInclusive;

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

/// Reads a text of JSON, in which a number may be one of Python's words, or a long integer. What is
/// built from it is charged to the budget.
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
    // Each word and each long integer becomes a string that begins with a marker, because strings
    // are what a parser gives back unchanged.
    for attempt in 0..MAX_ATTEMPTS {
        let marker = format!("number {attempt}: ");
        let (marked, word_count) = mark_words(text, &marker);
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
        Ok(PlainValue::unsigned(number))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<PlainValue, E> {
        // The parser makes a float of a long integer. One that is marked keeps all its digits.
        if self.0.marker.is_none() && number.abs() >= LEAST_LONG_INTEGER {
            return Err(E::custom("an integer may have more than 64 bits"));
        }
        Ok(PlainValue::Float(number))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<PlainValue, E> {
        let number = self
            .0
            .marker
            .and_then(|marker| number_of_marked_word(text, marker));
        if let Some(number) = number {
            self.0.found_count += 1;
            return Ok(number);
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

/// Returns the text with every word and every long integer outside of strings as a string, and
/// their number.
fn mark_words(text: &[u8], marker: &str) -> (Vec<u8>, usize) {
    let mut marked = Vec::with_capacity(text.len());
    let mut word_count = 0;
    let mut position = 0;
    let mut is_in_string = false;
    while let Some(&byte) = text.get(position) {
        let rest = &text[position..];
        let mut length = 1;
        let mut is_word = false;
        if is_in_string {
            // A character after a backslash does not end the string.
            if byte == b'\\' {
                length = 2.min(rest.len());
            }
        } else if let Some((word, _)) = WORDS.iter().find(|(word, _)| rest.starts_with(word)) {
            (length, is_word) = (word.len(), true);
        } else if byte == b'-' || byte.is_ascii_digit() {
            let end = rest
                .iter()
                .position(|byte| !byte.is_ascii_digit() && !b"+-.eE".contains(byte));
            length = end.unwrap_or(rest.len());
            is_word = is_long_integer(&rest[..length]);
        }
        if is_word {
            marked.push(b'"');
            marked.extend_from_slice(marker.as_bytes());
            marked.extend_from_slice(&rest[..length]);
            marked.push(b'"');
            word_count += 1;
        } else {
            is_in_string ^= byte == b'"';
            marked.extend_from_slice(&rest[..length]);
        }
        position += length;
    }
    (marked, word_count)
}

/// The digits of an integer that may have more than 64 bits, up to those of the longest one that is
/// read.
const DIGITS_OF_LONG_INTEGERS: RangeInclusive<usize> = 19..=2400;
/// The smallest float that such an integer may have become.
const LEAST_LONG_INTEGER: f64 = 1e18;

/// Returns `true` for a number without a fraction or an exponent that may have more than 64 bits.
fn is_long_integer(number: &[u8]) -> bool {
    let digits = number.strip_prefix(b"-").unwrap_or(number);
    // JSON has no numbers with zeros before them.
    digits.first() != Some(&b'0')
        && digits.iter().all(u8::is_ascii_digit)
        && DIGITS_OF_LONG_INTEGERS.contains(&digits.len())
}

/// Returns the value of a marked word or integer; `None` for any other text.
fn number_of_marked_word(text: &str, marker: &str) -> Option<PlainValue> {
    let word = text.strip_prefix(marker)?;
    if is_long_integer(word.as_bytes()) {
        return Some(match word.parse() {
            Ok(integer) => PlainValue::Int(integer),
            Err(_) => PlainValue::BigInt(bytes_of_integer(word)),
        });
    }
    let mut words = WORDS.iter();
    let (_, number) = words.find(|(python_word, _)| *python_word == word.as_bytes())?;
    Some(PlainValue::Float(*number))
}

/// Returns an integer as little-endian two's complement, of as many bytes as it needs.
fn bytes_of_integer(text: &str) -> Vec<u8> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    // Nine digits at a time, the most that always fit into 32 bits.
    let mut limbs: Vec<u32> = Vec::new();
    for chunk in digits.as_bytes().chunks(9) {
        let factor = 10u64.pow(chunk.len() as u32);
        let mut carry = 0u64;
        for digit in chunk {
            carry = carry * 10 + u64::from(digit - b'0');
        }
        for limb in &mut limbs {
            let product = u64::from(*limb) * factor + carry;
            *limb = product as u32;
            carry = product >> 32;
        }
        if carry > 0 {
            limbs.push(carry as u32);
        }
    }
    let mut bytes: Vec<u8> = limbs.iter().flat_map(|limb| limb.to_le_bytes()).collect();
    // The sign is the highest bit.
    bytes.push(0);
    if text.starts_with('-') {
        let mut carry = true;
        for byte in &mut bytes {
            (*byte, carry) = (!*byte).overflowing_add(u8::from(carry));
        }
    }
    while let [.., second, last] = bytes[..]
        && last == if second >= 0x80 { 0xff } else { 0 }
    {
        bytes.pop();
    }
    bytes
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
    fn longer_integers_keep_all_digits_and_floats_stay_floats() {
        // The state of a generator of NumPy has 128 bits.
        let big = |bytes: &[u8]| PlainValue::BigInt(bytes.to_vec());
        let two_to_64 = [&[0; 8][..], &[1]].concat();
        for (text, value) in [
            ("18446744073709551616", big(&two_to_64)),
            ("-9223372036854775808", PlainValue::Int(i64::MIN)),
            (
                "-9223372036854775809",
                big(&[255, 255, 255, 255, 255, 255, 255, 127, 255]),
            ),
            ("-18446744073709551616", big(&[0, 0, 0, 0, 0, 0, 0, 0, 255])),
            (
                "18446744073709551616.0",
                PlainValue::Float(18446744073709551616.0),
            ),
            ("1e300", PlainValue::Float(1e300)),
            ("-2e18", PlainValue::Float(-2e18)),
        ] {
            assert_eq!(parsed(text.as_bytes()).unwrap(), value, "{text}");
        }
        let text = r#"{"18446744073709551616": [NaN, 340282366920938463463374607431768211456, "18446744073709551616"]}"#;
        let PlainValue::Dict(entries) = parsed(text.as_bytes()).unwrap() else {
            panic!("no dict")
        };
        let (key, PlainValue::List(items)) = &entries[0] else {
            panic!("no list")
        };
        assert_eq!(*key, PlainValue::from("18446744073709551616"));
        assert_eq!(items[1], big(&[&[0; 16][..], &[1]].concat()));
        assert_eq!(items[2], PlainValue::from("18446744073709551616"));
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
            "00018446744073709551616",
            "18446744073709551616-",
        ] {
            assert!(parsed(text.as_bytes()).is_err(), "{text}");
        }
    }
}
