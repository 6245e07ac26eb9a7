//! An optimizer's local state dict: by ids or by its own names, with flat pieces of this rank.

use std::collections::HashMap;

use fsdp_state::{StateDict, StateError, StateValue};

use super::entry::{EntryOptions, EntryPlan, Saved, SavedEntries};
use super::groups::{SavedGroup, group_dict, read_param_groups};
use super::names::key_type_of;
use super::{OptimStateError, OptimStateKeyType};
use crate::algorithm::StateKind;
use crate::optimizer::{GroupUpdate, LocalParam, Optimizer, ParamState};
use crate::{NnError, Result};

/// The key in a local state dict of the state of parameters that a rank has nothing of, by the keys of `state`.
///
/// torch has no such thing: its ranks forget how often these parameters have been stepped.
const EMPTY_PIECES: &str = "state_of_empty_pieces";

/// Writes a local state dict: states by local parameter, and hyperparameters of each group. Tensors are shared.
///
/// # Errors
/// candle's.
pub(crate) fn local_dict<'a>(
    optimizer: &Optimizer,
    key_type: OptimStateKeyType,
    state_of: impl Fn(usize) -> Option<&'a ParamState>,
    user_state: &StateDict,
    groups: Option<Vec<Vec<(String, fsdp_layout::PlainValue)>>>,
) -> Result<StateDict> {
    let key = |index: usize| match key_type {
        OptimStateKeyType::ParamId => index.to_string(),
        OptimStateKeyType::ParamName => optimizer.locals()[index].name(),
    };
    let (mut state, mut of_empty) = (StateDict::new(), StateDict::new());
    for (index, local) in optimizer.locals().iter().enumerate() {
        if let Some(entries) = state_of(index) {
            let entries: StateDict = local.local_entries(entries)?.into_iter().collect();
            // torch's dicts have no state of pieces without elements, so that it is kept apart.
            let state = if local.is_empty() { &mut of_empty } else { &mut state };
            if state.insert(key(index), entries).is_some() {
                return Err(StateError::DuplicateKey { key: key(index) }.into());
            }
        }
    }
    for (key, value) in user_state {
        state.insert(key.as_str(), value.clone());
    }
    let mut dict = StateDict::new();
    dict.insert("state", state);
    if let Some(groups) = groups {
        let mut dicts = Vec::with_capacity(groups.len());
        for (index, hyperparameters) in groups.into_iter().enumerate() {
            let params = optimizer.params_of_group(index).iter().map(|&local| key(local)).collect();
            dicts.push(group_dict(SavedGroup { hyperparameters, params, key_type: Some(key_type) }));
        }
        dict.insert("param_groups", StateValue::List(dicts));
    }
    if optimizer.locals().iter().any(LocalParam::is_empty) {
        dict.insert(EMPTY_PIECES, of_empty);
    }
    Ok(dict)
}

/// A local optimizer state dict, taken apart. Tensors are shared with it.
pub(crate) struct LocalStates<'a> {
    /// The state of each local parameter, and its key in the dict.
    pub(crate) states: Vec<Option<(&'a str, &'a StateDict)>>,
    /// The local parameters that have state, in the dict's order.
    pub(crate) order: Vec<usize>,
    /// State under other keys.
    pub(crate) user_state: Vec<(&'a str, &'a StateValue)>,
    /// The groups, with the names of the model's parameters; `None` if the dict has none.
    pub(crate) groups: Option<Vec<SavedGroup>>,
}

