//! torch's `Optimizer.state_dict` and `load_state_dict`: this rank's state by parameter id. No communication.

use candle_core::Tensor;
use fsdp_flat::storage::{owned_copy, to_device};
use fsdp_layout::PlainValue;
use fsdp_state::{StateDict, StateValue};

use super::staged::as_step;
use super::{GroupUpdate, LocalParam, LocalState, Optimizer, StagedState};
use crate::Result;
use crate::algorithm::{Algorithm, Initial, StateKind};
use crate::fsdp_state::{OptimStateError, OptimStateKeyType};
use crate::optim_state::{SavedGroup, read_param_groups};

/// Where a local state dict has the state of parameters that a rank has nothing of, by the keys of `state`.
///
/// torch has no such thing: its ranks forget how often these parameters have been stepped.
pub(crate) const EMPTY_PIECES: &str = "state_of_empty_pieces";

/// What is to be put into an optimizer: complete and checked.
#[derive(Debug)]
pub(crate) struct Staged {
    pub(crate) state: StagedState,
    pub(crate) groups: Vec<GroupUpdate>,
}

impl Optimizer {
    /// The state of this rank: `{"state": {"0": {…}}, "param_groups": [{…, "params": [0, 1]}]}`, as torch's
    /// `Optimizer.state_dict` gives it. Ids are positions over all groups, and are text as keys of `state`.
    ///
    /// A parameter is what this rank steps on. With `use_orig_params` it is the flat piece of one of the model's
    /// parameters, of shape `[elements on this rank]`, or the whole parameter in its own shape where nothing is sharded;
    /// a piece without elements has an id but no state there: its scalars, which this rank must know to save the same as
    /// others, are under a key of their own, `state_of_empty_pieces`. Without, it is a rank's whole shard of a
    /// FlatParameter, right padding (zeros) included. Parameters that have not been stepped have no state. Tensors are copies.
    ///
    /// # Errors
    /// candle's.
    pub fn state_dict(&self) -> Result<StateDict> {
        Ok(self.state_dict_views(OptimStateKeyType::ParamId)?.copy()?)
    }

    /// As [`Self::state_dict`], with names instead of ids: those of the model's parameters with `use_orig_params`,
    /// `<unit>._flat_param` without. What torch's named optimizers give.
    ///
    /// # Errors
    /// candle's.
    pub fn named_state_dict(&self) -> Result<StateDict> {
        Ok(self.state_dict_views(OptimStateKeyType::ParamName)?.copy()?)
    }

    /// Names of the model's parameters that this optimizer holds, over all groups in order: what ids mean in the
    /// optimizer of the same model without sharding.
    pub fn fqns(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().flat_map(|group| group.fqns()).map(String::as_str)
    }

    /// The local state dict, its tensors views of the live state.
    pub(crate) fn state_dict_views(&self, key_type: OptimStateKeyType) -> Result<StateDict> {
        let key = |index: usize| match key_type {
            OptimStateKeyType::ParamId => PlainValue::Int(index as i64),
            OptimStateKeyType::ParamName => PlainValue::Str(self.locals[index].name()),
        };
        let (mut state, mut of_empty) = (StateDict::new(), StateDict::new());
        for (index, local) in self.locals.iter().enumerate() {
            if let Some(entries) = &local.state {
                let entries: StateDict = local.local_entries(entries)?.into_iter().collect();
                let state = if local.is_empty() { &mut of_empty } else { &mut state };
                match key(index) {
                    PlainValue::Str(name) => state.insert(name, entries),
                    _ => state.insert(index.to_string(), entries),
                };
            }
        }
        for (key, value) in &self.user_state {
            state.insert(key.as_str(), value.clone());
        }
        let mut groups = Vec::with_capacity(self.groups.len());
        for group in &self.groups {
            let hyperparameters = group.algorithm.to_group().into_iter().chain(group.extra.iter().cloned());
            let mut dict: StateDict = hyperparameters.map(|(key, value)| (key, StateValue::Plain(value))).collect();
            dict.insert("params", PlainValue::List(group.params.iter().map(|&index| key(index)).collect()));
            groups.push(StateValue::Dict(dict));
        }
        let mut dict = StateDict::new();
        dict.insert("state", state);
        dict.insert("param_groups", StateValue::List(groups));
        if self.locals.iter().any(LocalParam::is_empty) {
            dict.insert(EMPTY_PIECES, of_empty);
        }
        Ok(dict)
    }

