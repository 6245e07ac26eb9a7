//! Getting and setting the state of a sharded model and its optimizers: torch's `get_state_dict`
//! family.
//!
//! Getting changes nothing. Setting checks everything on every rank first; if anything does not
//! fit, every rank gets the same error and nothing has been changed.

use std::collections::HashSet;

use candle_core::Device;
use fsdp_comm::ProcessGroup;
use fsdp_state::engine::Source as _;
use fsdp_state::{
    GatherOptions, LoadError as _, LoadOptions, LoadReport, StateDict, gather_state_dict,
    load_state,
};

use super::StateDictOptions;
use super::model::open_source;
use crate::error::{NnError, Result, StateDictError};
use crate::model::ShardedParameters;
use crate::optimizer::Optimizer;
use crate::state::{
    LiveTarget, MissingState, OptimStateError, SavedGroup, StatePrefixes, live_model_state_dict,
    live_states_and_groups, make_optim_dict,
};
use crate::unit::FLAT_PARAM;

/// Returns the state dicts of a model and its optimizers: (model, optimizers). torch's
/// `get_state_dict`.
///
/// Sharded (the default): no communication; each rank gets its own boxes under the same keys, and
/// buffers and scalars whole. Full: all ranks get whole tensors, or those that [`StateDictOptions`]
/// names, and the others empty dicts.
///
/// Collectives for full dicts: those of [`gather_state_dict`], for the model and for the
/// optimizers.
///
/// # Errors
/// Contradicting options ([`NnError::Options`]); a submodule that the model does not have; names
/// that collide under `fqn_renames`, or keys that two optimizers have state under
/// ([`StateError::DuplicateKey`](fsdp_state::StateError::DuplicateKey)); an optimizer of another
/// model; with full state dicts any rank's error, on every rank.
///
/// ```
/// use candle_nn::linear;
/// use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::torch::{StateDictOptions, get_state_dict, set_state_dict};
/// use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
/// fsdp_comm::run_local(2, |group| {
///     let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| linear(3, 2, scope.vb()))?;
///     let mut optimizer = Optimizer::new(model.parameters(), Algorithm::AdamW(AdamOptions::adamw()))?;
///     let options = StateDictOptions::default();
///     let (m, o) = get_state_dict(model.parameters(), &[&optimizer], &options)?;
///     let report = set_state_dict(&m, &o, model.parameters(), &mut [&mut optimizer], &options)?;
///     assert!(report.is_clean());
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn get_state_dict(
    parameters: &ShardedParameters,
    optimizers: &[&Optimizer],
    options: &StateDictOptions,
) -> Result<(StateDict, StateDict)> {
    Ok((
        get_model_state_dict(parameters, options)?,
        get_optimizer_state_dict(parameters, optimizers, options)?,
    ))
}

/// Returns the model's half of [`get_state_dict`]: parameters under all their names, and persistent
/// buffers. torch's `get_model_state_dict`. Collectives: those of [`get_state_dict`].
///
/// # Errors
/// As [`get_state_dict`].
pub fn get_model_state_dict(
    parameters: &ShardedParameters,
    options: &StateDictOptions,
) -> Result<StateDict> {
    finish_state_dict(
        parameters.group(),
        model_views(parameters, options),
        options,
    )
}

/// Returns views of the live model's values, under the names that they have in the state dict.
fn model_views(parameters: &ShardedParameters, options: &StateDictOptions) -> Result<StateDict> {
    options.check(parameters)?;
    let mut state = StateDict::new();
    for (fqn, value) in live_model_state_dict(parameters)? {
        if options.ignore_frozen_params
            && parameters.contains(&fqn)
            && !parameters.requires_grad(&fqn)?
        {
            continue;
        }
        if let Some(name) = options.name_in_dict(&fqn) {
            state.insert_new(name, value)?;
        }
    }
    if options.returns_views() {
        // The caller may write to the views, so gathered copies of the parameters must not be used
        // again.
        parameters.lend()?;
    }
    Ok(state)
}

/// Returns the optimizers' half of [`get_state_dict`]: `{"state", "param_groups"}`, states joined,
/// groups concatenated. torch's `get_optimizer_state_dict`, which however takes a step with a fresh
/// optimizer: here parameters that have not been stepped have their algorithm's initial state
/// (`step` 0), and the optimizer is not touched. Collectives: those of [`get_state_dict`].
///
/// The dict has a place for every entry that a checkpoint of the same algorithm may have, so it can
/// be loaded into before the first step. As in torch, a momentum that begins with the first
/// gradient is zero in it until then; with dampening, a first step from that differs from one
/// without state.
///
/// # Errors
/// As [`get_state_dict`].
pub fn get_optimizer_state_dict(
    parameters: &ShardedParameters,
    optimizers: &[&Optimizer],
    options: &StateDictOptions,
) -> Result<StateDict> {
    let mut views = optimizer_views(parameters, optimizers, options);
    if options.returns_views() {
        // The caller may write to the views at any time, so no copy of the state can be left for
        // later, and those that a save in the background has left must have been made.
        views = views.and_then(|views| parameters.wait_for_readers().map(|()| views));
        parameters.shared.values.lend();
    }
    finish_state_dict(parameters.group(), views, options)
}

