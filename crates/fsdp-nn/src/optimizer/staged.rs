//! State on its way into an optimizer.

use candle_core::{DType, Tensor};
use fsdp_flat::ShardedTensor;
use fsdp_flat::storage::{owned_copy, share_storage, with_bytes, zeros_on};
use fsdp_layout::{PlainTensor, PlainValue};
use fsdp_state::{StateDict, StateValue};

use super::{LocalParam, LocalState, Optimizer, ParamState};
use crate::fsdp_state::OptimStateError;
use crate::parameters::write_boxes;
use crate::{NnError, Result};

/// State that is being loaded: complete before any of it is put in place.
#[derive(Debug)]
pub struct StagedState {
    states: Vec<Option<ParamState>>,
    user_state: StateDict,
}

impl StagedState {
    pub(super) fn new(locals: usize) -> Self {
        StagedState { states: (0..locals).map(|_| None).collect(), user_state: StateDict::new() }
    }

    pub(super) fn into_parts(self) -> (Vec<Option<ParamState>>, StateDict) {
        (self.states, self.user_state)
    }

    /// Keeps a value under a key that is no parameter's.
    pub(crate) fn set_user_state(&mut self, key: &str, value: StateValue) {
        self.user_state.insert(key, value);
    }

    /// The state of a local parameter, to be filled.
    pub(crate) fn state(&mut self, local: usize) -> &mut ParamState {
        self.states[local].get_or_insert_with(ParamState::default)
    }

    /// Whether a local parameter has state by now.
    pub(crate) fn has_state(&self, local: usize) -> bool {
        self.states[local].is_some()
    }

    /// The step of a local parameter, if it has one by now.
    pub(crate) fn step(&self, local: usize) -> Option<f32> {
        self.states[local].as_ref()?.step
    }

    /// The values of a local parameter that are no pieces and have one element at most: the same on all ranks, if all
    /// is well.
    pub(crate) fn scalars_of(&self, local: usize) -> Result<Vec<(String, PlainValue)>> {
        let Some(state) = &self.states[local] else { return Ok(Vec::new()) };
        let mut scalars = Vec::new();
        scalars.extend(state.step.map(|step| ("step".to_owned(), PlainValue::Float(step.into()))));
        for (name, value) in &state.entries {
            match value {
                LocalState::Plain(value) => scalars.push((name.clone(), value.clone())),
                LocalState::Whole(tensor) if tensor.elem_count() <= 1 => {
                    let (dtype, shape) = (fsdp_flat::dtype::of(tensor)?, tensor.dims().to_vec());
                    let data = with_bytes(tensor, <[u8]>::to_vec)?;
                    scalars.push((name.clone(), PlainValue::Tensor(PlainTensor { dtype, shape, data })));
                }
                LocalState::Whole(_) | LocalState::Piece(_) => {}
            }
        }
        Ok(scalars)
    }

    /// Sets one value of a parameter's state that is kept as it is, and that all parameters of a FlatParameter share,
    /// also if it happens to be shaped like this one.
    pub(crate) fn set_whole(&mut self, optimizer: &Optimizer, fqn: &str, name: &str, value: &StateValue) -> Result<()> {
        let Some(index) = optimizer.local_index(fqn) else {
            return Err(NnError::UnknownParameter { fqn: fqn.to_owned() });
        };
        self.state(index).set_shared(&optimizer.locals[index], name, value)
    }

