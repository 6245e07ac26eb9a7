//! The state schema: what an optimizer keeps for each parameter.

use fsdp_layout::DType;

/// One state entry of a parameter, under torch's name.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StateEntry {
    /// The key in an optimizer state dict, e.g. `exp_avg`.
    pub name: &'static str,
    /// Its shape.
    pub kind: StateKind,
    /// The value before the first update.
    pub initial: Initial,
}

/// The shape of a state entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateKind {
    /// 0-d, one for the whole parameter, the same on every rank that holds a piece of it.
    Scalar,
    /// A tensor like the parameter, and sharded with it.
    LikeParameter,
}

/// The value of a state entry before the first update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Initial {
    /// This value, everywhere.
    Value(f64),
    /// The parameter's own value at its first update.
    Parameter,
    /// Nothing: the entry comes into being with the first update, which stores the gradient (after
    /// maximize and weight decay) in it. Until then a torch state dict does not have the parameter.
    FirstGradient,
}

/// Room for the longest list of state entries.
pub(super) type StateEntries = [Option<StateEntry>; 4];

impl StateEntry {
    pub(super) const STEP: StateEntry = StateEntry {
        name: "step",
        kind: StateKind::Scalar,
        initial: Initial::Value(0.0),
    };

    /// Makes an entry of the parameter's shape that has the value `initial` everywhere at first.
    pub(super) const fn like_parameter(name: &'static str, initial: f64) -> StateEntry {
        StateEntry {
            name,
            kind: StateKind::LikeParameter,
            initial: Initial::Value(initial),
        }
    }

    /// Returns the entry's dtype: that of the parameter, but `f32` for a scalar.
    #[must_use]
    pub const fn dtype(&self, parameter: DType) -> DType {
        match self.kind {
            StateKind::Scalar => DType::F32,
            StateKind::LikeParameter => parameter,
        }
    }
}
