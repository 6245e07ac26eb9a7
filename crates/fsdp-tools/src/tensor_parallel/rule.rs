//! The rules that tell how each tensor is cut.

use std::collections::BTreeMap;

use super::error::TensorParallelError;

/// The rules for models in Hugging Face's naming: Llama, Mistral, Qwen, Gemma, Phi, Mixtral,
/// GPT-NeoX, GPT-2 and others with the same names of layers. The first rule that matches a tensor
/// counts.
///
/// The rules of GPT-NeoX name the model too: ChatGLM's `mlp.dense_h_to_4h` is two fused matrices.
const BUILTIN: &str = include_str!("builtin.rules");

/// The way in which a tensor is cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum How {
    /// Whole on every rank.
    Replicate,
    /// By the rows of a vocabulary.
    Vocab,
    /// By the outputs of a layer. Each part of them is divided by itself.
    Outputs { parts: Parts, is_conv1d: bool },
    /// By the inputs of a layer.
    Inputs { parts: Parts, is_conv1d: bool },
}

/// The parts that a dimension is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Parts {
    /// This number of equal parts, each of which may be cut at any index.
    Equal(usize),
    /// A part for each of these numbers of heads. All heads have the same size, and cuts are
    /// between heads.
    Heads(Vec<Heads>),
}

/// A number of heads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Heads {
    Number(usize),
    /// A name, such as `heads`. Its number is given with the rules.
    Name(String),
}

/// The name of the number of key and value heads, which may be on several ranks each.
pub(super) const KV_HEADS: &str = "kv_heads";

/// A rule: the tensors that it matches, and how they are cut.
#[derive(Debug, Clone)]
pub(super) struct CutRule {
    /// All of the rule, as it was written.
    pub(super) text: String,
    /// The last parts of a key. `*` matches any one part, and `**` at the end one or more.
    pattern: Vec<String>,
    pub(super) how: How,
    /// The text after the `=`, such as `colwise(heads)`.
    pub(super) how_text: String,
    is_builtin: bool,
}

/// The rules by which tensors are cut, and the numbers that they name.
#[derive(Debug, Clone)]
pub struct Rules {
    rules: Vec<CutRule>,
    /// The numbers, by their names.
    pub(super) values: BTreeMap<String, usize>,
}

impl Rules {
    /// Parses rules `PATTERN=HOW`, which take precedence over the built-in ones. A pattern matches
    /// the end of a key, with or without its `.weight` or `.bias`: `self_attn.q_proj`,
    /// `layers.*.mixer.in_proj`. `values` has the numbers for names such as `heads`.
    ///
    /// # Errors
    /// [`TensorParallelError::Rule`] for the first text that is not a rule.
    pub fn new<T: AsRef<str>>(
        texts: &[T],
        values: BTreeMap<String, usize>,
    ) -> Result<Self, TensorParallelError> {
        let mut rules = Vec::new();
        // Given rules come first, so they take precedence.
        for text in texts {
            let text = text.as_ref();
            let rule = CutRule::parse(text, false).map_err(|reason| TensorParallelError::Rule {
                text: text.to_owned(),
                reason,
            })?;
            rules.push(rule);
        }
        for text in BUILTIN.lines() {
            rules.push(CutRule::parse(text, true).expect("the rules that are built in are rules"));
        }
        Ok(Rules { rules, values })
    }

    /// Returns the first rule that matches a tensor, with its position; `None` if no rule does.
    pub(super) fn find(&self, fqn: &str) -> Option<(usize, &CutRule)> {
        self.rules
            .iter()
            .enumerate()
            .find(|(_, rule)| rule.fits(fqn))
    }

    /// Returns the rules that were given, with their positions.
    pub(super) fn given(&self) -> impl Iterator<Item = (usize, &CutRule)> {
        self.rules
            .iter()
            .enumerate()
            .filter(|(_, rule)| !rule.is_builtin)
    }

