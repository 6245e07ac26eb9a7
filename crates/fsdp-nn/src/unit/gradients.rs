//! The gradients of a unit on this rank, from the backward that computes them to the optimizer.

use std::collections::HashSet;

use candle_core::Tensor;

/// The progress of the present backward, or the last one, with a unit.
#[derive(Debug, Default)]
pub(super) enum Backward {
    /// No backward has come to the unit, or it has ended without a reduction.
    #[default]
    Idle,
    /// The backward has yet to finish with these parameters.
    Expecting(HashSet<usize>),
    /// The backward reduces the unit after all others.
    ReducesLast,
    /// The backward has reduced the unit's gradients, or begun to.
    Reduced,
}

/// The gradients of a unit on this rank.
#[derive(Debug)]
pub(super) struct Gradients {
    pub(super) backward: Backward,
    /// The gradients that the backward has computed so far, by the numbers of their parameters.
    pub(super) received: Vec<(usize, Tensor)>,
    /// The gradient of this rank's own batches. It exists from the last gradient to the reduction.
    pub(super) unsharded: Option<Unsharded>,
    /// The gradient that has been reduced over the shard group, and not yet over replicas; as long
    /// as the shard.
    pub(super) partial: Option<Tensor>,
    /// The gradient that has been reduced over all ranks, as long as the shard.
    pub(super) reduced: Option<Tensor>,
    /// `true` for each parameter that got a gradient on this rank since the last `zero_grad`.
    pub(super) has_own_gradient: Vec<bool>,
    /// `true` for each parameter that got a gradient on any rank; `None` where the ranks have not
    /// agreed on it.
    pub(super) has_gradient: Option<Vec<bool>>,
}

/// The flat gradient of all parameters of a unit.
#[derive(Debug)]
pub(super) struct Unsharded {
    pub(super) flat: Tensor,
    /// `true` for each parameter whose gradient has been written.
    pub(super) is_written: Vec<bool>,
}

impl Gradients {
    /// Makes the state of a unit of so many parameters before its first backward.
    pub(super) fn new(param_count: usize) -> Self {
        Gradients {
            backward: Backward::Idle,
            received: Vec::new(),
            unsharded: None,
            partial: None,
            reduced: None,
            has_own_gradient: vec![false; param_count],
            has_gradient: None,
        }
    }

    /// Returns what is left to reduce.
    pub(super) fn unreduced(&self) -> PendingReduction {
        if matches!(self.backward, Backward::Reduced) {
            PendingReduction::AlreadyReduced
        } else if self.unsharded.is_some() {
            PendingReduction::Whole
        } else if self.partial.is_some() {
            PendingReduction::Partial
        } else {
            PendingReduction::Nothing
        }
    }
}

/// The gradients of a unit that a rank has at the end of a backward, and has yet to reduce. Of
/// several ranks, the one whose variant comes last in this list decides what they do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PendingReduction {
    /// No gradients.
    Nothing,
    /// Gradients that have been reduced over the shard group, and not yet over replicas.
    Partial,
    /// Gradients of the rank's own batches, whole.
    Whole,
    /// No gradients, because the rank has reduced them in this backward already.
    AlreadyReduced,
}

impl PendingReduction {
    /// Returns the variant of this number, which ranks send each other; the last one for any other
    /// number.
    pub(crate) const fn from_byte(byte: u8) -> Self {
        match byte {
            0 => PendingReduction::Nothing,
            1 => PendingReduction::Partial,
            2 => PendingReduction::Whole,
            _ => PendingReduction::AlreadyReduced,
        }
    }
}