impl<'a> LocalStates<'a> {
    /// Takes apart the dict that [`Optimizer::state_dict`] or [`Optimizer::named_state_dict`] gave.
    ///
    /// # Errors
    /// [`OptimStateError`]: keys of parameters that the optimizer does not have; a dict without `state`.
    pub(crate) fn read(optimizer: &Optimizer, state: &'a StateDict) -> Result<Self> {
        let states = state.dict("state").ok_or_else(|| OptimStateError::MissingKey { key: "state".to_owned() })?;
        let locals = optimizer.locals();
        let mut groups = read_param_groups(state)?;
        let of_groups = groups.iter().filter_map(|group| group.key_type);
        // Without groups to tell, numbers are ids and all else is names.
        let by_name =
            !groups.is_empty() && key_type_of(&StateDict::new(), of_groups)? == Some(OptimStateKeyType::ParamName);
        let by_names: HashMap<String, usize> =
            locals.iter().enumerate().map(|(index, local)| (local.name(), index)).collect();
        let find = |key: &str| match key.parse::<usize>() {
            Ok(id) if !by_name => (id < locals.len()).then_some(id),
            _ => by_names.get(key).copied(),
        };
        let mut read =
            LocalStates { states: vec![None; locals.len()], order: Vec::new(), user_state: Vec::new(), groups: None };
        for (key, value) in states {
            match (find(key), value.as_dict()) {
                (Some(index), Some(entries)) => {
                    read.states[index] = Some((key, entries));
                    read.order.push(index);
                }
                (Some(_), None) => {
                    let expected = format!("the state of parameter `{key}` is a {}", value.kind());
                    return Err(OptimStateError::InvalidKeys { keys: vec![key.clone()], expected }.into());
                }
                (None, _) if !by_name && key.parse::<usize>().is_ok() => {
                    return Err(OptimStateError::UnknownState { key: key.clone(), count: locals.len() }.into());
                }
                (None, _) => read.user_state.push((key, value)),
            }
        }
        // Groups name local parameters; the joined form needs the model's.
        if state.contains_key("param_groups") {
            for (index, group) in groups.iter_mut().enumerate() {
                let mut names = Vec::new();
                for key in &group.params {
                    let Some(local) = find(key) else {
                        return Err(OptimStateError::UnknownParam { index, key: key.clone() }.into());
                    };
                    names.extend(locals[local].fqns());
                }
                group.params = names;
                group.key_type = Some(OptimStateKeyType::ParamName);
            }
            read.groups = Some(groups);
        }
        Ok(read)
    }
}

/// Returns the state of each of the model's parameters that a local parameter is made of, from its local state: pieces
/// become boxes of views.
///
/// # Errors
/// [`OptimStateError::WrongShape`] for pieces of another length than this rank's; containers where tensors should be.
pub(crate) fn portable_state(optimizer: &Optimizer, index: usize, entries: &StateDict) -> Result<Vec<StateDict>> {
    let local = &optimizer.locals()[index];
    let params = local.params();
    let mut states: Vec<StateDict> = params.iter().map(|_| StateDict::new()).collect();
    let kinds = optimizer.entry_kinds_of_local(index);
    for (name, value) in entries {
        let is_like = kinds.iter().any(|(known, kind)| known == name && *kind == StateKind::LikeParameter);
        match value {
            StateValue::Tensor(tensor) if tensor.dims() == local.dims() && (is_like || tensor.rank() > 0) => {
                let flat = tensor.flatten_all()?;
                for (state, &param) in states.iter_mut().zip(&params) {
                    state.insert(name.as_str(), local.sharded_piece(&flat, param)?);
                }
            }
            StateValue::Tensor(tensor) if is_like => {
                return Err(OptimStateError::WrongShape {
                    fqn: local.name(),
                    name: name.clone(),
                    found: tensor.dims().to_vec(),
                    expected: local.dims(),
                }
                .into());
            }
            StateValue::Sharded(_) => {
                let (fqn, name, kind) = (local.name(), name.clone(), value.kind());
                return Err(NnError::UnexpectedState { fqn, name, kind });
            }
            value => states.iter_mut().for_each(|state| _ = state.insert(name.as_str(), value.clone())),
        }
    }
    Ok(states)
}

