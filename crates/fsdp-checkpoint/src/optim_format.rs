//! The formats of an optimizer state dict: nested, and flat (`flatten_optimizer_state_dict`); and the names in either.

use fsdp_layout::PlainValue;
use fsdp_nn::ShardedParameters;
use fsdp_nn::fsdp_state::OptimStateKeyType;
use fsdp_nn::optim_state::read_param_groups;
use fsdp_state::{StateDict, StateValue};

use crate::{CheckpointError, StateDictOptions, names};

/// The nested state dict under the names of the state dict, flat if the options say so.
pub(crate) fn to_dict(nested: StateDict, options: &StateDictOptions) -> Result<StateDict, CheckpointError> {
    // Submodules narrow the model state dict only.
    let options = StateDictOptions { submodules: Vec::new(), keep_submodule_prefixes: true, ..options.clone() };
    let renamed = rename(nested, &|fqn| names::to_dict(fqn, &options).unwrap_or_else(|| fqn.to_owned()))?;
    if options.flatten_optimizer_state_dict { flatten(&renamed) } else { Ok(renamed) }
}

/// A state dict of either format, nested and under the model's names. An empty dict stays one.
pub(crate) fn to_model(
    state: &StateDict,
    parameters: &ShardedParameters,
    options: &StateDictOptions,
) -> Result<StateDict, CheckpointError> {
    let options = StateDictOptions { submodules: Vec::new(), keep_submodule_prefixes: true, ..options.clone() };
    let is_nested = state.contains_key("state") || state.contains_key("param_groups") || state.is_empty();
    let nested = if is_nested { state.clone() } else { unflatten(state, parameters, &options)? };
    rename(nested, &|name| names::to_model(name, &options))
}

fn rename(nested: StateDict, name: &dyn Fn(&str) -> String) -> Result<StateDict, CheckpointError> {
    let mut renamed = StateDict::new();
    let groups = read_param_groups(&nested)?;
    for (key, value) in nested {
        match (key.as_str(), value) {
            ("state", StateValue::Dict(states)) => {
                let states: StateDict = states.into_iter().map(|(fqn, state)| (name(&fqn), state)).collect();
                renamed.insert(key, states);
            }
            ("param_groups", _) => {
                let groups = groups.iter().map(|group| {
                    let entries = group.hyperparameters.iter().cloned();
                    let mut dict: StateDict = entries.map(|(key, value)| (key, StateValue::Plain(value))).collect();
                    // Ids stay ids, so that a load tells them from names.
                    let param = |key: &String| match (group.key_type, key.parse()) {
                        (Some(OptimStateKeyType::ParamId), Ok(id)) => PlainValue::Int(id),
                        _ => PlainValue::Str(name(key)),
                    };
                    let params = group.params.iter().map(param).collect();
                    dict.insert("params", PlainValue::List(params));
                    StateValue::Dict(dict)
                });
                renamed.insert(key, StateValue::List(groups.collect()));
            }
            (_, value) => {
                renamed.insert(key, value);
            }
        }
    }
    Ok(renamed)
}

fn flatten(nested: &StateDict) -> Result<StateDict, CheckpointError> {
    let mut flat = StateDict::new();
    for (fqn, state) in nested.dict("state").into_iter().flatten() {
        for (name, value) in state.as_dict().into_iter().flatten() {
            flat.insert(format!("state.{fqn}.{name}"), value.clone());
        }
    }
    for group in read_param_groups(nested)? {
        for fqn in &group.params {
            for (key, value) in &group.hyperparameters {
                flat.insert(format!("param_groups.{fqn}.{key}"), value.clone());
            }
        }
    }
    Ok(flat)
}

/// Each parameter gets a group of its own; where they meet in a live group, loading checks that they agree.
fn unflatten(
    flat: &StateDict,
    parameters: &ShardedParameters,
    options: &StateDictOptions,
) -> Result<StateDict, CheckpointError> {
    let mut states = StateDict::new();
    let mut groups = StateDict::new();
    for (key, value) in flat {
        let place = ["state.", "param_groups."].iter().find_map(|kind| {
            let (fqn, name) = split(key.strip_prefix(kind)?, parameters, options)?;
            Some((*kind, fqn, name))
        });
        let Some((kind, fqn, name)) = place else {
            return Err(CheckpointError::UnknownFlatKey { key: key.clone() });
        };
        let dicts = if kind == "state." { &mut states } else { &mut groups };
        if !dicts.contains_key(fqn) {
            dicts.insert(fqn, StateDict::new());
        }
        if let Some(StateValue::Dict(dict)) = dicts.get_mut(fqn) {
            dict.insert(name, value.clone());
        }
    }
    let groups = groups.into_iter().map(|(fqn, group)| match group {
        StateValue::Dict(mut group) => {
            group.insert("params", PlainValue::List(vec![PlainValue::Str(fqn)]));
            StateValue::Dict(group)
        }
        other => other,
    });
    let groups = StateValue::List(groups.collect());
    let mut nested = StateDict::new();
    nested.insert("state", states);
    nested.insert("param_groups", groups);
    Ok(nested)
}

/// Splits `<fqn>.<name>` at the end of a parameter's name.
fn split<'a>(key: &'a str, parameters: &ShardedParameters, options: &StateDictOptions) -> Option<(&'a str, &'a str)> {
    let mut dots = key.match_indices('.').map(|(at, _)| at).rev();
    dots.find_map(|at| {
        let (fqn, name) = (&key[..at], &key[at + 1..]);
        parameters.contains(&names::to_model(fqn, options)).then_some((fqn, name))
    })
}
