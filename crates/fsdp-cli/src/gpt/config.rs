//! The sizes of the model.

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

/// The reason that a model cannot have its sizes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GptConfigError {
    /// A size is zero.
    #[error("a GPT cannot have `{size}` = 0")]
    Zero {
        /// The size.
        size: &'static str,
    },
    /// The heads cannot share the hidden width equally.
    #[error(
        "hidden width {hidden} cannot be shared by {heads} heads: it must be a multiple of them"
    )]
    Heads {
        /// The width.
        hidden: usize,
        /// The heads.
        heads: usize,
    },
}

impl GptConfig {
    /// Checks that a model can have these sizes.
    ///
    /// # Errors
    /// A size of zero, or a width that the heads cannot share.
    pub fn validate(&self) -> std::result::Result<(), GptConfigError> {
        let sizes = [
            ("layers", self.layers),
            ("heads", self.heads),
            ("hidden", self.hidden),
            ("seq", self.seq),
            ("vocab", self.vocab),
        ];
        if let Some((size, _)) = sizes.into_iter().find(|&(_, value)| value == 0) {
            return Err(GptConfigError::Zero { size });
        }
        if !self.hidden.is_multiple_of(self.heads) {
            return Err(GptConfigError::Heads {
                hidden: self.hidden,
                heads: self.heads,
            });
        }
        Ok(())
    }
}
