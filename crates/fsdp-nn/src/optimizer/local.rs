//! The parameters that an optimizer steps on, and the state that it keeps for them.

use std::sync::Arc;

use candle_core::Tensor;
use fsdp_flat::storage::{HostSlice, HostSliceMut, zeros_on};
use fsdp_flat::{ShardedTensor, with_float};
use fsdp_layout::PlainValue;
use fsdp_layout::flat::aligned_numel;
use fsdp_state::{StateDict, StateValue};
use indexmap::IndexMap;

use crate::algorithm::{Algorithm, Initial, StateKind};
use crate::error::Result;
use crate::unit::FlatParamHandle;

/// One value of a parameter's state.
#[derive(Debug, Clone)]
pub(crate) enum LocalState {
    /// This rank's piece of a tensor shaped like the parameter: flat, as long as the local
    /// parameter.
    Piece(Tensor),
    /// A whole tensor of another shape, the same on every rank.
    Whole(Tensor),
    /// A value that is not a tensor.
    Plain(PlainValue),
}

/// The state that an optimizer keeps for one local parameter.
#[derive(Debug, Clone, Default)]
pub(crate) struct ParamState {
    pub(crate) step: Option<f32>,
    pub(crate) entries: IndexMap<String, LocalState>,
}

impl ParamState {
    /// Returns the number of the parameter's next update, counted from 1.
    pub(crate) fn next_step(&self) -> f32 {
        self.step.unwrap_or(0.0) + 1.0
    }

    /// Returns the state, or `None` if there is nothing in it.
    pub(crate) fn unless_empty(self) -> Option<Self> {
        (self.step.is_some() || !self.entries.is_empty()).then_some(self)
    }
}

/// A stretch of a local parameter that belongs to one of the model's parameters: the parameter's
/// position in its unit, and the stretch in elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    pub(crate) param: usize,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

/// A tensor that the optimizer steps on: a parameter's piece, or a whole shard of a FlatParameter.
#[derive(Debug, Clone)]
pub(crate) struct LocalParam {
    pub(crate) handle: Arc<FlatParamHandle>,
    /// `true` if it is a FlatParameter, of all its unit's parameters, rather than one parameter's
    /// piece.
    pub(crate) is_flat: bool,
    /// The position of its group in the optimizer.
    pub(crate) group: usize,
    pub(crate) segments: Vec<Segment>,
    pub(crate) numel: usize,
    pub(crate) state: Option<ParamState>,
}

impl LocalParam {
    /// Returns `true` if it is trained now. The parameters of a FlatParameter are either all
    /// trained or all frozen.
    pub(crate) fn requires_grad(&self) -> bool {
        self.handle.params[self.params()[0]].requires_grad()
    }

    /// Returns the positions in the unit of the model's parameters that it is made of.
    pub(crate) fn params(&self) -> Vec<usize> {
        if self.is_flat {
            (0..self.handle.params.len()).collect()
        } else {
            self.segments.iter().map(|segment| segment.param).collect()
        }
    }

    /// Returns `true` if any of its parameters got a gradient.
    pub(crate) fn has_gradient(&self) -> bool {
        self.params()
            .into_iter()
            .any(|param| self.handle.has_gradient(param))
    }

    /// Returns the names of the model's parameters that it is made of.
    pub(crate) fn fqns(&self) -> Vec<String> {
        self.params()
            .into_iter()
            .map(|param| self.handle.params[param].fqn.clone())
            .collect()
    }

    /// Returns its name in torch: the parameter's name, or `<unit>._flat_param`.
    pub(crate) fn name(&self) -> String {
        if self.is_flat {
            self.handle.flat_param_name()
        } else {
            self.fqns().remove(0)
        }
    }

    /// Returns the shape of a state tensor in a local state dict. It is flat, or the parameter's
    /// own where every rank holds all of it.
    pub(crate) fn dims(&self) -> Vec<usize> {
        match self.segments.as_slice() {
            [segment] if !self.is_flat && !self.handle.is_sharded() => {
                self.handle.layout().shapes()[segment.param].clone()
            }
            _ => vec![self.numel],
        }
    }

    /// Returns `true` if this rank has no elements of a parameter that is not empty. torch keeps no
    /// state for such a parameter.
    pub(crate) fn is_empty(&self) -> bool {
        self.numel == 0
            && self
                .params()
                .into_iter()
                .any(|param| self.handle.layout().numels()[param] > 0)
    }

    /// Returns `true` if it is one box of one of the model's parameters.
    pub(crate) fn is_one_box(&self) -> bool {
        match self.segments.as_slice() {
            [segment] if !self.is_flat => {
                self.handle
                    .layout()
                    .param_boxes(segment.param, self.handle.shard_rank())
                    .len()
                    == 1
            }
            _ => false,
        }
    }

