//! One parameter of a unit.

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::Tensor;

/// Returns `true` if candle's backward reaches a parameter, as it does for all that were built to be trained.
///
/// The backward also reaches frozen parameters of units that are released after their backward: gradients of earlier
/// layers need their values, and reaching them shows when they can be released. Frozen parameters of the root stay
/// gathered until the end, so it need not reach them.
pub(crate) const fn takes_part_in_backward(is_trainable: bool, is_root: bool, is_sharded: bool) -> bool {
    is_trainable || (is_sharded && !is_root)
}

/// One parameter of a unit.
#[derive(Debug)]
pub(crate) struct Parameter {
    pub(crate) fqn: String,
    /// The tensor that the model computes with. Its storage is released while the unit is sharded.
    pub(crate) tensor: Tensor,
    /// `true` if the model was built to train it. Only such a parameter can be frozen and unfrozen later.
    pub(crate) is_trainable: bool,
    requires_grad: AtomicBool,
}

impl Parameter {
    /// Makes a parameter that is trained from the beginning if it is trainable.
    pub(crate) const fn new(fqn: String, tensor: Tensor, is_trainable: bool) -> Self {
        Parameter { fqn, tensor, is_trainable, requires_grad: AtomicBool::new(is_trainable) }
    }

    /// Returns `true` if the parameter is trained now.
    pub(crate) fn requires_grad(&self) -> bool {
        self.requires_grad.load(Ordering::Relaxed)
    }

    pub(crate) fn set_requires_grad(&self, requires_grad: bool) {
        self.requires_grad.store(requires_grad, Ordering::Relaxed);
    }
}
