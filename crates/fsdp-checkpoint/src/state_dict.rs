//! Getting and setting the state of a sharded model and its optimizers: torch's `get_state_dict` family.
//!
//! Getting changes nothing. Setting checks everything on every rank first; if anything does not fit, every rank gets
//! the same error and nothing has been changed.

use fsdp_comm::ProcessGroup;
use fsdp_nn::model_state::{CheckedModelState, check_model_state_dict, live_model_state_dict};
use fsdp_nn::optim_state::{CheckedOptimState, MissingState, check_optim_state_dict, live_optim_state_dict};
use fsdp_nn::{Optimizer, ShardedParameters};
use fsdp_state::{
    GatherOptions, KeepOn, LoadReport, StateDict, StateValue, gather_state_dict, offload_state_dict_to_cpu,
};

use crate::exchange::localize;
use crate::from_rank0::CPU;
use crate::incoming::Incoming;
use crate::{CheckpointError, StateDictOptions, names, optim_format};

/// The state dicts of a model and its optimizers: (model, optimizers).
///
/// Sharded (the default): no communication; each rank gets its own boxes under the same keys. Full: one gather for
/// each tensor; all ranks get whole tensors, or those that [`StateDictOptions`] names, and the others empty dicts.
///
/// # Errors
/// Contradicting options; with full state dicts any rank's error, on every rank.
pub fn get_state_dict(
    parameters: &ShardedParameters,
    optimizers: &[&Optimizer],
    options: &StateDictOptions,
) -> Result<(StateDict, StateDict), CheckpointError> {
    Ok((get_model_state_dict(parameters, options)?, get_optimizer_state_dict(parameters, optimizers, options)?))
}

/// The model's half of [`get_state_dict`]: parameters under all their names, and persistent buffers.
///
/// # Errors
/// As [`get_state_dict`].
pub fn get_model_state_dict(
    parameters: &ShardedParameters,
    options: &StateDictOptions,
) -> Result<StateDict, CheckpointError> {
    options.check()?;
    let mut state = StateDict::new();
    for (fqn, value) in live_model_state_dict(parameters)? {
        if options.ignore_frozen_params && parameters.contains(&fqn) && !parameters.requires_grad(&fqn)? {
            continue;
        }
        if let Some(name) = names::to_dict(&fqn, options) {
            state.insert(name, value);
        }
    }
    finish(parameters.group(), state, options)
}

/// The optimizers' half of [`get_state_dict`]: `{"state", "param_groups"}`, states joined, groups concatenated.
/// Parameters that have not been stepped have their algorithm's initial state (`step` 0): the optimizer is not touched.
///
/// # Errors
/// As [`get_state_dict`].
pub fn get_optimizer_state_dict(
    parameters: &ShardedParameters,
    optimizers: &[&Optimizer],
    options: &StateDictOptions,
) -> Result<StateDict, CheckpointError> {
    options.check()?;
    let nested = live_optim_state_dict(optimizers, MissingState::Initial)?;
    finish(parameters.group(), optim_format::to_dict(nested, options)?, options)
}

/// Gathers, offloads or copies, as the options say.
fn finish(group: &ProcessGroup, state: StateDict, options: &StateDictOptions) -> Result<StateDict, CheckpointError> {
    if options.full_state_dict {
        let device = options.cpu_offload.then_some(CPU);
        return Ok(gather_state_dict(group, &state, &GatherOptions { keep_on: options.kept_on(), device })?);
    }
    if options.cpu_offload {
        return Ok(offload_state_dict_to_cpu(&state, &KeepOn::All, group.rank())?);
    }
    if options.share_storage {
        return Ok(state);
    }
    state.into_iter().map(|(key, value)| Ok((key, owned_value(value)?))).collect()
}

fn owned_value(value: StateValue) -> Result<StateValue, CheckpointError> {
    let all = |list: Vec<StateValue>| list.into_iter().map(owned_value).collect::<Result<Vec<_>, CheckpointError>>();
    Ok(match value {
        StateValue::Tensor(tensor) => StateValue::Tensor(tensor.copy()?.detach()),
        StateValue::Sharded(tensor) => StateValue::Sharded(tensor.copy()?),
        StateValue::Dict(dict) => {
            let copied = dict.into_iter().map(|(key, value)| Ok((key, owned_value(value)?)));
            StateValue::Dict(copied.collect::<Result<_, CheckpointError>>()?)
        }
        StateValue::List(list) => StateValue::List(all(list)?),
        StateValue::Tuple(list) => StateValue::Tuple(all(list)?),
        other => other,
    })
}

