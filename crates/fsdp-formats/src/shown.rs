//! Short texts of values for messages, in Python's notation.

use fsdp_layout::{PlainValue, PythonType, count_text};

/// The maximum length of a text in bytes. Longer ones are cut off.
const MAX_BYTES: usize = 200;

/// Returns the text of a value. A text that is cut off ends with `…`.
pub fn shown(value: &PlainValue) -> String {
    let mut text = String::new();
    append_value(value, &mut text);
    if text.len() > MAX_BYTES {
        text.truncate(text.floor_char_boundary(MAX_BYTES));
        text.push('…');
    }
    text
}

/// Appends the text of a value, unless the text is long enough already.
fn append_value(value: &PlainValue, text: &mut String) {
    if text.len() > MAX_BYTES {
        return;
    }
    match value {
        PlainValue::None => text.push_str("None"),
        PlainValue::Bool(true) => text.push_str("True"),
        PlainValue::Bool(false) => text.push_str("False"),
        PlainValue::Int(number) => text.push_str(&number.to_string()),
        PlainValue::BigInt(bytes) if bytes.len() <= MAX_BYTES / 4 => {
            text.push_str(&decimal_text(bytes));
        }
        PlainValue::BigInt(bytes) => text.push_str(&format!("an integer of {} bytes", bytes.len())),
        PlainValue::Float(number) => text.push_str(&format!("{number:?}")),
        PlainValue::Str(string) => {
            // Escape no more of a long string than is shown.
            let start: String = string.chars().take(MAX_BYTES).collect();
            text.push_str(&format!("{start:?}"));
        }
        PlainValue::Bytes(bytes) => text.push_str(&count_text(bytes.len(), "byte", "bytes")),
        PlainValue::List(items) => append_items("[", items, "]", text),
        PlainValue::Tuple(items) if items.len() == 1 => append_items("(", items, ",)", text),
        PlainValue::Tuple(items) => append_items("(", items, ")", text),
        PlainValue::Set(items) => append_items("{", items, "}", text),
        PlainValue::Dict(items) => {
            text.push('{');
            for (index, (key, value)) in items.iter().enumerate().take(MAX_BYTES) {
                text.push_str(if index > 0 { ", " } else { "" });
                append_value(key, text);
                text.push_str(": ");
                append_value(value, text);
            }
            text.push('}');
        }
        PlainValue::Tensor(tensor) => {
            text.push_str(&format!("a tensor of {} {:?}", tensor.dtype, tensor.shape))
        }
        PlainValue::Typed(python_type, description) => match (python_type, description.as_str()) {
            (PythonType::DType | PythonType::QScheme, Some(name)) => text.push_str(name),
            _ => {
                text.push_str(&format!("{}(", python_type.name()));
                append_value(description, text);
                text.push(')');
            }
        },
        other => text.push_str(&format!("a {}", other.type_name())),
    }
}

/// Appends the items of a container between `open` and `close`. Of a long one only the first are
/// shown.
fn append_items(open: &str, items: &[PlainValue], close: &str, text: &mut String) {
    text.push_str(open);
    for (index, item) in items.iter().enumerate().take(MAX_BYTES) {
        text.push_str(if index > 0 { ", " } else { "" });
        append_value(item, text);
    }
    text.push_str(close);
}

/// Returns the decimal digits of an integer in little-endian two's complement of any length. The
/// time is quadratic in it.
pub fn decimal_text(bytes: &[u8]) -> String {
    let is_negative = bytes.last().is_some_and(|last_byte| last_byte & 0x80 != 0);
    let mut magnitude = bytes.to_vec();
    if is_negative {
        // The magnitude is the two's complement: all bits inverted, plus 1.
        let mut carry = true;
        for byte in &mut magnitude {
            (*byte, carry) = (!*byte).overflowing_add(u8::from(carry));
        }
    }
    // Divide by 10 until nothing is left: the remainders are the digits, the last one first.
    let mut digits = Vec::new();
    while magnitude.iter().any(|&byte| byte != 0) {
        let mut remainder = 0u32;
        for byte in magnitude.iter_mut().rev() {
            let value = remainder << 8 | u32::from(*byte);
            *byte = (value / 10) as u8;
            remainder = value % 10;
        }
        digits.push(char::from(b'0' + remainder as u8));
    }
    if digits.is_empty() {
        digits.push('0');
    }
    if is_negative {
        digits.push('-');
    }
    digits.iter().rev().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_looks_as_in_python() {
        let value = PlainValue::Dict(vec![
            ("a".into(), PlainValue::Tuple(vec![1i64.into(), 0.5.into()])),
            (
                1i64.into(),
                PlainValue::List(vec![PlainValue::Bool(true), PlainValue::None]),
            ),
            (
                "b".into(),
                PlainValue::Tuple(vec![PlainValue::Bytes(vec![0; 3])]),
            ),
            (
                "c".into(),
                PlainValue::typed(PythonType::DType, "torch.float16"),
            ),
            (
                "d".into(),
                PlainValue::typed(
                    PythonType::Size,
                    PlainValue::Tuple(vec![2i64.into(), 3i64.into()]),
                ),
            ),
            ("e".into(), PlainValue::typed(PythonType::Device, "cuda:0")),
        ]);
        let text = r#"{"a": (1, 0.5), 1: [True, None], "b": (3 bytes,), "c": torch.float16, "d": torch.Size((2, 3)), "e": torch.device("cuda:0")}"#;
        assert_eq!(shown(&value), text);
    }

    #[test]
    fn a_long_value_is_cut_short() {
        let deep = (0..10_000).fold(PlainValue::None, |inner, _| PlainValue::List(vec![inner]));
        let long = PlainValue::List(vec![PlainValue::Str("ä".repeat(5_000)); 5_000]);
        for value in [&deep, &long] {
            let text = shown(value);
            assert!(
                text.len() <= MAX_BYTES + '…'.len_utf8() && text.ends_with('…'),
                "{text}"
            );
        }
        // Dropping a deep value would call itself as often.
        std::mem::forget(deep);
    }
}
