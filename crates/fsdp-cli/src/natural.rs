//! The order in which people look for names: `layers.9` before `layers.10`.

use std::cmp::Ordering;

/// Compares two names: runs of digits by the numbers that they are, all else byte by byte.
pub(crate) fn compare<T: AsRef<str> + ?Sized>(left: &T, right: &T) -> Ordering {
    let mut left = left.as_ref().as_bytes();
    let mut right = right.as_ref().as_bytes();
    while let (Some(left_byte), Some(right_byte)) = (left.first(), right.first()) {
        let order;
        if left_byte.is_ascii_digit() && right_byte.is_ascii_digit() {
            let (left_number, left_rest) = left.split_at(count_digits(left));
            let (right_number, right_rest) = right.split_at(count_digits(right));
            order = compare_numbers(left_number, right_number);
            left = left_rest;
            right = right_rest;
        } else {
            order = left_byte.cmp(right_byte);
            left = &left[1..];
            right = &right[1..];
        }
        if order.is_ne() {
            return order;
        }
    }
    left.len().cmp(&right.len())
}

/// Returns the number of digits that a text begins with.
fn count_digits(text: &[u8]) -> usize {
    text.iter().take_while(|byte| byte.is_ascii_digit()).count()
}

/// Compares two numbers by their digits, of which each has at least one.
fn compare_numbers(left: &[u8], right: &[u8]) -> Ordering {
    // Numbers that are padded with zeros have the same length, and are compared as texts.
    if left[0] == b'0' || right[0] == b'0' {
        return left.cmp(right);
    }
    // The longer number is the larger one.
    left.len().cmp(&right.len()).then_with(|| left.cmp(right))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_inside_names_count_as_numbers() {
        let names = [
            "",
            "a",
            "a.b",
            "a0.w",
            "a1",
            "a1.w",
            "a2",
            "a10",
            "a10.0",
            "a10.00",
            "a10.01",
            "a10.1",
            "a10.9",
            "a10.10",
            "a123456789012345678901234567890",
            "a1234567890123456789012345678901",
            "a_1",
            "b",
            "ä",
        ];
        for (index, left) in names.iter().enumerate() {
            for (other, right) in names.iter().enumerate() {
                assert_eq!(
                    compare(left, right),
                    index.cmp(&other),
                    "{left} and {right}"
                );
            }
        }
    }
}