/// Returns the entries of one parameter's state that this rank has.
fn own_entries(entries: &StateDict, is_like: impl Fn(&str) -> bool, fqn: &str) -> Result<SavedEntries> {
    let mut saved = SavedEntries::new();
    for (name, value) in entries {
        let entry = match value {
            StateValue::Tensor(tensor) if tensor.rank() > 0 || is_like(name) => {
                let dtype = fsdp_flat::dtype::of(tensor)?;
                Saved::Tensor { position: 0, dtype, shape: tensor.dims().to_vec() }
            }
            StateValue::Sharded(tensor) => {
                Saved::Tensor { position: 0, dtype: tensor.file_dtype()?, shape: tensor.shape().to_vec() }
            }
            StateValue::Tensor(_) => Saved::Scalar(value.clone()),
            other => {
                let (fqn, name, kind) = (fqn.to_owned(), name.clone(), other.kind());
                let value = super::groups::plain(other).ok_or(NnError::UnexpectedState { fqn, name, kind })?;
                Saved::Scalar(value.into())
            }
        };
        saved.insert(name.clone(), entry);
    }
    saved.sort_keys();
    Ok(saved)
}

/// Returns the state of a local parameter from that of its parameters, whose values this rank has: whole tensors, or
/// boxes that cover its own. `None` if none of them has state. No communication.
///
/// # Errors
/// [`OptimStateError`] for state that the parameters cannot take.
pub(crate) fn load_local(
    optimizer: &Optimizer,
    index: usize,
    groups: Option<&[GroupUpdate]>,
    values: &[Option<&StateDict>],
) -> Result<Option<ParamState>> {
    let local = &optimizer.locals()[index];
    let group = optimizer.group_of_local(index);
    let algorithm = groups.map_or(&optimizer.groups()[group].algorithm, |groups| &groups[group].0);
    let fqns = local.fqns();
    let mut saved = Vec::with_capacity(values.len());
    for (fqn, value) in fqns.iter().zip(values) {
        let is_scalar = optimizer.parameters().shape(fqn)?.is_empty();
        let is_like = |name: &str| is_scalar && optimizer.is_like_parameter(fqn, name);
        saved.push(match value.filter(|entries| !entries.is_empty()) {
            Some(entries) => Some(own_entries(entries, is_like, fqn)?),
            None => None,
        });
    }
    let saved: Vec<Option<&SavedEntries>> = saved.iter().map(Option::as_ref).collect();
    let Some(mut plan) = EntryPlan::new(local, algorithm, &saved, EntryOptions::default())? else { return Ok(None) };
    check_entries(local, &plan)?;
    plan.fill(local, values)?;
    Ok(Some(plan.state))
}

/// Refuses state that lacks an entry that the algorithm needs.
pub(crate) fn check_entries(local: &LocalParam, plan: &EntryPlan) -> Result<()> {
    match (plan.missing.first(), local.fqns().first()) {
        (Some(name), Some(fqn)) => {
            let fqn = if local.is_flat { local.name() } else { fqn.clone() };
            Err(OptimStateError::MissingEntry { fqn, name: (*name).to_owned() }.into())
        }
        _ => Ok(()),
    }
}

