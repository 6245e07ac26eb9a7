//! The optimizer state dict on one rank, with torch's keys: reading it, checking one, loading one. No communication.

use std::collections::HashSet;

use candle_core::Tensor;
use fsdp_flat::ShardedTensor;
use fsdp_layout::PlainValue;
use fsdp_state::{LoadReport, Mismatch, StateDict, StateValue};

use crate::algorithm::{Initial, StateKind};
use crate::fsdp_state::{OptimStateError, OptimStateKeyType};
use crate::model_state::{describe, describe_value};
use crate::optimizer::{GroupUpdate, Optimizer, StagedState};
use crate::parameters::ShardedParameters;
pub use crate::scalars::Scalars;
use crate::{NnError, Result};

/// Which state a parameter without any is given in a state dict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissingState {
    /// None: the parameter is left out, as `FSDP.optim_state_dict` does.
    Omit,
    /// The algorithm's initial values, as `get_optimizer_state_dict` promises; the optimizer is not changed.
    Initial,
}

/// The state of several optimizers over one model, as torch's `get_optimizer_state_dict` has it before any copy:
/// `{"state": {fqn: {name: value}}, "param_groups": [{…, "params": [fqn]}]}`.
///
/// States are joined and groups are concatenated in order. Values shaped like a parameter are sharded views of the
/// live state, `step` is a 0-d tensor of its own for each parameter. The same keys on every rank.
///
/// # Errors
/// candle's.
pub fn live_optim_state_dict(optimizers: &[&Optimizer], missing: MissingState) -> Result<StateDict> {
    let mut state = StateDict::new();
    let mut groups = Vec::new();
    for optimizer in optimizers {
        for group in optimizer.groups() {
            for fqn in group.fqns() {
                let entries = match optimizer.state_of(fqn)? {
                    None if missing == MissingState::Initial => optimizer.initial_state_of(fqn)?,
                    entries => entries,
                };
                if let Some(entries) = entries {
                    state.insert(fqn.as_str(), entries.into_iter().collect::<StateDict>());
                }
            }
            let hyperparameters = group.algorithm.to_group().into_iter().chain(group.extra.iter().cloned());
            let mut dict: StateDict = hyperparameters.map(|(key, value)| (key, StateValue::Plain(value))).collect();
            let params = group.fqns().iter().map(|fqn| PlainValue::Str(fqn.clone())).collect();
            dict.insert("params", PlainValue::List(params));
            groups.push(StateValue::Dict(dict));
        }
    }
    let mut dict = StateDict::new();
    dict.insert("state", state);
    dict.insert("param_groups", StateValue::List(groups));
    Ok(dict)
}

/// A param group of a state dict.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct SavedGroup {
    /// Hyperparameters, in order; tensors of one element have become numbers.
    pub hyperparameters: Vec<(String, PlainValue)>,
    /// Names of the parameters, as the state dict has them; or their ids, as text.
    pub params: Vec<String>,
    /// Which of the two; `None` without parameters.
    pub key_type: Option<OptimStateKeyType>,
}

/// Reads the `param_groups` of an optimizer state dict; none if it has no such key.
///
/// # Errors
/// [`NnError::MalformedGroup`] for what is no list of dicts with names or ids.
pub fn read_param_groups(state: &StateDict) -> Result<Vec<SavedGroup>> {
    let Some(groups) = state.get("param_groups") else { return Ok(Vec::new()) };
    let groups: Vec<Vec<(String, StateValue)>> = match groups {
        StateValue::List(groups) | StateValue::Tuple(groups) => groups.iter().enumerate().map(group_entries).collect(),
        StateValue::Plain(PlainValue::List(groups) | PlainValue::Tuple(groups)) => {
            groups.iter().cloned().map(StateValue::Plain).enumerate().map(|(i, g)| group_entries((i, &g))).collect()
        }
        other => Err(NnError::MalformedGroup { index: 0, problem: format!("`param_groups` is a {}", other.kind()) }),
    }?;
    groups.into_iter().enumerate().map(|(index, entries)| read_group(index, entries)).collect()
}

