//! The parts of a parsed map.

use std::collections::BTreeMap;

use fsdp_layout::count_text;
use thiserror::Error;

use super::operation::Operation;
use super::template::Template;

/// A map that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MapError {
    /// A line that is not a rule.
    #[error("line {line} of the map: {reason}")]
    Line {
        /// Its number, from 1.
        line: usize,
        /// The reason.
        reason: String,
    },
    /// A rule that matches no key, which is likely a slip.
    #[error("line {line} of the map matches no key")]
    Unused {
        /// Its number.
        line: usize,
    },
    /// A map of this name that is built in matches no key at all.
    #[error("no rule of the map matches a key")]
    UnusedMap,
    /// A rule fits a key, but not the tensors.
    #[error("line {line} of the map, for `{fqn}`: {reason}")]
    Tensor {
        /// The rule's line.
        line: usize,
        /// The key.
        fqn: String,
        /// The reason.
        reason: String,
    },
    /// Keys of layers that no rule names, in a map that must name all of them: the model would be
    /// loaded with random numbers in their places.
    #[error(
        "no rule of the map names {} of layers, which the result cannot have unchanged: {keys}",
        count_text(*count, "key", "keys")
    )]
    Unnamed {
        /// The number of the keys.
        count: usize,
        /// The first of them.
        keys: String,
    },
    /// A value with names of parameters cannot be read.
    #[error("the names of parameters cannot be renamed: {reason}")]
    Value {
        /// The reason.
        reason: String,
    },
    /// Two rules give one key.
    #[error("the map gives `{fqn}` twice")]
    Twice {
        /// The key.
        fqn: String,
    },
}

/// The values of the names in a map: `heads`, `kv_heads`.
pub type Values = BTreeMap<String, usize>;

/// A parsed map.
#[derive(Debug, Clone)]
pub struct Map {
    pub(super) rules: Vec<KeyRule>,
    /// The keys of which a rule must name each.
    pub(super) strict: Vec<StrictKeys>,
    /// `true` if a rule may fit no key: the map is for several variants of a model.
    pub(super) is_builtin: bool,
}

/// One line of a map.
#[derive(Debug, Clone)]
pub(super) struct KeyRule {
    /// Its number, from 1.
    pub(super) line: usize,
    /// The templates of the old keys.
    pub(super) sources: Vec<Template>,
    /// The templates of the new keys; none for a rule that drops what it fits.
    pub(super) targets: Vec<Template>,
    /// The operations, in order.
    pub(super) operations: Vec<Operation>,
    /// `true` for a rule that leaves the old keys as they are, and adds the new one.
    pub(super) is_copy: bool,
}

/// The rules of a map, and the keys of which a rule must name each.
#[derive(Debug, Default)]
pub(super) struct ParsedMap {
    pub(super) rules: Vec<KeyRule>,
    pub(super) strict: Vec<StrictKeys>,
}

/// Keys of which a rule must name each: those that a template fits.
#[derive(Debug, Clone)]
pub(super) struct StrictKeys {
    /// The old keys.
    pub(super) source: Template,
    /// The new keys, which are the old ones of the reversed map.
    pub(super) target: Template,
}
