//! The model state dict of a sharded model on one rank: reading it, checking one, loading one. No communication.

use fsdp_flat::ShardedTensor;
use fsdp_state::{LoadReport, Mismatch, StateDict, StateValue};

use crate::Result;
use crate::parameters::ShardedParameters;

/// The model state dict with sharded values: every parameter under each of its names, then persistent buffers. What
/// torch's `state_dict` of type `SHARDED` is before any copy.
///
/// Values are views of the live parameters, as torch's are: the next optimizer step changes them.
/// The same keys on every rank; a rank that owns nothing of a parameter has a sharded tensor without boxes.
///
/// # Errors
/// candle's.
pub fn live_model_state_dict(parameters: &ShardedParameters) -> Result<StateDict> {
    let mut state = StateDict::new();
    for fqn in parameters.fqns() {
        state.insert(fqn, parameters.parameter(fqn)?);
    }
    for (alias, fqn) in parameters.aliases() {
        state.insert(alias.as_str(), parameters.parameter(fqn)?);
    }
    for (name, (value, persistent)) in parameters.buffers() {
        if *persistent {
            state.insert(name.as_str(), value.clone());
        }
    }
    Ok(state)
}

/// A state dict that has been checked against a model, ready to be written into it.
#[derive(Debug)]
pub struct CheckedModelState {
    values: Vec<(String, ShardedTensor)>,
    buffers: Vec<(String, candle_core::Tensor)>,
    /// What differs.
    pub report: LoadReport,
}

/// Compares a state dict with the model: names, shapes, dtypes. Changes nothing: what differs is in
/// [`CheckedModelState::report`], this rank's alone.
///
/// Values may be whole tensors or sharded ones in whatever boxes; that they cover this rank's boxes is checked by
/// [`CheckedModelState::apply`]. A tied parameter is loaded from any of its names.
///
/// # Errors
/// candle's.
pub fn check_model_state_dict(parameters: &ShardedParameters, state: &StateDict) -> Result<CheckedModelState> {
    let mut checked = CheckedModelState { values: Vec::new(), buffers: Vec::new(), report: LoadReport::default() };
    for (name, value) in state {
        if parameters.contains(name) {
            let target = parameters.parameter(name)?;
            match as_sharded(value) {
                Some(saved) if saved.shape() == target.shape() && saved.dtype() == target.dtype() => {
                    let fqn = parameters.canonical_fqn(name).to_owned();
                    if !checked.values.iter().any(|(known, _)| *known == fqn) {
                        checked.values.push((fqn, saved));
                    }
                }
                _ => checked.report.mismatched.push(mismatch(name, value, &describe(target.dtype(), target.shape()))),
            }
        } else if let Some((target, true)) = parameters.buffers().get(name).map(|(value, saved)| (value, *saved)) {
            match as_sharded(value).map(|saved| saved.to_whole()) {
                Some(Ok(saved)) if saved.dims() == target.dims() && saved.dtype() == target.dtype() => {
                    checked.buffers.push((name.clone(), saved));
                }
                _ => checked.report.mismatched.push(mismatch(name, value, &describe(target.dtype(), target.dims()))),
            }
        } else {
            checked.report.unexpected.push(name.clone());
        }
    }
    for fqn in parameters.fqns() {
        if !checked.values.iter().any(|(known, _)| known == fqn) && !checked.has_mismatch_of(parameters, fqn) {
            checked.report.missing.push(fqn.to_owned());
        }
    }
    for (name, (_, persistent)) in parameters.buffers() {
        if *persistent && !state.contains_key(name) {
            checked.report.missing.push(name.clone());
        }
    }
    checked.report = std::mem::take(&mut checked.report).merge(LoadReport::default());
    Ok(checked)
}

impl CheckedModelState {
    fn has_mismatch_of(&self, parameters: &ShardedParameters, fqn: &str) -> bool {
        self.report.mismatched.iter().any(|m| parameters.canonical_fqn(&m.fqn) == fqn)
    }

    /// Gives a name that has been checked other values, of the same shape and dtype.
    ///
    /// # Errors
    /// A buffer's values that are not whole.
    pub fn replace(&mut self, parameters: &ShardedParameters, name: &str, values: ShardedTensor) -> Result<()> {
        let fqn = parameters.canonical_fqn(name);
        if let Some((_, known)) = self.values.iter_mut().find(|(known, _)| known == fqn) {
            *known = values;
        } else if let Some((_, known)) = self.buffers.iter_mut().find(|(known, _)| known == name) {
            *known = values.to_whole()?;
        }
        Ok(())
    }

    /// Writes the values into the live parameters and buffers of this rank.
    ///
    /// # Errors
    /// Values that do not cover this rank's boxes; candle's.
    pub fn apply(self, parameters: &ShardedParameters) -> Result<()> {
        for (fqn, values) in &self.values {
            parameters.set_parameter(fqn, values)?;
        }
        for (name, value) in &self.buffers {
            if let Some((target, _)) = parameters.buffers().get(name) {
                let whole = fsdp_layout::TensorBox::whole(target.dims());
                fsdp_flat::sharded::copy_overlap(value, &whole, target, &whole)?;
            }
        }
        Ok(())
    }
}

/// A tensor value as boxes.
fn as_sharded(value: &StateValue) -> Option<ShardedTensor> {
    match value {
        StateValue::Sharded(tensor) => Some(tensor.clone()),
        StateValue::Tensor(tensor) => Some(ShardedTensor::from_whole(&tensor.contiguous().ok()?)),
        _ => None,
    }
}

/// `float32 [2, 3]`
pub(crate) fn describe(dtype: candle_core::DType, shape: &[usize]) -> String {
    let name = fsdp_flat::dtype::from_candle(dtype).map_or("unsupported", fsdp_layout::DType::torch_name);
    format!("{name} {shape:?}")
}

/// A value's dtype and shape, for messages.
pub(crate) fn describe_value(value: &StateValue) -> String {
    match value {
        StateValue::Tensor(tensor) => describe(tensor.dtype(), tensor.dims()),
        StateValue::Sharded(tensor) => describe(tensor.dtype(), tensor.shape()),
        StateValue::Raw(tensor) => format!("{} {:?}", tensor.dtype(), tensor.shape()),
        other => other.kind().to_owned(),
    }
}

fn mismatch(fqn: &str, saved: &StateValue, current: &str) -> Mismatch {
    Mismatch { fqn: fqn.to_owned(), saved: describe_value(saved), current: current.to_owned() }
}
