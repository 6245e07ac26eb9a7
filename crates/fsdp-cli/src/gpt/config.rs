//! The sizes of the model.

use crate::failure::{CommandError, usage_error};

/// The sizes of a [`Gpt`](super::Gpt).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GptConfig {
    /// The number of blocks.
    pub layers: usize,
    /// The number of attention heads of a block, which share `hidden` equally.
    pub heads: usize,
    /// The width of the residual stream.
    pub hidden: usize,
    /// The longest sequence, which is the number of rows of the position embedding.
    pub seq: usize,
    /// The number of different tokens.
    pub vocab: usize,
}

impl GptConfig {
    /// Checks that a model can have these sizes.
    ///
    /// # Errors
    /// A size of zero, or a width that the heads cannot share.
    pub(crate) fn validate(&self) -> Result<(), CommandError> {
        let sizes = [
            ("layers", self.layers),
            ("heads", self.heads),
            ("hidden", self.hidden),
            ("seq", self.seq),
            ("vocab", self.vocab),
        ];
        if let Some((size, _)) = sizes.into_iter().find(|&(_, value)| value == 0) {
            return Err(usage_error(format!("a GPT cannot have `{size}` = 0"), None));
        }
        let GptConfig { hidden, heads, .. } = self;
        if !hidden.is_multiple_of(*heads) {
            return Err(usage_error(
                format!(
                    "hidden width {hidden} cannot be shared by {heads} heads: it must be a \
                     multiple of them"
                ),
                None,
            ));
        }
        Ok(())
    }
}
