//! torch's `Optimizer.state_dict` and `load_state_dict`: this rank's state by parameter id. No communication.

use fsdp_state::StateDict;

use super::{OptimStateKeyType, StagedLocal, hyperparameters_of, local_dict};
use crate::Result;
use crate::optimizer::Optimizer;

impl Optimizer {
    /// Returns the state of this rank: `{"state": {"0": {…}}, "param_groups": [{…, "params": [0, 1]}]}`, as torch's
    /// `Optimizer.state_dict` gives it. Ids are positions over all groups, and are text as keys of `state`.
    ///
    /// A parameter is what this rank steps on. With `use_orig_params` it is the flat piece of one of the model's
    /// parameters, of shape `[elements on this rank]`, or the whole parameter in its own shape where nothing is
    /// sharded; a piece without elements has an id but no state there: its scalars, which this rank must know to save
    /// the same as others, are under a key of their own, `state_of_empty_pieces`. Without, it is a rank's whole shard
    /// of a FlatParameter, right padding (zeros) included. Parameters that have not been stepped have no state. Tensors
    /// are copies.
    ///
    /// # Errors
    /// candle's.
    pub fn state_dict(&self) -> Result<StateDict> {
        Ok(self.state_dict_views(OptimStateKeyType::ParamId)?.copy()?)
    }

    /// Returns the same as [`Self::state_dict`], with names instead of ids, as torch's named optimizers give it. The
    /// names are those of the model's parameters with `use_orig_params`, and `<unit>._flat_param` without.
    ///
    /// # Errors
    /// candle's.
    pub fn named_state_dict(&self) -> Result<StateDict> {
        Ok(self.state_dict_views(OptimStateKeyType::ParamName)?.copy()?)
    }

    /// Returns the local state dict, its tensors views of the live state.
    pub(crate) fn state_dict_views(&self, key_type: OptimStateKeyType) -> Result<StateDict> {
        let groups = self.groups().iter().map(hyperparameters_of).collect();
        local_dict(self, key_type, |index| self.locals()[index].state.as_ref(), self.user_state(), Some(groups))
    }

    /// Takes over a state dict as [`Self::state_dict`] or [`Self::named_state_dict`] gives it: torch's
    /// `Optimizer.load_state_dict`. All or nothing; tensors are copied, and nothing is cast. State under keys that are
    /// neither ids nor names is kept, and given out again.
    ///
    /// Groups and their parameters are matched by position, as in torch. Parameters that the dict has no state for get
    /// none. Where this rank has nothing of a parameter and the dict (one of torch's) has no `state_of_empty_pieces`,
    /// the parameter counts as having been stepped as often as the others of its group, if those agree.
    ///
    /// # Errors
    /// [`OptimStateError`](super::OptimStateError): another number of groups or parameters, tensors of another shape or
    /// dtype than this rank's piece, entries that the algorithm needs and that are missing; malformed groups and
    /// hyperparameters.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        self.take(self.stage_state_dict(state)?)
    }

    /// Takes over state that has been loaded and checked.
    pub(crate) fn take(&mut self, staged: StagedLocal) -> Result<()> {
        let StagedLocal { states, groups, user_state } = staged;
        self.replace_state(states, groups)?;
        self.set_user_state(user_state);
        Ok(())
    }
}
