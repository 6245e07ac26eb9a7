//! An optimizer's local state dict: the state of this rank only, in which a parameter is a flat
//! piece of the model's, under an id or a name. torch's `Optimizer.state_dict` and
//! `load_state_dict`.

use std::collections::HashMap;
use std::sync::Arc;

use fsdp_comm::ProcessGroup;
use fsdp_state::engine::{DictSource, LoadOptions};
use fsdp_state::{StateDict, StateValue, load_state};

use super::entry::unexpected_state_error;
use super::groups::{SavedGroup, make_optim_dict, read_param_groups, to_plain};
use super::names::find_key_type;
use super::{ExactLoad, LiveTarget, OptimStateError, OptimStateKeyType, StatePrefixes};
use crate::algorithm::Initial;
use crate::error::{NnError, Result};
use crate::optimizer::{LocalParam, LocalState, Optimizer, initial_state};

/// The key in a local state dict under which the state of empty pieces is: of parameters of which
/// this rank has no element. Below it are the same keys as in `state`.
///
/// torch does not have this key: its ranks forget how many steps these parameters have made.
pub(crate) const EMPTY_PIECES: &str = "state_of_empty_pieces";

/// A local optimizer state dict, taken apart. Tensors are shared with it.
#[derive(Default)]
pub(crate) struct LocalStates {
    /// The local parameters that have state, by their positions in the optimizer: their keys and
    /// their states, in the dict's order.
    pub(crate) states: Vec<(usize, String, StateDict)>,
    /// The states of local parameters of which this rank has no element, by their positions in the
    /// optimizer.
    empty_piece_states: Vec<(usize, StateDict)>,
    /// State under other keys.
    pub(crate) user_state: StateDict,
    /// The groups, with the names of the model's parameters; `None` if the dict has none.
    pub(crate) groups: Option<Vec<SavedGroup>>,
}

impl LocalStates {
    /// Takes apart the dict that [`Optimizer::state_dict`] or [`Optimizer::named_state_dict`] gave.
    ///
    /// # Errors
    /// [`OptimStateError`]: keys of parameters that the optimizer does not have; a dict without
    /// `state`.
    pub(crate) fn read(optimizer: &Optimizer, state: StateDict) -> Result<Self> {
        let count = optimizer.locals().len();
        let names: HashMap<String, usize> = optimizer
            .locals()
            .iter()
            .enumerate()
            .map(|(index, local)| (local.name(), index))
            .collect();
        let groups = read_param_groups(&state)?;
        Self::sort(optimizer, state, groups, |key, are_names| {
            match key.parse::<usize>() {
                Ok(id) if !are_names => (id < count).then_some(id),
                _ => names.get(key).copied(),
            }
        })
    }

    /// Takes apart a dict whose groups are matched with this optimizer's by position. As in torch,
    /// a saved parameter is loaded into the local parameter at the same position of the same group,
    /// whatever its key.
    ///
    /// # Errors
    /// [`OptimStateError`]: a missing key; another number of groups, or of parameters in a group.
    fn read_by_position(optimizer: &Optimizer, state: StateDict) -> Result<Self> {
        if let Some(key) = ["state", "param_groups"]
            .into_iter()
            .find(|key| !state.contains_key(key))
        {
            return Err(OptimStateError::missing_key(key));
        }
        let groups = read_param_groups(&state)?;
        if groups.len() != optimizer.groups().len() {
            return Err(OptimStateError::GroupCount {
                saved: groups.len(),
                current: optimizer.groups().len(),
            }
            .into());
        }
        // Ids and names of the saved optimizer count only as marks of positions.
        let mut positions: HashMap<String, usize> = HashMap::new();
        for (index, group) in groups.iter().enumerate() {
            let params = optimizer.locals_of_group(index);
            if group.params.len() != params.len() {
                return Err(OptimStateError::GroupSize {
                    index,
                    saved: group.params.len(),
                    current: params.len(),
                }
                .into());
            }
            positions.extend(group.params.iter().cloned().zip(params));
        }
        Self::sort(optimizer, state, groups, |key, _| {
            positions.get(key).copied()
        })
    }

