//! Getting and setting the state of a sharded model and its optimizers: torch's `get_state_dict` family.
//!
//! Getting changes nothing. Setting checks everything on every rank first; if anything does not fit, every rank gets
//! the same error and nothing has been changed.

use fsdp_nn::model_state::{check_model_state_dict, sharded_model_state_dict};
use fsdp_nn::optim_state::{MissingState, check_optim_state_dict, sharded_optim_state_dict};
use fsdp_nn::{Optimizer, ShardedParameters};
use fsdp_state::{LoadReport, StateDict, StateValue};

use crate::exchange::localize;
use crate::{CheckpointError, StateDictOptions};

/// The state dicts of a model and its optimizers: (model, optimizers).
///
/// Sharded (the default): no communication; each rank gets its own boxes under the same keys.
///
/// # Errors
/// Contradicting options; candle's.
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
    let mut state = sharded_model_state_dict(parameters)?;
    if options.ignore_frozen_params {
        let mut trained = StateDict::new();
        for (name, value) in state {
            if !parameters.contains(&name) || parameters.requires_grad(&name)? {
                trained.insert(name, value);
            }
        }
        state = trained;
    }
    owned(state, options)
}

/// The optimizers' half of [`get_state_dict`]: `{"state", "param_groups"}`, states joined, groups concatenated.
/// Parameters that have not been stepped have their algorithm's initial state (`step` 0): the optimizer is not touched.
///
/// # Errors
/// As [`get_state_dict`].
pub fn get_optimizer_state_dict(
    _parameters: &ShardedParameters,
    optimizers: &[&Optimizer],
    options: &StateDictOptions,
) -> Result<StateDict, CheckpointError> {
    options.check()?;
    owned(sharded_optim_state_dict(optimizers, MissingState::Initial)?, options)
}

/// Values in memory of their own, unless sharing is asked for.
fn owned(state: StateDict, options: &StateDictOptions) -> Result<StateDict, CheckpointError> {
    if options.share_storage {
        return Ok(state);
    }
    state.into_iter().map(|(key, value)| Ok((key, owned_value(value)?))).collect()
}

fn owned_value(value: StateValue) -> Result<StateValue, CheckpointError> {
    Ok(match value {
        StateValue::Tensor(tensor) => StateValue::Tensor(tensor.copy()?.detach()),
        StateValue::Sharded(tensor) => StateValue::Sharded(tensor.copy()?),
        StateValue::Dict(dict) => {
            let copied = dict.into_iter().map(|(key, value)| Ok((key, owned_value(value)?)));
            StateValue::Dict(copied.collect::<Result<_, CheckpointError>>()?)
        }
        StateValue::List(list) => {
            StateValue::List(list.into_iter().map(owned_value).collect::<Result<_, CheckpointError>>()?)
        }
        StateValue::Tuple(list) => {
            StateValue::Tuple(list.into_iter().map(owned_value).collect::<Result<_, CheckpointError>>()?)
        }
        other => other,
    })
}

/// Loads a model and its optimizers. The caller's dicts are not changed. An empty model dict means optimizers only.
///
/// Values may be whole tensors or sharded in any boxes: what a rank needs and does not have comes from the others.
/// Collectives: agreements; one exchange for each value whose boxes have to move between ranks.
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
    let model = model.filter(|model| !model.is_empty());
    let local = localize(parameters, model, optim)?;
    let checked =
        group.agree("set_state_dict", check(parameters, optimizers, local.model.as_ref(), local.optim.as_ref()))?;
    let reports = group.all_gather_object(&(checked.model_report.clone(), checked.optim_report.clone()))?;
    let (model_reports, optim_reports): (Vec<_>, Vec<_>) = reports.into_iter().unzip();
    let merge = |reports: Vec<LoadReport>| reports.into_iter().fold(LoadReport::default(), LoadReport::merge);
    let (model_report, optim_report) = (merge(model_reports), merge(optim_reports));
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
    let applied = checked.apply(parameters, optimizers);
    group.agree("set_state_dict", applied)?;
    Ok(model_report.merge(optim_report))
}

/// All that is to be put in place on this rank.
struct Checked {
    model: Option<fsdp_nn::model_state::CheckedModelState>,
    optims: Vec<fsdp_nn::optim_state::CheckedOptimState>,
    model_report: LoadReport,
    optim_report: LoadReport,
}

fn check(
    parameters: &ShardedParameters,
    optimizers: &[&mut Optimizer],
    model: Option<&StateDict>,
    optim: Option<&StateDict>,
) -> Result<Checked, CheckpointError> {
    let model = model.map(|model| check_model_state_dict(parameters, model)).transpose()?;
    let mut optim_report = LoadReport::default();
    let mut optims = Vec::new();
    if let Some(optim) = optim {
        for optimizer in optimizers {
            optims.push(check_optim_state_dict(optimizer, optim, &mut optim_report)?);
        }
        for fqn in optim.dict("state").into_iter().flat_map(StateDict::keys) {
            if !optimizers.iter().any(|optimizer| optimizer.holds(fqn)) {
                optim_report.unexpected.push(fqn.to_owned());
            }
        }
    }
    let model_report = model.as_ref().map(|checked| checked.report.clone()).unwrap_or_default();
    Ok(Checked { model, optims, model_report, optim_report })
}

impl Checked {
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
