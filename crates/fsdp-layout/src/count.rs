//! Counts in messages.

/// Formats a count with the word for what is counted: `1 file`, `2 files`.
///
/// ```
/// assert_eq!(fsdp_layout::count_text(1, "box", "boxes"), "1 box");
/// assert_eq!(fsdp_layout::count_text(0, "box", "boxes"), "0 boxes");
/// ```
#[must_use]
pub fn count_text(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}
