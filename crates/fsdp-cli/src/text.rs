//! Text for terminals. Names that a checkpoint's author chose must not move the cursor, change
//! colours or reverse text.

use std::borrow::Cow;

use clap::ValueEnum;

/// Returns `true` for control characters, with which terminal commands begin, and for characters
/// that are invisible or change the direction of text.
fn is_unsafe(character: char) -> bool {
    let is_invisible = matches!(
        character,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
    );
    character.is_control() || is_invisible
}

/// Escapes unsafe characters of a name like Rust does: `\n`, `\u{1b}`.
pub(crate) fn escaped(name: &str) -> Cow<'_, str> {
    escape(name, is_unsafe)
}

/// Escapes text of several lines, in which line breaks are safe.
pub(crate) fn escaped_lines(text: &str) -> Cow<'_, str> {
    escape(text, |character| character != '\n' && is_unsafe(character))
}

/// Escapes the characters that `is_unsafe` picks, and copies nothing if there are none.
fn escape(text: &str, is_unsafe: impl Fn(char) -> bool) -> Cow<'_, str> {
    // Nearly all names are safe, and there are millions of them in some checkpoints.
    if !text.contains(&is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        match character {
            '\n' | '\r' | '\t' if is_unsafe(character) => {
                escaped.extend(character.escape_default())
            }
            character if is_unsafe(character) => escaped.extend(character.escape_unicode()),
            character => escaped.push(character),
        }
    }
    Cow::Owned(escaped)
}

/// Formats a number of bytes for people.
pub(crate) fn bytes_text(bytes: u64) -> String {
    // Larger units have too few digits to tell two checkpoints apart.
    let units = [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match units.into_iter().find(|&(_, unit)| bytes >= unit) {
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} B"),
    }
}

/// Formats a value that may be unknown: the word stands for none.
pub(crate) fn or_word(value: Option<impl ToString>, word: &str) -> String {
    value.map_or_else(|| word.to_owned(), |value| value.to_string())
}

/// Returns the width of each column of a table: that of its widest cell.
pub(crate) fn column_widths<const N: usize>(rows: &[[String; N]]) -> [usize; N] {
    std::array::from_fn(|column| {
        let widths = rows.iter().map(|row| row[column].chars().count());
        widths.fold(0, usize::max)
    })
}

/// Returns the name of a choice on the command line.
pub(crate) fn choice_name(choice: &impl ValueEnum) -> String {
    let value = choice.to_possible_value().expect("no choice is skipped");
    value.get_name().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_act_on_a_terminal_is_shown_instead() {
        assert_eq!(escaped("blocks.0.wéight"), "blocks.0.wéight");
        assert_eq!(
            escaped("a\u{1b}[31mb\n\u{202e}c\u{9b}"),
            "a\\u{1b}[31mb\\n\\u{202e}c\\u{9b}"
        );
        assert_eq!(escaped_lines("one\ntwo\r"), "one\ntwo\\r");
    }

    #[test]
    fn sizes_have_the_largest_unit_that_fits() {
        assert_eq!(
            [bytes_text(1023), bytes_text(1536), bytes_text(5 << 30)],
            ["1023 B", "1.5 KiB", "5.0 GiB"]
        );
    }
}