fn group_entries((index, group): (usize, &StateValue)) -> Result<Vec<(String, StateValue)>> {
    match group {
        StateValue::Dict(dict) => Ok(dict.iter().map(|(key, value)| (key.clone(), value.clone())).collect()),
        StateValue::Plain(PlainValue::Dict(entries)) => entries
            .iter()
            .map(|(key, value)| match key {
                PlainValue::Str(key) => Ok((key.clone(), StateValue::Plain(value.clone()))),
                other => Err(NnError::MalformedGroup { index, problem: format!("a key is a {}", other.type_name()) }),
            })
            .collect(),
        other => Err(NnError::MalformedGroup { index, problem: format!("it is a {}", other.kind()) }),
    }
}

fn read_group(index: usize, entries: Vec<(String, StateValue)>) -> Result<SavedGroup> {
    let malformed = |problem: String| NnError::MalformedGroup { index, problem };
    let mut group = SavedGroup { hyperparameters: Vec::new(), params: Vec::new(), key_type: None };
    for (key, value) in entries {
        let value = plain(&value).ok_or_else(|| malformed(format!("`{key}` is a {}", value.kind())))?;
        if key != "params" {
            group.hyperparameters.push((key, value));
            continue;
        }
        let (PlainValue::List(params) | PlainValue::Tuple(params)) = value else {
            return Err(malformed(format!("`params` is a {}", value.type_name())));
        };
        for param in params {
            let (key, key_type) = match param {
                PlainValue::Str(fqn) => (fqn, OptimStateKeyType::ParamName),
                PlainValue::Int(id) => (id.to_string(), OptimStateKeyType::ParamId),
                other => return Err(malformed(format!("`params` holds a {}, not names or ids", other.type_name()))),
            };
            if group.key_type.is_some_and(|before| before != key_type) {
                return Err(malformed("`params` holds names and ids".to_owned()));
            }
            group.key_type = Some(key_type);
            group.params.push(key);
        }
    }
    Ok(group)
}

/// A value as a plain one; tensors of one element (a learning rate may be one) become numbers.
pub(crate) fn plain(value: &StateValue) -> Option<PlainValue> {
    match value {
        StateValue::Plain(value) => Some(value.clone()),
        StateValue::Tensor(tensor) if tensor.elem_count() == 1 => {
            let number = tensor.flatten_all().ok()?.to_dtype(candle_core::DType::F64).ok()?.to_vec1::<f64>().ok()?;
            number.first().map(|&number| PlainValue::Float(number))
        }
        StateValue::List(list) => Some(PlainValue::List(list.iter().map(plain).collect::<Option<_>>()?)),
        StateValue::Tuple(list) => Some(PlainValue::Tuple(list.iter().map(plain).collect::<Option<_>>()?)),
        StateValue::Dict(dict) => {
            let entry = |(key, value): (&String, &StateValue)| Some((PlainValue::Str(key.clone()), plain(value)?));
            Some(PlainValue::Dict(dict.iter().map(entry).collect::<Option<_>>()?))
        }
        _ => None,
    }
}

/// Makes sure that groups name their parameters.
pub(crate) fn check_named(groups: &[SavedGroup]) -> Result<()> {
    match groups.iter().find(|group| group.key_type == Some(OptimStateKeyType::ParamId)) {
        None => Ok(()),
        Some(group) => Err(OptimStateError::InvalidKeys {
            keys: group.params.clone(),
            expected: "these are ids, and names are needed: see `rekey_optim_state_dict`".to_owned(),
        }
        .into()),
    }
}

/// What is to be put into one optimizer.
#[derive(Debug)]
pub struct CheckedOptimState {
    staged: StagedState,
    groups: Vec<GroupUpdate>,
}

