//! Optimizer state by names to the local state of this rank's optimizer.

use candle_core::Tensor;
use fsdp_flat::ShardedTensor;
use fsdp_flat::storage::zeros;
use fsdp_layout::TensorBox;
use fsdp_state::{LoadReport, Reshard, StateDict, StateValue, reshard_sharded_tensors};
use indexmap::IndexMap;

use super::agree::{agree, agree_on};
use super::plan::{Plan, Planned, check_presence, plan};
use super::processed::{ProcessedState, ProcessedValue, process, process_entries};
use super::save::{check_owner, group_dict, or_abort};
use super::user_state::Carried;
use super::{OptimStateError, OptimStateKeyType};
use crate::optim_state::{SavedGroup, check_named, match_groups, read_param_groups};
use crate::optimizer::{LocalParam, Optimizer};
use crate::parameters::{ShardedParameters, write_boxes};
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
/// saved with, whatever the order and number of groups. State under keys that are no parameter's is passed on.
///
/// The optimizer is changed only with [`OptimLoadOptions::load_directly`], which also tells it the scalars of parameters
/// that this rank has nothing of.
///
/// Collectives: two agreements (one more to load directly). If every rank has whole tensors, nothing else. With
/// `rank0_only` one object broadcast; and then, or for sharded tensors, see [`reshard_sharded_tensors`]: only what ranks
/// lack moves, coalesced.
///
/// # Errors
/// The same on every rank, and nothing is changed: [`OptimStateError`] for state that the parameters cannot take;
/// [`NnError::ConflictingGroups`]; ranks that bring different dicts.
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
        let staged = optimizer.stage_state_dict(&loaded.state, &|local| loaded.of_empty.get(&local).cloned());
        let staged = agree(parameters.group(), OPERATION, staged)?;
        optimizer.replace_state(staged.state, staged.groups)?;
    }
    Ok(loaded.state)
}

/// As [`optim_state_dict_to_load`], with the optimizer's own names (`<unit>._flat_param` without `use_orig_params`) as
/// keys and nothing loaded: torch's `_flatten_optim_state_dict`. With `rank0_only`, only rank 0's `state` counts.
///
/// # Errors
/// As [`optim_state_dict_to_load`].
pub fn flatten_optim_state_dict(
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    state: Option<&StateDict>,
    rank0_only: bool,
) -> Result<StateDict> {
    let source = Source { state, rank0_only, allow_missing_state: false };
    Ok(to_local(parameters, optimizer, source, OptimStateKeyType::ParamName)?.state)
}

const OPERATION: &str = "optim_state_dict_to_load";

/// What is to be loaded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) state: Option<&'a StateDict>,
    pub(crate) rank0_only: bool,
    pub(crate) allow_missing_state: bool,
}

/// A local state dict.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) state: StateDict,
    /// The state of parameters that this rank has nothing of, which the dict leaves out, by position.
    of_empty: IndexMap<usize, StateDict>,
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

/// What goes into each of the optimizer's parameters, by position.
type Plans = Vec<Option<Plan>>;

