//! Converts optimizer state between its two forms: keyed by the model's parameter names, and local
//! to a rank.

use fsdp_comm::ProcessGroup;
use fsdp_layout::{KeyPath, PathPart};
use fsdp_state::engine::{DictSource, Source as _};
use fsdp_state::{GatherOptions, LoadError as _, StateDict, StateValue};
use indexmap::IndexMap;

use super::model::{gather_state, open_source};
use crate::error::{NnError, Result, StateDictError};
use crate::model::ShardedParameters;
use crate::model::state_dict_type::StateDictConfig;
use crate::optimizer::Optimizer;
use crate::state::{
    ExactLoad, LocalStates, OptimStateError, OptimStateKey, OptimStateKeyType, PortableStates,
    join, load_exactly, load_from_this_rank, make_group_dicts, names_that_count, resolve_keys,
};

/// Returns the optimizer's state by the model's names: torch's `FSDP.optim_state_dict`. Collective
/// over the model's group.
///
/// `state` is a local state dict, by ids or by names, as [`Optimizer::state_dict`] and
/// [`Optimizer::named_state_dict`] give it; `None` is the live state of `optimizer`, which is not
/// changed. The type and the config that are set on the model say what comes: whole tensors on all
/// ranks (`Full`), on rank 0 alone while the others get an empty dict (`rank0_only`), or the boxes
/// of each rank (`Sharded`; `Local` is the same, as in torch). `param_groups` is there if `state`
/// has it; a FlatParameter's id becomes the names of all its parameters. State under keys that are
/// neither ids nor names is passed on, each rank its own.
///
/// Each parameter has tensors of its own, `step` included. Parameters without state, or that the
/// optimizer does not hold, are left out. Scalars must agree on all ranks that have elements of the
/// parameter; those of others are ignored.
///
/// Collectives: with `Sharded`, one object all-gather and one agreement. With `Full`, one object
/// all-gather, two agreements, and one all-gather for each tensor, in the order of names (with
/// `rank0_only`, a gather). Small tensors share a call, up to half the size of the largest tensor
/// (but at least 1 MiB, and at most 32 MiB). A tensor whose shape is not that of its parameter
/// moves only if some rank has nothing of the parameter.
///
/// # Errors
/// The same on every rank: [`OptimStateError`] for state that differs between ranks or that some
/// ranks lack; [`NnError::ForeignOptimizer`].
pub fn optim_state_dict(
    state: Option<&StateDict>,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
) -> Result<StateDict> {
    let own_state = read_own_states(state, parameters, optimizer);
    let settings = parameters.get_state_dict_type();
    let config = settings.optim_state_dict_config();
    collect_state(own_state, parameters, optimizer, config)
}

/// Makes the same values as [`optim_state_dict`], and hands each to `sink` (parameter, entry,
/// value) as soon as it is there. A rank that writes a file thus needs memory for one tensor.
/// Returns what is left: `state` with user state alone, and `param_groups`; on ranks that keep
/// nothing an empty dict. Collectives: those of [`optim_state_dict`].
///
/// # Errors
/// The same as [`optim_state_dict`], and those of `sink`: on every rank, once all values have
/// passed.
pub fn optim_state_dict_into(
    state: Option<&StateDict>,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    mut sink: impl FnMut(&str, &str, StateValue) -> Result<()>,
) -> Result<StateDict> {
    let own_state = read_own_states(state, parameters, optimizer);
    let settings = parameters.get_state_dict_type();
    let config = settings.optim_state_dict_config();
    Ok(stream_state(own_state, parameters, optimizer, config, &mut sink)?.0)
}

/// Returns the optimizer's state by names with whole tensors on the CPU, whatever settings are in
/// force: torch's `full_optim_state_dict`. With `rank0_only` (torch's default) the other ranks get
/// an empty dict. For the rest, and for the collectives, see [`optim_state_dict`] with `Full`.
///
/// # Errors
/// As [`optim_state_dict`].
pub fn full_optim_state_dict(
    state: Option<&StateDict>,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    rank0_only: bool,
) -> Result<StateDict> {
    let config = StateDictConfig::Full {
        offload_to_cpu: true,
        rank0_only,
    };
    let own_state = read_own_states(state, parameters, optimizer);
    collect_state(own_state, parameters, optimizer, &config)
}