/// Loads a model and its optimizers. The caller's dicts are not changed. An empty model dict means optimizers only
/// (with `broadcast_from_rank0`, one that is empty on rank 0).
///
/// Values may be whole tensors or sharded in any boxes: what a rank needs and does not have comes from the others.
/// Collectives: agreements; with `broadcast_from_rank0` one broadcast for each tensor; else exchanges of the values
/// whose boxes have to move between ranks.
///
/// # Errors
/// The same on every rank, and nothing is changed: names that differ (`strict`), shapes, dtypes, malformed groups,
/// values that no rank has.
pub fn set_state_dict(
    parameters: &ShardedParameters,
    optimizers: &mut [&mut Optimizer],
    model: &StateDict,
    optim: &StateDict,
    options: &StateDictOptions,
) -> Result<LoadReport, CheckpointError> {
    set(parameters, optimizers, Some(model), Some(optim), options)
}

/// The model's half of [`set_state_dict`].
///
/// # Errors
/// As [`set_state_dict`].
pub fn set_model_state_dict(
    parameters: &ShardedParameters,
    model: &StateDict,
    options: &StateDictOptions,
) -> Result<LoadReport, CheckpointError> {
    set(parameters, &mut [], Some(model), None, options)
}

/// The optimizers' half of [`set_state_dict`].
///
/// # Errors
/// As [`set_state_dict`].
pub fn set_optimizer_state_dict(
    parameters: &ShardedParameters,
    optimizers: &mut [&mut Optimizer],
    optim: &StateDict,
    options: &StateDictOptions,
) -> Result<LoadReport, CheckpointError> {
    set(parameters, optimizers, None, Some(optim), options)
}

fn set(
    parameters: &ShardedParameters,
    optimizers: &mut [&mut Optimizer],
    model: Option<&StateDict>,
    optim: Option<&StateDict>,
    options: &StateDictOptions,
) -> Result<LoadReport, CheckpointError> {
    options.check()?;
    let group = parameters.group();
    let mut state = group.agree("set_state_dict", Incoming::new(parameters, model, optim, options))?;
    if options.broadcast_from_rank0 {
        state = state.broadcast(parameters)?;
    }
    let state = localize(parameters, state)?;
    let checked = group.agree("set_state_dict", Checked::new(parameters, optimizers, &state, options))?;
    let (model_report, optim_report) = checked.reports(group)?;
    let fails = |report: &LoadReport, unexpected: bool| {
        !report.mismatched.is_empty()
            || options.strict && (!report.missing.is_empty() || unexpected && !report.unexpected.is_empty())
    };
    if fails(&model_report, true) {
        return Err(CheckpointError::Mismatch { what: "model", report: Box::new(model_report) });
    }
    // State of parameters that are not here is no error: they may be frozen or belong to another model.
    if fails(&optim_report, false) {
        return Err(CheckpointError::Mismatch { what: "optimizer", report: Box::new(optim_report) });
    }
    group.agree("set_state_dict", checked.apply(parameters, optimizers))?;
    Ok(model_report.merge(optim_report))
}

/// All that is to be put in place on this rank.
struct Checked {
    model: Option<CheckedModelState>,
    optims: Vec<CheckedOptimState>,
    model_report: LoadReport,
    optim_report: LoadReport,
}

impl Checked {
    fn new(
        parameters: &ShardedParameters,
        optimizers: &[&mut Optimizer],
        state: &Incoming,
        options: &StateDictOptions,
    ) -> Result<Self, CheckpointError> {
        let model = state.model.as_ref().filter(|model| !model.is_empty());
        let model = model.map(|model| check_model_state_dict(parameters, model)).transpose()?;
        let mut model_report = model.as_ref().map(|checked| checked.report.clone()).unwrap_or_default();
        if options.ignore_frozen_params {
            let is_trained = |name: &String| parameters.requires_grad(name).unwrap_or(true);
            model_report.missing.retain(is_trained);
        }
        let mut optim_report = LoadReport::default();
        let mut optims = Vec::new();
        if let Some(optim) = &state.optim {
            for optimizer in optimizers {
                optims.push(check_optim_state_dict(optimizer, optim, &mut optim_report)?);
            }
            for fqn in optim.dict("state").into_iter().flat_map(StateDict::keys) {
                if !optimizers.iter().any(|optimizer| optimizer.holds(fqn)) {
                    optim_report.unexpected.push(fqn.to_owned());
                }
            }
        }
        Ok(Checked { model, optims, model_report, optim_report })
    }

    /// What any rank found, on every rank.
    fn reports(&self, group: &ProcessGroup) -> Result<(LoadReport, LoadReport), CheckpointError> {
        let all = group.all_gather_object(&(self.model_report.clone(), self.optim_report.clone()))?;
        let merge = |(model, optim): (LoadReport, LoadReport), more: (LoadReport, LoadReport)| {
            (model.merge(more.0), optim.merge(more.1))
        };
        Ok(all.into_iter().fold(Default::default(), merge))
    }

    fn apply(self, parameters: &ShardedParameters, optimizers: &mut [&mut Optimizer]) -> Result<(), CheckpointError> {
        if let Some(model) = self.model {
            model.apply(parameters)?;
        }
        for (optimizer, checked) in optimizers.iter_mut().zip(self.optims) {
            checked.apply(optimizer)?;
        }
        Ok(())
    }
}
