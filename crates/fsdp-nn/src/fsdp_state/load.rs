//! Optimizer state by names to the local state of this rank's optimizer.

use fsdp_comm::CommError;
use fsdp_flat::ShardedTensor;
use fsdp_layout::{PlainValue, TensorBox};
use fsdp_state::{LoadReport, Reshard, StateDict, StateValue, reshard_sharded_tensors_into};
use indexmap::IndexMap;

use super::agree::{agree, agree_on};
use super::build::{Building, finish, put};
use super::plan::{Plans, check_presence, plan};
use super::processed::{ProcessedState, ProcessedValue, process, process_entries};
use super::save::{check_owner, group_dict, or_abort};
use super::user_state::Carried;
use super::{OptimStateError, OptimStateKeyType};
use crate::optim_state::{SavedGroup, Scalars, check_named, match_groups, read_param_groups};
use crate::optimizer::{LocalParam, Optimizer};
use crate::parameters::ShardedParameters;
use crate::{NnError, Result};

/// Options of [`optim_state_dict_to_load`]; the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OptimLoadOptions {
    /// Whether the result has names as keys, for optimizers keyed by name; ids by default.
    pub is_named_optimizer: bool,
    /// Whether the state is put into the optimizer as well.
    pub load_directly: bool,
    /// Whether a trained parameter may lack state that others of its unit have, and begin afresh. An error by default:
    /// torch skips such a parameter in silence. (Never an error: a whole unit without state, which was not used, and state
    /// that begins with the first gradient, such as momentum.)
    pub allow_missing_state: bool,
}

/// The state of this rank's optimizer, as [`Optimizer::load_state_dict`] takes it, from a state dict by the model's names:
/// torch's `FSDP.optim_state_dict_to_load`. Collective over the model's group.
///
/// `state` is what [`optim_state_dict`](super::optim_state_dict) gave on any number of ranks, with any units, strategy
/// and mode; or the named state dict of a plain optimizer (see
/// [`rekey_optim_state_dict`](super::rekey_optim_state_dict) for one by ids). It is not changed. Values are whole tensors
/// or sharded in any boxes. With a `rank0_only` config set on the model only rank 0 has it, and what the others pass is
/// ignored. A tied parameter's state loads from any of its names.
///
/// Groups go by the names in them: each of the optimizer's groups gets the hyperparameters that its parameters were
/// saved with, whatever the order and number of groups. A parameter that no saved group names goes with the others of
/// its group, and a group without any that is named keeps what it has. State under keys that are no parameter's is
/// passed on.
///
/// The optimizer is changed only with [`OptimLoadOptions::load_directly`].
///
/// Memory beyond what is given: the result, which is this rank's shard of the state (twice that to load directly, as the
/// optimizer has its own), and one tensor on its way.
///
/// Collectives: two agreements (and another to load directly). If every rank has whole tensors, nothing else. With
/// `rank0_only` one agreement more and one object broadcast; and then, or for sharded tensors, see
/// [`reshard_sharded_tensors_into`]: only what ranks lack moves, tensor by tensor, small ones together.
///
/// # Errors
/// The same on every rank, and nothing is changed: [`OptimStateError`] for state that the parameters cannot take;
/// [`NnError::ConflictingGroups`]; ranks that bring different dicts
/// ([`DifferingOnRanks`](OptimStateError::DifferingOnRanks) for scalars and hyperparameters; the elements of whole
/// tensors, of which each rank takes its own part, are not compared).
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::fsdp_state::{OptimLoadOptions, optim_state_dict, optim_state_dict_to_load};
/// # use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
/// fsdp_comm::run_local(2, |group| {
/// #   let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
/// #       candle_nn::linear(3, 2, scope.vb())
/// #   })?;
/// #   let mut optimizer = Optimizer::new(model.parameters(), Algorithm::Adam(AdamOptions::default()))?;
/// #   let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
/// #   let loss = model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?;
/// #   model.backward(&loss)?;
/// #   optimizer.step()?;
///     // A linear layer 3 -> 2 on two ranks, after one step of Adam.
///     let parameters = model.parameters();
///     let saved = optim_state_dict(parameters, &optimizer, None)?;
///     let mut resumed = Optimizer::new(parameters, Algorithm::Adam(AdamOptions::default()))?;
///     let local = optim_state_dict_to_load(parameters, &mut resumed, &saved, &OptimLoadOptions::default())?;
///     assert!(resumed.is_fresh());
///     resumed.load_state_dict(&local)?;
///     let step = resumed.state_of("weight")?.unwrap()["step"].as_tensor().unwrap().to_scalar::<f32>()?;
///     assert_eq!(step, 1.0);
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn optim_state_dict_to_load(
    parameters: &ShardedParameters,
    optimizer: &mut Optimizer,
    state: &StateDict,
    options: &OptimLoadOptions,
) -> Result<StateDict> {
    let rank0_only = parameters.get_state_dict_type().optim_state_dict_config().rank0_only();
    let key_type = match options.is_named_optimizer {
        true => OptimStateKeyType::ParamName,
        false => OptimStateKeyType::ParamId,
    };
    let source = Source { state: Some(state), rank0_only, allow_missing_state: options.allow_missing_state };
    let loaded = to_local(parameters, optimizer, source, key_type)?;
    if options.load_directly {
        let staged = optimizer.stage_state_dict(&loaded);
        let staged = agree(parameters.group(), OPERATION, staged)?;
        optimizer.replace_state(staged.state, staged.groups)?;
    }
    Ok(loaded)
}

