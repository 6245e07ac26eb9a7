//! Options of `get_state_dict` and `set_state_dict`.

use fsdp_state::KeepOn;

use crate::CheckpointError;

/// torch's `StateDictOptions`; the same on every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateDictOptions {
    /// Whole tensors instead of sharded ones. A load takes either, and each rank its part.
    pub full_state_dict: bool,
    /// Values on the CPU; a load does not mind. With `full_state_dict` only rank 0 gets them, the others an empty dict,
    /// as in torch, unless `keep_on` says otherwise.
    pub cpu_offload: bool,
    /// Which ranks get a full state dict; the others get an empty one. `None`: all, or rank 0 with `cpu_offload`.
    pub keep_on: Option<KeepOn>,
    /// Leave frozen parameters out of the model state dict, and do not miss them on load.
    pub ignore_frozen_params: bool,
    /// Only the parameters and buffers of these submodules (by FQN) in the model state dict; all if empty.
    /// A load of such a dict needs `strict` off.
    pub submodules: Vec<String>,
    /// Whether names keep the submodule's FQN in front. Without it only one submodule may be named.
    pub keep_submodule_prefixes: bool,
    /// Whether names that differ between a state dict and the model are an error on load. Shapes always are; state of
    /// parameters that no optimizer holds never is.
    pub strict: bool,
    /// Load from the dicts that rank 0 has; the others may pass empty ones. Needs `full_state_dict`.
    pub broadcast_from_rank0: bool,
    /// `state.<fqn>.<name>` and `param_groups.<fqn>.<hyperparameter>` instead of nested dicts. A load knows either.
    pub flatten_optimizer_state_dict: bool,
    /// Other names in the state dict than in the model: (FQN or prefix of FQNs in the model, the same in the dict).
    pub fqn_renames: Vec<(String, String)>,
    /// Sharded values are views of the live model and optimizer, as torch's are: no copy, but the next step changes
    /// them. Right for a save and for [`load_in_place`](crate::load_in_place); by default values are copied. Setting such
    /// views leaves them where they are, with or without this.
    pub share_storage: bool,
}

impl Default for StateDictOptions {
    fn default() -> Self {
        StateDictOptions {
            full_state_dict: false,
            cpu_offload: false,
            keep_on: None,
            ignore_frozen_params: false,
            submodules: Vec::new(),
            keep_submodule_prefixes: true,
            strict: true,
            broadcast_from_rank0: false,
            flatten_optimizer_state_dict: false,
            fqn_renames: Vec::new(),
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
        if !self.keep_submodule_prefixes && self.submodules.len() != 1 {
            return Err(CheckpointError::Options {
                problem: "without keep_submodule_prefixes exactly one submodule must be named",
            });
        }
        Ok(())
    }

    /// The ranks that keep a full state dict.
    pub(crate) fn kept_on(&self) -> KeepOn {
        match &self.keep_on {
            Some(keep_on) => keep_on.clone(),
            None if self.cpu_offload => KeepOn::Ranks(vec![0]),
            None => KeepOn::All,
        }
    }
}