/// Builds what an optimizer state dict would make of `optimizer`, without changing it.
///
/// Groups are matched by the names in them, never by position: a saved group that covers several live ones goes to
/// each, several saved groups that meet in one live group must agree. `report` collects names that differ; a value
/// that does not fit goes there as mismatched. Of a trained parameter whose state is there, but which no saved group
/// names, it says `param_groups.<index>.params.<name>`, and of a group none of whose parameters is named
/// `param_groups.<index>`; torch does not notice the former, and gives the latter defaults.
///
/// # Errors
/// Malformed or conflicting groups, hyperparameters of wrong type or range, and what cannot be put into a
/// FlatParameter (differing steps).
pub fn check_optim_state_dict(
    optimizer: &Optimizer,
    state: &StateDict,
    report: &mut LoadReport,
) -> Result<CheckedOptimState> {
    let parameters = optimizer.parameters();
    let saved_groups = read_param_groups(state)?;
    check_named(&saved_groups)?;
    let empty = StateDict::new();
    let states = state.dict("state").unwrap_or(&empty);
    let mut staged = optimizer.stage_state();
    for fqn in optimizer.groups().iter().flat_map(|group| group.fqns()) {
        let saved = names_of(parameters, fqn).find_map(|name| states.dict(name));
        let schema = optimizer.state_schema(fqn);
        let Some(saved) = saved else {
            // A never-stepped optimizer saves no state at all; a frozen parameter never has any.
            let stateful = schema.iter().any(|entry| entry.initial != Initial::FirstGradient);
            if stateful && parameters.requires_grad(fqn)? && !states.is_empty() {
                report.missing.push(fqn.clone());
            }
            continue;
        };
        for (name, value) in saved {
            let set = match is_of_all(optimizer, states, fqn, name)? {
                true => staged.set_whole(optimizer, fqn, name, value),
                false => staged.set(optimizer, fqn, name, value),
            };
            match set {
                Ok(()) => {}
                Err(error @ NnError::OptimState { error: OptimStateError::DifferingScalars { .. }, .. }) => {
                    return Err(error);
                }
                Err(_) => report.mismatched.push(Mismatch {
                    fqn: format!("{fqn}.{name}"),
                    saved: describe_value(value),
                    current: format!("state of {:?}", parameters.shape(fqn)?),
                }),
            }
        }
        for entry in schema {
            let begins_later = entry.initial == Initial::FirstGradient;
            if !begins_later && !saved.contains_key(entry.name) {
                report.missing.push(format!("{fqn}.{}", entry.name));
            }
            if entry.kind == StateKind::LikeParameter
                && let Some(value) = saved.get(entry.name)
                && !fits(parameters, fqn, value)?
                && !report.mismatched.iter().any(|m| m.fqn == format!("{fqn}.{}", entry.name))
            {
                report.mismatched.push(Mismatch {
                    fqn: format!("{fqn}.{}", entry.name),
                    saved: describe_value(value),
                    current: describe(parameters.dtype(fqn)?, parameters.shape(fqn)?),
                });
            }
        }
    }
    Ok(CheckedOptimState { staged, groups: match_groups(optimizer, &saved_groups, report)? })
}

/// Whether an entry that no schema names is one tensor of a whole FlatParameter, because all its parameters have it in
/// the same shape, which is not that of each of them.
fn is_of_all(optimizer: &Optimizer, states: &StateDict, fqn: &str, name: &str) -> Result<bool> {
    let parameters = optimizer.parameters();
    let Some(local) = optimizer.local_index(fqn).map(|local| &optimizer.locals()[local]) else { return Ok(false) };
    if !local.is_flat || optimizer.state_schema(fqn).iter().any(|entry| entry.name == name) {
        return Ok(false);
    }
    let mut shapes = Vec::new();
    let mut differs = false;
    for fqn in local.fqns() {
        let saved = names_of(parameters, &fqn).find_map(|name| states.dict(name)).and_then(|saved| saved.get(name));
        let Some(StateValue::Tensor(tensor)) = saved else { return Ok(false) };
        differs |= tensor.dims() != parameters.shape(&fqn)?;
        shapes.push(tensor.dims());
    }
    Ok(differs && shapes.iter().all(|shape| *shape == shapes[0]))
}

fn fits(parameters: &ShardedParameters, fqn: &str, value: &StateValue) -> Result<bool> {
    let (shape, dtype) = match value {
        StateValue::Tensor(tensor) => (Tensor::dims(tensor), tensor.dtype()),
        StateValue::Sharded(tensor) => (tensor.shape(), tensor.dtype()),
        _ => return Ok(false),
    };
    Ok(shape == parameters.shape(fqn)? && dtype == parameters.dtype(fqn)?)
}

