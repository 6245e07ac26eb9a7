//! Optimizers over the parameters of a sharded model: each rank steps on its own shard, in place.

use std::sync::Arc;

use candle_core::Tensor;
use fsdp_flat::storage::{Scalar, with_slice, with_slice_mut, zeros};
use fsdp_flat::{ShardedTensor, with_float};
use fsdp_layout::PlainValue;
use fsdp_state::StateValue;
use indexmap::IndexMap;

use crate::algorithm::{Algorithm, Float, Initial, StateEntry, StateKind};
use crate::handle::FlatParamHandle;
use crate::parameters::{Location, ShardedParameters, write_boxes};
use crate::{NnError, Result};

/// Which parameters share hyperparameters.
#[derive(Debug, Clone)]
pub struct ParamGroup {
    /// The update rule and its hyperparameters.
    pub algorithm: Algorithm,
    /// Keys of the group that the algorithm does not know, kept as they are (`initial_lr`, …).
    pub extra: Vec<(String, PlainValue)>,
    fqns: Vec<String>,
    /// Indices into the optimizer's local parameters.
    params: Vec<usize>,
}

impl ParamGroup {
    /// A group of these parameters; it may be empty.
    #[must_use]
    pub fn new(algorithm: Algorithm, fqns: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let fqns = fqns.into_iter().map(Into::into).collect();
        ParamGroup { algorithm, extra: Vec::new(), fqns, params: Vec::new() }
    }

    /// Names of the parameters.
    #[must_use]
    pub fn fqns(&self) -> &[String] {
        &self.fqns
    }
}

/// The hyperparameters that a group is to have, and the keys that its algorithm does not know.
pub type GroupUpdate = (Algorithm, Vec<(String, PlainValue)>);

/// One value of a parameter's state.
#[derive(Debug, Clone)]
pub(crate) enum LocalState {
    /// This rank's piece of a tensor shaped like the parameter: flat, as long as the local parameter.
    Piece(Tensor),
    /// A whole tensor of another shape, the same on every rank.
    Whole(Tensor),
    /// A value that is no tensor.
    Plain(PlainValue),
}

/// What an optimizer keeps for one local parameter.
#[derive(Debug, Clone, Default)]
pub(crate) struct ParamState {
    pub(crate) step: Option<f32>,
    pub(crate) entries: IndexMap<String, LocalState>,
}

/// A stretch of a local parameter that belongs to one of the model's parameters.
#[derive(Debug, Clone, Copy)]
struct Segment {
    param: usize,
    start: usize,
    len: usize,
}

/// What the optimizer steps on: a parameter's piece, or a whole shard of a FlatParameter.
#[derive(Debug)]
pub(crate) struct LocalParam {
    handle: Arc<FlatParamHandle>,
    segments: Vec<Segment>,
    numel: usize,
    requires_grad: bool,
    pub(crate) state: Option<ParamState>,
}

/// torch's optimizers over a sharded model: SGD, Adam, AdamW, Adagrad ([`Algorithm`]).
///
/// State is sharded as the parameters are, exists from a parameter's first step on (torch's rule), and is
/// described before that by the algorithm's schema, so that reading or loading it never takes a fake step.
/// No method communicates.
#[derive(Debug)]
pub struct Optimizer {
    parameters: Arc<ShardedParameters>,
    groups: Vec<ParamGroup>,
    locals: Vec<LocalParam>,
    /// The local parameter of each of the model's parameters.
    local_of: IndexMap<String, usize>,
}

impl Optimizer {
    /// An optimizer of all parameters, in one group.
    ///
    /// # Errors
    /// Hyperparameters out of range.
    pub fn new(parameters: &Arc<ShardedParameters>, algorithm: Algorithm) -> Result<Self> {
        let group = ParamGroup::new(algorithm, parameters.fqns());
        Self::with_groups(parameters, vec![group])
    }

