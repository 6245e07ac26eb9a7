//! The model state dict of the three types, and loading one.

use fsdp_comm::ProcessGroup;
use fsdp_flat::{LocalShard, ShardedTensor};
use fsdp_layout::{KeyPath, PathPart, TensorBox};
use fsdp_state::engine::{DictSource, DictTarget};
use fsdp_state::{
    GatherCall, GatherOptions, LoadError as _, LoadOptions, LoadReport, StateDict, StateValue,
    copy_state_dict, load_state,
};

use crate::error::{NnError, Result, StateDictError};
use crate::model::ShardedParameters;
use crate::model::state_dict_type::StateDictType;
use crate::state::{LiveTarget, StatePrefixes, live_model_state_dict, persistent_buffers};

/// Returns the model state dict, of the type that is set ([`ShardedParameters::state_dict_type`]):
/// torch's `state_dict` of a `FullyShardedDataParallel`. Collective over the model's group. Tensors
/// own their memory; names of one tied parameter share a tensor in the dict.
///
/// - **Full**: every parameter whole, in its own dtype, under each of its names, and persistent
///   buffers. With `rank0_only` rank 0 gets all of it and the others an empty dict; these need no
///   memory beyond their shards. Collectives: two agreements, and one all-gather (with `rank0_only`
///   one gather) for each tensor, in the order of names. Small tensors share a call, up to half the
///   size of the largest tensor (but at least 1 MiB, and at most 32 MiB). There are none where
///   nothing is sharded.
/// - **Sharded**: the same names; each parameter as the boxes that this rank owns, maybe none. No
///   communication.
/// - **Local**: for each unit `<unit>._flat_param`, a one-dimensional [`ShardedTensor`] of the
///   FlatParameter without the padding at its end, and persistent buffers. No communication.
///
/// # Errors
/// With `Full` any rank's, on every rank. With `Local`, [`StateDictError::MeshWithLocal`] and
/// [`StateDictError::LocalWithoutSharding`].
pub fn state_dict(parameters: &ShardedParameters) -> Result<StateDict> {
    let mut state = StateDict::new();
    state_dict_into(parameters, |name, value| {
        state.insert(name, value);
        Ok(())
    })?;
    if parameters.get_state_dict_type().state_dict_type() != StateDictType::Full {
        return Ok(state);
    }
    // A gather hands values out sorted by name. Give them the model's own order, which views of the
    // live values have. These were made before the gather, too, and need no communication.
    let mut ordered = StateDict::new();
    for (name, _) in live_model_state_dict(parameters)? {
        if let Some(value) = state.get(&name) {
            ordered.insert(name, value.clone());
        }
    }
    Ok(ordered)
}

/// Makes the same values as [`state_dict`], and hands each to `sink` as soon as it is there. A rank
/// that writes a file thus needs memory for one tensor, not for the whole model. `sink` is called
/// on the ranks that keep the result only.
///
/// # Errors
/// The same as [`state_dict`], and those of `sink`. With [`StateDictType::Full`] every rank gets an
/// error of `sink`, when all values have passed; otherwise only this rank does, at once.
pub fn state_dict_into(
    parameters: &ShardedParameters,
    mut sink: impl FnMut(&str, StateValue) -> Result<()>,
) -> Result<()> {
    let settings = parameters.get_state_dict_type();
    let gather_options = settings.state_dict_config().gather_options();
    let state = match settings.state_dict_type() {
        StateDictType::Full => return gather_full_state(parameters, &gather_options, sink),
        StateDictType::Sharded => live_model_state_dict(parameters)?,
        StateDictType::Local => local_views(parameters)?,
    };
    for (name, value) in &state {
        sink(name, value.copy_to(gather_options.device.as_ref())?)?;
    }
    Ok(())
}

/// Gathers the whole values, and hands each to `sink` under all its names.
fn gather_full_state(
    parameters: &ShardedParameters,
    gather_options: &GatherOptions,
    mut sink: impl FnMut(&str, StateValue) -> Result<()>,
) -> Result<()> {
    // Each parameter moves once, under its own name.
    let mut state = StateDict::new();
    for (name, value) in live_model_state_dict(parameters)? {
        if parameters.canonical_fqn(&name) == name {
            state.insert(name, value);
        }
    }
    // The other names get the same value, without another transfer.
    let aliases = parameters.aliases_by_fqn();
    gather_state(
        "state_dict",
        &state,
        parameters,
        gather_options,
        |path, value| {
            let name = path.flat_key();
            for alias in aliases.get(name.as_str()).into_iter().flatten() {
                sink(alias, value.clone())?;
            }
            sink(&name, value)
        },
    )
}

/// Gathers a dict of views of live values, shaped like parameters, where arithmetic knows the boxes
/// of all ranks. The path of a value begins with its parameter's name.
pub(super) fn gather_state(
    operation: &'static str,
    state: &StateDict,
    parameters: &ShardedParameters,
    gather_options: &GatherOptions,
    mut sink: impl FnMut(&KeyPath, StateValue) -> Result<()>,
) -> Result<()> {
    let boxes_on = |path: &KeyPath, rank: usize| match path.0.first() {
        Some(PathPart::Key(fqn)) => parameters.boxes_on(fqn, rank).ok(),
        _ => None,
    };
    let call = GatherCall {
        operation,
        group: parameters.group(),
        options: gather_options,
        boxes_on: Some(&boxes_on),
    };
    Ok(fsdp_state::gather(&call, state, |path, value| {
        Ok(sink(path, value)?)
    })?)
}