/// As [`optim_state_dict_to_load`], with the optimizer's own names (`<unit>._flat_param` without `use_orig_params`) as
/// keys and nothing loaded: torch's `_flatten_optim_state_dict`. With `rank0_only`, only rank 0's `state` counts.
///
/// # Errors
/// As [`optim_state_dict_to_load`].
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::fsdp_state::{flatten_optim_state_dict, full_optim_state_dict};
/// # use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
/// fsdp_comm::run_local(2, |group| {
/// #   let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig { use_orig_params: false, ..FsdpConfig::default() }, |scope| {
/// #       candle_nn::linear(3, 2, scope.vb())
/// #   })?;
/// #   let mut optimizer = Optimizer::new(model.parameters(), Algorithm::Adam(AdamOptions::default()))?;
/// #   let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
/// #   let loss = model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?;
/// #   model.backward(&loss)?;
/// #   optimizer.step()?;
///     // A linear layer 3 -> 2 on two ranks, after one step of Adam.
///     let parameters = model.parameters();
///     let full = full_optim_state_dict(parameters, &optimizer, None, false)?;
///     let local = flatten_optim_state_dict(parameters, &optimizer, Some(&full), false)?;
///     // One FlatParameter of 2 * 3 + 2 elements, half of it on each rank.
///     let state = local.dict("state").unwrap().dict("_flat_param").unwrap();
///     assert_eq!(state.get("exp_avg").unwrap().as_tensor().unwrap().dims(), [4]);
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn flatten_optim_state_dict(
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    state: Option<&StateDict>,
    rank0_only: bool,
) -> Result<StateDict> {
    let source = Source { state, rank0_only, allow_missing_state: false };
    to_local(parameters, optimizer, source, OptimStateKeyType::ParamName)
}

const OPERATION: &str = "optim_state_dict_to_load";

/// What is to be loaded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) state: Option<&'a StateDict>,
    pub(crate) rank0_only: bool,
    pub(crate) allow_missing_state: bool,
}

/// What a state dict says without the elements of tensors.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Description {
    states: ProcessedState,
    /// Names of the values that are sharded.
    sharded: Vec<String>,
    user_state: Vec<(String, Carried)>,
    groups: Option<Vec<SavedGroup>>,
}

pub(crate) fn to_local(
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    source: Source<'_>,
    key_type: OptimStateKeyType,
) -> Result<StateDict> {
    let group = parameters.group();
    let mine = source.state.filter(|_| !source.rank0_only || group.rank() == 0);
    let described = check_owner(parameters, optimizer).and_then(|()| match mine {
        Some(state) => Ok(Some(describe(optimizer, state)?)),
        None if !source.rank0_only || group.rank() == 0 => {
            Err(OptimStateError::MissingKey { key: "state".to_owned() }.into())
        }
        None => Ok(None),
    });
    let described = match source.rank0_only {
        true => {
            let described = agree(group, OPERATION, described)?;
            Ok(group.broadcast_object(described.as_ref(), 0)?)
        }
        false => described.and_then(|described| {
            described.ok_or_else(|| OptimStateError::MissingKey { key: "state".to_owned() }.into())
        }),
    };
    let planned = described.and_then(|described| {
        let plans = plan_all(optimizer, &described, source.allow_missing_state)?;
        let groups = local_groups(optimizer, described.groups.as_deref(), key_type)?;
        Ok((described, plans, groups))
    });
    let scalars = planned.as_ref().ok().map(|(described, _, groups)| scalars(optimizer, described, groups.as_deref()));
    let hash = match (&planned, &scalars) {
        (Ok((described, ..)), Some(scalars)) => hash(described, source, scalars),
        _ => 0,
    };
    let (described, plans, groups) = match agree_on(group, OPERATION, hash, planned) {
        Err(error @ NnError::Comm(CommError::SchemaMismatch { .. })) => {
            // A value that differs says more than that something does.
            scalars.map_or(Ok(()), |scalars| scalars.compare(group))?;
            return Err(error);
        }
        agreed => agreed?,
    };
    let mut building = Building::new(optimizer, &plans);
    let own = own_values(optimizer, &described.states, mine);
    let built = match source.rank0_only || !described.sharded.is_empty() {
        true => stream(parameters, &or_abort(group, own)?, &mut building)?,
        false => own.and_then(|own| own.iter().try_for_each(|((fqn, name), values)| building.put(fqn, name, values))),
    };
    let loaded =
        built.and_then(|()| building.finish(described.user_state, groups, |index| key_of(optimizer, index, key_type)));
    agree(group, OPERATION, loaded)
}

