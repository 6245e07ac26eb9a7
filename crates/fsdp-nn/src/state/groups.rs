//! `param_groups`: read from state dicts, written, and matched with live groups.

use std::collections::{HashMap, HashSet, VecDeque};

use candle_core::{DType, Tensor};
use fsdp_layout::PlainValue;
use fsdp_state::{StateDict, StateValue};

use super::OptimStateKeyType;
use crate::error::{NnError, Result, StateDictError};
use crate::model::ShardedParameters;
use crate::optimizer::{GroupUpdate, Optimizer, ParamGroup};

/// A param group of a state dict.
#[derive(Debug, Clone)]
pub(crate) struct SavedGroup {
    /// Hyperparameters, in order; tensors of one element have become numbers.
    pub(crate) hyperparameters: Vec<(String, PlainValue)>,
    /// Names of the parameters, as the state dict has them; or their ids, as text.
    pub(crate) params: Vec<String>,
    /// The kind of `params`; `None` without parameters.
    pub(crate) key_type: Option<OptimStateKeyType>,
}

impl SavedGroup {
    /// Returns a live group as a state dict has it. `params` are the names or ids of its
    /// parameters. Its hyperparameters come in torch's order, and after them the keys that its
    /// algorithm does not know.
    pub(crate) fn from_live_group(
        group: &ParamGroup,
        params: Vec<String>,
        key_type: OptimStateKeyType,
    ) -> Self {
        let hyperparameters = group
            .algorithm
            .to_group()
            .into_iter()
            .chain(group.extra.iter().cloned())
            .collect();
        SavedGroup {
            hyperparameters,
            params,
            key_type: Some(key_type),
        }
    }

    /// Returns a group of one parameter, without hyperparameters.
    pub(crate) fn for_parameter(name: &str) -> Self {
        let key_type = Some(OptimStateKeyType::ParamName);
        SavedGroup {
            hyperparameters: Vec::new(),
            params: vec![name.to_owned()],
            key_type,
        }
    }
}

/// Makes an optimizer state dict of its two parts. Every optimizer state dict is made here.
pub(crate) fn make_optim_dict(states: StateDict, groups: Vec<SavedGroup>) -> StateDict {
    let mut dict = StateDict::new();
    dict.insert("state", states);
    dict.insert("param_groups", make_group_dicts(groups));
    dict
}

/// Returns the value of `param_groups` in an optimizer state dict. Every such value is made here.
pub(crate) fn make_group_dicts(groups: Vec<SavedGroup>) -> StateValue {
    StateValue::List(groups.into_iter().map(make_group_dict).collect())
}

/// Returns a group as a dict of `param_groups`.
fn make_group_dict(group: SavedGroup) -> StateValue {
    let mut dict: StateDict = group
        .hyperparameters
        .into_iter()
        .map(|(key, value)| (key, StateValue::Plain(value)))
        .collect();
    let mut params = Vec::with_capacity(group.params.len());
    for key in group.params {
        // Ids are written as numbers, so that a load can tell them from names.
        params.push(match (group.key_type, key.parse()) {
            (Some(OptimStateKeyType::ParamId), Ok(id)) => PlainValue::Int(id),
            _ => PlainValue::Str(key),
        });
    }
    dict.insert("params", PlainValue::List(params));
    StateValue::Dict(dict)
}

/// Reads the `param_groups` of an optimizer state dict. Without this key there are no groups.
///
/// # Errors
/// [`StateDictError::MalformedGroup`] for anything but a list of dicts with names or ids.
pub(crate) fn read_param_groups(state: &StateDict) -> Result<Vec<SavedGroup>> {
    let groups: Vec<StateValue> = match state.get("param_groups") {
        None => Vec::new(),
        Some(StateValue::List(groups) | StateValue::Tuple(groups)) => groups.clone(),
        Some(StateValue::Plain(PlainValue::List(groups) | PlainValue::Tuple(groups))) => {
            groups.iter().cloned().map(Into::into).collect()
        }
        Some(other) => {
            let problem = format!("`param_groups` is a {}", other.kind());
            return Err(malformed_group_error(0, problem));
        }
    };
    let groups = groups.iter().enumerate();
    groups
        .map(|(index, group)| read_group(index, group))
        .collect()
}

/// Returns the error for a group that cannot be read.
fn malformed_group_error(index: usize, problem: String) -> NnError {
    StateDictError::MalformedGroup { index, problem }.into()
}

