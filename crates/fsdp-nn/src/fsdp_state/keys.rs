//! Which parameters the ranks' optimizers have state for.

use fsdp_comm::ProcessGroup;
use fsdp_state::StateDict;
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use super::OptimStateError;
use super::agree::agree;
use super::local::{LocalStateDict, key_of};
use crate::optimizer::Optimizer;
use crate::{NnError, Result};

/// What stands for one local parameter on all ranks, whatever its ids there: torch's `_OptimStateKey`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OptimStateKey {
    /// Names of the model's parameters: one with `use_orig_params`, all of a FlatParameter without.
    pub unflat_param_names: Vec<String>,
    /// Whether it belongs to a sharded unit; always true here, where a model is sharded as a whole.
    pub is_fsdp_managed: bool,
}

/// The parameters that some rank's local state dict has state for, in one order for all ranks; and for those that this
/// rank's has, the key there. torch's `_map_param_key_to_optim_keys`.
///
/// Without `merge_keys` (for FlatParameters) the order is that of rank 0, whose parameters all ranks must have; what
/// other ranks have beyond them is left out. With it (for original parameters, which a rank may have nothing of) all
/// ranks' parameters are joined and sorted. Optimizers may have been given their parameters in any order. Rank 0 is
/// that of the model's group, whatever its global rank.
///
/// Collectives: one agreement and one object all-gather.
///
/// # Errors
/// The same on every rank: [`OptimStateError::MissingOnRanks`]; state dicts of other optimizers.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::fsdp_state::map_param_key_to_optim_keys;
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
///     let local = optimizer.state_dict()?;
///     let (keys, ids) = map_param_key_to_optim_keys(&optimizer, &local, true)?;
///     let names: Vec<&str> = keys.iter().map(|key| key.unflat_param_names[0].as_str()).collect();
///     assert_eq!(names, ["bias", "weight"]);
///     // Rank 0 has nothing of the bias, and so no state for it.
///     assert_eq!(ids.len(), if parameters.boxes("bias")?.is_empty() { 1 } else { 2 });
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn map_param_key_to_optim_keys(
    optimizer: &Optimizer,
    state: &StateDict,
    merge_keys: bool,
) -> Result<(Vec<OptimStateKey>, IndexMap<OptimStateKey, String>)> {
    let group = optimizer.parameters().group();
    let local = LocalStateDict::read(optimizer, state).map(|local| {
        let keyed = local.params.iter().map(|&(key, index, _)| (key_of(optimizer, index), key.to_owned()));
        keyed.collect::<IndexMap<_, _>>()
    });
    let local = agree(group, "map_param_key_to_optim_keys", local)?;
    let mine: Vec<&OptimStateKey> = local.keys().collect();
    let all: Vec<Vec<OptimStateKey>> = all_gather_keys(group, &mine)?;
    Ok((resolve_keys(group, &all, merge_keys)?, local))
}

fn all_gather_keys(group: &ProcessGroup, mine: &[&OptimStateKey]) -> Result<Vec<Vec<OptimStateKey>>> {
    let mine: Vec<OptimStateKey> = mine.iter().map(|&key| key.clone()).collect();
    Ok(group.all_gather_object(&mine)?)
}

/// The order of keys that all ranks follow, from what each has.
pub(crate) fn resolve_keys(
    group: &ProcessGroup,
    all: &[Vec<OptimStateKey>],
    merge_keys: bool,
) -> Result<Vec<OptimStateKey>> {
    if merge_keys {
        let mut keys: Vec<OptimStateKey> = all.iter().flatten().cloned().collect();
        keys.sort();
        keys.dedup();
        return Ok(keys);
    }
    let Some(keys) = all.first() else { return Ok(Vec::new()) };
    let lacks = |(rank, has): (&usize, &Vec<OptimStateKey>)| {
        let missing: Vec<String> = keys
            .iter()
            .filter(|key| !has.contains(key))
            .flat_map(|key| key.unflat_param_names.iter().cloned())
            .collect();
        (!missing.is_empty()).then_some((*rank, missing))
    };
    let missing: Vec<(usize, Vec<String>)> = group.global_ranks().iter().zip(all).filter_map(lacks).collect();
    match missing.is_empty() {
        true => Ok(keys.clone()),
        false => Err(NnError::from(OptimStateError::MissingOnRanks { missing })),
    }
}
