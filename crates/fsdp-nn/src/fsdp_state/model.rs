//! The model state dict of the three types, and loading one.

use candle_core::Tensor;
use fsdp_flat::storage::owned_copy;
use fsdp_flat::{LocalShard, ShardedTensor};
use fsdp_layout::TensorBox;
use fsdp_state::{
    LoadOptions, LoadReport, StateDict, StateError, StateValue, broadcast_state_dict, copy_state_dict,
    distribute_state_dict, reshard_state_dict,
};
use indexmap::IndexMap;

use super::agree::agree;
use super::gather::{Keep, gather_flat};
use super::settings::{StateDictConfig, StateDictType};
use crate::handle::FlatParamHandle;
use crate::model_state::live_model_state_dict;
use crate::parameters::ShardedParameters;
use crate::{NnError, Result};

/// The model state dict, of the type that is set ([`ShardedParameters::state_dict_type`]): torch's `state_dict` of a
/// `FullyShardedDataParallel`. Collective over the model's group. Tensors own their memory; names of one tied
/// parameter share a tensor in the dict.
///
/// - **Full**: every parameter whole, in its own dtype, under each of its names, and persistent buffers. With
///   `rank0_only` rank 0 gets all of it and the others an empty dict; these need no memory beyond their shards.
///   Collectives, for each unit that is sharded: one all-gather, or one gather; then one agreement.
/// - **Sharded**: the same names; each parameter as the boxes that this rank owns, maybe none. No communication.
/// - **Local**: for each unit `<unit>._flat_param`, a one-dimensional [`ShardedTensor`] of the FlatParameter without the
///   padding at its end, and persistent buffers. No communication.
///
/// # Errors
/// With `Full` any rank's, on every rank. With `Local`, [`NnError::MeshWithLocal`] and
/// [`NnError::LocalWithoutSharding`].
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::fsdp_state::{StateDictSettings, StateDictType, state_dict};
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
///     let full = state_dict(parameters)?;
///     assert_eq!(full.get("weight").unwrap().as_tensor().unwrap().dims(), [2, 3]);
///     let local = parameters.state_dict_type(StateDictSettings::of(StateDictType::Local), || state_dict(parameters))?;
///     assert_eq!(local.keys().collect::<Vec<_>>(), ["_flat_param"]);
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn state_dict(parameters: &ShardedParameters) -> Result<StateDict> {
    let mut values: IndexMap<String, StateValue> = IndexMap::new();
    state_dict_into(parameters, |name, value| {
        values.insert(name.to_owned(), value);
        Ok(())
    })?;
    // In the model's own order, not that of the units.
    let names = parameters.fqns().chain(parameters.aliases().keys().map(String::as_str));
    let names: Vec<String> = names.map(str::to_owned).collect();
    let mut state = StateDict::new();
    for name in names {
        if let Some(value) = values.shift_remove(&name) {
            state.insert(name, value);
        }
    }
    for (name, value) in values {
        state.insert(name, value);
    }
    Ok(state)
}

/// As [`state_dict`], with each value handed to `sink` as soon as it is there, unit by unit, so that a rank that writes
/// a file needs memory for one unit, not for the whole model. `sink` is called on the ranks that keep the result only.
///
/// # Errors
/// As [`state_dict`], and those of `sink`: on every rank, once all values have passed.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::fsdp_state::state_dict_into;
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
///     let mut elements = 0;
///     state_dict_into(parameters, |_name, value| {
///         // Written to a file, say, and forgotten.
///         elements += value.as_tensor().map_or(0, |tensor| tensor.elem_count());
///         Ok(())
///     })?;
///     assert_eq!(elements, 2 * 3 + 2);
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn state_dict_into(
    parameters: &ShardedParameters,
    mut sink: impl FnMut(&str, StateValue) -> Result<()>,
) -> Result<()> {
    let settings = parameters.get_state_dict_type();
    let config = settings.state_dict_config();
    let keep = Keep { rank0_only: config.rank0_only(), offload_to_cpu: config.offload_to_cpu() };
    match settings.state_dict_type() {
        StateDictType::Full => full(parameters, keep, &mut sink),
        StateDictType::Sharded => {
            let state = live_model_state_dict(parameters)?;
            offer_owned(&state, keep, &mut sink)
        }
        StateDictType::Local => offer_owned(&local_views(parameters)?, keep, &mut sink),
    }
}