/// Returns the flat parameters as views of this rank's shards, and the persistent buffers.
fn local_views(parameters: &ShardedParameters) -> Result<StateDict> {
    if parameters.has_mesh {
        return Err(StateDictError::MeshWithLocal.into());
    }
    if parameters.shard_group().is_none() {
        return Err(StateDictError::LocalWithoutSharding.into());
    }
    parameters.synchronize()?;
    let mut state = StateDict::new();
    for handle in &parameters.handles {
        let Some(shard) = handle.flat_shard() else {
            continue;
        };
        let layout = handle.layout();
        // With `use_orig_params` torch counts the padding for the number of ranks as part of the
        // FlatParameter. Here the tensor has no padding, and is the same for any number of ranks.
        let last_param = layout.fqns().len() - 1;
        let end = layout.param_range(last_param).end;
        let range = layout.shard_range(handle.shard_rank());
        let numel = range.end.min(end).saturating_sub(range.start);
        let mut shards = Vec::new();
        if numel > 0 {
            let bounds = TensorBox::new(vec![range.start], vec![numel]);
            shards.push(LocalShard {
                bounds,
                tensor: shard.narrow(0, 0, numel)?,
            });
        }
        state.insert_new(
            handle.flat_param_name(),
            ShardedTensor::new(handle.dtype(), vec![end], shards)?,
        )?;
    }
    state.extend(persistent_buffers(parameters));
    Ok(state)
}

/// Opens a state dict as the source of a load: that of rank 0 alone if `rank0_only`, where the
/// others may bring any, or else that of each rank. Collectives: one agreement if that fails or if
/// `rank0_only`, with which there is an object broadcast too.
pub(super) fn open_source<'s>(
    operation: &'static str,
    group: &ProcessGroup,
    rank0_only: bool,
    state: Result<&'s StateDict>,
) -> Result<DictSource<'s>> {
    if rank0_only {
        return DictSource::on_root(group, operation, 0, state.map(Some));
    }
    let opened = state.and_then(|state| Ok(DictSource::on_every_rank(state)?));
    NnError::or_refuse(group, operation, opened)
}

/// Loads a model state dict of the type that is set: torch's `load_state_dict`. Collective over the
/// model's group. A tied parameter loads from any of its names, and buffers from theirs; `state` is
/// not changed.
///
/// - **Full**: every rank has the dict and takes its own part: no tensor moves. With `rank0_only`
///   only rank 0 has one (what the others pass is ignored), and each rank gets just its own part,
///   by scatters.
/// - **Sharded**: values are whole or in any boxes, from any number of ranks; what a rank lacks
///   comes from the others, by all-to-alls of overlaps.
/// - **Local**: flat parameters in any boxes, saved with the same units and mode by any number of
///   ranks.
///
/// The report is the same on every rank. Unless `strict`, names that are missing keep their values
/// and unexpected ones are left out. Whole tensors must be the same on all ranks; buffers are each
/// rank's own.
///
/// Collectives: two agreements; with `rank0_only` another and an object broadcast; and those of the
/// moves.
///
/// # Errors
/// The same on every rank, and nothing is changed:
/// [`StateError::Incompatible`](fsdp_state::StateError::Incompatible) for other shapes or dtypes
/// and, if `strict`, for names that only one side has; ranks that pass different dicts; elements
/// that no rank has. On a single rank, if that one calls it inside a forward:
/// [`NnError::UnitInUse`]. [`NnError::Swapped`] while the model has an average of its weights.
pub fn load_state_dict(
    state: &StateDict,
    parameters: &ShardedParameters,
    strict: bool,
) -> Result<LoadReport> {
    const OPERATION: &str = "load_state_dict";
    let settings = parameters.get_state_dict_type();
    let options = LoadOptions {
        strict,
        ..LoadOptions::default()
    };
    let group = parameters.group();
    if settings.state_dict_type() == StateDictType::Local {
        // On the next swap the loaded values would become the average.
        parameters.check_not_swapped()?;
        // Everything is moved and checked beside the live shards, and copied into them at the end.
        let mut live = local_views(parameters)?;
        let mut source = open_source(OPERATION, group, false, Ok(state))?;
        let views = DictTarget::new(&live, None);
        let mut target = NnError::or_refuse(group, OPERATION, views)?.with_own_tensors();
        let report: LoadReport =
            load_state::<_, _, NnError>(OPERATION, group, &mut source, &mut target, &options)?;
        // The last names are copied first, so that of several names of one buffer the first counts.
        let loaded = target.into_state().into_iter().rev().collect();
        // A backward of an earlier forward becomes an error.
        parameters
            .handles
            .iter()
            .try_for_each(|handle| handle.begin_change())?;
        copy_state_dict(&loaded, &mut live)?;
        return Ok(report);
    }
    let rank0_only = settings.state_dict_config().rank0_only();
    let mut source = open_source(OPERATION, group, rank0_only, Ok(state))?;
    let prefixes = StatePrefixes {
        model: Some(Vec::new()),
        optim: None,
    };
    let mut target = LiveTarget::new(parameters, Vec::new(), prefixes)?;
    load_state(OPERATION, group, &mut source, &mut target, &options)
}
