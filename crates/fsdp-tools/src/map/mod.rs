//! Maps from the keys and shapes of one framework to those of another.
//!
//! A map is a text with a rule on each line:
//!
//! ```text
//! # torchtitan's Llama as Hugging Face's
//! tok_embeddings.weight -> model.embed_tokens.weight
//! layers.{i}.attention.wq.weight -> model.layers.{i}.self_attn.q_proj.weight | permute(heads)
//! layers.{i}.w1, layers.{i}.w3 -> layers.{i}.gate_up | concat(0)
//! copy tok_embeddings.weight -> lm_head.weight
//! drop freqs_cis
//! strict layers.{rest*} -> model.layers.{rest*}
//! ```
//!
//! `{i}` matches a part of a key without dots, and `{rest*}` any text. Operations come after `|`,
//! and are applied from left to right:
//!
//! | operation | effect |
//! |---|---|
//! | `transpose` | swaps the two dimensions of a matrix |
//! | `concat(d)` | joins several tensors along dimension `d` |
//! | `split(d)`, `split(d, 4, 2, 2)` | splits a tensor along dimension `d`: into equal parts, or in these proportions |
//! | `permute(heads)`, `unpermute(heads)` | reorders the rows of each head for rotary embeddings, from interleaved pairs to halves and back |
//! | `split_qkv(heads, kv_heads)`, `join_qkv(heads, kv_heads)` | splits Megatron's grouped rows into queries, keys and values, and back |
//! | `unstack(i)`, `stack(i)` | makes a tensor of each index of the first dimension, which becomes `{i}` in the keys, and back |
//!
//! Numbers may be names, whose values are given with the map. The first rule that matches a key is
//! applied; keys that no rule matches stay as they are, unless a line `strict` says that a rule
//! must name them. `copy` leaves the old key to the rules after it. Elements are moved and never
//! computed with, so there and back is bit-exact.

mod builtin;
mod match_keys;
mod node;
mod operation;
mod parse;
mod rule;
mod template;
mod view;

use self::operation::Operation;
use self::rule::{KeyRule, ParsedMap, StrictKeys};

pub use self::builtin::BUILTIN;
pub use self::rule::{Map, MapError, Values};
pub use self::view::Mapped;

impl Map {
    /// Reads a map.
    ///
    /// # Errors
    /// The first line that is not a rule, or uses a name that has no value.
    ///
    /// ```
    /// use fsdp_tools::map::{Map, Values};
    /// let map = Map::parse("w.{i} -> v.{i} | transpose", &Values::new())?;
    /// assert!(Map::parse("w -> v | turn", &Values::new()).is_err());
    /// # let _ = map;
    /// # Ok::<(), fsdp_tools::map::MapError>(())
    /// ```
    pub fn parse(text: &str, values: &Values) -> Result<Self, MapError> {
        let ParsedMap { rules, strict } = parse::parse_map(text, values)?;
        Ok(Map {
            rules,
            strict,
            is_builtin: false,
        })
    }

    /// Returns the map of one of the names in [`BUILTIN`]; `None` for any other name.
    ///
    /// # Errors
    /// A name in the map has no value: most need `heads`, some `kv_heads`.
    pub fn builtin(name: &str, values: &Values) -> Option<Result<Self, MapError>> {
        let (text, is_reversed) = builtin::find_text(name)?;
        Some(parse::parse_map(text, values).map(|parsed| {
            let map = Map {
                rules: parsed.rules,
                strict: parsed.strict,
                is_builtin: true,
            };
            if is_reversed { map.reversed() } else { map }
        }))
    }

    /// Returns the map that undoes this one. Dropped keys are not restored, and copies stay.
    #[must_use]
    pub fn reversed(&self) -> Self {
        let mut rules = Vec::new();
        for rule in &self.rules {
            // A rule without targets drops tensors, so nothing can be mapped back. A copy may have
            // been changed since, so it is not dropped.
            if rule.targets.is_empty() || rule.is_copy {
                continue;
            }
            // The last operation of a rule is the first to be undone.
            let operations = rule.operations.iter().rev();
            rules.push(KeyRule {
                line: rule.line,
                sources: rule.targets.clone(),
                targets: rule.sources.clone(),
                operations: operations.map(Operation::reversed).collect(),
                is_copy: false,
            });
        }
        let strict = self.strict.iter().map(|keys| StrictKeys {
            source: keys.target.clone(),
            target: keys.source.clone(),
        });
        Map {
            rules,
            strict: strict.collect(),
            is_builtin: self.is_builtin,
        }
    }
}