    /// An optimizer of several groups. Parameters in no group are not trained by it.
    ///
    /// # Errors
    /// Hyperparameters out of range, unknown or repeated parameters, and, without `use_orig_params`, a FlatParameter
    /// that is split between groups.
    pub fn with_groups(parameters: &Arc<ShardedParameters>, groups: Vec<ParamGroup>) -> Result<Self> {
        let mut optimizer = Optimizer {
            parameters: Arc::clone(parameters),
            groups: Vec::new(),
            locals: Vec::new(),
            local_of: IndexMap::new(),
        };
        for mut group in groups {
            group.algorithm.validate()?;
            for fqn in &mut group.fqns {
                *fqn = parameters.canonical_fqn(fqn).to_owned();
                let Location { handle, .. } = parameters.location(fqn)?;
                if let Some(dtype) = fsdp_flat::dtype::from_candle(parameters.handles[handle].dtype()) {
                    group.algorithm.check_dtype(dtype)?;
                }
                if optimizer.local_of.contains_key(fqn) {
                    return Err(NnError::DuplicateParameter { fqn: fqn.clone() });
                }
                let local = optimizer.local_for(fqn, &group.params)?;
                optimizer.local_of.insert(fqn.clone(), local);
                if !group.params.contains(&local) {
                    group.params.push(local);
                }
            }
            optimizer.groups.push(group);
        }
        optimizer.check_flat_parameters_are_whole()?;
        for group in 0..optimizer.groups.len() {
            if optimizer.groups[group].algorithm.state_exists_from_construction() {
                for &local in &optimizer.groups[group].params {
                    let state = initial_state(&optimizer.groups[group].algorithm, &optimizer.locals[local])?;
                    optimizer.locals[local].state = Some(state);
                }
            }
        }
        Ok(optimizer)
    }

    /// The local parameter for `fqn`: its own piece, or the FlatParameter that holds it, which may be there already.
    fn local_for(&mut self, fqn: &str, of_group: &[usize]) -> Result<usize> {
        let Location { handle: index, param } = self.parameters.location(fqn)?;
        let handle = Arc::clone(&self.parameters.handles[index]);
        let of_handle = self.locals.iter().position(|local| Arc::ptr_eq(&local.handle, &handle));
        if let (false, Some(existing)) = (self.parameters.use_orig_params(), of_handle) {
            if !of_group.contains(&existing) {
                let first = handle.params.iter().find(|other| self.local_of.contains_key(&other.fqn));
                let first = first.map_or_else(String::new, |other| other.fqn.clone());
                return Err(NnError::SplitFlatParameter { first, second: fqn.to_owned() });
            }
            return Ok(existing);
        }
        let infos = handle.layout().shard_param_infos(handle.shard_rank());
        let (segments, numel) = if self.parameters.use_orig_params() {
            let len = infos[param].map_or(0, |info| info.numel_in_shard);
            (vec![Segment { param, start: 0, len }], len)
        } else {
            let of_param = |(param, info): (usize, &Option<fsdp_layout::ShardParamInfo>)| {
                info.map(|info| Segment { param, start: info.offset_in_shard, len: info.numel_in_shard })
            };
            (infos.iter().enumerate().filter_map(of_param).collect(), handle.layout().sharded_numel())
        };
        let requires_grad = handle.params[param].requires_grad;
        self.locals.push(LocalParam { handle, segments, numel, requires_grad, state: None });
        Ok(self.locals.len() - 1)
    }

    fn check_flat_parameters_are_whole(&self) -> Result<()> {
        if self.parameters.use_orig_params() {
            return Ok(());
        }
        for local in &self.locals {
            let (inside, outside): (Vec<_>, Vec<_>) =
                local.handle.params.iter().partition(|param| self.local_of.contains_key(&param.fqn));
            if let (Some(first), Some(second)) = (inside.first(), outside.first()) {
                return Err(NnError::SplitFlatParameter { first: first.fqn.clone(), second: second.fqn.clone() });
            }
        }
        Ok(())
    }

    /// The model's parameters.
    #[must_use]
    pub const fn parameters(&self) -> &Arc<ShardedParameters> {
        &self.parameters
    }

    /// The groups.
    #[must_use]
    pub fn groups(&self) -> &[ParamGroup] {
        &self.groups
    }

    /// The groups, to change hyperparameters: a learning rate schedule.
    pub fn groups_mut(&mut self) -> &mut [ParamGroup] {
        &mut self.groups
    }

    /// Whether this optimizer holds the parameter.
    #[must_use]
    pub fn holds(&self, fqn: &str) -> bool {
        self.local_of.contains_key(self.parameters.canonical_fqn(fqn))
    }