/// Returns the optimizer's state by names in each rank's boxes, whatever settings are in force:
/// torch's `sharded_optim_state_dict`. For the rest, and for the collectives, see
/// [`optim_state_dict`] with `Sharded`.
///
/// # Errors
/// As [`optim_state_dict`].
pub fn sharded_optim_state_dict(
    state: Option<&StateDict>,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
) -> Result<StateDict> {
    let config = StateDictConfig::Sharded {
        offload_to_cpu: false,
    };
    let own_state = read_own_states(state, parameters, optimizer);
    collect_state(own_state, parameters, optimizer, &config)
}

/// Returns this rank's state by the model's names: that of a local state dict, or the live one.
fn read_own_states(
    state: Option<&StateDict>,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
) -> Result<PortableStates> {
    optimizer.check_belongs_to(parameters)?;
    match state {
        Some(state) => PortableStates::read(optimizer, state.clone()),
        None => PortableStates::from_live(optimizer),
    }
}

/// Puts the values that [`stream_state`] hands out into one dict, parameters in their order.
fn collect_state(
    own_state: Result<PortableStates>,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    config: &StateDictConfig,
) -> Result<StateDict> {
    // The gather hands entries out sorted by name. The result has the order of the join.
    let mut states: IndexMap<String, StateDict> = IndexMap::new();
    let (mut result, fqn_order) = stream_state(
        own_state,
        parameters,
        optimizer,
        config,
        &mut |fqn, name, value| {
            states
                .entry(fqn.to_owned())
                .or_default()
                .insert(name, value);
            Ok(())
        },
    )?;
    // A rank that keeps nothing has no `state`. Elsewhere it holds user state, which comes last.
    if let Some(StateValue::Dict(joined_states)) = result.get_mut("state") {
        let user_state = std::mem::take(joined_states);
        for fqn in fqn_order {
            if let Some(state) = states.swap_remove(&fqn) {
                joined_states.insert(fqn, state);
            }
        }
        joined_states.extend(user_state);
    }
    Ok(result)
}

/// Hands all values to `sink`. Returns the user state and the groups, and the names of the
/// parameters in their order.
fn stream_state(
    own_state: Result<PortableStates>,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    config: &StateDictConfig,
    sink: &mut dyn FnMut(&str, &str, StateValue) -> Result<()>,
) -> Result<(StateDict, Vec<String>)> {
    const OPERATION: &str = "optim_state_dict";
    let group = parameters.group();
    let gather_options = config.gather_options();
    let (joined, own_state) = join(optimizer, group, OPERATION, own_state)?;
    let fqn_order = joined.keys().map(str::to_owned).collect();
    if matches!(config, StateDictConfig::Full { .. }) {
        gather_state(
            OPERATION,
            &joined,
            parameters,
            &gather_options,
            |path, value| match path.0.as_slice() {
                [PathPart::Key(fqn), entry @ ..] => {
                    sink(fqn, &KeyPath(entry.to_vec()).flat_key(), value)
                }
                [PathPart::Index(_), ..] | [] => Ok(()),
            },
        )?;
        return Ok((
            user_state_and_groups(own_state, &gather_options, group)?,
            fqn_order,
        ));
    }
    // Boxes are not gathered. So without this agreement the other ranks would not learn of an
    // error.
    let outcome = joined.iter().try_for_each(|(fqn, entries)| {
        let mut entries = entries.as_dict().into_iter().flatten();
        entries.try_for_each(|(name, value)| {
            sink(fqn, name, value.copy_to(gather_options.device.as_ref())?)
        })
    });
    let leftover = outcome.and_then(|()| user_state_and_groups(own_state, &gather_options, group));
    Ok((NnError::agree(group, OPERATION, None, leftover)?, fqn_order))
}

/// Returns a dict with the state under keys that are no parameter's, and with the groups. It is
/// empty on ranks that keep nothing.
fn user_state_and_groups(
    own_state: PortableStates,
    gather_options: &GatherOptions,
    group: &ProcessGroup,
) -> Result<StateDict> {
    let mut dict = StateDict::new();
    if !gather_options.keep_on.contains(group.rank()) {
        return Ok(dict);
    }
    dict.insert("state", own_state.user_state.copy()?);
    if let Some(groups) = own_state.groups {
        dict.insert("param_groups", make_group_dicts(groups));
    }
    Ok(dict)
}

