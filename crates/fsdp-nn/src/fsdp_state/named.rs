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
    Ok(to_local(parameters, optimizer, source, OptimStateKeyType::ParamId)?.state)
}