    /// Returns the same parameter without any state.
    pub(crate) fn without_state(&self) -> Self {
        LocalParam {
            state: None,
            ..self.clone()
        }
    }

    /// Makes a piece of state that is zero, in fresh memory.
    pub(crate) fn zeros(&self) -> Result<Tensor> {
        let device = self.handle.shard_device();
        Ok(zeros_on(&[self.numel], self.handle.dtype(), device)?)
    }

    /// Returns this rank's piece of a state tensor; `None` if there is no state, or no such tensor.
    pub(crate) fn live_piece(&self, name: &str) -> Option<&Tensor> {
        match self.state.as_ref()?.entries.get(name)? {
            LocalState::Piece(flat) => Some(flat),
            _ => None,
        }
    }

    /// Returns the state as a local state dict has it, as views; `None` if there is none.
    pub(crate) fn local_entries(&self) -> Result<Option<StateDict>> {
        let state = self.state.as_ref();
        let dims = self.dims();
        state
            .map(|state| make_state_dict(state, |flat| Ok(flat.reshape(dims.as_slice())?.into())))
            .transpose()
    }

    /// Returns the part of a parameter that this rank holds; an empty one if it holds none.
    pub(crate) fn segment(&self, param: usize) -> Segment {
        let segment = self
            .segments
            .iter()
            .copied()
            .find(|segment| segment.param == param);
        segment.unwrap_or(Segment {
            param,
            start: 0,
            len: 0,
        })
    }

    /// Returns the optimizer state of one parameter, under torch's state names. This rank's pieces
    /// become sharded tensors, whose layout does not depend on units. `param` is the position of
    /// the parameter in its unit.
    pub(crate) fn portable_state(&self, state: &ParamState, param: usize) -> Result<StateDict> {
        make_state_dict(state, |flat| Ok(self.sharded_piece(flat, param)?.into()))
    }

    /// Returns the elements of one of the model's parameters in a flat piece of state, as boxes of
    /// the parameter's own shape.
    pub(crate) fn sharded_piece(&self, flat: &Tensor, param: usize) -> Result<ShardedTensor> {
        let Segment { start, len, .. } = self.segment(param);
        self.handle
            .to_boxes(param, Some(&flat.narrow(0, start, len)?))
    }
}

/// Returns a parameter's state under torch's names. `make_value` makes the value of a piece.
fn make_state_dict(
    state: &ParamState,
    make_value: impl Fn(&Tensor) -> Result<StateValue>,
) -> Result<StateDict> {
    let mut entries = StateDict::new();
    if let Some(step) = state.step {
        // A new tensor each time, so that an in-place edit of one parameter's step does not change
        // the others.
        entries.insert("step", Tensor::new(step, &candle_core::Device::Cpu)?);
    }
    for (name, value) in &state.entries {
        let value = match value {
            LocalState::Piece(flat) => make_value(flat)?,
            LocalState::Whole(tensor) => tensor.clone().into(),
            LocalState::Plain(value) => value.clone().into(),
        };
        entries.insert(name.as_str(), value);
    }
    Ok(entries)
}

/// Returns the state that a local parameter has before its first step, in fresh memory. Entries
/// that begin with the first step are left out.
pub(crate) fn initial_state(algorithm: &Algorithm, local: &LocalParam) -> Result<ParamState> {
    let mut states = initial_states(algorithm, &[local])?;
    Ok(states.remove(0))
}

/// Returns the states that local parameters of one unit have before their first step. Each kind of
/// state is in one buffer of fresh memory, where one parameter's part follows that of another.
/// Entries that begin with the first step are left out.
fn initial_states(algorithm: &Algorithm, locals: &[&LocalParam]) -> Result<Vec<ParamState>> {
    let handle = &locals[0].handle;
    // Each part begins where memory is read best.
    let alignment = aligned_numel(handle.file_dtype());
    let mut starts = Vec::with_capacity(locals.len());
    let mut numel = 0usize;
    for local in locals {
        numel = numel.next_multiple_of(alignment);
        starts.push(numel);
        numel += local.numel;
    }
    let mut states = vec![ParamState::default(); locals.len()];
    for entry in algorithm.state_entries() {
        if entry.kind == StateKind::Scalar {
            states.iter_mut().for_each(|state| state.step = Some(0.0));
            continue;
        }
        let value = match entry.initial {
            Initial::FirstGradient => continue,
            Initial::Parameter => 0.0,
            Initial::Value(value) => value,
        };
        let buffer = filled(numel, value, handle)?;
        for ((state, local), start) in states.iter_mut().zip(locals).zip(&starts) {
            let piece = buffer.narrow(0, *start, local.numel)?;
            if entry.initial == Initial::Parameter {
                copy_parameter(local, &piece)?;
            }
            let piece = LocalState::Piece(piece);
            state.entries.insert(entry.name.to_owned(), piece);
        }
    }
    Ok(states)
}

