//! The patterns in an adapter's settings: regular expressions for the ends of the names of modules.

use fancy_regex::{Regex, RegexBuilder};
use fsdp_formats::FormatError;
use indexmap::IndexMap;

/// The most steps that one match may take. Patterns with references can take a number of steps that
/// is exponential in the length of a name.
const MAX_STEPS: usize = 100_000;
/// The most memory that a compiled pattern may take.
const MAX_BYTES: usize = 1 << 20;

/// The numbers that a setting gives to modules, by pattern.
#[derive(Debug, Clone, Default)]
pub(super) struct Patterns {
    /// The name of the setting.
    setting: &'static str,
    /// The patterns in their order, of which the first that matches counts.
    numbers: Vec<(Regex, f64)>,
    /// The numbers by the texts of the patterns.
    by_text: IndexMap<String, f64>,
}

impl Patterns {
    /// Compiles the patterns of a setting. PEFT calls `re.match(rf"(.*\.)?({pattern})$", name)`.
    ///
    /// # Errors
    /// A pattern that is no regular expression, or that Python reads in another way.
    pub(super) fn compile(
        setting: &'static str,
        by_text: IndexMap<String, f64>,
    ) -> Result<Self, FormatError> {
        let mut numbers = Vec::with_capacity(by_text.len());
        for (pattern, number) in &by_text {
            if has_set_operation(pattern) {
                return Err(FormatError::unsupported(format!(
                    "the pattern `{pattern}` in `{setting}`, with a character class that may be read in two ways,"
                )));
            }
            let regex = RegexBuilder::new(&format!(r"\A(.*\.)?({pattern})$"))
                .backtrack_limit(MAX_STEPS)
                .delegate_size_limit(MAX_BYTES)
                .delegate_dfa_size_limit(MAX_BYTES)
                .build();
            let regex = regex.map_err(|error| {
                FormatError::unsupported(format!(
                    "the pattern `{pattern}` in `{setting}` ({error})"
                ))
            })?;
            numbers.push((regex, *number));
        }
        Ok(Patterns {
            setting,
            numbers,
            by_text,
        })
    }

    /// Returns the number of a module; `None` if no pattern matches its name.
    ///
    /// # Errors
    /// A pattern that takes too long to match.
    pub(super) fn number_of(&self, module: &str) -> Result<Option<f64>, FormatError> {
        for ((regex, number), pattern) in self.numbers.iter().zip(self.by_text.keys()) {
            let is_match = regex.is_match(module).map_err(|error| {
                let setting = self.setting;
                FormatError::unsupported(format!(
                    "the pattern `{pattern}` in `{setting}` for the module `{module}` ({error})"
                ))
            })?;
            if is_match {
                return Ok(Some(*number));
            }
        }
        // PEFT then looks for the name itself, which need not match itself.
        Ok(self.by_text.get(module).copied())
    }
}

/// Returns `true` if a pattern has a character class inside of another one, or an operation on
/// classes, such as `&&`. Python takes these for plain characters.
fn has_set_operation(pattern: &str) -> bool {
    let mut characters = pattern.chars().peekable();
    let mut is_in_class = false;
    while let Some(character) = characters.next() {
        match character {
            '\\' => _ = characters.next(),
            '[' if is_in_class => return true,
            '[' => {
                is_in_class = true;
                // A bracket at the start of a class is a plain character.
                characters.next_if_eq(&'^');
                characters.next_if_eq(&']');
            }
            ']' => is_in_class = false,
            '&' | '-' | '~' if is_in_class && characters.peek() == Some(&character) => return true,
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number that patterns give to a module.
    fn number_of(patterns: &[(&str, f64)], module: &str) -> Option<f64> {
        let by_text = patterns
            .iter()
            .map(|(pattern, number)| ((*pattern).to_owned(), *number))
            .collect();
        let patterns = Patterns::compile("alpha_pattern", by_text).unwrap();
        patterns.number_of(module).unwrap()
    }

    /// The expected values are those of `get_pattern_key` in PEFT 0.21.
    #[test]
    fn patterns_match_the_ends_of_names_as_in_peft() {
        for (pattern, module, is_match) in [
            ("q_proj", "layers.0.q_proj", true),
            ("q_proj", "layers.0.xq_proj", false),
            ("q_proj", "q_proj", true),
            ("q_proj", "q_proj.lora", false),
            ("q.proj", "layers.0.q_proj", true),
            ("q.proj", "layers.0.q.proj", true),
            (r"q\.proj", "layers.0.q_proj", false),
            ("^q_proj", "layers.0.q_proj", false),
            ("^layers.0.q_proj", "layers.0.q_proj", true),
            ("q_proj$", "layers.0.q_proj", true),
            ("q_proj|v_proj", "layers.0.v_proj", true),
            (r"layers\.[01]\..*", "layers.1.mlp.up", true),
            (r"layers\.[01]\..*", "layers.2.mlp.up", false),
            (r"layers\.\d+\.(q|k)_proj", "model.layers.12.k_proj", true),
            (r"layers\.(?!0\.)\d+\.up", "layers.0.up", false),
            (r"layers\.(?!0\.)\d+\.up", "layers.3.up", true),
            (r"(?<=self_attn\.)q_proj", "layers.0.self_attn.q_proj", true),
            (r"(?<=mlp\.)q_proj", "layers.0.self_attn.q_proj", false),
            (r"(a)\3", "x.aa", true),
            (r"(?P<n>a)(?P=n)", "x.aa", true),
            ("[]q]_proj", "layers.0.q_proj", true),
            ("", "layers.0.", true),
            ("", "layers.0", false),
            (".*", "anything.at.all", true),
        ] {
            assert_eq!(
                number_of(&[(pattern, 7.0)], module),
                is_match.then_some(7.0),
                "`{pattern}` and `{module}`"
            );
        }
    }

    #[test]
    fn the_first_pattern_that_matches_counts() {
        let patterns = [("k_proj", 1.0), (".*proj", 2.0), ("q_proj", 3.0)];
        assert_eq!(number_of(&patterns, "a.q_proj"), Some(2.0));
        assert_eq!(number_of(&patterns, "a.k_proj"), Some(1.0));
        assert_eq!(number_of(&patterns, "a.up"), None);
        // A text that does not match itself still names itself.
        assert_eq!(number_of(&[("a+b", 4.0)], "a+b"), Some(4.0));
    }

    #[test]
    fn a_pattern_that_cannot_be_read_is_named() {
        for pattern in ["(", "[a", "*", "[a&&b]", "[[a]]", "[a--z]", "[a~~b]", r"\9"] {
            let by_text = IndexMap::from([(pattern.to_owned(), 1.0)]);
            let error = Patterns::compile("rank_pattern", by_text).unwrap_err();
            let text = error.to_string();
            assert!(
                text.contains(&format!("`{pattern}`")) && text.contains("`rank_pattern`"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_pattern_that_takes_too_long_is_an_error() {
        let pattern = r"(?:(a|aa)+\3)+b";
        let by_text = IndexMap::from([(pattern.to_owned(), 1.0)]);
        let patterns = Patterns::compile("alpha_pattern", by_text).unwrap();
        let module = format!("b.{}", "a".repeat(64));
        let error = patterns.number_of(&module).unwrap_err();
        assert!(error.to_string().contains(pattern), "{error}");
    }
}
