//! The functions of one layout each, which torch keeps beside `optim_state_dict` and `optim_state_dict_to_load`.

use fsdp_state::StateDict;

use super::OptimStateKeyType;
use super::gather::Keep;
use super::load::{Source, to_local};
use super::save::{SaveOptions, save};
use crate::Result;
use crate::optimizer::Optimizer;
use crate::parameters::ShardedParameters;

/// The optimizer's state by names with whole tensors on the CPU, whatever settings are in force: torch's
/// `full_optim_state_dict`. With `rank0_only` (torch's default) the other ranks get an empty dict. For the rest see
/// [`optim_state_dict`](super::optim_state_dict).
///
/// # Errors
/// As [`optim_state_dict`](super::optim_state_dict).
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::fsdp_state::full_optim_state_dict;
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
///     let full = full_optim_state_dict(parameters, &optimizer, None, true)?;
///     assert_eq!(full.is_empty(), group.rank() != 0);
///     if let Some(states) = full.dict("state") {
///         let moment = states.dict("weight").unwrap().get("exp_avg").unwrap().as_tensor().unwrap();
///         assert_eq!(moment.dims(), [2, 3]);
///     }
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn full_optim_state_dict(
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    state: Option<&StateDict>,
    rank0_only: bool,
) -> Result<StateDict> {
    let keep = Keep { rank0_only, offload_to_cpu: true };
    save(parameters, optimizer, state, SaveOptions { full: true, keep })
}

/// The optimizer's state by names in each rank's boxes, whatever settings are in force: torch's
/// `sharded_optim_state_dict`. For the rest see [`optim_state_dict`](super::optim_state_dict).
///
/// # Errors
/// As [`optim_state_dict`](super::optim_state_dict).
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::fsdp_state::sharded_optim_state_dict;
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
///     let sharded = sharded_optim_state_dict(parameters, &optimizer, None)?;
///     let moment = sharded.dict("state").unwrap().dict("weight").unwrap().get("exp_avg").unwrap().as_sharded().unwrap();
///     assert_eq!((moment.shape(), moment.boxes()), (&[2, 3][..], parameters.boxes("weight")?));
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn sharded_optim_state_dict(
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    state: Option<&StateDict>,
) -> Result<StateDict> {
    let keep = Keep { rank0_only: false, offload_to_cpu: false };
    save(parameters, optimizer, state, SaveOptions { full: false, keep })
}

/// The local state, by ids, from a full one that every rank has: torch's `shard_full_optim_state_dict`. No tensor moves.
/// For the rest see [`optim_state_dict_to_load`](super::optim_state_dict_to_load).
///
/// # Errors
/// As [`optim_state_dict_to_load`](super::optim_state_dict_to_load).
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::fsdp_state::{full_optim_state_dict, shard_full_optim_state_dict};
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
///     let local = shard_full_optim_state_dict(&full, parameters, &optimizer)?;
///     optimizer.load_state_dict(&local)?;
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn shard_full_optim_state_dict(
    full: &StateDict,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
) -> Result<StateDict> {
    by_ids(Some(full), false, parameters, optimizer)
}

/// The local state, by ids, from a full one that only rank 0 has: torch's `scatter_full_optim_state_dict`. What other
/// ranks pass is ignored. For the rest see [`optim_state_dict_to_load`](super::optim_state_dict_to_load).
///
/// # Errors
/// As [`optim_state_dict_to_load`](super::optim_state_dict_to_load); no state dict on rank 0.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::fsdp_state::{full_optim_state_dict, scatter_full_optim_state_dict};
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
///     let full = full_optim_state_dict(parameters, &optimizer, None, true)?;
///     // From a file that only rank 0 reads, say.
///     let full = (group.rank() == 0).then_some(&full);
///     let local = scatter_full_optim_state_dict(full, parameters, &optimizer)?;
///     optimizer.load_state_dict(&local)?;
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn scatter_full_optim_state_dict(
    full: Option<&StateDict>,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
) -> Result<StateDict> {
    by_ids(full, true, parameters, optimizer)
}

/// The local state, by ids, from one that is sharded in any boxes: torch's `flatten_sharded_optim_state_dict`. For the
/// rest see [`optim_state_dict_to_load`](super::optim_state_dict_to_load).
///
/// # Errors
/// As [`optim_state_dict_to_load`](super::optim_state_dict_to_load).
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::fsdp_state::{flatten_sharded_optim_state_dict, sharded_optim_state_dict};
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
///     let sharded = sharded_optim_state_dict(parameters, &optimizer, None)?;
///     let local = flatten_sharded_optim_state_dict(&sharded, parameters, &optimizer)?;
///     optimizer.load_state_dict(&local)?;
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn flatten_sharded_optim_state_dict(
    sharded: &StateDict,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
) -> Result<StateDict> {
    by_ids(Some(sharded), false, parameters, optimizer)
}

fn by_ids(
    state: Option<&StateDict>,
    rank0_only: bool,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
) -> Result<StateDict> {
    let source = Source { state, rank0_only, allow_missing_state: false };
    to_local(parameters, optimizer, source, OptimStateKeyType::ParamId)
}