fn describe(optimizer: &Optimizer, state: &StateDict) -> Result<Description> {
    let parameters = optimizer.parameters();
    let mut states = process(optimizer, state)?;
    states.sort_keys();
    states.values_mut().for_each(IndexMap::sort_keys);
    for fqn in states.keys() {
        if !optimizer.holds(fqn) {
            let (key, count) = (fqn.clone(), optimizer.fqns().count());
            return Err(OptimStateError::UnknownState { key, count }.into());
        }
    }
    let mut sharded = Vec::new();
    for (fqn, entries) in &states {
        for name in entries.keys() {
            if matches!(value_of(optimizer, state, fqn, name), Some(StateValue::Sharded(_))) {
                sharded.push(format!("{fqn}.{name}"));
            }
        }
    }
    let mut user_state = Vec::new();
    for (key, value) in state.dict("state").into_iter().flatten() {
        if !parameters.contains(key) {
            user_state.push((key.clone(), Carried::of(key, value)?));
        }
    }
    let groups = state.contains_key("param_groups").then(|| read_param_groups(state)).transpose()?;
    check_named(groups.as_deref().unwrap_or_default())?;
    Ok(Description { states, sharded, user_state, groups })
}

/// A value of a state dict, under any of the parameter's names.
fn value_of<'a>(optimizer: &Optimizer, state: &'a StateDict, fqn: &str, name: &str) -> Option<&'a StateValue> {
    let states = state.dict("state")?;
    let mut names = crate::optim_state::names_of(optimizer.parameters(), fqn);
    names.find_map(|fqn| states.dict(fqn))?.get(name)
}

fn plan_all(optimizer: &Optimizer, described: &Description, allow_missing_state: bool) -> Result<Plans> {
    let plans = optimizer.locals().iter().map(|local| plan(optimizer, local, &described.states));
    let plans = plans.collect::<Result<_>>()?;
    if !allow_missing_state && optimizer.parameters().use_orig_params() {
        check_presence(optimizer, &described.states)?;
    }
    Ok(plans)
}

/// What all ranks must have alike: user state is each rank's own.
fn hash(described: &Description, source: Source<'_>, scalars: &Scalars) -> u64 {
    let text = format!("{:?} {:?} {} {}", described.states, described.sharded, source.rank0_only, scalars.hash());
    twox_hash::XxHash3_64::oneshot(text.as_bytes())
}

/// The values of which each rank takes its own.
fn scalars(optimizer: &Optimizer, described: &Description, groups: Option<&[StateValue]>) -> Scalars {
    let mut scalars = Scalars::default();
    for (fqn, entries) in &described.states {
        for (name, value) in entries {
            match value {
                ProcessedValue::ZeroDim(value) => scalars.insert(fqn, name, PlainValue::Tensor(value.clone())),
                ProcessedValue::NonTensor(value) => scalars.insert(fqn, name, value.clone()),
                ProcessedValue::PosDim { .. } => {}
            }
        }
    }
    for (group, dict) in optimizer.groups().iter().zip(groups.unwrap_or_default()) {
        let entries = dict.as_dict().into_iter().flatten().filter(|(key, _)| *key != "params");
        let entries = entries.filter_map(|(key, value)| Some((key.as_str(), value.as_plain()?.clone())));
        scalars.insert_group(group.fqns(), entries);
    }
    scalars
}