    /// Sorts a local state dict into the states of local parameters, state under other keys, and
    /// groups. `find_local` returns the position of the local parameter that has a key. Its second
    /// argument is `true` if keys are names, and `false` if they are ids.
    fn sort(
        optimizer: &Optimizer,
        mut state: StateDict,
        mut groups: Vec<SavedGroup>,
        find_local: impl Fn(&str, bool) -> Option<usize>,
    ) -> Result<Self> {
        let Some(StateValue::Dict(states)) = state.remove("state") else {
            return Err(OptimStateError::missing_key("state"));
        };
        let locals = optimizer.locals();
        // The groups determine whether keys are ids or names. Without groups, keys that are numbers
        // count as ids.
        let group_key_types = groups.iter().filter_map(|group| group.key_type);
        let are_names = find_key_type(&StateDict::new(), group_key_types)?
            == Some(OptimStateKeyType::ParamName);
        let mut local_states = LocalStates::default();
        for (key, value) in states {
            match (find_local(&key, are_names), value) {
                (Some(index), StateValue::Dict(entries)) => {
                    local_states.states.push((index, key, entries))
                }
                (Some(_), value) => {
                    let expected = format!("the state of parameter `{key}` is a {}", value.kind());
                    return Err(OptimStateError::InvalidKeys {
                        keys: vec![key],
                        expected,
                    }
                    .into());
                }
                // In a dict by ids, a user's key that is a number would be taken for an id.
                (None, _) if key.parse::<usize>().is_ok() => {
                    return Err(OptimStateError::UnknownState {
                        key,
                        count: locals.len(),
                    }
                    .into());
                }
                (None, value) => _ = local_states.user_state.insert(key, value),
            }
        }
        // Parameters of which this rank holds nothing have their state under a key of its own.
        for (key, value) in state.dict(EMPTY_PIECES).into_iter().flatten() {
            let index = find_local(key, are_names).filter(|&index| locals[index].is_empty());
            local_states
                .empty_piece_states
                .extend(index.zip(value.as_dict().cloned()));
        }
        // Groups list local parameters. Replace them by the names of the model's parameters, which
        // all other code uses.
        if state.contains_key("param_groups") {
            for (index, group) in groups.iter_mut().enumerate() {
                let mut names = Vec::new();
                for key in &group.params {
                    let Some(local) = find_local(key, are_names) else {
                        let key = key.clone();
                        return Err(OptimStateError::UnknownParam { index, key }.into());
                    };
                    names.extend(locals[local].fqns());
                }
                group.params = names;
                group.key_type = Some(OptimStateKeyType::ParamName);
            }
            local_states.groups = Some(groups);
        }
        Ok(local_states)
    }
}

/// An optimizer's state on this rank, by the model's names. Tensors shaped like parameters are
/// boxes.
pub(crate) struct PortableStates {
    /// The local parameters that have state and elements on this rank, by their positions in the
    /// optimizer, each with the states of the model's parameters that it is made of.
    pub(crate) states: Vec<(usize, Vec<(String, StateDict)>)>,
    /// State under other keys.
    pub(crate) user_state: StateDict,
    /// The groups; `None` if there are none.
    pub(crate) groups: Option<Vec<SavedGroup>>,
}

impl PortableStates {
    /// Returns the live state, as views.
    pub(crate) fn from_live(optimizer: &Optimizer) -> Result<Self> {
        let mut states = Vec::new();
        for (index, local) in optimizer.locals().iter().enumerate() {
            let Some(state) = local.state.as_ref().filter(|_| !local.is_empty()) else {
                continue;
            };
            // Views: nothing is copied before it is needed.
            let mut param_states = Vec::new();
            for (fqn, param) in local.fqns().into_iter().zip(local.params()) {
                param_states.push((fqn, local.portable_state(state, param)?));
            }
            states.push((index, param_states));
        }
        let mut groups = Vec::with_capacity(optimizer.groups().len());
        for (index, group) in optimizer.groups().iter().enumerate() {
            let locals = &optimizer.locals()[optimizer.locals_of_group(index)];
            let fqns = locals.iter().flat_map(LocalParam::fqns);
            groups.push(SavedGroup::from_live_group(
                group,
                fqns.collect(),
                OptimStateKeyType::ParamName,
            ));
        }
        Ok(PortableStates {
            states,
            user_state: optimizer.user_state().clone(),
            groups: Some(groups),
        })
    }

