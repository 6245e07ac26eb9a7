//! The formats of an optimizer state dict: nested, and flat (`flatten_optimizer_state_dict`).

use std::collections::HashSet;

use fsdp_state::{StateDict, StateError};

use super::StateDictOptions;
use crate::Result;
use crate::state::{OptimStateError, SavedGroup, optim_dict, read_param_groups};

/// Returns a nested state dict under the names of the state dict, flat if the options say so.
///
/// # Errors
/// [`StateError::DuplicateKey`] for two parameters that get one name; [`OptimStateError::InvalidKeys`] for state under
/// a user's key, which the flat format has no place for.
pub(super) fn to_dict(nested: &StateDict, options: &StateDictOptions) -> Result<StateDict> {
    let options = options.of_optimizers();
    let name = |fqn: &str| options.name_in_dict(fqn).unwrap_or_else(|| fqn.to_owned());
    let mut groups = read_param_groups(nested)?;
    groups.iter_mut().flat_map(|group| &mut group.params).for_each(|param| *param = name(param));
    let mut states = StateDict::new();
    for (fqn, state) in nested.dict("state").into_iter().flatten() {
        if states.insert(name(fqn), state.clone()).is_some() {
            return Err(StateError::DuplicateKey { key: name(fqn) }.into());
        }
    }
    if options.flatten_optimizer_state_dict {
        return flatten(&states, groups);
    }
    Ok(optim_dict(states, groups))
}

/// Returns the same in the flat format, which has a place for state of parameters only.
fn flatten(states: &StateDict, groups: Vec<SavedGroup>) -> Result<StateDict> {
    let mut flat = StateDict::new();
    let mut parameters: HashSet<String> = HashSet::new();
    for group in groups {
        for fqn in &group.params {
            for (key, value) in &group.hyperparameters {
                flat.insert(format!("param_groups.{fqn}.{key}"), value.clone());
            }
        }
        parameters.extend(group.params);
    }
    for (fqn, state) in states {
        let Some(entries) = state.as_dict().filter(|_| parameters.contains(fqn)) else {
            let expected = "a flat optimizer state dict has a place for the state of parameters only".to_owned();
            return Err(OptimStateError::InvalidKeys { keys: vec![fqn.clone()], expected }.into());
        };
        for (name, value) in entries {
            flat.insert(format!("state.{fqn}.{name}"), value.clone());
        }
    }
    Ok(flat)
}
