//! Maps from the keys and shapes of one framework to those of another.
//!
//! A map is a text with a rule on each line:
//!
//! ```text
//! # torchtitan's Llama as Hugging Face's
//! tok_embeddings.weight -> model.embed_tokens.weight
//! layers.{i}.attention.wq.weight -> model.layers.{i}.self_attn.q_proj.weight | permute(heads)
//! layers.{i}.w1, layers.{i}.w3 -> layers.{i}.gate_up | concat(0)
//! drop freqs_cis
//! ```
//!
//! `{i}` stands for a part of a key without dots, and `{rest*}` for any text. After `|` come operations, from left to right:
//!
//! | operation | what becomes of the tensors |
//! |---|---|
//! | `transpose` | the two dimensions of a matrix are swapped |
//! | `concat(d)` | several become one, along dimension `d` |
//! | `split(d)`, `split(d, 4, 2, 2)` | one becomes several: of one size, or of these shares |
//! | `permute(heads)`, `unpermute(heads)` | rotary halves of each head from interleaved to one after the other, and back |
//! | `split_qkv(heads, kv_heads)`, `join_qkv(heads, kv_heads)` | Megatron's rows of queries, keys and values by group, to three tensors and back |
//! | `unstack(i)`, `stack(i)` | the first dimension becomes `{i}` in the keys, and back |
//!
//! Numbers may be names, whose values are given with the map. The first rule that fits a key takes it; keys that no rule
//! fits stay as they are. Nothing is computed with the elements, so there and back is bit-exact.

mod builtin;
mod match_keys;
mod node;
mod operation;
mod parse;
mod rule;
mod template;
mod view;

pub use self::builtin::NAMES as BUILTIN;
use self::operation::Operation;
use self::rule::Rule;
pub use self::rule::{Map, MapError, Values};
pub use self::view::Mapped;

impl Map {
    /// Reads a map.
    ///
    /// # Errors
    /// The first line that is no rule, or uses a name that has no value.
    ///
    /// ```
    /// use fsdp_dcp::map::{Map, Values};
    /// let map = Map::parse("w.{i} -> v.{i} | transpose", &Values::new())?;
    /// assert!(Map::parse("w -> v | turn", &Values::new()).is_err());
    /// # let _ = map;
    /// # Ok::<(), fsdp_dcp::map::MapError>(())
    /// ```
    pub fn parse(text: &str, values: &Values) -> Result<Self, MapError> {
        Ok(Map { rules: parse::rules(text, values)?, is_builtin: false })
    }

    /// Returns the map of one of the names in [`BUILTIN`]; `None` for any other name.
    ///
    /// # Errors
    /// A name in the map has no value: most need `heads`, some `kv_heads`.
    pub fn builtin(name: &str, values: &Values) -> Option<Result<Self, MapError>> {
        let (text, is_reversed) = builtin::text(name)?;
        Some(parse::rules(text, values).map(|rules| {
            let map = Map { rules, is_builtin: true };
            if is_reversed { map.reversed() } else { map }
        }))
    }

    /// Returns the map that undoes this one. What it drops is not brought back.
    #[must_use]
    pub fn reversed(&self) -> Self {
        let rules = self.rules.iter().filter(|rule| !rule.targets.is_empty());
        let rules = rules.map(|rule| Rule {
            line: rule.line,
            sources: rule.targets.clone(),
            targets: rule.sources.clone(),
            operations: rule.operations.iter().rev().map(Operation::reversed).collect(),
        });
        Map { rules: rules.collect(), is_builtin: self.is_builtin }
    }
}