    /// Returns `true` if a rule that was given cuts this tensor.
    pub(super) fn is_cut_by_given(&self, fqn: &str) -> bool {
        self.find(fqn)
            .is_some_and(|(_, rule)| !rule.is_builtin && rule.how != How::Replicate)
    }
}

impl CutRule {
    /// Parses `PATTERN=HOW`. The error says what is wrong with it.
    fn parse(text: &str, is_builtin: bool) -> Result<Self, String> {
        let (pattern, how) = text.split_once('=').ok_or("it is not PATTERN=HOW")?;
        let pattern: Vec<String> = pattern.trim().split('.').map(str::to_owned).collect();
        if pattern.iter().any(String::is_empty) {
            return Err("a part of the pattern is empty".to_owned());
        }
        if pattern.iter().rev().skip(1).any(|part| part == "**") {
            return Err("`**` can only be the last part of the pattern".to_owned());
        }
        let how_text = how.trim();
        Ok(CutRule {
            text: text.to_owned(),
            pattern,
            how: How::parse(how_text)?,
            how_text: how_text.to_owned(),
            is_builtin,
        })
    }

    /// Returns `true` if the pattern is the end of a key, or of the name of the layer that a weight
    /// or a bias belongs to.
    fn fits(&self, fqn: &str) -> bool {
        self.matches_end(fqn) || layer_name(fqn).is_some_and(|layer| self.matches_end(layer))
    }

    /// Returns `true` if the pattern fits the end of a name, or, with a last `**`, a place in the
    /// name before its last part.
    fn matches_end(&self, name: &str) -> bool {
        // Patterns match whole parts of names.
        let parts: Vec<&str> = name.split('.').collect();
        if let Some((last_part, module_parts)) = self.pattern.split_last()
            && last_part == "**"
        {
            let mut windows = parts[..parts.len() - 1].windows(module_parts.len().max(1));
            return module_parts.is_empty()
                || windows.any(|parts| are_parts_of(parts, module_parts));
        }
        match parts.len().checked_sub(self.pattern.len()) {
            Some(start) => are_parts_of(&parts[start..], &self.pattern),
            None => false,
        }
    }
}

/// Returns `true` if parts of a name are those of a pattern.
fn are_parts_of(parts: &[&str], pattern: &[String]) -> bool {
    parts
        .iter()
        .zip(pattern)
        .all(|(part, pattern_part)| pattern_part == "*" || pattern_part == part)
}

/// Returns the layer that a weight or a bias belongs to; `None` for any other tensor.
pub(super) fn layer_name(fqn: &str) -> Option<&str> {
    fqn.strip_suffix(".weight")
        .or_else(|| fqn.strip_suffix(".bias"))
}

impl How {
    /// Parses how a tensor is cut: a word, and the numbers of heads in brackets if it has some.
    fn parse(text: &str) -> Result<Self, String> {
        let (word, heads) = match text.split_once('(') {
            None => (text, None),
            Some((word, ending)) => {
                let argument_list = ending.strip_suffix(')').ok_or("`)` is missing")?;
                let heads: Result<Vec<Heads>, String> =
                    argument_list.split(',').map(Heads::parse).collect();
                (word, Some(heads?))
            }
        };
        // The layers of GPT-2 have their weights the other way round.
        let is_conv1d = word.starts_with("conv1d_");
        match (word, heads) {
            ("replicate", None) => Ok(How::Replicate),
            ("vocab", None) => Ok(How::Vocab),
            ("packed_colwise", None) => Ok(How::Outputs {
                parts: Parts::Equal(2),
                is_conv1d,
            }),
            ("colwise" | "conv1d_colwise", heads) => Ok(How::Outputs {
                parts: heads.map_or(Parts::Equal(1), Parts::Heads),
                is_conv1d,
            }),
            ("rowwise" | "conv1d_rowwise", heads) => Ok(How::Inputs {
                parts: heads.map_or(Parts::Equal(1), Parts::Heads),
                is_conv1d,
            }),
            ("replicate" | "vocab" | "packed_colwise", Some(_)) => {
                Err(format!("`{word}` has no heads"))
            }
            _ => Err(format!(
                "`{word}` is not one of colwise, rowwise, packed_colwise, conv1d_colwise, conv1d_rowwise, vocab, replicate"
            )),
        }
    }
}

