//! The texts that Python makes of the keys of a dict, which stand in flat keys.

use crate::value::{PlainValue, PythonType};

impl PlainValue {
    /// Returns the text that Python's `str` makes of this key of a dict; `None` for a value that is
    /// no key of a state dict.
    ///
    /// ```
    /// use fsdp_layout::PlainValue;
    /// assert_eq!(PlainValue::Float(1.0).key_text().as_deref(), Some("1.0"));
    /// assert_eq!(PlainValue::Tuple(vec!["a".into(), 1i64.into()]).key_text().as_deref(), Some("('a', 1)"));
    /// assert_eq!(PlainValue::List(vec![]).key_text(), None);
    /// ```
    #[must_use]
    pub fn key_text(&self) -> Option<String> {
        Some(match self {
            PlainValue::Str(text) => text.clone(),
            PlainValue::Int(number) => number.to_string(),
            PlainValue::Bool(true) => "True".to_owned(),
            PlainValue::Bool(false) => "False".to_owned(),
            PlainValue::None => "None".to_owned(),
            PlainValue::Float(number) => float_text(*number),
            PlainValue::Bytes(bytes) => format!(
                "b{}",
                quoted(bytes.iter().map(|&byte| char::from(byte)), '\u{7f}')
            ),
            PlainValue::Tuple(items) => {
                let texts: Option<Vec<String>> =
                    items.iter().map(PlainValue::quoted_key_text).collect();
                // Without the comma, one item in parentheses would be no tuple.
                let comma = if items.len() == 1 { "," } else { "" };
                format!("({}{comma})", texts?.join(", "))
            }
            PlainValue::Typed(PythonType::Size, description) => {
                let PlainValue::Tuple(sizes) = &**description else {
                    return None;
                };
                let texts: Option<Vec<String>> = sizes.iter().map(PlainValue::key_text).collect();
                format!("torch.Size([{}])", texts?.join(", "))
            }
            PlainValue::Typed(_, description) => return description.key_text(),
            _ => return None,
        })
    }

    /// Returns the text of this key with quotes around it if it is text, as Python's `repr` makes
    /// it: that of an item of a tuple.
    #[must_use]
    pub fn quoted_key_text(&self) -> Option<String> {
        match self {
            PlainValue::Str(text) => Some(quoted(text.chars(), char::MAX)),
            key => key.key_text(),
        }
    }
}

/// Returns the text that Python makes of a float.
fn float_text(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    let text = format!("{value:?}");
    let Some((digits, exponent)) = text.split_once('e') else {
        return text;
    };
    // Rust writes an exponent where Python does, but without a plus and a leading zero.
    match exponent.strip_prefix('-') {
        Some(exponent) => format!("{digits}e-{exponent:0>2}"),
        None => format!("{digits}e+{exponent:0>2}"),
    }
}

/// Returns text in quotes, with escapes for quotes, control characters, and all characters from
/// `first_escaped` on.
fn quoted(text: impl Iterator<Item = char> + Clone, first_escaped: char) -> String {
    // Python takes double quotes only where that saves escapes.
    let has_single = text.clone().any(|c| c == '\'');
    let has_double = text.clone().any(|c| c == '"');
    let quote = if has_single && !has_double { '"' } else { '\'' };
    let mut quoted = String::from(quote);
    for c in text {
        match c {
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\\' => quoted.push_str("\\\\"),
            c if c == quote => quoted.extend(['\\', c]),
            c if c.is_control() || c >= first_escaped => {
                quoted.push_str(&format!("\\x{:02x}", u32::from(c)));
            }
            c => quoted.push(c),
        }
    }
    quoted.push(quote);
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_the_texts_that_python_makes() {
        // The texts on the right are the results of `str(key)` in Python 3.11.
        let floats = [
            (1.0, "1.0"),
            (0.5, "0.5"),
            (-0.0, "-0.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (5e-324, "5e-324"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
            (f64::NAN, "nan"),
        ];
        for (number, text) in floats {
            assert_eq!(PlainValue::Float(number).key_text().as_deref(), Some(text));
        }
        let tuple = |items: &[PlainValue]| PlainValue::Tuple(items.to_vec());
        let size = PlainValue::typed(PythonType::Size, tuple(&[2i64.into(), 3i64.into()]));
        let others = [
            (tuple(&[]), "()"),
            (tuple(&[0i64.into()]), "(0,)"),
            (
                tuple(&["it's".into(), PlainValue::None]),
                "(\"it's\", None)",
            ),
            (tuple(&["'\"\\\n\u{1b}é".into()]), "('\\'\"\\\\\\n\\x1bé',)"),
            (
                PlainValue::Bytes(b"a\"b\x00\xff".to_vec()),
                "b'a\"b\\x00\\xff'",
            ),
            (PlainValue::Bytes(b"it's".to_vec()), "b\"it's\""),
            (size, "torch.Size([2, 3])"),
            (
                PlainValue::typed(PythonType::DType, "torch.int8"),
                "torch.int8",
            ),
        ];
        for (key, text) in others {
            assert_eq!(key.key_text().as_deref(), Some(text));
        }
    }
}
