//! Gradients that are sent in another dtype than they are computed in.

use candle_core::DType;

use crate::agreement::agree_on_model;
use crate::fully_sharded::FullyShardedDataParallel;
use crate::{NnError, Result};

/// The way in which gradients travel between ranks: torch's communication hooks of the same names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommHook {
    /// Rounded to `bf16`: torch's `bf16_compress_hook`.
    Bf16Compress,
    /// Rounded to `f16`: torch's `fp16_compress_hook`. What `f16` cannot hold becomes infinite:
    /// scale the loss ([`GradScaler`](crate::GradScaler)).
    Fp16Compress,
}

impl CommHook {
    const fn dtype(self) -> DType {
        match self {
            CommHook::Bf16Compress => DType::BF16,
            CommHook::Fp16Compress => DType::F16,
        }
    }
}

impl<M> FullyShardedDataParallel<M> {
    /// Sends gradients between ranks as a hook says, in all backwards to come: torch's
    /// `register_comm_hook`. They are rounded before they are sent, and converted back when they
    /// have been reduced; what is added up on a rank is not rounded. With `f32` gradients it halves
    /// what reductions move. As in torch, a model has one hook for good. Collectives: one
    /// agreement.
    ///
    /// ```
    /// # use candle_nn::linear;
    /// # use fsdp_nn::{CommHook, FsdpConfig, FullyShardedDataParallel, NnError};
    /// # fsdp_comm::run_local(2, |group| {
    /// let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| linear(3, 1, scope.vb()))?;
    /// model.register_comm_hook(CommHook::Bf16Compress)?;
    /// # Ok::<(), NnError>(())
    /// # })?.into_iter().collect::<Result<Vec<()>, _>>()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`NnError::SecondHook`]; [`NnError::DifferentModels`] if ranks register different ones. One
    /// rank's error is every rank's.
    pub fn register_comm_hook(&self, hook: CommHook) -> Result<()> {
        let shared = &self.parameters().shared;
        let free = if shared.sent_dtype().is_none() {
            Ok(hook)
        } else {
            Err(NnError::SecondHook)
        };
        let hook = agree_on_model(self.group(), "register_comm_hook", free, |hook| {
            vec![format!("the hook {hook:?}")]
        })?;
        if shared.set_sent_dtype(hook.dtype()) {
            Ok(())
        } else {
            Err(NnError::SecondHook)
        }
    }
}