impl Heads {
    /// Parses a number of heads, or a name that has a value.
    fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let is_name = !text.is_empty()
            && text
                .chars()
                .all(|character| character.is_ascii_alphanumeric() || character == '_');
        match text.parse() {
            Ok(0) => Err("the number of heads must not be 0".to_owned()),
            Ok(number) => Ok(Heads::Number(number)),
            Err(_) if is_name => Ok(Heads::Name(text.to_owned())),
            Err(_) => Err(format!("`{text}` is neither a number nor a name")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_ends_of_keys_at_dots() {
        let rule = CutRule::parse("layers.*.q = colwise", false).unwrap();
        assert!(
            rule.fits("model.layers.3.q.weight")
                && rule.fits("layers.3.q.bias")
                && rule.fits("layers.3.q")
        );
        for other in [
            "layers.3.q.scale",
            "layers.3.4.q.weight",
            "layers.q.weight",
            "layers.3.xq.weight",
            "mylayers.3.q",
        ] {
            assert!(!rule.fits(other), "{other}");
        }
        assert!(
            CutRule::parse("a.weight=replicate", false)
                .unwrap()
                .fits("x.a.weight")
        );
    }

    #[test]
    fn two_stars_match_all_below_a_module() {
        let rule = CutRule::parse("vision_tower.** = replicate", false).unwrap();
        for key in [
            "vision_tower.weight",
            "model.vision_tower.layers.0.self_attn.q_proj.weight",
        ] {
            assert!(rule.fits(key), "{key}");
        }
        for other in [
            "vision_tower",
            "model.vision_towers.q_proj.weight",
            "q_proj.weight",
        ] {
            assert!(!rule.fits(other), "{other}");
        }
        assert!(CutRule::parse("** = replicate", false).unwrap().fits("a.b"));
        assert!(CutRule::parse("**.q_proj = replicate", false).is_err());
    }

    #[test]
    fn the_heads_of_the_text_model_do_not_cut_a_vision_model() {
        let rules = Rules::new::<&str>(&[], BTreeMap::new()).unwrap();
        for key in [
            "vision_tower.encoder.layers.0.self_attn.q_proj.weight",
            "visual.blocks.0.mlp.gate_proj.weight",
        ] {
            assert_eq!(rules.find(key).unwrap().1.how, How::Replicate, "{key}");
        }
    }

    #[test]
    fn what_is_no_rule_is_refused() {
        for bad in [
            "a",
            "a=",
            "=colwise",
            "a..b=colwise",
            "a=columns",
            "a=colwise(",
            "a=colwise()",
            "a=colwise(0)",
        ] {
            assert!(Rules::new(&[bad], BTreeMap::new()).is_err(), "{bad}");
        }
        for bad in [
            "a=vocab(2)",
            "a=replicate(heads)",
            "a=packed_colwise(heads)",
            "a=colwise(a b)",
            "a=colwise(heads",
        ] {
            assert!(Rules::new(&[bad], BTreeMap::new()).is_err(), "{bad}");
        }
    }

    #[test]
    fn rules_that_are_given_go_before_those_that_are_built_in() {
        let rules = Rules::new(&["q_proj = replicate"], BTreeMap::new()).unwrap();
        assert_eq!(
            rules
                .find("model.layers.0.self_attn.q_proj.weight")
                .unwrap()
                .1
                .how,
            How::Replicate
        );
        assert_ne!(
            rules
                .find("model.layers.0.self_attn.k_proj.weight")
                .unwrap()
                .1
                .how,
            How::Replicate
        );
    }
}