/// Returns views of the live optimizers' state, in the format and under the names of the state
/// dict.
fn optimizer_views(
    parameters: &ShardedParameters,
    optimizers: &[&Optimizer],
    options: &StateDictOptions,
) -> Result<StateDict> {
    options.check(parameters)?;
    optimizers
        .iter()
        .try_for_each(|optimizer| optimizer.check_belongs_to(parameters))?;
    let (states, groups) = live_states_and_groups(optimizers, MissingState::Complete, &|fqn| {
        options.rename_for_dict(fqn)
    })?;
    if options.flatten_optimizer_state_dict {
        return flatten_optim_dict(&states, groups);
    }
    Ok(make_optim_dict(states, groups))
}

/// Returns an optimizer state dict in the flat format (`flatten_optimizer_state_dict`).
///
/// # Errors
/// [`OptimStateError::InvalidKeys`] for state under a user's key, which the flat format has no
/// place for.
fn flatten_optim_dict(states: &StateDict, groups: Vec<SavedGroup>) -> Result<StateDict> {
    let mut flat = StateDict::new();
    let mut parameters: HashSet<String> = HashSet::new();
    for group in groups {
        // In the flat format each parameter has the hyperparameters of its group.
        for fqn in &group.params {
            for (key, value) in &group.hyperparameters {
                flat.insert(format!("param_groups.{fqn}.{key}"), value.clone());
            }
        }
        parameters.extend(group.params);
    }
    for (fqn, state) in states {
        let Some(entries) = state.as_dict().filter(|_| parameters.contains(fqn)) else {
            let expected =
                "a flat optimizer state dict has a place for the state of parameters only"
                    .to_owned();
            return Err(OptimStateError::InvalidKeys {
                keys: vec![fqn.clone()],
                expected,
            }
            .into());
        };
        for (name, value) in entries {
            flat.insert(format!("state.{fqn}.{name}"), value.clone());
        }
    }
    Ok(flat)
}

/// Turns views of live values into the state dict that the options ask for: gathered whole, on the
/// CPU, as views, or copied. Collective only for a full state dict.
fn finish_state_dict(
    group: &ProcessGroup,
    views: Result<StateDict>,
    options: &StateDictOptions,
) -> Result<StateDict> {
    let state = match views {
        Ok(state) => state,
        // The other ranks go on to the gather, which begins with an agreement. This rank takes part
        // in that agreement, to tell them its error.
        Err(error) if options.full_state_dict => {
            return Ok(group.agree_on("gather_state_dict", 0, Err(error))?);
        }
        Err(error) => return Err(error),
    };
    let device = options.cpu_offload.then_some(Device::Cpu);
    if options.full_state_dict {
        return Ok(gather_state_dict(
            &state,
            group,
            &GatherOptions {
                keep_on: options.ranks_to_keep(),
                device,
            },
        )?);
    }
    if options.returns_views() {
        return Ok(state);
    }
    Ok(state.copy_to(device.as_ref())?)
}

/// Loads a model and its optimizers: torch's `set_state_dict`. The caller's dicts are not changed.
/// An empty model dict means optimizers only (with `broadcast_from_rank0`, one that is empty on
/// rank 0).
///
/// Every rank passes dicts of the same names, and takes its own part of whole tensors. Scalars,
/// hyperparameters and whole tensors must be the same on all ranks; buffers are each rank's own.
/// With `broadcast_from_rank0` everything is rank 0's.
///
/// Unless [`StateDictOptions::strict`], names that the dicts lack are in the report as missing: a
/// parameter or buffer keeps its value; a parameter of an optimizer has no state then, and begins
/// afresh; one that no saved group names (`param_groups.<index>.params.<name>`) takes the
/// hyperparameters of the others of its group; a group of which none is named
/// (`param_groups.<index>`) keeps its own; an optimizer for which nothing was saved at all
/// (`param_groups`) keeps its state.
///
/// Values may be whole tensors or sharded in any boxes: boxes that a rank needs and does not have
/// come from the others. Values go straight into the live memory, so that a rank needs no second
/// copy of its state.
///
/// Collectives: two agreements; with `broadcast_from_rank0` one more and one object broadcast; for
/// values whose boxes have to move one or two object all-gathers, and the moves: only what a rank
/// needs, small tensors together.
///
/// # Errors
/// The same on every rank, and nothing is changed:
/// [`StateError::Incompatible`](fsdp_state::StateError::Incompatible) for names (`strict`), shapes
/// and dtypes that differ; ranks that pass different names, kinds or values; malformed groups;
/// values that no rank has; an optimizer of another model. A rank that is lost while values move
/// leaves some of them changed
/// ([`StateError::PartlyLoaded`](fsdp_state::StateError::PartlyLoaded)).
pub fn set_state_dict(
    model: &StateDict,
    optim: &StateDict,
    parameters: &ShardedParameters,
    optimizers: &mut [&mut Optimizer],
    options: &StateDictOptions,
) -> Result<LoadReport> {
    load_dicts(
        "set_state_dict",
        &[(MODEL, model), (OPTIM, optim)],
        parameters,
        optimizers,
        options,
    )
}

