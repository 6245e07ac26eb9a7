//! Names and ids of parameters in optimizer state dicts, and prefixes that wrappers put before names.

use fsdp_layout::PlainValue;
use fsdp_state::{StateDict, StateValue};

use super::{OptimStateError, OptimStateKeyType};
use crate::Result;
use crate::state::{SavedGroup, group_dict, key_type_of, read_param_groups};

/// Returns the same state under the other kind of keys: torch's `rekey_optim_state_dict`. `names[id]` is the name of
/// the parameter with that id: the order of the unsharded model's optimizer
/// ([`Optimizer::fqns`](crate::Optimizer::fqns) if both have the same groups). So a plain or DDP optimizer's dict by
/// ids becomes one that a sharded model loads, and back.
///
/// `state` is unchanged and the result owns its memory, also if nothing is to be done. Groups keep the order of their
/// parameters as names, and have ids sorted, which is the optimizer's order. No communication.
///
/// # Errors
/// [`OptimStateError::InvalidKeys`] for keys that are neither all names nor all ids; [`OptimStateError::UnknownState`]
/// and [`OptimStateError::UnknownParam`] for those that `names` lacks; malformed groups.
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
    let states = state.dict("state").ok_or_else(|| OptimStateError::MissingKey { key: "state".to_owned() })?;
    let groups = read_param_groups(state)?;
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    let id_of = |name: &str| names.iter().position(|known| *known == name);
    if key_type_of(states, groups.iter().filter_map(|group| group.key_type))? == Some(key_type) {
        return Ok(state.copy()?);
    }
    // Other keys of the dict stay as they are.
    let mut result = state.clone();
    let mut rekeyed = StateDict::new();
    for (key, value) in states {
        let new = match key_type {
            OptimStateKeyType::ParamName => {
                key.parse().ok().and_then(|id: usize| names.get(id)).map(|s| (*s).to_owned())
            }
            OptimStateKeyType::ParamId => id_of(key).map(|id| id.to_string()),
        };
        let Some(new) = new else {
            let (id, count) = (key.clone(), names.len());
            return Err(OptimStateError::UnknownState { key: id, count }.into());
        };
        rekeyed.insert(new, value.clone());
    }
    result.insert("state", rekeyed);
    if state.contains_key("param_groups") {
        let mut dicts = Vec::with_capacity(groups.len());
        for (index, group) in groups.into_iter().enumerate() {
            let unknown = |key: &String| OptimStateError::UnknownParam { index, key: key.clone() };
            let params: Vec<PlainValue> = match key_type {
                OptimStateKeyType::ParamName => {
                    let name = |key: &String| key.parse().ok().and_then(|id: usize| names.get(id)).copied();
                    let named = group.params.iter().map(|key| Ok(name(key).ok_or_else(|| unknown(key))?.into()));
                    named.collect::<Result<_, OptimStateError>>()?
                }
                OptimStateKeyType::ParamId => {
                    let ids = group.params.iter().map(|key| id_of(key).ok_or_else(|| unknown(key)));
                    let mut ids: Vec<usize> = ids.collect::<Result<_, OptimStateError>>()?;
                    ids.sort_unstable();
                    ids.into_iter().map(|id| PlainValue::Int(id as i64)).collect()
                }
            };
            let params = params.iter().map(|param| match param {
                PlainValue::Int(id) => id.to_string(),
                other => other.as_str().unwrap_or_default().to_owned(),
            });
            dicts.push(group_dict(SavedGroup { params: params.collect(), key_type: Some(key_type), ..group }));
        }
        result.insert("param_groups", StateValue::List(dicts));
    }
    Ok(result.copy()?)
}

/// Returns a state dict without a prefix that a wrapper put before its names (`module.` for DDP, `_orig_mod.` for a
/// compiled model): torch's `consume_prefix_in_state_dict_if_present`, which however changes the dict in place. Names
/// without the prefix stay. Tensors are shared.
///
/// ```
/// use fsdp_nn::torch::consume_prefix_in_state_dict_if_present;
/// use fsdp_state::StateDict;
/// let mut state = StateDict::new();
/// state.insert("module.h.0.weight", 1.0);
/// let state = consume_prefix_in_state_dict_if_present(&state, "module.");
/// assert!(state.contains_key("h.0.weight"));
/// ```
#[must_use]
pub fn consume_prefix_in_state_dict_if_present(state: &StateDict, prefix: &str) -> StateDict {
    let strip =
        |(name, value): (&String, &StateValue)| (name.strip_prefix(prefix).unwrap_or(name).to_owned(), value.clone());
    state.iter().map(strip).collect()
}