/// What takes the values of a state dict one by one.
type Sink<'a> = dyn FnMut(&str, StateValue) -> Result<()> + 'a;

fn offer_owned(state: &StateDict, keep: Keep, sink: &mut Sink<'_>) -> Result<()> {
    for (name, value) in state {
        let value = match value.copy()? {
            StateValue::Tensor(tensor) => keep.place(tensor)?.into(),
            StateValue::Sharded(tensor) if keep.offload_to_cpu => tensor.to_device(&candle_core::Device::Cpu)?.into(),
            other => other,
        };
        sink(name, value)?;
    }
    Ok(())
}

fn full(parameters: &ShardedParameters, keep: Keep, sink: &mut Sink<'_>) -> Result<()> {
    let mut outcome = Ok(());
    for handle in &parameters.handles {
        let whole = whole_params(parameters, handle, keep)?;
        let names = handle.params.iter().map(|param| param.fqn.as_str());
        for (fqn, tensor) in names.zip(whole.into_iter().flatten()) {
            // After a failure the collectives go on, so that no rank waits for this one.
            if outcome.is_ok() {
                outcome = offer_names(parameters, fqn, &keep.place(tensor)?, sink);
            }
        }
    }
    if keep.here(parameters) && outcome.is_ok() {
        outcome = offer_owned(&persistent_buffers(parameters), keep, sink);
    }
    agree(parameters.group(), "state_dict", outcome)
}

/// A parameter under each of its names.
fn offer_names(parameters: &ShardedParameters, fqn: &str, tensor: &Tensor, sink: &mut Sink<'_>) -> Result<()> {
    sink(fqn, tensor.clone().into())?;
    let aliases = parameters.aliases().iter().filter(|(_, target)| *target == fqn);
    aliases.into_iter().try_for_each(|(alias, _)| sink(alias, tensor.clone().into()))
}

/// All parameters of a unit, whole, where they are kept.
fn whole_params(parameters: &ShardedParameters, handle: &FlatParamHandle, keep: Keep) -> Result<Option<Vec<Tensor>>> {
    if let Some(shard) = handle.flat_shard() {
        let wanted = vec![true; handle.params.len()];
        let whole = gather_flat(parameters, handle.layout(), shard, &wanted, keep)?;
        return Ok(whole.map(|whole| whole.into_iter().flatten().collect()));
    }
    if !keep.here(parameters) {
        return Ok(None);
    }
    let copy = |param: usize| Ok(owned_copy(&handle.sharded_param(param)?.to_whole()?)?);
    (0..handle.params.len()).map(copy).collect::<Result<_>>().map(Some)
}

fn persistent_buffers(parameters: &ShardedParameters) -> StateDict {
    let saved = parameters.buffers().iter().filter(|(_, (_, persistent))| *persistent);
    saved.map(|(name, (value, _))| (name.clone(), StateValue::Tensor(value.clone()))).collect()
}

/// The flat parameters as views of this rank's shards, and the persistent buffers.
fn local_views(parameters: &ShardedParameters) -> Result<StateDict> {
    if parameters.on_mesh {
        return Err(NnError::MeshWithLocal);
    }
    if parameters.shard_group().is_none() {
        return Err(NnError::LocalWithoutSharding);
    }
    let mut state = StateDict::new();
    for handle in &parameters.handles {
        let Some(shard) = handle.flat_shard() else { continue };
        let layout = handle.layout();
        // With `use_orig_params` the padding for the number of ranks counts as part of the FlatParameter; without it
        // the tensor is the same for any number of ranks.
        let end = (0..layout.fqns().len()).map(|param| layout.param_range(param).end).max().unwrap_or(0);
        let range = layout.shard(handle.shard_rank()).range;
        let numel = range.end.min(end).saturating_sub(range.start);
        let mut shards = Vec::new();
        if numel > 0 {
            let bounds = TensorBox::new(vec![range.start], vec![numel]);
            shards.push(LocalShard { bounds, tensor: shard.narrow(0, 0, numel)? });
        }
        let name = handle.flat_param_name();
        let tensor = ShardedTensor::new(handle.dtype(), vec![end], shards)?;
        if state.insert(name.as_str(), tensor).is_some() {
            return Err(NnError::State(StateError::DuplicateKey { key: name }));
        }
    }
    for (name, value) in persistent_buffers(parameters) {
        state.insert(name, value);
    }
    Ok(state)
}