pub(crate) fn to_local(
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    source: Source<'_>,
    key_type: OptimStateKeyType,
) -> Result<Loaded> {
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
    let hash = planned.as_ref().map_or(0, |(described, ..)| hash(described, source));
    let (described, plans, groups) = agree_on(group, OPERATION, hash, planned)?;
    let values = match source.rank0_only || !described.sharded.is_empty() {
        true => exchange(parameters, optimizer, &described.states, mine)?,
        false => or_abort(group, own_values(optimizer, &described.states, mine))?,
    };
    or_abort(group, build(optimizer, described, &plans, &values, groups, key_type))
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
fn hash(described: &Description, source: Source<'_>) -> u64 {
    let text = format!("{:?} {:?} {}", described.states, described.sharded, source.rank0_only);
    xxhash_rust::xxh3::xxh3_64(text.as_bytes())
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

/// The values in this rank's boxes, from the ranks that have them.
fn exchange(
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    states: &ProcessedState,
    mine: Option<&StateDict>,
) -> Result<Values> {
    let group = parameters.group();
    let own = or_abort(group, own_values(optimizer, states, mine))?;
    let mut wanted = Vec::with_capacity(own.len());
    for ((fqn, name), tensor) in &own {
        let boxes = match or_abort(group, parameters.shape(fqn))? == tensor.shape() {
            true => or_abort(group, parameters.boxes(fqn))?,
            false => vec![TensorBox::whole(tensor.shape())],
        };
        wanted.push((format!("{fqn}.{name}"), tensor, boxes));
    }
    let wanted: Vec<Reshard<'_>> = wanted.iter().map(|(name, tensor, boxes)| Reshard { name, tensor, boxes }).collect();
    let moved = reshard_sharded_tensors(group, &wanted)?;
    Ok(own.keys().cloned().zip(moved).collect())
}

fn build(
    optimizer: &Optimizer,
    described: Description,
    plans: &Plans,
    values: &Values,
    groups: Option<Vec<StateValue>>,
    key_type: OptimStateKeyType,
) -> Result<Loaded> {
    let mut states = StateDict::new();
    let mut of_empty = IndexMap::new();
    for (index, (local, plan)) in optimizer.locals().iter().zip(plans).enumerate() {
        let Some(plan) = plan else { continue };
        let entries = local_entries(local, plan, &|fqn, name| values.get(&(fqn.to_owned(), name.to_owned())).cloned())?;
        match local.is_empty() {
            true => _ = of_empty.insert(index, entries),
            false => _ = states.insert(key_of(optimizer, index, key_type), entries),
        }
    }
    for (key, value) in described.user_state {
        states.insert(key, value.into_value()?);
    }
    let mut state = StateDict::new();
    state.insert("state", states);
    if let Some(groups) = groups {
        state.insert("param_groups", StateValue::List(groups));
    }
    Ok(Loaded { state, of_empty })
}

/// The local state of one of the optimizer's parameters.
fn local_entries(
    local: &LocalParam,
    plan: &Plan,
    value: &dyn Fn(&str, &str) -> Option<ShardedTensor>,
) -> Result<StateDict> {
    let missing = |fqn: &str, name: &str| {
        NnError::from(OptimStateError::MissingEntry { fqn: fqn.to_owned(), name: name.to_owned() })
    };
    let fqns = local.fqns();
    let mut entries = StateDict::new();
    for (name, planned) in plan {
        let entry = match planned {
            Planned::Scalar(value) => value.scalar()?.ok_or_else(|| missing(&local.name(), name))?,
            Planned::Whole => {
                let mut whole: Option<Tensor> = None;
                for fqn in &fqns {
                    let tensor = value(fqn, name).ok_or_else(|| missing(fqn, name))?.to_whole()?;
                    if let Some(first) = &whole
                        && !same_elements(first, &tensor)?
                    {
                        return Err(OptimStateError::DifferingScalars {
                            name: name.clone(),
                            values: vec!["tensors with other elements".to_owned()],
                            dtypes: vec![tensor.dtype().as_str().to_owned()],
                            fqns,
                        }
                        .into());
                    }
                    whole = Some(tensor);
                }
                let whole = whole.ok_or_else(|| missing(&local.name(), name))?;
                whole.force_contiguous()?.detach().into()
            }
            Planned::Piece { dtype, present } => {
                let flat = zeros(&[local.numel], *dtype)?;
                for ((fqn, param), _) in fqns.iter().zip(local.params()).zip(present).filter(|(_, present)| **present) {
                    let values = value(fqn, name).ok_or_else(|| missing(fqn, name))?;
                    write_boxes(&values, &local.sharded_piece(&flat, param)?)?;
                }
                flat.reshape(local.dims())?.into()
            }
        };
        entries.insert(name.as_str(), entry);
    }
    Ok(entries)
}

fn same_elements(a: &Tensor, b: &Tensor) -> Result<bool> {
    use fsdp_flat::storage::with_bytes;
    let (a, b) = (a.force_contiguous()?, b.force_contiguous()?);
    Ok(with_bytes(&a, <[u8]>::to_vec)? == with_bytes(&b, <[u8]>::to_vec)?)
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
    let value = |fqn: &str, name: &str| match processed.get(fqn)?.get(name)? {
        ProcessedValue::PosDim { dtype, shape } => as_sharded(state.dict(fqn)?.get(name), *dtype, shape).ok(),
        _ => None,
    };
    local_entries(local, &plan, &value)
}

/// The state of one of the model's parameters on this rank from its whole state (`{entry: value}`): torch's
/// `_shard_orig_param_state`, for `use_orig_params`. Tensors become this rank's flat piece (the parameter's own shape where
/// nothing is sharded); an empty dict where this rank has nothing of the parameter, or there is no state. Values are
/// whole tensors, or sharded ones that cover this rank's boxes. No communication.
///
/// # Errors
/// [`OptimStateError`]: tensors of another shape or dtype than the parameter (torch cuts them in silence), entries that
/// the optimizer needs and that are missing. [`NnError::UnknownParameter`] for one that the optimizer does not hold.
pub fn shard_orig_param_state(optimizer: &Optimizer, fqn: &str, state: &StateDict) -> Result<StateDict> {
    let fqn = optimizer.parameters().canonical_fqn(fqn);
    let local = optimizer.local_index(fqn).and_then(|local| optimizer.locals().get(local));
    let local = local.ok_or_else(|| NnError::UnknownParameter { fqn: fqn.to_owned() })?;
    let states = [(fqn, StateValue::Dict(state.clone()))].into_iter().collect();
    let entries = flatten_local(optimizer, local, &states)?;
    Ok(if local.is_empty() { StateDict::new() } else { entries })
}
