//! Names and ids of parameters in optimizer state dicts, and prefixes that wrappers put before
//! names.

use std::collections::HashMap;

use fsdp_state::{StateDict, StateError};

use super::{OptimStateError, OptimStateKeyType};
use crate::error::Result;
use crate::state::{EMPTY_PIECES, find_key_type, make_group_dicts, read_param_groups};

/// Returns the same state under the other kind of keys: torch's `rekey_optim_state_dict`.
/// `names[id]` is the name of the parameter with that id: the order of the unsharded model's
/// optimizer ([`Optimizer::fqns`](crate::Optimizer::fqns) if both have the same groups). So a plain
/// or DDP optimizer's dict by ids becomes one that a sharded model loads, and back.
///
/// `state` is unchanged and the result owns its memory, also if nothing is to be done. Groups keep
/// the order of their parameters as names, and have ids sorted, which is the optimizer's order. No
/// communication.
///
/// # Errors
/// [`OptimStateError::InvalidKeys`] for keys that are neither all names nor all ids;
/// [`OptimStateError::UnknownState`] and [`OptimStateError::UnknownParam`] for those that `names`
/// lacks; [`StateError::DuplicateKey`] for two ids of one name; malformed groups.
///
/// ```
/// use fsdp_layout::PlainValue;
/// use fsdp_nn::torch::{OptimStateKeyType, rekey_optim_state_dict};
/// use fsdp_state::{StateDict, StateValue};
/// let mut group = StateDict::new();
/// group.insert("params", PlainValue::List(vec![PlainValue::Int(0), PlainValue::Int(1)]));
/// let mut b_state = StateDict::new();
/// b_state.insert("step", 3.0);
/// let mut state = StateDict::new();
/// state.insert("state", [("1", StateValue::Dict(b_state))].into_iter().collect::<StateDict>());
/// state.insert("param_groups", StateValue::List(vec![group.into()]));
/// let named = rekey_optim_state_dict(&state, OptimStateKeyType::ParamName, &["a", "b"])?;
/// assert!(named.dict("state").unwrap().contains_key("b"));
/// # Ok::<(), fsdp_nn::NnError>(())
/// ```
pub fn rekey_optim_state_dict(
    state: &StateDict,
    key_type: OptimStateKeyType,
    names: &[impl AsRef<str>],
) -> Result<StateDict> {
    let states = state
        .dict("state")
        .ok_or_else(|| OptimStateError::missing_key("state"))?;
    let mut groups = read_param_groups(state)?;
    if find_key_type(states, groups.iter().filter_map(|group| group.key_type))? == Some(key_type) {
        return Ok(state.copy()?);
    }
    let ids = (0..names.len()).map(|id| id.to_string());
    let names_and_ids = names.iter().map(|name| name.as_ref().to_owned()).zip(ids);
    let new_keys: HashMap<String, String> = match key_type {
        OptimStateKeyType::ParamName => names_and_ids.map(|(name, id)| (id, name)).collect(),
        // Of a name that is there twice, the first counts.
        OptimStateKeyType::ParamId => names_and_ids.rev().collect(),
    };
    // Other keys of the dict stay as they are.
    let mut result = state.clone();
    for part in ["state", EMPTY_PIECES] {
        let Some(states) = state.dict(part) else {
            continue;
        };
        let mut rekeyed = StateDict::new();
        for (key, value) in states {
            let Some(new_key) = new_keys.get(key) else {
                return Err(OptimStateError::UnknownState {
                    key: key.clone(),
                    count: names.len(),
                }
                .into());
            };
            rekeyed.insert_new(new_key.as_str(), value.clone())?;
        }
        result.insert(part, rekeyed);
    }
    if state.contains_key("param_groups") {
        for (index, group) in groups.iter_mut().enumerate() {
            for key in &mut group.params {
                let Some(new_key) = new_keys.get(key) else {
                    let key = key.clone();
                    return Err(OptimStateError::UnknownParam { index, key }.into());
                };
                key.clone_from(new_key);
            }
            if key_type == OptimStateKeyType::ParamId {
                group.params.sort_by_key(|id| id.parse::<usize>().ok());
            }
            group.key_type = Some(key_type);
        }
        result.insert("param_groups", make_group_dicts(groups));
    }
    Ok(result.copy()?)
}

/// Returns a state dict without a prefix that a wrapper put before its names (`module.` for DDP,
/// `_orig_mod.` for a compiled model): torch's `consume_prefix_in_state_dict_if_present`, which
/// however changes the dict in place. Names without the prefix stay. Tensors are shared.
///
/// # Errors
/// [`StateError::DuplicateKey`] for a name that is there with the prefix and without, of which
/// torch drops one.
///
/// ```
/// use fsdp_nn::torch::consume_prefix_in_state_dict_if_present;
/// use fsdp_state::StateDict;
/// let mut state = StateDict::new();
/// state.insert("module.h.0.weight", 1.0);
/// let state = consume_prefix_in_state_dict_if_present(&state, "module.")?;
/// assert!(state.contains_key("h.0.weight"));
/// # Ok::<(), fsdp_state::StateError>(())
/// ```
pub fn consume_prefix_in_state_dict_if_present(
    state: &StateDict,
    prefix: &str,
) -> Result<StateDict, StateError> {
    let mut stripped = StateDict::new();
    for (name, value) in state {
        stripped.insert_new(name.strip_prefix(prefix).unwrap_or(name), value.clone())?;
    }
    Ok(stripped)
}