/// Returns the states of a FlatParameter's parameters, in their order, from its local state
/// (`{entry: value}`, as in [`Optimizer::state_dict`]): torch's `_unflatten_optim_state`. The
/// model's settings decide whether values are whole tensors or boxes, and which ranks get them; the
/// other ranks get empty dicts.
///
/// Collectives: those of [`optim_state_dict`], and one agreement.
///
/// # Errors
/// The errors of [`optim_state_dict`], and [`StateDictError::NotAFlatParameter`], the same on every
/// rank.
pub fn unflatten_optim_state(
    flat_state: &StateDict,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    fqns: &[impl AsRef<str>],
) -> Result<Vec<StateDict>> {
    let local = NnError::agree(
        parameters.group(),
        "unflatten_optim_state",
        None,
        find_local(optimizer, fqns),
    )?;
    let own_state = optimizer
        .check_belongs_to(parameters)
        .and_then(|()| PortableStates::from_local(optimizer, local, flat_state));
    let settings = parameters.get_state_dict_type();
    let config = settings.optim_state_dict_config();
    let state = collect_state(own_state, parameters, optimizer, config)?;
    // A rank that keeps nothing has no `state`, and parameters without state are not in it.
    let states = state.dict("state");
    let param_states = fqns.iter().map(|fqn| states?.dict(fqn.as_ref()));
    Ok(param_states
        .map(|state| state.cloned().unwrap_or_default())
        .collect())
}

/// Finds the local parameter that is made of the parameters `fqns`, in this order, and returns its
/// index.
///
/// # Errors
/// [`StateDictError::NotAFlatParameter`] if there is none.
fn find_local(optimizer: &Optimizer, fqns: &[impl AsRef<str>]) -> Result<usize> {
    let fqns: Vec<&str> = fqns.iter().map(AsRef::as_ref).collect();
    let local = optimizer
        .locals()
        .iter()
        .position(|local| local.fqns() == fqns);
    local.ok_or_else(|| {
        let fqns = fqns.iter().map(|fqn| (*fqn).to_owned()).collect();
        StateDictError::NotAFlatParameter { fqns }.into()
    })
}

/// Options of [`optim_state_dict_to_load`]; the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OptimLoadOptions {
    /// `true` if the result has names as keys, for optimizers keyed by name; ids by default.
    pub is_named_optimizer: bool,
    /// `true` if the state is put into the optimizer as well.
    pub load_directly: bool,
    /// `true` if a trained parameter may lack state that others of its unit have, and begin afresh.
    /// By default that is an error, where torch skips the parameter in silence. Two things are
    /// never an error: a whole unit without state, which was not used, and missing state that
    /// begins with the first gradient, such as momentum.
    pub allow_missing_state: bool,
}