    /// Sets one value of a parameter's state. Tensors shaped like the parameter are sharded values that cover this
    /// rank's boxes; `step` is a 0-d tensor or a number, and never sharded; anything else is kept as it is.
    /// `value`'s elements are copied, unless they are views of the live state in its place.
    ///
    /// # Errors
    /// A parameter that is not in the optimizer, values that do not fit, and, without `use_orig_params`, values that
    /// the parameters of one FlatParameter share (scalars, tensors of other shapes) but that differ between them.
    pub fn set(&mut self, optimizer: &Optimizer, fqn: &str, name: &str, value: &StateValue) -> Result<()> {
        let location = optimizer.parameters.location(fqn)?;
        let canonical = optimizer.parameters.canonical_fqn(fqn);
        let Some(&index) = optimizer.local_of.get(canonical) else {
            return Err(NnError::UnknownParameter { fqn: fqn.to_owned() });
        };
        let local = &optimizer.locals[index];
        let is_scalar = optimizer.is_scalar_state(fqn, name);
        let state = self.state(index);
        let shape = &local.handle.layout().shapes()[location.param];
        // Also where the parameter has no dimensions either: its step is no piece of it.
        if is_scalar {
            return match as_step(value) {
                Some(step) => state.set_step(local, step),
                None => state.set_shared(local, name, value),
            };
        }
        let whole = match value {
            StateValue::Sharded(values) => Some(values.clone()),
            StateValue::Tensor(tensor) if tensor.dims() == shape => Some(ShardedTensor::from_whole(tensor)),
            _ => None,
        };
        let Some(values) = whole else { return state.set_shared(local, name, value) };
        if values.shape() != shape {
            return Err(NnError::Flat(fsdp_flat::FlatError::ShapeMismatch {
                name: format!("{fqn}.{name}"),
                expected: shape.clone(),
                found: values.shape().to_vec(),
            }));
        }
        let staged = match state.entries.get(name) {
            Some(LocalState::Piece(flat)) => Some(flat.clone()),
            _ => None,
        };
        let live = local.live_piece(name);
        // Values that are where they should go already stay there. A FlatParameter's could be joined by others that do not.
        if let (None, Some(live), false) = (&staged, live, local.is_flat)
            && values.is_same_view(&local.sharded_piece(live, location.param)?)
        {
            state.entries.insert(name.to_owned(), LocalState::Piece(live.clone()));
            return Ok(());
        }
        let flat = match staged.filter(|staged| !live.is_some_and(|live| share_storage(live, staged))) {
            Some(flat) => flat,
            None => zeros_on(&[local.numel], values.dtype(), local.handle.device())?,
        };
        write_boxes(&values, &local.sharded_piece(&flat, location.param)?)?;
        state.entries.insert(name.to_owned(), LocalState::Piece(flat));
        Ok(())
    }
}

impl ParamState {
    /// Sets the step, which all parameters of a FlatParameter share.
    pub(crate) fn set_step(&mut self, local: &LocalParam, step: f32) -> Result<()> {
        match self.step {
            Some(before) if before.to_bits() != step.to_bits() => Err(OptimStateError::DifferingScalars {
                name: "step".to_owned(),
                values: vec![before.to_string(), step.to_string()],
                dtypes: vec!["float32".to_owned()],
                fqns: local.fqns(),
            }
            .into()),
            _ => {
                self.step = Some(step);
                Ok(())
            }
        }
    }

    /// Sets a value that is not shaped like the parameter. A FlatParameter has one of it.
    pub(crate) fn set_shared(&mut self, local: &LocalParam, name: &str, value: &StateValue) -> Result<()> {
        let kept = match value {
            StateValue::Tensor(tensor) => LocalState::Whole(owned_copy(tensor)?),
            StateValue::Plain(value) => LocalState::Plain(value.clone()),
            other => {
                return Err(NnError::UnexpectedState { fqn: local.name(), name: name.to_owned(), kind: other.kind() });
            }
        };
        if let Some(before) = self.entries.get(name)
            && !same(before, &kept)?
        {
            return Err(OptimStateError::DifferingScalars {
                name: name.to_owned(),
                values: vec![describe(before), describe(&kept)],
                dtypes: Vec::new(),
                fqns: local.fqns(),
            }
            .into());
        }
        self.entries.insert(name.to_owned(), kept);
        Ok(())
    }
}

fn same(a: &LocalState, b: &LocalState) -> Result<bool> {
    Ok(match (a, b) {
        (LocalState::Plain(a), LocalState::Plain(b)) => a.same_bits(b),
        (LocalState::Whole(a), LocalState::Whole(b)) => {
            a.dims() == b.dims()
                && a.dtype() == b.dtype()
                && with_bytes(a, <[u8]>::to_vec)? == with_bytes(b, <[u8]>::to_vec)?
        }
        _ => false,
    })
}

fn describe(state: &LocalState) -> String {
    match state {
        LocalState::Plain(value) => format!("{value:?}"),
        LocalState::Piece(tensor) | LocalState::Whole(tensor) => {
            format!("tensor of {} {:?}", tensor.dtype().as_str(), tensor.dims())
        }
    }
}

/// A number of steps: a number, or a tensor of one element.
pub(crate) fn as_step(value: &StateValue) -> Option<f32> {
    match value {
        StateValue::Tensor(tensor) if tensor.elem_count() == 1 => first_element(tensor).ok(),
        StateValue::Plain(value) => value.as_float().map(|step| step as f32),
        _ => None,
    }
}

fn first_element(tensor: &Tensor) -> candle_core::Result<f32> {
    tensor.flatten_all()?.to_dtype(DType::F32)?.get(0)?.to_scalar::<f32>()
}