/// The optimizer's groups with the hyperparameters that were saved, as a local state dict has them.
fn local_groups(
    optimizer: &Optimizer,
    saved: Option<&[SavedGroup]>,
    key_type: OptimStateKeyType,
) -> Result<Option<Vec<StateValue>>> {
    let Some(saved) = saved else { return Ok(None) };
    for (index, group) in saved.iter().enumerate() {
        if let Some(key) = group.params.iter().find(|fqn| !optimizer.holds(fqn)) {
            return Err(OptimStateError::UnknownParam { index, key: key.clone() }.into());
        }
    }
    let updates = match_groups(optimizer, saved, &mut LoadReport::default())?;
    let mut groups = Vec::with_capacity(updates.len());
    for (group, (algorithm, extra)) in optimizer.groups().iter().zip(updates) {
        let mut params: Vec<usize> = group.fqns().iter().filter_map(|fqn| optimizer.local_index(fqn)).collect();
        params.sort_unstable();
        params.dedup();
        groups.push(group_dict(&SavedGroup {
            hyperparameters: algorithm.to_group().into_iter().chain(extra).collect(),
            params: params.into_iter().map(|local| key_of(optimizer, local, key_type)).collect(),
            key_type: Some(key_type),
        }));
    }
    Ok(Some(groups))
}

fn key_of(optimizer: &Optimizer, local: usize, key_type: OptimStateKeyType) -> String {
    match key_type {
        OptimStateKeyType::ParamId => local.to_string(),
        OptimStateKeyType::ParamName => optimizer.locals()[local].name(),
    }
}

/// Tensors by parameter and entry; each covers what this rank needs of it.
type Values = IndexMap<(String, String), ShardedTensor>;

fn tensors(states: &ProcessedState) -> impl Iterator<Item = (&str, &str, fsdp_layout::DType, &[usize])> {
    states.iter().flat_map(|(fqn, entries)| {
        entries.iter().filter_map(move |(name, value)| match value {
            ProcessedValue::PosDim { dtype, shape } => Some((fqn.as_str(), name.as_str(), *dtype, shape.as_slice())),
            _ => None,
        })
    })
}

fn as_sharded(value: Option<&StateValue>, dtype: fsdp_layout::DType, shape: &[usize]) -> Result<ShardedTensor> {
    Ok(match value {
        Some(StateValue::Sharded(tensor)) => tensor.clone(),
        Some(StateValue::Tensor(tensor)) => ShardedTensor::from_whole(&tensor.contiguous()?),
        _ => ShardedTensor::new(fsdp_flat::dtype::to_candle(dtype)?, shape.to_vec(), Vec::new())?,
    })
}

/// The values as this rank has them.
fn own_values(optimizer: &Optimizer, states: &ProcessedState, mine: Option<&StateDict>) -> Result<Values> {
    tensors(states)
        .map(|(fqn, name, dtype, shape)| {
            let value = mine.and_then(|state| value_of(optimizer, state, fqn, name));
            Ok(((fqn.to_owned(), name.to_owned()), as_sharded(value, dtype, shape)?))
        })
        .collect()
}

/// Brings the values, in this rank's boxes, from the ranks that have them into what is being built, one after the
/// other. The outer error is every rank's, the inner one this rank's.
fn stream(parameters: &ShardedParameters, own: &Values, building: &mut Building<'_>) -> Result<Result<()>> {
    let group = parameters.group();
    let mut wanted = Vec::with_capacity(own.len());
    for ((fqn, name), tensor) in own {
        let boxes = match or_abort(group, parameters.shape(fqn))? == tensor.shape() {
            true => or_abort(group, parameters.boxes(fqn))?,
            false => vec![TensorBox::whole(tensor.shape())],
        };
        wanted.push((format!("{fqn}.{name}"), tensor, boxes));
    }
    let wanted: Vec<Reshard<'_>> = wanted.iter().map(|(name, tensor, boxes)| Reshard { name, tensor, boxes }).collect();
    let mut outcome = Ok(());
    reshard_sharded_tensors_into(group, &wanted, |index, values| {
        if let (true, Some(((fqn, name), _))) = (outcome.is_ok(), own.get_index(index)) {
            outcome = building.put(fqn, name, &values);
        }
        Ok(())
    })?;
    Ok(outcome)
}