/// Returns the state of this rank's optimizer, as [`Optimizer::load_state_dict`] takes it, from a
/// state dict by the model's names: torch's `FSDP.optim_state_dict_to_load`. Collective over the
/// model's group.
///
/// `state` is a dict that [`optim_state_dict`] gave on any number of ranks, with any units,
/// strategy and mode; or the named state dict of a plain optimizer (see
/// [`rekey_optim_state_dict`](super::rekey_optim_state_dict) for one by ids). It is not changed.
/// Values are whole tensors or sharded in any boxes. With a `rank0_only` config set on the model
/// only rank 0 has it, and what the others pass is ignored. A tied parameter's state loads from any
/// of its names.
///
/// Groups go by the names in them: each of the optimizer's groups gets the hyperparameters that its
/// parameters were saved with, whatever the order and number of groups. A parameter that no saved
/// group names goes with the others of its group, and a group without any that is named keeps what
/// it has. State under keys that are no parameter's is passed on. The algorithm that was saved
/// decides which entries must be there.
///
/// The optimizer is changed only with [`OptimLoadOptions::load_directly`].
///
/// Memory beyond what is given: the result, which is this rank's shard of the state (twice that to
/// load directly, as the optimizer has its own), and one tensor on its way, or 32 MiB of it.
///
/// Collectives: two agreements. With `rank0_only` one agreement more and one object broadcast, and
/// scatters of what ranks need. For sharded tensors one object all-gather, and only what ranks lack
/// moves, small tensors together.
///
/// # Errors
/// The same on every rank, and nothing is changed: [`OptimStateError`] for state that the
/// parameters cannot take; [`StateDictError::ConflictingGroups`]; ranks that pass different dicts
/// ([`StateError::DifferingOnRanks`](fsdp_state::StateError::DifferingOnRanks) for scalars,
/// hyperparameters and whole tensors).
pub fn optim_state_dict_to_load(
    state: &StateDict,
    parameters: &ShardedParameters,
    optimizer: &mut Optimizer,
    options: &OptimLoadOptions,
) -> Result<StateDict> {
    let rank0_only = parameters
        .get_state_dict_type()
        .optim_state_dict_config()
        .rank0_only();
    let (loaded, dict) =
        load_into_new_optimizer(Some(state), parameters, optimizer, rank0_only, options)?;
    if !options.load_directly {
        return Ok(dict);
    }
    if !dict.contains_key("param_groups") {
        return Err(OptimStateError::missing_key("param_groups"));
    }
    // Everything has been checked, and the state is complete.
    *optimizer = loaded;
    // The result shares no memory with the optimizer.
    Ok(dict.copy()?)
}

/// Returns the same as [`optim_state_dict_to_load`], with the optimizer's own names
/// (`<unit>._flat_param` without `use_orig_params`) as keys and nothing loaded: torch's
/// `_flatten_optim_state_dict`. With `rank0_only`, only rank 0's `state` counts. Collectives: those
/// of [`optim_state_dict_to_load`].
///
/// # Errors
/// The same as [`optim_state_dict_to_load`].
pub fn flatten_optim_state_dict(
    state: Option<&StateDict>,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    rank0_only: bool,
) -> Result<StateDict> {
    let options = OptimLoadOptions {
        is_named_optimizer: true,
        ..OptimLoadOptions::default()
    };
    Ok(load_into_new_optimizer(state, parameters, optimizer, rank0_only, &options)?.1)
}

/// Returns the local state, by ids, from a full one that every rank has: torch's
/// `shard_full_optim_state_dict`. No tensor moves. Collectives: those of
/// [`optim_state_dict_to_load`], which also says how to use the result.
///
/// # Errors
/// The same as [`optim_state_dict_to_load`].
pub fn shard_full_optim_state_dict(
    full: &StateDict,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
) -> Result<StateDict> {
    let options = OptimLoadOptions::default();
    Ok(load_into_new_optimizer(Some(full), parameters, optimizer, false, &options)?.1)
}

/// Returns this rank's local optimizer state dict, keyed by parameter ids, from a full one that
/// only rank 0 passes: torch's `scatter_full_optim_state_dict`. `full` is ignored on other ranks.
/// Collectives: those of [`optim_state_dict_to_load`] with `rank0_only`; it also says how to use
/// the result.
///
/// # Errors
/// The errors of [`optim_state_dict_to_load`]; `None` on rank 0.
pub fn scatter_full_optim_state_dict(
    full: Option<&StateDict>,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
) -> Result<StateDict> {
    let options = OptimLoadOptions::default();
    Ok(load_into_new_optimizer(full, parameters, optimizer, true, &options)?.1)
}

/// Returns the local state, by ids, from one that is sharded in any boxes: torch's
/// `flatten_sharded_optim_state_dict`. It is the same function as [`shard_full_optim_state_dict`],
/// because that takes values of both kinds.
pub use self::shard_full_optim_state_dict as flatten_sharded_optim_state_dict;