    /// Takes over a state dict as [`Self::state_dict`] or [`Self::named_state_dict`] gives it: torch's
    /// `Optimizer.load_state_dict`. All or nothing; tensors are copied, and nothing is cast. State under keys that are
    /// neither ids nor names is kept, and given out again.
    ///
    /// As in torch, groups and their parameters are matched by position. Parameters that the dict has no state for get
    /// none. Where this rank has nothing of a parameter and the dict (one of torch's) has no `state_of_empty_pieces`, the
    /// parameter counts as having been stepped as often as the others of its group, if those agree.
    ///
    /// # Errors
    /// [`OptimStateError`]: another number of groups or parameters, tensors of another shape or dtype than this rank's
    /// piece, entries that the algorithm needs and that are missing; malformed groups and hyperparameters.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let staged = self.stage_state_dict(state)?;
        self.replace_state(staged.state, staged.groups)
    }

    /// What a local state dict would make of this optimizer.
    pub(crate) fn stage_state_dict(&self, state: &StateDict) -> Result<Staged> {
        let missing = |key: &str| OptimStateError::MissingKey { key: key.to_owned() };
        let states = state.dict("state").ok_or_else(|| missing("state"))?;
        if !state.contains_key("param_groups") {
            return Err(missing("param_groups").into());
        }
        let saved = read_param_groups(state)?;
        let keys = self.match_positions(&saved)?;
        let mut groups = Vec::with_capacity(saved.len());
        for (group, saved) in self.groups.iter().zip(&saved) {
            let read = group.algorithm.with_group(&saved.hyperparameters)?;
            groups.push((read.algorithm, read.unknown));
        }
        let mut staged = self.stage_state();
        for (key, value) in states {
            let Some(index) = keys.iter().position(|known| known == key) else {
                if key.parse::<usize>().is_ok() {
                    return Err(OptimStateError::UnknownState { key: key.clone(), count: self.locals.len() }.into());
                }
                staged.set_user_state(key, value.copy()?);
                continue;
            };
            let Some(entries) = value.as_dict() else {
                let expected = format!("the state of parameter `{key}` is a {}", value.kind());
                return Err(OptimStateError::InvalidKeys { keys: vec![key.clone()], expected }.into());
            };
            self.stage_local(index, entries, &groups, &mut staged)?;
        }
        let of_empty = state.dict(EMPTY_PIECES);
        for (index, local) in self.locals.iter().enumerate().filter(|(_, local)| local.is_empty()) {
            match of_empty {
                Some(of_empty) => {
                    if let Some(entries) = of_empty.dict(&keys[index]) {
                        self.stage_local(index, entries, &groups, &mut staged)?;
                    }
                }
                None if staged.has_state(index) => {}
                None => self.deduce_empty(index, local, &groups, &mut staged)?,
            }
        }
        Ok(Staged { state: staged, groups })
    }

    /// The key in the state dict of each local parameter.
    fn match_positions(&self, saved: &[SavedGroup]) -> Result<Vec<String>> {
        if saved.len() != self.groups.len() {
            return Err(OptimStateError::GroupCount { saved: saved.len(), current: self.groups.len() }.into());
        }
        let mut keys = vec![String::new(); self.locals.len()];
        for (index, (group, saved)) in self.groups.iter().zip(saved).enumerate() {
            if saved.params.len() != group.params.len() {
                let (saved, current) = (saved.params.len(), group.params.len());
                return Err(OptimStateError::GroupSize { index, saved, current }.into());
            }
            for (&local, key) in group.params.iter().zip(&saved.params) {
                keys[local].clone_from(key);
            }
        }
        Ok(keys)
    }

    fn algorithm_of<'a>(&self, local: usize, groups: &'a [GroupUpdate]) -> Option<&'a Algorithm> {
        let group = self.groups.iter().position(|group| group.params.contains(&local))?;
        groups.get(group).map(|(algorithm, _)| algorithm)
    }

    fn stage_local(
        &self,
        index: usize,
        entries: &StateDict,
        groups: &[GroupUpdate],
        staged: &mut StagedState,
    ) -> Result<()> {
        let local = &self.locals[index];
        let Some(algorithm) = self.algorithm_of(index, groups) else { return Ok(()) };
        let state = staged.state(index);
        for (name, value) in entries {
            let kind = algorithm.state_entries().find(|entry| entry.name == *name).map(|entry| entry.kind);
            match (kind, value) {
                (Some(StateKind::Scalar), _) => match as_step(value) {
                    Some(step) => state.set_step(local, step)?,
                    None => state.set_shared(local, name, value)?,
                },
                (Some(StateKind::LikeParameter), StateValue::Tensor(tensor)) => {
                    check_piece(local, name, tensor)?;
                    let flat = own_flat(tensor, local)?;
                    state.entries.insert(name.clone(), LocalState::Piece(flat));
                }
                (Some(StateKind::LikeParameter), other) => {
                    return Err(OptimStateError::DifferingTypes {
                        name: name.clone(),
                        types: vec![other.kind().to_owned()],
                        fqns: local.fqns(),
                    }
                    .into());
                }
                (None, StateValue::Tensor(tensor)) if tensor.rank() > 0 && tensor.dims() == local.dims() => {
                    let flat = own_flat(tensor, local)?;
                    state.entries.insert(name.clone(), LocalState::Piece(flat));
                }
                (None, value) => state.set_shared(local, name, value)?,
            }
        }
        for entry in algorithm.state_entries() {
            let found = match entry.kind {
                StateKind::Scalar => state.step.is_some(),
                StateKind::LikeParameter => state.entries.contains_key(entry.name),
            };
            if !found && entry.initial != Initial::FirstGradient {
                let (fqn, name) = (local.name(), entry.name.to_owned());
                return Err(OptimStateError::MissingEntry { fqn, name }.into());
            }
        }
        Ok(())
    }

    /// Makes up the state of a parameter that this rank has nothing of, from that of the others of its group.
    fn deduce_empty(
        &self,
        index: usize,
        local: &LocalParam,
        groups: &[GroupUpdate],
        staged: &mut StagedState,
    ) -> Result<()> {
        let of_group = self.groups.iter().find(|group| group.params.contains(&index));
        let others: Vec<usize> = of_group.map(|group| group.params.clone()).unwrap_or_default();
        let mut steps = others.iter().filter(|&&other| staged.has_state(other)).map(|&other| staged.step(other));
        let (Some(algorithm), Some(first)) = (self.algorithm_of(index, groups), steps.next()) else { return Ok(()) };
        if steps.all(|step| step == first) {
            let mut state = super::initial_state(algorithm, local)?;
            state.step = first;
            *staged.state(index) = state;
        }
        Ok(())
    }
}

fn check_piece(local: &LocalParam, name: &str, tensor: &candle_core::Tensor) -> Result<()> {
    if tensor.dims() != local.dims() {
        return Err(OptimStateError::WrongShape {
            fqn: local.name(),
            name: name.to_owned(),
            found: tensor.dims().to_vec(),
            expected: local.dims(),
        }
        .into());
    }
    if tensor.dtype() != local.handle.dtype() {
        return Err(OptimStateError::WrongDType {
            fqn: local.name(),
            name: name.to_owned(),
            found: tensor.dtype().as_str().to_owned(),
            expected: local.handle.dtype().as_str().to_owned(),
        }
        .into());
    }
    Ok(())
}

/// A copy of a piece of state, flat, where its parameter is.
fn own_flat(tensor: &Tensor, local: &LocalParam) -> Result<Tensor> {
    let flat = owned_copy(&tensor.flatten_all()?)?;
    Ok(to_device(&flat, local.handle.device())?)
}
