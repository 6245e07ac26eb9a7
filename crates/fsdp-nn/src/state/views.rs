//! The live state of a sharded model and its optimizers, as state dicts of views.

use fsdp_state::{StateDict, StateValue};

use super::OptimStateKeyType;
use super::groups::{SavedGroup, make_optim_dict};
use crate::error::Result;
use crate::model::ShardedParameters;
use crate::optimizer::Optimizer;

/// The content of a state dict in place of state that a parameter does not have yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissingState {
    /// Nothing, as `FSDP.optim_state_dict` does.
    Omit,
    /// The values with which the algorithm begins, of which an entry that is made of the first
    /// gradient is none. The optimizer is not changed.
    Initial,
    /// Initial values, and zeros for entries that begin with the first step: a place for every
    /// entry that a checkpoint may have. The optimizer is not changed.
    Complete,
}

/// Returns the model state dict with sharded values: every parameter under each of its names, then
/// persistent buffers. torch's `state_dict` of type `SHARDED` before any copy.
///
/// Values are views of the live parameters, as torch's are: the next optimizer step changes them.
/// The same keys on every rank; a rank that owns nothing of a parameter has a sharded tensor
/// without boxes.
///
/// # Errors
/// candle's errors.
pub fn live_model_state_dict(parameters: &ShardedParameters) -> Result<StateDict> {
    let mut state = StateDict::new();
    for name in parameters.names() {
        state.insert(name, parameters.parameter(name)?);
    }
    state.extend(persistent_buffers(parameters));
    Ok(state)
}

/// Returns the buffers that are saved, by their names.
pub(crate) fn persistent_buffers(
    parameters: &ShardedParameters,
) -> impl Iterator<Item = (&str, StateValue)> {
    let persistent = parameters
        .buffers()
        .iter()
        .filter(|(_, (_, persistent))| *persistent);
    persistent.map(|(name, (value, _))| (name.as_str(), value.clone().into()))
}

/// Returns the state of several optimizers over one model, as torch's `get_optimizer_state_dict`
/// has it before any copy: `{"state": {fqn: {name: value}}, "param_groups": [{…, "params":
/// [fqn]}]}`.
///
/// States are joined and groups are concatenated in order. Values shaped like a parameter are
/// sharded views of the live state, `step` is a 0-d tensor of its own for each parameter. State
/// under keys that are no parameter's is there too. The same keys on every rank.
///
/// # Errors
/// [`StateError::DuplicateKey`](fsdp_state::StateError::DuplicateKey) for a key under which two
/// optimizers have state; candle's errors.
pub fn live_optim_state_dict(
    optimizers: &[&Optimizer],
    missing: MissingState,
) -> Result<StateDict> {
    let (state, groups) = live_states_and_groups(optimizers, missing, &str::to_owned)?;
    Ok(make_optim_dict(state, groups))
}

/// Returns the two parts of [`live_optim_state_dict`]. `rename` turns the names of the model's
/// parameters into those of the state dict.
pub(crate) fn live_states_and_groups(
    optimizers: &[&Optimizer],
    missing: MissingState,
    rename: &dyn Fn(&str) -> String,
) -> Result<(StateDict, Vec<SavedGroup>)> {
    let mut state = StateDict::new();
    let mut groups = Vec::new();
    for optimizer in optimizers {
        optimizer.parameters().synchronize()?;
        // The parameters of a FlatParameter share its state, which is therefore made once.
        let mut states = Vec::with_capacity(optimizer.locals().len());
        for (index, local) in optimizer.locals().iter().enumerate() {
            let state = local.state.clone();
            states.push(match missing {
                MissingState::Initial if state.is_none() => optimizer.initial_state(index)?,
                MissingState::Omit | MissingState::Initial => state,
                MissingState::Complete => optimizer.complete_state(index)?,
            });
        }
        for group in optimizer.groups() {
            for fqn in group.fqns() {
                let Some(index) = optimizer.local_index(fqn) else {
                    continue;
                };
                let local = &optimizer.locals()[index];
                if let Some(local_state) = &states[index] {
                    let (_, param) = optimizer.parameters().place(fqn)?;
                    state.insert_new(rename(fqn), local.portable_state(local_state, param)?)?;
                }
            }
            let params = group.fqns().iter().map(|fqn| rename(fqn)).collect();
            groups.push(SavedGroup::from_live_group(
                group,
                params,
                OptimStateKeyType::ParamName,
            ));
        }
        // A key that two optimizers have state under is an error: one of them would be lost.
        for (key, value) in optimizer.user_state() {
            state.insert_new(rename(key), value.clone())?;
        }
    }
    Ok((state, groups))
}