/// Loads state by the model's names into a new optimizer like `optimizer`, which is not changed.
/// Returns the new one, and its local state dict, whose tensors are views of it. The dict has no
/// `param_groups` if `state` has none. With `rank0_only` the `state` of other ranks is not used.
/// All functions that make local state call this; ranks must pass the same options.
///
/// # Errors
/// The same on every rank: no state where one is used, or one without the states of parameters;
/// state that does not fit the optimizer.
fn load_into_new_optimizer(
    state: Option<&StateDict>,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    rank0_only: bool,
    options: &OptimLoadOptions,
) -> Result<(Optimizer, StateDict)> {
    const OPERATION: &str = "optim_state_dict_to_load";
    let group = parameters.group();
    let empty = StateDict::new();
    let own_dict = optimizer.check_belongs_to(parameters).and_then(|()| {
        if rank0_only && group.rank() != 0 {
            return Ok(&empty);
        }
        state
            .filter(|state| state.dict("state").is_some())
            .ok_or_else(|| OptimStateError::missing_key("state"))
    });
    let mut source = open_source(OPERATION, group, rank0_only, own_dict)?;
    let mut loaded = optimizer.without_state();
    load_exactly(
        OPERATION,
        group,
        &mut source,
        &mut loaded,
        ExactLoad {
            allow_missing_state: options.allow_missing_state,
            arguments: format!("{options:?}"),
        },
    )?;
    let key_type = if options.is_named_optimizer {
        OptimStateKeyType::ParamName
    } else {
        OptimStateKeyType::ParamId
    };
    let mut dict = loaded.state_dict_views(key_type)?;
    if !source.schema().has_key("param_groups") {
        dict.remove("param_groups");
    }
    Ok((loaded, dict))
}

/// Returns the state of one FlatParameter on this rank from the states of its parameters (`{name:
/// {entry: value}}`): torch's `_flatten_optim_state`. `fqns` are the FlatParameter's parameters in
/// order. Values are whole tensors, or sharded ones that cover this rank's boxes. Returns an empty
/// dict if none of the parameters has state. No communication.
///
/// Tensors become this rank's flat shard, with zeros as right padding. A parameter that lacks a
/// tensor has zeros in its place. Scalars must be the same for all parameters, so none may lack
/// one.
///
/// # Errors
/// [`OptimStateError`]: differing names, types, dtypes, scalars; shapes other than the parameters';
/// missing entries. [`StateDictError::NotAFlatParameter`]; boxes that are not covered.
pub fn flatten_optim_state(
    state: &StateDict,
    optimizer: &Optimizer,
    fqns: &[impl AsRef<str>],
) -> Result<StateDict> {
    let local = find_local(optimizer, fqns)?;
    let states = fqns
        .iter()
        .filter_map(|fqn| Some((fqn.as_ref(), state.dict(fqn.as_ref())?.clone().into())));
    flatten_states(optimizer, local, states.collect())
}

/// Returns a local parameter's state as a dict, from the states of its parameters; an empty one if
/// none has state.
fn flatten_states(optimizer: &Optimizer, local: usize, states: StateDict) -> Result<StateDict> {
    let mut loaded = optimizer.with_one_local(local);
    load_from_this_rank(states, &mut loaded)?;
    Ok(loaded.locals()[0].local_entries()?.unwrap_or_default())
}

/// Returns the state of one of the model's parameters on this rank from its whole state (`{entry:
/// value}`): torch's `_shard_orig_param_state`, for `use_orig_params`. Tensors become this rank's
/// flat piece, or keep the parameter's shape where nothing is sharded. Returns an empty dict if
/// this rank has nothing of the parameter, or there is no state. Values are whole tensors, or
/// sharded ones that cover this rank's boxes. No communication.
///
/// # Errors
/// [`OptimStateError`]: tensors of another shape or dtype than the parameter (torch cuts them in
/// silence), entries that the optimizer needs and that are missing. [`NnError::UnknownParameter`]
/// for one that the optimizer does not hold.
pub fn shard_orig_param_state(
    state: &StateDict,
    optimizer: &Optimizer,
    fqn: &str,
) -> Result<StateDict> {
    let local = optimizer
        .local_index(fqn)
        .ok_or_else(|| NnError::unknown_parameter(fqn))?;
    let states = [(fqn, state.clone().into())].into_iter().collect();
    let entries = flatten_states(optimizer, local, states)?;
    Ok(if optimizer.locals()[local].is_empty() {
        StateDict::new()
    } else {
        entries
    })
}