    /// The group of a parameter.
    #[must_use]
    pub fn group_of(&self, fqn: &str) -> Option<usize> {
        let local = *self.local_of.get(self.parameters.canonical_fqn(fqn))?;
        self.groups.iter().position(|group| group.params.contains(&local))
    }

    /// Whether no parameter has state: nothing has been stepped or loaded.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.locals.iter().all(|local| local.state.is_none())
    }

    /// Updates all parameters that have a gradient, in place, each in one pass over its shard. No communication.
    ///
    /// # Errors
    /// candle's; hyperparameters are checked before anything is changed.
    pub fn step(&mut self) -> Result<()> {
        for group in &self.groups {
            group.algorithm.validate()?;
        }
        for group in &self.groups {
            for &index in &group.params {
                let local = &mut self.locals[index];
                if !local.requires_grad || local.handle.grad().is_none() {
                    continue;
                }
                with_float!(local.handle.dtype(), T => step_local::<T>(&group.algorithm, local)?, else {
                    return Err(candle_core::Error::UnsupportedDTypeForOp(local.handle.dtype(), "optimizer step").into());
                });
            }
        }
        self.parameters.reshard()
    }

    /// A parameter's state as torch names it: `step` as a 0-d f32 tensor, tensors shaped like the parameter as
    /// boxes of views of the live state, other values as they are. `None` if the parameter has no state yet, or is
    /// not in this optimizer. The same keys on every rank.
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`] and candle's.
    pub fn state_of(&self, fqn: &str) -> Result<Option<IndexMap<String, StateValue>>> {
        let location = self.parameters.location(fqn)?;
        let Some(&local) = self.local_of.get(self.parameters.canonical_fqn(fqn)) else { return Ok(None) };
        let local = &self.locals[local];
        local.state.as_ref().map(|state| local.portable(state, location.param)).transpose()
    }

    /// What [`Self::state_of`] would be before the first step: the algorithm's schema with its initial values, in
    /// fresh memory. Nothing is changed. `None` for parameters that are frozen or not in this optimizer, and where the
    /// algorithm has no state before its first step.
    ///
    /// # Errors
    /// As [`Self::state_of`].
    pub fn initial_state_of(&self, fqn: &str) -> Result<Option<IndexMap<String, StateValue>>> {
        let location = self.parameters.location(fqn)?;
        let fqn = self.parameters.canonical_fqn(fqn);
        let (Some(&local), Some(group)) = (self.local_of.get(fqn), self.group_of(fqn)) else { return Ok(None) };
        let local = &self.locals[local];
        if !local.requires_grad {
            return Ok(None);
        }
        let state = initial_state(&self.groups[group].algorithm, local)?;
        if state.step.is_none() && state.entries.is_empty() {
            return Ok(None);
        }
        local.portable(&state, location.param).map(Some)
    }

    /// Names of the state entries shaped like the parameter that the parameter's algorithm keeps, and of scalars.
    #[must_use]
    pub fn state_schema(&self, fqn: &str) -> Vec<StateEntry> {
        match self.group_of(fqn) {
            Some(group) => self.groups[group].algorithm.state_entries().collect(),
            None => Vec::new(),
        }
    }

    /// An empty replacement of all state, to be filled and then put in place by [`Self::replace_state`].
    #[must_use]
    pub fn stage_state(&self) -> StagedState {
        StagedState { states: self.locals.iter().map(|_| None).collect() }
    }

    /// Puts state in place of the present one, and hyperparameters into the groups (in their order). Nothing is
    /// changed on error.
    ///
    /// # Errors
    /// The number of groups must stay, and hyperparameters must be in range.
    pub fn replace_state(&mut self, staged: StagedState, groups: Vec<GroupUpdate>) -> Result<()> {
        for (algorithm, _) in &groups {
            algorithm.validate()?;
        }
        for (group, (algorithm, extra)) in self.groups.iter_mut().zip(groups) {
            group.algorithm = algorithm;
            group.extra = extra;
        }
        for (local, state) in self.locals.iter_mut().zip(staged.states) {
            local.state = state;
        }
        Ok(())
    }
}

impl LocalParam {
    fn segment(&self, param: usize) -> Segment {
        let found = self.segments.iter().copied().find(|segment| segment.param == param);
        found.unwrap_or(Segment { param, start: 0, len: 0 })
    }

    /// The state of one of the model's parameters.
    fn portable(&self, state: &ParamState, param: usize) -> Result<IndexMap<String, StateValue>> {
        let mut portable = IndexMap::new();
        if let Some(step) = state.step {
            // A tensor of its own for each parameter: an in-place edit of one must not change the others.
            portable.insert("step".to_owned(), Tensor::new(step, &candle_core::Device::Cpu)?.into());
        }
        for (name, value) in &state.entries {
            let value = match value {
                LocalState::Piece(flat) => self.sharded_piece(flat, param)?.into(),
                LocalState::Whole(tensor) => StateValue::Tensor(tensor.clone()),
                LocalState::Plain(value) => StateValue::Plain(value.clone()),
            };
            portable.insert(name.clone(), value);
        }
        Ok(portable)
    }

    fn sharded_piece(&self, flat: &Tensor, param: usize) -> Result<ShardedTensor> {
        let layout = self.handle.layout();
        let shape = &layout.shapes()[param];
        let Segment { start, len, .. } = self.segment(param);
        if len == 0 {
            return Ok(ShardedTensor::new(flat.dtype(), shape.clone(), Vec::new())?);
        }
        let boxes = layout.param_boxes(param, self.handle.shard_rank());
        Ok(ShardedTensor::from_flat(shape, boxes, &flat.narrow(0, start, len)?)?)
    }
}

/// State that is being loaded: complete before any of it is put in place.
#[derive(Debug)]
pub struct StagedState {
    states: Vec<Option<ParamState>>,
}

impl StagedState {
    /// Sets one value of a parameter's state. Tensors shaped like the parameter are sharded values that cover this
    /// rank's boxes; `step` is a 0-d tensor or a number; anything else is kept as it is.
    /// `value`'s elements are copied.
    ///
    /// # Errors
    /// A parameter that is not in the optimizer, values that do not fit, and, without `use_orig_params`, scalars that
    /// differ between parameters of one FlatParameter.
    pub fn set(&mut self, optimizer: &Optimizer, fqn: &str, name: &str, value: &StateValue) -> Result<()> {
        let location = optimizer.parameters.location(fqn)?;
        let canonical = optimizer.parameters.canonical_fqn(fqn);
        let Some(&index) = optimizer.local_of.get(canonical) else {
            return Err(NnError::UnknownParameter { fqn: fqn.to_owned() });
        };
        let local = &optimizer.locals[index];
        let state = self.states[index].get_or_insert_with(ParamState::default);
        let shape = &local.handle.layout().shapes()[location.param];
        if name == "step"
            && let Some(step) = as_step(value)
        {
            match state.step {
                Some(before) if before.to_bits() != step.to_bits() => {
                    return Err(NnError::DifferingScalarState {
                        name: name.to_owned(),
                        fqn: fqn.to_owned(),
                        values: format!("{step} and before {before}"),
                        fqns: local.handle.layout().fqns().to_vec(),
                    });
                }
                _ => state.step = Some(step),
            }
            return Ok(());
        }
        let whole = match value {
            StateValue::Sharded(values) => Some(values.clone()),
            StateValue::Tensor(tensor) if tensor.dims() == shape => Some(ShardedTensor::from_whole(tensor)),
            _ => None,
        };
        if let Some(values) = whole {
            if values.shape() != shape {
                return Err(NnError::Flat(fsdp_flat::FlatError::ShapeMismatch {
                    name: format!("{fqn}.{name}"),
                    expected: shape.clone(),
                    found: values.shape().to_vec(),
                }));
            }
            let flat = match state.entries.get(name) {
                Some(LocalState::Piece(flat)) => flat.clone(),
                _ => zeros(&[local.numel], values.dtype())?,
            };
            write_boxes(&values, &local.sharded_piece(&flat, location.param)?)?;
            state.entries.insert(name.to_owned(), LocalState::Piece(flat));
            return Ok(());
        }
        let kept = match value {
            StateValue::Tensor(tensor) => LocalState::Whole(tensor.copy()?.detach()),
            StateValue::Plain(value) => LocalState::Plain(value.clone()),
            other => {
                return Err(NnError::UnexpectedState {
                    fqn: fqn.to_owned(),
                    name: name.to_owned(),
                    kind: other.kind(),
                });
            }
        };
        state.entries.insert(name.to_owned(), kept);
        Ok(())
    }
}

fn as_step(value: &StateValue) -> Option<f32> {
    match value {
        StateValue::Tensor(tensor) if tensor.elem_count() == 1 => {
            let scalar =
                tensor.flatten_all().and_then(|t| t.to_dtype(candle_core::DType::F32)?.get(0)?.to_scalar::<f32>());
            scalar.ok()
        }
        StateValue::Plain(value) => value.as_float().map(|step| step as f32),
        _ => None,
    }
}

/// The state that the algorithm's schema describes, in fresh memory; entries that begin as the first gradient are
/// left out.
fn initial_state(algorithm: &Algorithm, local: &LocalParam) -> Result<ParamState> {
    let mut state = ParamState::default();
    for entry in algorithm.state_entries() {
        match (entry.kind, entry.initial) {
            (StateKind::Scalar, _) => state.step = Some(0.0),
            (StateKind::LikeParameter, Initial::FirstGradient) => {}
            (StateKind::LikeParameter, Initial::Value(value)) => {
                let flat = zeros(&[local.numel], local.handle.dtype())?;
                if value != 0.0 {
                    with_float!(local.handle.dtype(), T => {
                        with_slice_mut::<T, _>(&flat, |data| {
                            data.fill(<T as candle_core::WithDType>::from_f64(value));
                        })?;
                    }, else ());
                }
                state.entries.insert(entry.name.to_owned(), LocalState::Piece(flat));
            }
        }
    }
    Ok(state)
}

fn step_local<T: Scalar + Float>(algorithm: &Algorithm, local: &mut LocalParam) -> Result<()> {
    let mut state = match local.state.take() {
        Some(state) => state,
        None => initial_state(algorithm, local)?,
    };
    let mut first = false;
    let mut slices = Vec::new();
    for entry in algorithm.state_entries().filter(|entry| entry.kind == StateKind::LikeParameter) {
        let missing = !matches!(state.entries.get(entry.name), Some(LocalState::Piece(_)));
        if missing {
            // `first` holds for the one entry that begins as the gradient; others that a loaded checkpoint lacked
            // begin at their initial value.
            first |= entry.initial == Initial::FirstGradient;
            let mut fresh = initial_state(algorithm, local)?;
            let piece = match fresh.entries.swap_remove(entry.name) {
                Some(piece) => piece,
                None => LocalState::Piece(zeros(&[local.numel], local.handle.dtype())?),
            };
            state.entries.insert(entry.name.to_owned(), piece);
        }
        if let Some(LocalState::Piece(flat)) = state.entries.get(entry.name) {
            slices.push(flat.clone());
        }
    }
    let step = state.step.map_or(1.0, |step| step + 1.0);
    for segment in local.segments.iter().filter(|segment| segment.len > 0) {
        let (Some(param), Some(grad)) =
            (local.handle.local_piece(segment.param)?, local.handle.grad_piece(segment.param)?)
        else {
            continue;
        };
        let pieces = slices
            .iter()
            .map(|flat| flat.narrow(0, segment.start, segment.len))
            .collect::<candle_core::Result<Vec<_>>>()?;
        with_slice_mut::<T, _>(&param, |param| {
            with_slice::<T, _>(&grad, |grad| {
                let update = |state: &mut [&mut [T]]| algorithm.update(step, first, param, grad, state);
                with_slices_mut::<T, _>(&pieces, Vec::new(), Box::new(update))
            })
        })????;
    }
    state.step = state.step.map(|_| step);
    local.state = Some(state);
    Ok(())
}

/// What is done with several tensors' elements.
type OnSlices<'a, T, R> = Box<dyn FnOnce(&mut [&mut [T]]) -> R + 'a>;

/// Lends all tensors' elements at once. A trait object, because the nesting is as deep as there are tensors.
fn with_slices_mut<T: Scalar, R>(
    tensors: &[Tensor],
    mut lent: Vec<&mut [T]>,
    f: OnSlices<'_, T, R>,
) -> Result<R, fsdp_flat::FlatError> {
    match tensors {
        [] => Ok(f(&mut lent)),
        [tensor, rest @ ..] => with_slice_mut::<T, _>(tensor, |data| {
            let mut lent: Vec<&mut [T]> = lent;
            lent.push(data);
            with_slices_mut(rest, lent, f)
        })?,
    }
}