    /// Returns the state in a dict that [`Optimizer::state_dict`] or
    /// [`Optimizer::named_state_dict`] gave.
    ///
    /// # Errors
    /// [`OptimStateError`]: a malformed dict, as in [`LocalStates::read`]; pieces that do not fit,
    /// as in [`Self::from_local`].
    pub(crate) fn read(optimizer: &Optimizer, state: StateDict) -> Result<Self> {
        let local = LocalStates::read(optimizer, state)?;
        let mut states = Vec::new();
        for (index, _, entries) in &local.states {
            states.extend(Self::from_local(optimizer, *index, entries)?.states);
        }
        Ok(PortableStates {
            states,
            user_state: local.user_state,
            groups: local.groups,
        })
    }

    /// Returns the state of one local parameter alone.
    ///
    /// # Errors
    /// [`OptimStateError::WrongShape`] for pieces of another length than this rank's; containers of
    /// tensors.
    pub(crate) fn from_local(
        optimizer: &Optimizer,
        index: usize,
        entries: &StateDict,
    ) -> Result<Self> {
        let mut states = Vec::new();
        if !entries.is_empty() && !optimizer.locals()[index].is_empty() {
            states.push((index, portable_states(optimizer, index, entries)?));
        }
        Ok(PortableStates {
            states,
            user_state: StateDict::new(),
            groups: None,
        })
    }
}

