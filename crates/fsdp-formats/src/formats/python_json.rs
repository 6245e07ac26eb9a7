//! JSON as Python writes it: with the words `NaN`, `Infinity` and `-Infinity`, which JSON itself
//! does not have.

use fsdp_layout::PlainValue;
use serde_json::Value;

/// The words, the longer one of two with the same end first, and their values.
const WORDS: [(&[u8], f64); 3] = [
    (b"-Infinity", f64::NEG_INFINITY),
    (b"Infinity", f64::INFINITY),
    (b"NaN", f64::NAN),
];

/// The most markers that are tried.
const MAX_ATTEMPTS: u32 = 16;

/// Reads a text of JSON, in which a number may be one of Python's words. Any other text is the
/// error of the JSON reader.
pub(crate) fn parse(text: &[u8]) -> Result<PlainValue, serde_json::Error> {
    let error = match serde_json::from_slice(text) {
        Ok(value) => return Ok(into_plain(value, None, &mut 0)),
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
        let value = serde_json::from_slice(&marked)?;
        // A string of the text itself that looks like a marked word would be taken for a number:
        // try another marker.
        let mut found_count = 0;
        let plain_value = into_plain(value, Some(&marker), &mut found_count);
        if found_count == word_count {
            return Ok(plain_value);
        }
    }
    Err(error)
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

/// Returns a value of JSON as Python would hold it. Adds the number of marked words among the
/// values to `found_count`; as a key a word is an error, so those are not counted.
fn into_plain(value: Value, marker: Option<&str>, found_count: &mut usize) -> PlainValue {
    match value {
        Value::Null => PlainValue::None,
        Value::Bool(value) => PlainValue::Bool(value),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => PlainValue::Int(number),
            // A big integer is in two's complement, so its sign is a byte of its own.
            (None, Some(number)) => PlainValue::BigInt([&number.to_le_bytes()[..], &[0]].concat()),
            (None, None) => PlainValue::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(text) => match marker.and_then(|marker| number_of_marked_word(&text, marker))
        {
            Some(number) => {
                *found_count += 1;
                PlainValue::Float(number)
            }
            None => PlainValue::Str(text),
        },
        Value::Array(items) => PlainValue::List(
            items
                .into_iter()
                .map(|item| into_plain(item, marker, found_count))
                .collect(),
        ),
        Value::Object(items) => PlainValue::Dict(
            items
                .into_iter()
                .map(|(key, value)| (key.into(), into_plain(value, marker, found_count)))
                .collect(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> String {
        format!("{:?}", parse(text.as_bytes()).unwrap())
    }

    #[test]
    fn words_of_python_are_numbers_and_strings_stay() {
        let strict = r#"{"a": [1.5, -2, "NaN", "number 0: NaN"], "b": {"c": null}}"#;
        assert_eq!(shown(strict), shown(strict));
        let parsed = parse(
            br#"[NaN, Infinity,-Infinity, "NaN", "a\"NaN", "number 0: NaN", {"Infinity": NaN}]"#,
        )
        .unwrap();
        let PlainValue::List(items) = parsed else {
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
                        parse(format!("{number:?}").as_bytes()).unwrap(),
                        PlainValue::Float(number)
                    );
                }
            }
        }
    }

    #[test]
    fn integers_of_64_bits_stay_integers() {
        assert_eq!(
            parse(b"9223372036854775807").unwrap(),
            PlainValue::Int(i64::MAX)
        );
        let big = PlainValue::BigInt(vec![255, 255, 255, 255, 255, 255, 255, 255, 0]);
        assert_eq!(parse(b"18446744073709551615").unwrap(), big);
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
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