/// Reads one group: `params` are names or ids, and all other keys are hyperparameters.
fn read_group(index: usize, group: &StateValue) -> Result<SavedGroup> {
    let Some(PlainValue::Dict(entries)) = to_plain(group) else {
        // Name what is in the way: a tensor of many elements is no hyperparameter.
        let misfit = group
            .as_dict()
            .into_iter()
            .flatten()
            .find(|(_, value)| to_plain(value).is_none());
        return Err(malformed_group_error(
            index,
            match misfit {
                Some((key, value)) => format!("`{key}` is a {}", value.kind()),
                None => format!("it is a {}", group.kind()),
            },
        ));
    };
    let mut group = SavedGroup {
        hyperparameters: Vec::new(),
        params: Vec::new(),
        key_type: None,
    };
    for (key, value) in entries {
        let PlainValue::Str(key) = key else {
            return Err(malformed_group_error(
                index,
                format!("a key is a {}", key.type_name()),
            ));
        };
        if key != "params" {
            group.hyperparameters.push((key, value));
            continue;
        }
        let (PlainValue::List(params) | PlainValue::Tuple(params)) = value else {
            return Err(malformed_group_error(
                index,
                format!("`params` is a {}", value.type_name()),
            ));
        };
        for param in params {
            let (key, key_type) = match param {
                PlainValue::Str(fqn) => (fqn, OptimStateKeyType::ParamName),
                PlainValue::Int(id) => (id.to_string(), OptimStateKeyType::ParamId),
                other => {
                    return Err(malformed_group_error(
                        index,
                        format!("`params` holds a {}, not names or ids", other.type_name()),
                    ));
                }
            };
            // Names and ids together cannot be told apart later: a name may be a number.
            if group
                .key_type
                .is_some_and(|earlier_type| earlier_type != key_type)
            {
                return Err(malformed_group_error(
                    index,
                    "`params` holds names and ids".to_owned(),
                ));
            }
            group.key_type = Some(key_type);
            group.params.push(key);
        }
    }
    Ok(group)
}

/// Returns a value as a plain one; tensors of one element (a learning rate may be one) become
/// numbers. Returns `None` for other tensors, and for containers of them.
pub(crate) fn to_plain(value: &StateValue) -> Option<PlainValue> {
    match value {
        StateValue::Plain(value) => Some(value.clone()),
        StateValue::Tensor(tensor) if tensor.elem_count() == 1 => to_number(tensor).ok(),
        StateValue::List(list) => Some(PlainValue::List(
            list.iter().map(to_plain).collect::<Option<_>>()?,
        )),
        StateValue::Tuple(list) => Some(PlainValue::Tuple(
            list.iter().map(to_plain).collect::<Option<_>>()?,
        )),
        StateValue::Dict(dict) => {
            let mut entries = Vec::new();
            for (key, value) in dict {
                entries.push((PlainValue::Str(key.clone()), to_plain(value)?));
            }
            Some(PlainValue::Dict(entries))
        }
        _ => None,
    }
}

/// Returns a tensor of one element as a number: an integer if its dtype holds integers.
pub(crate) fn to_number(tensor: &Tensor) -> candle_core::Result<PlainValue> {
    let element = tensor.flatten_all()?.get(0)?;
    if element.dtype().is_float() {
        Ok(element.to_dtype(DType::F64)?.to_scalar::<f64>()?.into())
    } else {
        Ok(element.to_dtype(DType::I64)?.to_scalar::<i64>()?.into())
    }
}

/// The saved groups, by the parameters that they name.
pub(crate) struct SavedGroups {
    pub(crate) groups: Vec<SavedGroup>,
    /// The positions of the groups that name a parameter, by the parameter's own name in the model.
    pub(crate) positions_by_parameter: HashMap<String, Vec<usize>>,
    /// The positions of groups without parameters that no live group has been matched with yet.
    unmatched_positions: VecDeque<usize>,
}

impl SavedGroups {
    /// Sorts groups by the parameters that they name.
    pub(crate) fn new(groups: Vec<SavedGroup>, parameters: &ShardedParameters) -> Self {
        let mut positions_by_parameter: HashMap<String, Vec<usize>> = HashMap::new();
        for (index, group) in groups.iter().enumerate() {
            for name in &group.params {
                positions_by_parameter
                    .entry(parameters.canonical_fqn(name).to_owned())
                    .or_default()
                    .push(index);
            }
        }
        let unmatched_positions = (0..groups.len())
            .filter(|&index| groups[index].params.is_empty())
            .collect();
        SavedGroups {
            groups,
            positions_by_parameter,
            unmatched_positions,
        }
    }