/// A parameter's name and its aliases.
pub(crate) fn names_of<'a>(parameters: &'a ShardedParameters, fqn: &'a str) -> impl Iterator<Item = &'a str> {
    let aliases = parameters.aliases().iter().filter(move |(_, target)| *target == fqn);
    std::iter::once(fqn).chain(aliases.map(|(alias, _)| alias.as_str()))
}

/// The hyperparameters that each of the optimizer's groups takes over. `report` gets trained parameters that no saved
/// group names, if it does not miss their state already; they share what the others of their group get.
pub(crate) fn match_groups(
    optimizer: &Optimizer,
    saved: &[SavedGroup],
    report: &mut LoadReport,
) -> Result<Vec<GroupUpdate>> {
    let parameters = optimizer.parameters();
    let named: HashSet<&str> =
        saved.iter().flat_map(|group| &group.params).map(|name| parameters.canonical_fqn(name)).collect();
    let mut empty_saved = saved.iter().filter(|group| group.params.is_empty());
    let mut matched = Vec::new();
    for (index, group) in optimizer.groups().iter().enumerate() {
        let holds = |saved: &&SavedGroup| {
            saved.params.iter().any(|name| group.fqns().iter().any(|fqn| parameters.canonical_fqn(name) == fqn))
        };
        let mut sources = saved.iter().filter(holds);
        let source = if group.fqns().is_empty() { empty_saved.next() } else { sources.next() };
        let mut unnamed = Vec::new();
        for fqn in group.fqns().iter().filter(|fqn| !saved.is_empty() && !named.contains(fqn.as_str())) {
            if parameters.requires_grad(fqn)? {
                unnamed.push(fqn);
            }
        }
        let Some(source) = source else {
            if !unnamed.is_empty() {
                report.missing.push(format!("param_groups.{index}"));
            }
            matched.push((group.algorithm.clone(), group.extra.clone()));
            continue;
        };
        for other in sources {
            let same = other.hyperparameters.len() == source.hyperparameters.len()
                && other
                    .hyperparameters
                    .iter()
                    .zip(&source.hyperparameters)
                    .all(|(a, b)| a.0 == b.0 && a.1.same_bits(&b.1));
            if !same {
                return Err(NnError::ConflictingGroups {
                    index,
                    first: source.params.clone(),
                    second: other.params.clone(),
                });
            }
        }
        unnamed.retain(|fqn| !report.missing.contains(fqn));
        report.missing.extend(unnamed.into_iter().map(|fqn| format!("param_groups.{index}.params.{fqn}")));
        let read = group.algorithm.with_group(&source.hyperparameters)?;
        matched.push((read.algorithm, read.unknown));
    }
    Ok(matched)
}

impl CheckedOptimState {
    /// Gives an entry of a parameter's state that has been checked other values, of the same shape and dtype.
    ///
    /// # Errors
    /// Values that do not cover this rank's boxes.
    pub fn replace(&mut self, optimizer: &Optimizer, fqn: &str, name: &str, values: &ShardedTensor) -> Result<()> {
        self.staged.set(optimizer, fqn, name, &StateValue::Sharded(values.clone()))
    }

    /// What all ranks must have alike, because each takes its own.
    ///
    /// # Errors
    /// candle's.
    pub fn scalars(&self, optimizer: &Optimizer) -> Result<Scalars> {
        let mut scalars = Scalars::default();
        for (index, local) in optimizer.locals().iter().enumerate() {
            if let Some(fqn) = local.fqns().first() {
                for (name, value) in self.staged.scalars_of(index)? {
                    scalars.insert(fqn, &name, value);
                }
            }
        }
        for (group, (algorithm, extra)) in optimizer.groups().iter().zip(&self.groups) {
            let entries = algorithm.to_group().into_iter().chain(extra.iter().cloned()).collect::<Vec<_>>();
            scalars.insert_group(group.fqns(), entries.iter().map(|(key, value)| (key.as_str(), value.clone())));
        }
        Ok(scalars)
    }

    /// Puts state and hyperparameters in place.
    ///
    /// # Errors
    /// None once checked: the values are complete.
    pub fn apply(self, optimizer: &mut Optimizer) -> Result<()> {
        optimizer.replace_state(self.staged, self.groups)
    }
}