/// Returns the parameters that some rank's local state dict has state for, in one order for all
/// ranks; and for those that this rank's has, the key there. torch's
/// `_map_param_key_to_optim_keys`.
///
/// Without `merge_keys` (for FlatParameters) the order is that of rank 0, whose parameters all
/// ranks must have; the state of other ranks beyond them is left out. With it (for original
/// parameters, which a rank may have nothing of) all ranks' parameters are joined and sorted.
/// Optimizers may have been given their parameters in any order. Rank 0 is that of the model's
/// group, whatever its global rank.
///
/// Collectives: one agreement and one object all-gather.
///
/// # Errors
/// The same on every rank: [`OptimStateError::MissingOnRanks`]; state dicts of other optimizers.
pub fn map_param_key_to_optim_keys(
    state: &StateDict,
    optimizer: &Optimizer,
    merge_keys: bool,
) -> Result<(Vec<OptimStateKey>, IndexMap<OptimStateKey, String>)> {
    // Keys of one rank say nothing of the others: all exchange theirs.
    let group = optimizer.parameters().group();
    let local_states = LocalStates::read(optimizer, state.clone());
    let local = NnError::agree(group, "map_param_key_to_optim_keys", None, local_states)?;
    let keys_in_dict: IndexMap<OptimStateKey, String> = local
        .states
        .into_iter()
        .map(|(index, key, _)| (OptimStateKey::new(optimizer, index), key))
        .collect();
    let own_keys: Vec<OptimStateKey> = keys_in_dict.keys().cloned().collect();
    let keys_by_rank: Vec<Vec<OptimStateKey>> = group.all_gather_object(&own_keys)?;
    Ok((
        resolve_keys(group, &keys_by_rank, merge_keys)?,
        keys_in_dict,
    ))
}

/// Returns rank 0's states on every rank, without the elements of tensors: torch's
/// `_broadcast_processed_state`. `state` is rank 0's `{"state": {name: {entry: value}}}` and is
/// ignored on all others; rank 0 is that of the model's group.
///
/// In the result, `{name: {entry: value}}`, tensors are sharded ones without boxes, which have
/// dtype and shape alone. Plain values and tensors without dimensions are there, unless these are
/// shaped like their parameter. State under names that are no parameter's is left out.
///
/// Collectives: one agreement and one object broadcast.
///
/// # Errors
/// The same on every rank: no state dict on rank 0, or one that is malformed.
pub fn broadcast_processed_state(
    state: Option<&StateDict>,
    optimizer: &Optimizer,
) -> Result<StateDict> {
    let parameters = optimizer.parameters();
    let group = parameters.group();
    let states = match state.and_then(|state| state.dict("state")) {
        None if group.rank() == 0 => Err(OptimStateError::missing_key("state")),
        states => Ok(states),
    };
    let source = DictSource::on_root(group, "broadcast_processed_state", 0, states)?;
    let names = source
        .schema()
        .iter()
        .filter_map(|(path, _)| match path.0.first()? {
            PathPart::Key(name) => Some(name.as_str()),
            PathPart::Index(_) => None,
        });
    // A tied parameter may have state under several of its names. One of them counts.
    let chosen = names_that_count(parameters, names.filter(|name| parameters.contains(name)));
    let mut processed = StateDict::new();
    for (position, (path, leaf)) in source.schema().iter().enumerate() {
        let [PathPart::Key(name), entry @ ..] = path.0.as_slice() else {
            continue;
        };
        let fqn = parameters.canonical_fqn(name);
        if chosen.get(fqn) != Some(&name.as_str()) {
            continue;
        }
        let is_like_parameter =
            matches!(entry, [PathPart::Key(entry)] if optimizer.is_like_parameter(name, entry));
        let value = match leaf.tensor() {
            Some((_, shape)) if !shape.is_empty() || is_like_parameter => {
                leaf.without_elements(None)?
            }
            // On rank 0 this is the caller's own value.
            _ => source.values(&[position])?.remove(0).copy()?,
        };
        let path = std::iter::once(PathPart::Key(fqn.to_owned())).chain(entry.iter().cloned());
        fsdp_state::set_element(&mut processed, &KeyPath(path.collect()), value)?;
    }
    Ok(processed)
}