/// Makes a flat tensor that has one value everywhere, where the shards of a unit are.
fn filled(numel: usize, value: f64, handle: &FlatParamHandle) -> Result<Tensor> {
    let (dtype, device) = (handle.dtype(), handle.shard_device());
    if value != 0.0 && numel > 0 && !device.is_cpu() {
        return Ok(Tensor::full(value, numel, device)?.to_dtype(dtype)?);
    }
    let flat = zeros_on(&[numel], dtype, device)?;
    if value != 0.0 {
        with_float!(dtype, T => {
            let mut data = HostSliceMut::<T>::write(&flat)?;
            data.fill(<T as candle_core::WithDType>::from_f64(value));
            data.finish()?;
        });
    }
    Ok(flat)
}

/// Returns the state of a local parameter, or its initial state if it has none, with zeros in fresh
/// memory for entries that begin with the first step. `None` if the algorithm has no state.
pub(crate) fn complete_state(
    algorithm: &Algorithm,
    local: &LocalParam,
) -> Result<Option<ParamState>> {
    let mut state = match &local.state {
        Some(state) => state.clone(),
        None => initial_state(algorithm, local)?,
    };
    for entry in algorithm.state_entries() {
        if entry.initial == Initial::FirstGradient && !state.entries.contains_key(entry.name) {
            let piece = LocalState::Piece(local.zeros()?);
            state.entries.insert(entry.name.to_owned(), piece);
        }
    }
    // Averages have shapes of their own, and belong to one of the model's parameters.
    if let [param] = local.params()[..] {
        let shape = &local.handle.layout().shapes()[param];
        for (name, average_shape) in algorithm.averages_of(shape) {
            if state.entries.contains_key(name) {
                continue;
            }
            let average = if average_shape == *shape {
                LocalState::Piece(local.zeros()?)
            } else {
                let device = local.handle.shard_device();
                LocalState::Whole(zeros_on(&average_shape, local.handle.dtype(), device)?)
            };
            state.entries.insert(name.to_owned(), average);
        }
    }
    let has_state = state.step.is_some() || !state.entries.is_empty();
    Ok(has_state.then_some(state))
}

/// The invariant after [`begin_state`], for an algorithm with state.
pub(super) const BEGUN: &str = "the state of a parameter begins before its first step";

/// Sets the initial state of a local parameter, if it has none and its algorithm has state before
/// the first gradient.
pub(super) fn begin_state(algorithm: &Algorithm, local: &mut LocalParam) -> Result<()> {
    if local.state.is_none() {
        local.state = initial_state(algorithm, local)?.unless_empty();
    }
    Ok(())
}

/// Sets the initial states of local parameters that have none, which are trained and on a GPU:
/// those of a unit together.
pub(super) fn begin_states_on_device(
    algorithm: &Algorithm,
    locals: &mut [LocalParam],
) -> Result<()> {
    let mut fresh: Vec<&mut LocalParam> = locals
        .iter_mut()
        .filter(|local| begins_on_device(local))
        .collect();
    for unit in fresh.chunk_by_mut(|local, next| Arc::ptr_eq(&local.handle, &next.handle)) {
        let unit_locals: Vec<&LocalParam> = unit.iter().map(|local| &**local).collect();
        let states = initial_states(algorithm, &unit_locals)?;
        for (local, state) in unit.iter_mut().zip(states) {
            local.state = state.unless_empty();
        }
    }
    Ok(())
}

/// Returns `true` for a local parameter on a GPU that gets its state in the next step.
fn begins_on_device(local: &LocalParam) -> bool {
    local.state.is_none()
        && local.requires_grad()
        && local.handle.grad().is_some()
        && !local.handle.shard_device().is_cpu()
}

/// Copies this rank's piece of a local parameter to a flat tensor of zeros.
fn copy_parameter(local: &LocalParam, flat: &Tensor) -> Result<()> {
    // Padding between the parameters stays zero.
    for segment in local.segments.iter().filter(|segment| segment.len > 0) {
        let Some(piece) = local.handle.local_piece(segment.param)? else {
            continue;
        };
        if !flat.device().is_cpu() {
            flat.slice_set(&piece, 0, segment.start)?;
            continue;
        }
        with_float!(local.handle.dtype(), T => {
            let source_slice = HostSlice::<T>::read(&piece)?;
            let target_piece = flat.narrow(0, segment.start, segment.len)?;
            let mut target_slice = HostSliceMut::<T>::write(&target_piece)?;
            target_slice.copy_from_slice(&source_slice);
            target_slice.finish()?;
        });
    }
    Ok(())
}