/// The state of one FlatParameter on this rank from the states of its parameters (`{name: {entry: value}}`): torch's
/// `_flatten_optim_state`. `fqns` are the FlatParameter's parameters in order. Values are whole tensors, or sharded ones
/// that cover this rank's boxes. An empty dict if none of the parameters has state. No communication.
///
/// Tensors become this rank's flat shard, right padding zero; a parameter without the tensor has zeros there, which only
/// happens where there are no scalars: those all parameters must have, and alike.
///
/// # Errors
/// [`OptimStateError`]: differing names, types, dtypes, scalars; shapes other than the parameters'; missing entries.
/// [`NnError::NotAFlatParameter`]; boxes that are not covered.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::fsdp_state::{flatten_optim_state, full_optim_state_dict};
/// # use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
/// fsdp_comm::run_local(2, |group| {
/// #   let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig { use_orig_params: false, ..FsdpConfig::default() }, |scope| {
/// #       candle_nn::linear(3, 2, scope.vb())
/// #   })?;
/// #   let mut optimizer = Optimizer::new(model.parameters(), Algorithm::Adam(AdamOptions::default()))?;
/// #   let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
/// #   let loss = model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?;
/// #   model.backward(&loss)?;
/// #   optimizer.step()?;
///     // A linear layer 3 -> 2 on two ranks, after one step of Adam.
///     let parameters = model.parameters();
///     let full = full_optim_state_dict(parameters, &optimizer, None, false)?;
///     let state = flatten_optim_state(&optimizer, &["weight", "bias"], full.dict("state").unwrap())?;
///     assert_eq!(state.get("exp_avg").unwrap().as_tensor().unwrap().dims(), [4]);
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn flatten_optim_state(optimizer: &Optimizer, fqns: &[impl AsRef<str>], state: &StateDict) -> Result<StateDict> {
    let fqns: Vec<&str> = fqns.iter().map(AsRef::as_ref).collect();
    let local = optimizer.locals().iter().find(|local| local.fqns() == fqns);
    let local =
        local.ok_or_else(|| NnError::NotAFlatParameter { fqns: fqns.iter().map(|fqn| (*fqn).to_owned()).collect() })?;
    flatten_local(optimizer, local, state)
}

fn flatten_local(optimizer: &Optimizer, local: &LocalParam, state: &StateDict) -> Result<StateDict> {
    let mut processed = ProcessedState::new();
    for fqn in local.fqns() {
        if let Some(entries) = state.dict(&fqn) {
            processed.insert(fqn.clone(), process_entries(optimizer, &fqn, entries)?);
        }
    }
    let Some(plan) = plan(optimizer, local, &processed)? else { return Ok(StateDict::new()) };
    let mut built = StateDict::new();
    for (fqn, name, dtype, shape) in tensors(&processed) {
        let value = state.dict(fqn).and_then(|entries| entries.get(name));
        put(local, &plan, &mut built, (fqn, name), &as_sharded(value, dtype, shape)?)?;
    }
    finish(local, &plan, built)
}

/// The state of one of the model's parameters on this rank from its whole state (`{entry: value}`): torch's
/// `_shard_orig_param_state`, for `use_orig_params`. Tensors become this rank's flat piece (the parameter's own shape where
/// nothing is sharded); an empty dict where this rank has nothing of the parameter, or there is no state. Values are
/// whole tensors, or sharded ones that cover this rank's boxes. No communication.
///
/// # Errors
/// [`OptimStateError`]: tensors of another shape or dtype than the parameter (torch cuts them in silence), entries that
/// the optimizer needs and that are missing. [`NnError::UnknownParameter`] for one that the optimizer does not hold.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::fsdp_state::{full_optim_state_dict, shard_orig_param_state};
/// # use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
/// fsdp_comm::run_local(2, |group| {
/// #   let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
/// #       candle_nn::linear(3, 2, scope.vb())
/// #   })?;
/// #   let mut optimizer = Optimizer::new(model.parameters(), Algorithm::Adam(AdamOptions::default()))?;
/// #   let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
/// #   let loss = model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?;
/// #   model.backward(&loss)?;
/// #   optimizer.step()?;
///     // A linear layer 3 -> 2 on two ranks, after one step of Adam.
///     let parameters = model.parameters();
///     let full = full_optim_state_dict(parameters, &optimizer, None, false)?;
///     let weight = full.dict("state").unwrap().dict("weight").unwrap();
///     let state = shard_orig_param_state(&optimizer, "weight", weight)?;
///     // With alignment the FlatParameter has 6 + 2 + 2 elements, of which rank 0 has the first five.
///     let on_this_rank = [5, 1][group.rank()];
///     assert_eq!(state.get("exp_avg").unwrap().as_tensor().unwrap().dims(), [on_this_rank]);
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn shard_orig_param_state(optimizer: &Optimizer, fqn: &str, state: &StateDict) -> Result<StateDict> {
    let fqn = optimizer.parameters().canonical_fqn(fqn);
    let local = optimizer.local_index(fqn).and_then(|local| optimizer.locals().get(local));
    let local = local.ok_or_else(|| NnError::UnknownParameter { fqn: fqn.to_owned() })?;
    let states = [(fqn, StateValue::Dict(state.clone()))].into_iter().collect();
    let entries = flatten_local(optimizer, local, &states)?;
    Ok(if local.is_empty() { StateDict::new() } else { entries })
}
