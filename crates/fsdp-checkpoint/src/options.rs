//! Options of `get_state_dict` and `set_state_dict`.

use crate::CheckpointError;

/// torch's `StateDictOptions`; the same on every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateDictOptions {
    /// Whole tensors instead of sharded ones.
    pub full_state_dict: bool,
    /// Values on the CPU. With `full_state_dict` only rank 0 gets them, the others an empty dict, as in torch.
    pub cpu_offload: bool,
    /// Leave frozen parameters out of the model state dict.
    pub ignore_frozen_params: bool,
    /// Whether names that differ between a state dict and the model are an error on load. Shapes always are.
    pub strict: bool,
    /// Load from the dicts that rank 0 has; the others may pass empty ones. Needs `full_state_dict`.
    pub broadcast_from_rank0: bool,
    /// `state.<fqn>.<name>` and `param_groups.<fqn>.<hyperparameter>` instead of nested dicts.
    pub flatten_optimizer_state_dict: bool,
    /// Sharded values are views of the live model and optimizer, as torch's are: no copy, but the next step changes
    /// them. Right for a save; by default values are copied.
    pub share_storage: bool,
}

impl Default for StateDictOptions {
    fn default() -> Self {
        StateDictOptions {
            full_state_dict: false,
            cpu_offload: false,
            ignore_frozen_params: false,
            strict: true,
            broadcast_from_rank0: false,
            flatten_optimizer_state_dict: false,
            share_storage: false,
        }
    }
}

impl StateDictOptions {
    pub(crate) const fn check(&self) -> Result<(), CheckpointError> {
        if self.broadcast_from_rank0 && !self.full_state_dict {
            return Err(CheckpointError::Options {
                problem: "full_state_dict must be true when broadcast_from_rank0 is true",
            });
        }
        Ok(())
    }
}
