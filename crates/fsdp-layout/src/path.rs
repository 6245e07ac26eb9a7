//! The path of a value in a nested state dict, and the flat key that a checkpoint gives it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One step down a nested state dict.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PathPart {
    /// A dict key. A key that holds dots stays one part.
    Key(String),
    /// A position in a list (or, for state dicts that flatten them, a tuple).
    Index(usize),
}

impl fmt::Display for PathPart {
    /// Writes the part as it stands in a flat key: without quotes or brackets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PathPart::Key(key) => f.write_str(key),
            PathPart::Index(index) => write!(f, "{index}"),
        }
    }
}

/// Returns `true` for a flat key with an empty part, which a dot too many or too few makes.
#[must_use]
pub fn has_empty_part(key: &str) -> bool {
    key.split('.').any(str::is_empty)
}

/// The depth from which on nested values are refused: the functions that walk them are recursive.
pub const MAX_DEPTH: usize = 200;

/// The path from the root of a state dict to a value: torch's `planner_data` tuple.
///
/// ```
/// use fsdp_layout::{KeyPath, PathPart};
/// let path = KeyPath(vec![
///     PathPart::Key("optim".into()),
///     PathPart::Key("state".into()),
///     PathPart::Key("ln_f.weight".into()),
///     PathPart::Key("exp_avg".into()),
/// ]);
/// assert_eq!(path.flat_key(), "optim.state.ln_f.weight.exp_avg");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KeyPath(pub Vec<PathPart>);

impl KeyPath {
    /// Makes the path of a value at the top level of a state dict.
    #[must_use]
    pub fn from_key(key: impl Into<String>) -> Self {
        KeyPath(vec![PathPart::Key(key.into())])
    }

    /// Returns the parts joined with dots: the key in a checkpoint.
    ///
    /// Two different paths may have the same flat key, so code that flattens a state dict must
    /// refuse duplicates.
    #[must_use]
    pub fn flat_key(&self) -> String {
        let parts: Vec<String> = self.0.iter().map(PathPart::to_string).collect();
        parts.join(".")
    }

    /// Returns the rest of this path below a prefix of keys; `None` if it lies elsewhere.
    ///
    /// A path of one part may be a flat key, of a format that does not store paths. There the
    /// prefix is the beginning of the key.
    ///
    /// ```
    /// use fsdp_layout::{KeyPath, PathPart};
    /// let keys = |keys: &[&str]| KeyPath(keys.iter().map(|&key| PathPart::Key(key.to_owned())).collect());
    /// assert_eq!(keys(&["model", "bias"]).below(&["model"]), Some(keys(&["bias"])));
    /// assert_eq!(keys(&["model.bias"]).below(&["model"]), Some(keys(&["bias"])));
    /// assert_eq!(keys(&["optim", "state"]).below(&["model"]), None);
    /// ```
    #[must_use]
    pub fn below(&self, prefix: &[impl AsRef<str>]) -> Option<KeyPath> {
        if prefix.is_empty() {
            return Some(self.clone());
        }
        if let [PathPart::Key(flat)] = self.0.as_slice() {
            let mut key_tail = flat.as_str();
            for key in prefix {
                // The dot belongs to the prefix: `model` is no prefix of `model2.bias`.
                key_tail = key_tail.strip_prefix(key.as_ref())?.strip_prefix('.')?;
            }
            return Some(KeyPath::from_key(key_tail));
        }
        let (start, tail_parts) = self.0.split_at_checked(prefix.len())?;
        let is_prefix = start
            .iter()
            .zip(prefix)
            .all(|(part, key)| matches!(part, PathPart::Key(part) if part == key.as_ref()));
        // The path of the prefix itself has no rest, and is not below it.
        (is_prefix && !tail_parts.is_empty()).then(|| KeyPath(tail_parts.to_vec()))
    }

    /// Returns this path with one more part at its end.
    #[must_use]
    pub fn child(&self, part: PathPart) -> KeyPath {
        let mut parts = self.0.clone();
        parts.push(part);
        KeyPath(parts)
    }
}