/// Returns the state of each of the model's parameters that a local parameter is made of, from its
/// local state: pieces become boxes of views.
///
/// # Errors
/// [`OptimStateError::WrongShape`] for pieces of another length than this rank's; containers of
/// tensors.
fn portable_states(
    optimizer: &Optimizer,
    index: usize,
    entries: &StateDict,
) -> Result<Vec<(String, StateDict)>> {
    let local = &optimizer.locals()[index];
    let params = local.params();
    let mut states: Vec<(String, StateDict)> = local
        .fqns()
        .into_iter()
        .map(|fqn| (fqn, StateDict::new()))
        .collect();
    for (name, value) in entries {
        // One entry of a FlatParameter is the state of all its parameters.
        let is_like = states
            .first()
            .is_some_and(|(fqn, _)| optimizer.is_like_parameter(fqn, name));
        let value = match value {
            StateValue::Tensor(tensor)
                if tensor.dims() == local.dims() && (is_like || tensor.rank() > 0) =>
            {
                let flat = tensor.flatten_all()?;
                for ((_, state), &param) in states.iter_mut().zip(&params) {
                    state.insert(name.as_str(), local.sharded_piece(&flat, param)?);
                }
                continue;
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
            StateValue::Tensor(_) | StateValue::Raw(_) => value.clone(),
            other => match to_plain(other) {
                Some(plain) => plain.into(),
                None => return Err(unexpected_state_error(local, name, other.kind())),
            },
        };
        states
            .iter_mut()
            .for_each(|(_, state)| _ = state.insert(name.as_str(), value.clone()));
    }
    Ok(states)
}

/// Loads state by the model's names into an optimizer that is not in use yet. The first value that
/// does not fit is returned as an error, instead of a report of all.
pub(crate) fn load_exactly(
    operation: &'static str,
    group: &ProcessGroup,
    source: &mut DictSource<'_>,
    optimizer: &mut Optimizer,
    exact: ExactLoad,
) -> Result<()> {
    let parameters = Arc::clone(optimizer.parameters());
    let prefixes = StatePrefixes {
        model: None,
        optim: Some(Vec::new()),
    };
    let mut target =
        LiveTarget::new(&parameters, vec![optimizer], prefixes)?.with_exact_load(exact);
    let options = LoadOptions {
        strict: false,
        ..LoadOptions::default()
    };
    load_state::<_, _, NnError>(operation, group, source, &mut target, &options)?;
    Ok(())
}

/// Loads states by the model's names, like [`load_exactly`], from this rank alone: the states hold
/// everything that it needs. No communication.
pub(crate) fn load_from_this_rank(states: StateDict, optimizer: &mut Optimizer) -> Result<()> {
    let state: StateDict = [("state", states.into())].into_iter().collect();
    let exact = ExactLoad {
        allow_missing_state: true,
        arguments: String::new(),
    };
    load_exactly(
        "load_state_dict",
        &ProcessGroup::alone(),
        &mut DictSource::on_every_rank(&state)?,
        optimizer,
        exact,
    )
}

impl Optimizer {
    /// Returns the state of this rank: `{"state": {"0": {…}}, "param_groups": [{…, "params": [0,
    /// 1]}]}`, as torch's `Optimizer.state_dict` gives it. Ids are positions over all groups, and
    /// are text as keys of `state`.
    ///
    /// A parameter here is a tensor that this rank's optimizer updates:
    ///
    /// - With `use_orig_params` it is this rank's piece of one of the model's parameters, flat, of
    ///   shape `[elements on this rank]`. Where nothing is sharded it is the whole parameter in its
    ///   own shape.
    /// - Without `use_orig_params` it is this rank's shard of a FlatParameter, with the zeros of
    ///   its right padding.
    ///
    /// A piece without elements has an id, but no entry in `state`, as in torch. Its step count and
    /// other scalars are under a key of their own, `state_of_empty_pieces`, because all ranks must
    /// save the same scalars for a parameter. A parameter that has not made a step has no state.
    /// Tensors are copies.
    ///
    /// # Errors
    /// candle's errors.
    pub fn state_dict(&self) -> Result<StateDict> {
        Ok(self.state_dict_views(OptimStateKeyType::ParamId)?.copy()?)
    }

    /// Returns the same as [`Self::state_dict`], with names instead of ids, as torch's named
    /// optimizers give it. The names are those of the model's parameters with `use_orig_params`,
    /// and `<unit>._flat_param` without.
    ///
    /// # Errors
    /// candle's errors.
    pub fn named_state_dict(&self) -> Result<StateDict> {
        Ok(self
            .state_dict_views(OptimStateKeyType::ParamName)?
            .copy()?)
    }

    /// Returns the local state dict. Its tensors are views of the live state. Every local state
    /// dict is made here.
    pub(crate) fn state_dict_views(&self, key_type: OptimStateKeyType) -> Result<StateDict> {
        let mut state = StateDict::new();
        let mut empty_piece_states = StateDict::new();
        for (index, local) in self.locals().iter().enumerate() {
            let Some(entries) = local.local_entries()? else {
                continue;
            };
            // torch's state dicts have no state of pieces without elements, so it goes under a key
            // of its own.
            let state = if local.is_empty() {
                &mut empty_piece_states
            } else {
                &mut state
            };
            state.insert_new(self.key_of_local(index, key_type), entries)?;
        }
        state.extend(self.user_state().clone());
        let mut groups = Vec::with_capacity(self.groups().len());
        for (index, group) in self.groups().iter().enumerate() {
            let locals = self.locals_of_group(index);
            let params = locals.map(|local| self.key_of_local(local, key_type));
            groups.push(SavedGroup::from_live_group(
                group,
                params.collect(),
                key_type,
            ));
        }
        let mut dict = make_optim_dict(state, groups);
        if self.locals().iter().any(LocalParam::is_empty) {
            dict.insert(EMPTY_PIECES, empty_piece_states);
        }
        Ok(dict)
    }

    /// Returns the id or the name of a local parameter.
    fn key_of_local(&self, local: usize, key_type: OptimStateKeyType) -> String {
        match key_type {
            OptimStateKeyType::ParamId => local.to_string(),
            OptimStateKeyType::ParamName => self.locals()[local].name(),
        }
    }

    /// Loads a state dict that [`Self::state_dict`] or [`Self::named_state_dict`] returned: torch's
    /// `Optimizer.load_state_dict`. Tensors are copied, and nothing is cast. If there is an error,
    /// nothing has changed. State under keys that are neither ids nor names is kept, and is part of
    /// later state dicts.
    ///
    /// Groups and their parameters are matched by position, as in torch. A parameter for which the
    /// dict has no state has none afterwards. A dict of torch has no `state_of_empty_pieces`. Then
    /// a parameter of which this rank has no element gets the step count of the other parameters of
    /// its group, if that is the same for all of them.
    ///
    /// # Errors
    /// [`OptimStateError`]: another number of groups or parameters, tensors of another shape or
    /// dtype than this rank's piece, entries and hyperparameters that the algorithm needs and that
    /// are missing; malformed groups and hyperparameters.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let local_states = LocalStates::read_by_position(self, state.clone())?;
        let mut groups = Vec::with_capacity(self.groups().len());
        for (index, (group, saved)) in self
            .groups()
            .iter()
            .zip(local_states.groups.iter().flatten())
            .enumerate()
        {
            let group_update = group.algorithm.with_group(&saved.hyperparameters)?;
            if let Some(key) = group_update.missing.first() {
                let key = format!("param_groups.{index}.{key}");
                return Err(OptimStateError::missing_key(key));
            }
            groups.push((group_update.algorithm, group_update.unknown));
        }
        // Load the groups before the states: the new hyperparameters determine which entries there
        // must be.
        let mut loaded = self.without_state();
        loaded.replace_state(Vec::new(), groups)?;
        let mut states = StateDict::new();
        let nonempty_states = local_states
            .states
            .into_iter()
            .map(|(index, _, entries)| (index, entries));
        for (index, entries) in nonempty_states.chain(local_states.empty_piece_states) {
            let param_states = portable_states(&loaded, index, &entries)?;
            states.extend(
                param_states
                    .into_iter()
                    .map(|(fqn, state)| (fqn, state.into())),
            );
        }
        load_from_this_rank(states, &mut loaded)
            .map_err(|error| self.name_flat_parameter(error))?;
        if state.dict(EMPTY_PIECES).is_none() {
            loaded.deduce_empty_piece_states()?;
        }
        loaded.set_user_state(local_states.user_state.copy()?);
        *self = loaded;
        Ok(())
    }

    /// Replaces the name of a parameter in an error by that of its FlatParameter: a local state
    /// dict has one tensor for all parameters of a FlatParameter.
    fn name_flat_parameter(&self, mut error: NnError) -> NnError {
        if let NnError::OptimState {
            error: OptimStateError::WrongDType { fqn, .. },
            ..
        } = &mut error
            && let Some(local) = self.local_index(fqn)
        {
            *fqn = self.locals()[local].name();
        }
        error
    }

    /// Makes state for parameters of which this rank has no element and that have no state, from
    /// the states of the other parameters of their groups.
    fn deduce_empty_piece_states(&mut self) -> Result<()> {
        for group in 0..self.groups().len() {
            let positions = self.locals_of_group(group);
            let locals = &self.locals()[positions.clone()];
            let mut steps = locals
                .iter()
                .filter_map(|local| Some(local.state.as_ref()?.step));
            // If the others differ, it is not known how many steps this one has made.
            let Some(common_step) = steps
                .next()
                .filter(|&common_step| steps.all(|step| step == common_step))
            else {
                continue;
            };
            // Entries that begin with the first gradient are there if the others have them.
            let begun_entries: Vec<&str> = self.groups()[group]
                .algorithm
                .state_entries()
                .filter(|entry| entry.initial == Initial::FirstGradient)
                .map(|entry| entry.name)
                .filter(|name| {
                    let mut locals = locals.iter();
                    locals.any(|local| local.live_piece(name).is_some())
                })
                .collect();
            for index in positions {
                let local = &self.locals()[index];
                if local.is_empty() && local.state.is_none() {
                    let mut state = initial_state(&self.groups()[group].algorithm, local)?;
                    state.step = common_step;
                    for name in &begun_entries {
                        let zeros = LocalState::Piece(local.zeros()?);
                        state.entries.insert((*name).to_owned(), zeros);
                    }
                    self.locals_mut()[index].state = Some(state);
                }
            }
        }
        Ok(())
    }
}