/// Loads the model's half of [`set_state_dict`]: torch's `set_model_state_dict`. An empty dict
/// changes nothing. Collectives: those of [`set_state_dict`].
///
/// # Errors
/// As [`set_state_dict`].
pub fn set_model_state_dict(
    model: &StateDict,
    parameters: &ShardedParameters,
    options: &StateDictOptions,
) -> Result<LoadReport> {
    load_dicts(
        "set_model_state_dict",
        &[(MODEL, model)],
        parameters,
        &mut [],
        options,
    )
}

/// Loads the optimizers' half of [`set_state_dict`]: torch's `set_optimizer_state_dict`. Groups go
/// by the names in them; state of parameters that no optimizer holds is reported as unexpected and
/// left out. Collectives: those of [`set_state_dict`].
///
/// # Errors
/// As [`set_state_dict`].
pub fn set_optimizer_state_dict(
    optim: &StateDict,
    parameters: &ShardedParameters,
    optimizers: &mut [&mut Optimizer],
    options: &StateDictOptions,
) -> Result<LoadReport> {
    load_dicts(
        "set_optimizer_state_dict",
        &[(OPTIM, optim)],
        parameters,
        optimizers,
        options,
    )
}

/// The keys under which [`load_dicts`] loads the dicts of the model and of its optimizers.
const MODEL: &str = "model";
const OPTIM: &str = "optim";

/// Loads the dicts that are given. All three functions that set state call this.
fn load_dicts(
    operation: &'static str,
    dicts: &[(&str, &StateDict)],
    parameters: &ShardedParameters,
    optimizers: &mut [&mut Optimizer],
    options: &StateDictOptions,
) -> Result<LoadReport> {
    let group = parameters.group();
    let state: StateDict = dicts
        .iter()
        .map(|&(key, dict)| (key, dict.clone().into()))
        .collect();
    let mut check_outcome = options.check(parameters);
    // With `broadcast_from_rank0` the dicts of the other ranks are ignored, so they are not
    // checked.
    if !options.broadcast_from_rank0 || group.rank() == 0 {
        for (key, dict) in dicts {
            check_outcome = check_outcome.and_then(|()| match *key {
                MODEL => check_model_dict(dict, parameters),
                _ => check_optim_dict(dict),
            });
        }
    }
    let rank0_only = options.broadcast_from_rank0;
    let mut source = open_source(operation, group, rank0_only, check_outcome.map(|()| &state))?;
    // An empty model dict stands for none.
    let has_model = source.schema().has_key(MODEL);
    let has_optim = dicts.iter().any(|(key, _)| *key == OPTIM);
    let prefixes = StatePrefixes {
        model: has_model.then(|| vec![MODEL.to_owned()]),
        optim: has_optim.then(|| vec![OPTIM.to_owned()]),
    };
    let optimizers = optimizers
        .iter_mut()
        .map(|optimizer| &mut **optimizer)
        .collect();
    let live_target = LiveTarget::new(parameters, optimizers, prefixes);
    let mut target = NnError::or_refuse(group, operation, live_target)?
        .with_names(
            |name| options.name_in_model(name),
            |name| options.rename_for_model(name),
        )
        .ignore_frozen(options.ignore_frozen_params)
        .with_arguments(options.arguments_of_load());
    let load_options = LoadOptions {
        strict: options.strict,
        ..LoadOptions::default()
    };
    load_state(operation, group, &mut source, &mut target, &load_options)
}

/// Checks that a model's dict has no key of a FlatParameter: that is one of a local state dict,
/// which another function loads.
fn check_model_dict(dict: &StateDict, parameters: &ShardedParameters) -> Result<()> {
    for key in dict.keys() {
        if key.rsplit('.').next() == Some(FLAT_PARAM) && !parameters.contains(key) {
            let key = key.to_owned();
            return Err(StateDictError::FlatParameterKey { key }.into());
        }
    }
    Ok(())
}

/// Checks that an optimizers' dict is in a format that is known: nested (it has `state`), flat, or
/// empty. One without state must not pass for that of parameters that have not been stepped: the
/// state of all of them would be lost.
fn check_optim_dict(dict: &StateDict) -> Result<()> {
    let is_flat = dict
        .keys()
        .all(|key| key.starts_with("state.") || key.starts_with("param_groups."));
    if dict.contains_key("state") || is_flat {
        return Ok(());
    }
    Err(OptimStateError::missing_key("state"))
}