impl Optimizer {
    /// Returns the state and the groups that a local state dict makes of this optimizer.
    pub(crate) fn stage_state_dict(&self, state: &StateDict) -> Result<StagedLocal> {
        let missing = |key: &str| OptimStateError::MissingKey { key: key.to_owned() };
        if state.dict("state").is_none() {
            return Err(missing("state").into());
        }
        if !state.contains_key("param_groups") {
            return Err(missing("param_groups").into());
        }
        // Positions in the groups tell which parameter a key means, as in torch.
        let saved = read_param_groups(state)?;
        let keys = self.match_positions(&saved)?;
        let mut groups: Vec<GroupUpdate> = Vec::with_capacity(saved.len());
        for (group, saved) in self.groups().iter().zip(&saved) {
            let read = group.algorithm.with_group(&saved.hyperparameters)?;
            groups.push((read.algorithm, read.unknown));
        }
        let positions: HashMap<&str, usize> = keys.iter().enumerate().map(|(at, key)| (key.as_str(), at)).collect();
        let mut staged = StagedLocal { states: Vec::new(), groups, user_state: StateDict::new() };
        staged.states.resize_with(self.locals().len(), || None);
        for (key, value) in state.dict("state").into_iter().flatten() {
            let Some(&index) = positions.get(key.as_str()) else {
                if key.parse::<usize>().is_ok() {
                    return Err(OptimStateError::UnknownState { key: key.clone(), count: self.locals().len() }.into());
                }
                staged.user_state.insert(key.as_str(), value.copy()?);
                continue;
            };
            let Some(entries) = value.as_dict() else {
                let expected = format!("the state of parameter `{key}` is a {}", value.kind());
                return Err(OptimStateError::InvalidKeys { keys: vec![key.clone()], expected }.into());
            };
            staged.states[index] = self.local_state(index, entries, &staged.groups)?;
        }
        // torch saves nothing for pieces without elements. But their steps are needed, so that all ranks save the same
        // entries.
        let of_empty = state.dict(EMPTY_PIECES);
        for (index, local) in self.locals().iter().enumerate().filter(|(_, local)| local.is_empty()) {
            match of_empty {
                Some(of_empty) => {
                    if let Some(entries) = of_empty.dict(&keys[index]) {
                        staged.states[index] = self.local_state(index, entries, &staged.groups)?;
                    }
                }
                None if staged.states[index].is_some() => {}
                None => self.deduce_empty(index, local, &mut staged)?,
            }
        }
        Ok(staged)
    }

    /// Returns the state of a local parameter from its entries in a local state dict, for the new `groups`.
    fn local_state(&self, index: usize, entries: &StateDict, groups: &[GroupUpdate]) -> Result<Option<ParamState>> {
        let values = portable_state(self, index, entries)?;
        let values: Vec<Option<&StateDict>> = values.iter().map(Some).collect();
        load_local(self, index, Some(groups), &values).map_err(|error| match error {
            // The dict has one tensor for all of a FlatParameter, so name that and not one of its parameters.
            NnError::OptimState { error: OptimStateError::WrongDType { name, found, expected, .. }, ranks } => {
                let fqn = self.locals()[index].name();
                NnError::OptimState { error: OptimStateError::WrongDType { fqn, name, found, expected }, ranks }
            }
            error => error,
        })
    }

    /// Returns the key in the state dict of each local parameter. As in torch, a saved parameter belongs to the local
    /// one at the same position of the same group, so the groups must have the same sizes.
    fn match_positions(&self, saved: &[SavedGroup]) -> Result<Vec<String>> {
        if saved.len() != self.groups().len() {
            return Err(OptimStateError::GroupCount { saved: saved.len(), current: self.groups().len() }.into());
        }
        let mut keys = vec![String::new(); self.locals().len()];
        for (index, saved) in saved.iter().enumerate() {
            let params = self.params_of_group(index);
            if saved.params.len() != params.len() {
                let (saved, current) = (saved.params.len(), params.len());
                return Err(OptimStateError::GroupSize { index, saved, current }.into());
            }
            for (&local, key) in params.iter().zip(&saved.params) {
                keys[local].clone_from(key);
            }
        }
        Ok(keys)
    }

    /// Sets the state of a parameter of which this rank has no element, from the states of the other parameters of its
    /// group.
    fn deduce_empty(&self, index: usize, local: &LocalParam, staged: &mut StagedLocal) -> Result<()> {
        let group = self.group_of_local(index);
        let mut steps = self
            .params_of_group(group)
            .iter()
            .filter_map(|&other| staged.states[other].as_ref())
            .map(|state| state.step);
        let Some(first) = steps.next() else { return Ok(()) };
        // Where the others differ, nothing tells how often this one has been stepped.
        if steps.all(|step| step == first) {
            let mut state = crate::optimizer::initial_state(&staged.groups[group].0, local)?;
            state.step = first;
            staged.states[index] = Some(state);
        }
        Ok(())
    }
}

/// State that is to be put into an optimizer: complete and checked.
pub(crate) struct StagedLocal {
    pub(crate) states: Vec<Option<ParamState>>,
    pub(crate) groups: Vec<GroupUpdate>,
    pub(crate) user_state: StateDict,
}