    /// Returns the new hyperparameters of each of an optimizer's groups: those of the saved group
    /// that names the group's parameters. If several saved groups do, their hyperparameters must be
    /// the same. Groups without parameters are matched in order, over all optimizers.
    ///
    /// The following is added to `missing`: hyperparameters that a saved group lacks; groups with
    /// trained parameters of which no saved group names any; and trained parameters that no saved
    /// group names, in a group of which others are named. The last get the hyperparameters of their
    /// group. They are not added if `is_missed` returns `true`, because their state is reported as
    /// missing already.
    pub(crate) fn match_with(
        &mut self,
        optimizer: &Optimizer,
        missing: &mut Vec<String>,
        is_missed: impl Fn(&str) -> bool,
    ) -> Result<Vec<GroupUpdate>> {
        let mut updates = Vec::with_capacity(optimizer.groups().len());
        for (index, group) in optimizer.groups().iter().enumerate() {
            // Each saved group that names a parameter of this one counts once.
            let mut sources: Vec<usize> = Vec::new();
            let mut seen_positions = HashSet::new();
            let mut unnamed_fqns = Vec::new();
            for fqn in group.fqns() {
                match self.positions_by_parameter.get(fqn) {
                    Some(groups) => {
                        sources.extend(groups.iter().filter(|&&group| seen_positions.insert(group)))
                    }
                    None if optimizer.parameters().requires_grad(fqn)? => unnamed_fqns.push(fqn),
                    None => {}
                }
            }
            // A group without parameters cannot be found by name. It is matched by its position
            // among the groups without parameters.
            if group.fqns().is_empty() {
                sources.extend(self.unmatched_positions.pop_front());
            }
            // A group that was not saved keeps its hyperparameters.
            let Some((&first_position, other_positions)) = sources.split_first() else {
                if !unnamed_fqns.is_empty() && !self.groups.is_empty() {
                    missing.push(format!("param_groups.{index}"));
                }
                updates.push((group.algorithm.clone(), group.extra.clone()));
                continue;
            };
            // Parameters of several saved groups can share one only if the hyperparameters are the
            // same.
            let source = &self.groups[first_position];
            for &other in other_positions {
                if !same_hyperparameters(source, &self.groups[other]) {
                    return Err(StateDictError::ConflictingGroups {
                        index,
                        first: source.params.clone(),
                        second: self.groups[other].params.clone(),
                    }
                    .into());
                }
            }
            unnamed_fqns.retain(|fqn| !is_missed(fqn));
            missing.extend(
                unnamed_fqns
                    .iter()
                    .map(|fqn| format!("param_groups.{index}.params.{fqn}")),
            );
            let updated = group.algorithm.with_group(&source.hyperparameters)?;
            missing.extend(
                updated
                    .missing
                    .iter()
                    .map(|key| format!("param_groups.{index}.{key}")),
            );
            updates.push((updated.algorithm, updated.unknown));
        }
        Ok(updates)
    }
}

/// Adds the new hyperparameters of an optimizer's groups to the values that must be the same on all
/// ranks. Each group is named by one of its parameters, because the order of groups may differ
/// between ranks.
pub(crate) fn agree_on_groups(
    optimizer: &Optimizer,
    groups: &[GroupUpdate],
    agreed_values: &mut Vec<(String, String)>,
) {
    for (group, (algorithm, extra)) in optimizer.groups().iter().zip(groups) {
        // The order of parameters in a group may differ too, so take the first by name.
        let Some(first_fqn) = group.fqns().iter().min() else {
            continue;
        };
        for (key, value) in algorithm.to_group().iter().chain(extra) {
            agreed_values.push((
                format!("param_groups.{first_fqn}.{key}"),
                format!("{value:?}"),
            ));
        }
    }
}

/// Returns `true` if two groups have the same hyperparameters, in any order.
fn same_hyperparameters(a: &SavedGroup, b: &SavedGroup) -> bool {
    let b_values: HashMap<&str, &PlainValue> = b
        .hyperparameters
        .iter()
        .map(|(key, value)| (key.as_str(), value))
        .collect();
    a.hyperparameters.len() == b.hyperparameters.len()
        && a.hyperparameters.iter().all(|(key, value)| {
            b_values
                .get(key.as_str())
                .is_some_and(|other| value.same_bits(other))
        })
}
