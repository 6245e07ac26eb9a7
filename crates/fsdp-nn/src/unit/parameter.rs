//! One parameter of a unit.

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::Tensor;

/// One parameter of a unit.
#[derive(Debug)]
pub(crate) struct Parameter {
    pub(crate) fqn: String,
    /// The tensor that the model computes with. Its storage is released while the unit is sharded.
    pub(crate) tensor: Tensor,
    /// `true` if the model was built to train it. Only such a parameter can be frozen and unfrozen
    /// later.
    pub(crate) is_trainable: bool,
    /// `true` if candle records what is computed with it, so that a backward comes to it.
    pub(crate) is_in_graph: bool,
    requires_grad: AtomicBool,
}

impl Parameter {
    /// Makes a parameter that is trained from the beginning if it is trainable.
    pub(crate) const fn new(
        fqn: String,
        tensor: Tensor,
        is_trainable: bool,
        is_in_graph: bool,
    ) -> Self {
        Parameter {
            fqn,
            tensor,
            is_trainable,
            is_in_graph,
            requires_grad: AtomicBool::new(is_trainable),
        }
    }

    /// Returns `true` if the parameter is trained now.
    pub(crate) fn requires_grad(&self) -> bool {
        self.requires_grad.load(Ordering::Relaxed)
    }

    pub(crate) fn set_requires_grad(&self, requires_grad: bool) {
        self.requires_grad.store(requires_grad, Ordering::Relaxed);
    }
}
