//! Names and ids of parameters in optimizer state dicts, and prefixes that wrappers put before
//! names.

use std::collections::HashMap;

use fsdp_state::{StateDict, StateError};

use super::{OptimStateError, OptimStateKeyType};
use crate::error::Result;
use crate::state::{EMPTY_PIECES, group_dicts, key_type_of, read_param_groups};

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
/// let mut of_b = StateDict::new();
/// of_b.insert("step", 3.0);
/// let mut state = StateDict::new();
/// state.insert("state", [("1", StateValue::Dict(of_b))].into_iter().collect::<StateDict>());
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
        .ok_or_else(|| OptimStateError::MissingKey {
            key: "state".to_owned(),
        })?;
    let mut groups = read_param_groups(state)?;
    if key_type_of(states, groups.iter().filter_map(|group| group.key_type))? == Some(key_type) {
        return Ok(state.copy()?);
    }
    let keys = match key_type {
        OptimStateKeyType::ParamName => NewKeys::Names(names),
        // Of a name that is there twice, the first counts.
        OptimStateKeyType::ParamId => NewKeys::Ids(
            names
                .iter()
                .enumerate()
                .rev()
                .map(|(id, name)| (name.as_ref(), id))
                .collect(),
        ),
    };
    // Other keys of the dict stay as they are.
    let mut result = state.clone();
    for part in ["state", EMPTY_PIECES] {
        let Some(states) = state.dict(part) else {
            continue;
        };
        let mut rekeyed = StateDict::new();
        for (key, value) in states {
            let Some(new_key) = keys.rekey(key) else {
                return Err(OptimStateError::UnknownState {
                    key: key.clone(),
                    count: names.len(),
                }
                .into());
            };
            rekeyed.insert_new(new_key, value.clone())?;
        }
        result.insert(part, rekeyed);
    }
    if state.contains_key("param_groups") {
        for (index, group) in groups.iter_mut().enumerate() {
            for key in &mut group.params {
                *key = keys
                    .rekey(key)
                    .ok_or_else(|| OptimStateError::UnknownParam {
                        index,
                        key: key.clone(),
                    })?;
            }
            if key_type == OptimStateKeyType::ParamId {
                group.params.sort_by_key(|id| id.parse::<usize>().ok());
            }
            group.key_type = Some(key_type);
        }
        result.insert("param_groups", group_dicts(groups));
    }
    Ok(result.copy()?)
}

/// The keys that take the place of those of a state dict.
enum NewKeys<'a, N> {
    /// The names, by their ids.
    Names(&'a [N]),
    /// The ids, by their names.
    Ids(HashMap<&'a str, usize>),
}

impl<N: AsRef<str>> NewKeys<'_, N> {
    /// Returns the new key; `None` if the old one is none that is known.
    fn rekey(&self, key: &str) -> Option<String> {
        match self {
            NewKeys::Names(names) => {
                let name = names.get(key.parse::<usize>().ok()?)?;
                Some(name.as_ref().to_owned())
            }
            NewKeys::Ids(ids) => ids.get(key).map(usize::to_string),
        }
    }
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