/// Loads a model state dict of the type that is set: torch's `load_state_dict`. Collective over the model's group. A
/// tied parameter loads from any of its names, and buffers from theirs; `state` is not changed.
///
/// - **Full**: every rank has the dict and takes its own part: no tensor moves. With `rank0_only` only rank 0 has one
///   (what the others pass is ignored), and each rank gets just its own part, by scatters.
/// - **Sharded**: values are whole or in any boxes, from any number of ranks; what a rank lacks comes from the
///   others, by all-to-alls of overlaps.
/// - **Local**: flat parameters in any boxes, saved with the same units and mode by any number of ranks.
///
/// The report is the same on every rank. Unless `strict`, names that are missing keep their values and unexpected ones
/// are left out. Of whole tensors, buffers among them, each rank takes its own values; that they are the same on all
/// ranks is not checked.
///
/// Collectives: see [`distribute_state_dict`], [`broadcast_state_dict`] and [`reshard_state_dict`].
///
/// # Errors
/// The same on every rank, and nothing is changed: [`StateError::Incompatible`] for other shapes or dtypes and, if
/// `strict`, for names that only one side has; ranks that bring different dicts; elements that no rank has.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::fsdp_state::{load_state_dict, state_dict};
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
///     let saved = state_dict(parameters)?;
///     optimizer.step()?;
///     let report = load_state_dict(parameters, &saved, true)?;
///     assert!(report.is_clean());
///     let error = load_state_dict(parameters, &saved.iter().take(1).map(|(k, v)| (k.clone(), v.clone())).collect(), true);
///     assert!(error.unwrap_err().to_string().contains("missing [bias]"));
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn load_state_dict(parameters: &ShardedParameters, state: &StateDict, strict: bool) -> Result<LoadReport> {
    let settings = parameters.get_state_dict_type();
    let group = parameters.group();
    let mut live = match settings.state_dict_type() {
        StateDictType::Local => local_views(parameters)?,
        StateDictType::Full | StateDictType::Sharded => {
            without_aliases(parameters, &live_model_state_dict(parameters)?)
        }
    };
    let saved = without_aliases(parameters, state);
    let options = LoadOptions { strict, ..LoadOptions::default() };
    let (loaded, report) = match settings.state_dict_config() {
        StateDictConfig::Full(config) if config.rank0_only => {
            let saved = (group.rank() == 0).then_some(&saved);
            broadcast_state_dict(group, saved, &live, 0, &options)?
        }
        StateDictConfig::Full(_) => distribute_state_dict(group, &saved, &live, &options)?,
        StateDictConfig::Sharded(_) | StateDictConfig::Local(_) => reshard_state_dict(group, &saved, &live, &options)?,
    };
    copy_state_dict(&loaded, &mut live)?;
    parameters.reshard()?;
    Ok(report)
}

/// The values under the parameters' first names; where a dict has several names of one, the first one counts.
fn without_aliases(parameters: &ShardedParameters, state: &StateDict) -> StateDict {
    let mut canonical = StateDict::new();
    for (name, value) in state {
        let fqn = parameters.canonical_fqn(name);
        if fqn == name || !(state.contains_key(fqn) || canonical.contains_key(fqn)) {
            canonical.insert(fqn, value.clone());
        }
    }
    canonical
}
