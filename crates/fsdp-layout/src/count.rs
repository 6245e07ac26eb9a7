//! Counts in messages.

use std::fmt::Display;

/// Formats a count with the word for what is counted: `1 file`, `2 files`.
///
/// ```
/// assert_eq!(fsdp_layout::count_text(1, "box", "boxes"), "1 box");
/// assert_eq!(fsdp_layout::count_text(0, "box", "boxes"), "0 boxes");
/// ```
#[must_use]
pub fn count_text<N: Display + PartialEq + From<u8>>(number: N, one: &str, many: &str) -> String {
    let word = if number == N::from(1) { one } else { many };
    format!("{number} {word}")
}
