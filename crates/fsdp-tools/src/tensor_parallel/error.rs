//! The errors of rules and plans.

use fsdp_layout::count_text;
use thiserror::Error;

/// An error in the rules for tensor-parallel ranks, or a tensor that cannot be cut by them.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TensorParallelError {
    /// A text that is not a rule.
    #[error("`{text}` is not a rule for tensor-parallel ranks: {reason}")]
    Rule {
        /// The text.
        text: String,
        /// The reason.
        reason: String,
    },
    /// A rule that matches no tensor, which is likely a mistake.
    #[error("the rule `{rule}` for tensor-parallel ranks matches no tensor")]
    Unused {
        /// The rule.
        rule: String,
    },
    /// A rule that needs a number which is not given.
    #[error("the rule `{rule}` for `{fqn}` needs the number `{name}`, which is not given")]
    NoValue {
        /// The rule.
        rule: String,
        /// The key of the tensor.
        fqn: String,
        /// The name of the number.
        name: String,
    },
    /// Tensors that no rule matches. They cannot be assumed to be whole on every rank: the model
    /// would compute wrong results if they are not.
    #[error("no rule says how `{fqn}` of shape {shape:?} is cut over tensor-parallel ranks{}", and_more(.more))]
    Unknown {
        /// The key of the first one.
        fqn: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The number of the others.
        more: usize,
    },
    /// A tensor that a rule matches, but that cannot be cut by it, because of its shape or the
    /// number of ranks.
    #[error(
        "`{fqn}` of shape {shape:?} cannot be cut over {ranks} tensor-parallel ranks by `{rule}`: {reason}"
    )]
    Tensor {
        /// The key.
        fqn: String,
        /// The shape.
        shape: Vec<usize>,
        /// The number of ranks.
        ranks: usize,
        /// The rule.
        rule: String,
        /// The reason.
        reason: String,
    },
}

/// Returns the end of a sentence about keys of which not all are listed.
fn and_more(more: &usize) -> String {
    match more {
        0 => String::new(),
        more => format!(", nor {}", count_text(*more, "other", "others")),
    }
}
