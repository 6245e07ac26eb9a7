//! Checks of state dicts against expected ones, for tests of this project and of programs that use
//! it.

use std::collections::BTreeSet;

use fsdp_comm::ProcessGroup;
use fsdp_flat::storage::HostBytes;
use fsdp_state::{
    FlatStateDict, GatherOptions, StateDict, StateValue, flatten_containers, gather_state_dict,
};

use super::{StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict};
use crate::error::{Result, StateDictError};
use crate::model::ShardedParameters;
use crate::optimizer::Optimizer;

/// Gathers a distributed optimizer state dict, loads it into `fresh` optimizers of an unsharded
/// model, and requires what they then hold to be, bit for bit, what the `reference` optimizers
/// hold: torch's `_verify_osd_by_load`, with the values really compared.
///
/// `parameters` are those of the unsharded model (of a process group of one rank) that `fresh` and
/// `reference` step on. Collective over `group`; every rank passes its own unsharded model.
/// Collectives: those of [`gather_state_dict`] and one agreement.
///
/// # Errors
/// The same on every rank: the text of [`StateDictError::Differs`], which names the first
/// difference of each rank that has one; errors of the load.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// use fsdp_nn::torch::{StateDictOptions, get_optimizer_state_dict, verify_osd_by_load};
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
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
///     let sharded = get_optimizer_state_dict(parameters, &[&optimizer], &StateDictOptions::default())?;
///     // The same step of the same model on one rank.
///     let alone = fsdp_comm::run_local(1, |group| group)?.remove(0);
///     let plain = FullyShardedDataParallel::new(alone, FsdpConfig::default(), |scope| {
///         candle_nn::linear(3, 2, scope.vb())
///     })?;
///     let adam = || Optimizer::new(plain.parameters(), Algorithm::Adam(AdamOptions::default()));
///     let (mut reference, mut fresh) = (adam()?, adam()?);
///     let loss = plain.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?;
///     plain.backward(&loss)?;
///     reference.step()?;
///     verify_osd_by_load(&sharded, plain.parameters(), &mut [&mut fresh], &[&reference], &group)?;
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn verify_osd_by_load(
    distributed: &StateDict,
    parameters: &ShardedParameters,
    fresh: &mut [&mut Optimizer],
    reference: &[&Optimizer],
    group: &ProcessGroup,
) -> Result<()> {
    let full = gather_state_dict(distributed, group, &GatherOptions::default())?;
    let options = StateDictOptions {
        full_state_dict: true,
        ..StateDictOptions::default()
    };
    let loaded = set_optimizer_state_dict(&full, parameters, fresh, &options).and_then(|_| {
        let fresh: Vec<&Optimizer> = fresh.iter().map(|optimizer| &**optimizer).collect();
        let found = get_optimizer_state_dict(parameters, &fresh, &options)?;
        let reference_parameters = reference
            .first()
            .map_or(parameters, |optimizer| optimizer.parameters());
        check_same(
            &found,
            &get_optimizer_state_dict(reference_parameters, reference, &options)?,
        )
    });
    Ok(group.agree("verify_osd_by_load", loaded)?)
}

/// Gathers a distributed model state dict and requires it to be, bit for bit, the `reference` one,
/// which is whole: torch's `_verify_msd`, exact. Collective over `group`: those of
/// [`gather_state_dict`] and one agreement.
///
/// # Errors
/// The same on every rank: the text of [`StateDictError::Differs`], which names the first
/// difference of each rank that has one.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// use fsdp_nn::torch::{StateDictOptions, get_model_state_dict, verify_msd};
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
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
///     let sharded = get_model_state_dict(parameters, &StateDictOptions::default())?;
///     let full = StateDictOptions { full_state_dict: true, ..StateDictOptions::default() };
///     let mut expected = get_model_state_dict(parameters, &full)?;
///     verify_msd(&sharded, &expected, &group)?;
///     expected.insert("bias", Tensor::zeros(2, DType::F32, &Device::Cpu)?);
///     assert!(verify_msd(&sharded, &expected, &group).unwrap_err().to_string().contains("bias"));
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn verify_msd(
    distributed: &StateDict,
    reference: &StateDict,
    group: &ProcessGroup,
) -> Result<()> {
    let full = gather_state_dict(distributed, group, &GatherOptions::default())?;
    Ok(group.agree("verify_msd", check_same(&full, reference))?)
}

/// Checks that two whole state dicts hold the same keys and bits.
fn check_same(found: &StateDict, expected: &StateDict) -> Result<()> {
    let FlatStateDict { values: found, .. } = flatten_containers(found)?;
    let FlatStateDict {
        values: expected, ..
    } = flatten_containers(expected)?;
    // Sorted, so that every rank reports the same key.
    let keys: BTreeSet<&String> = found.keys().chain(expected.keys()).collect();
    for key in keys {
        let problem = match (found.get(key), expected.get(key)) {
            (Some(found), Some(expected)) => describe_difference(found, expected)?,
            (Some(_), None) => Some("it is not expected"),
            (None, _) => Some("it is missing"),
        };
        if let Some(problem) = problem {
            return Err(StateDictError::Differs {
                key: key.clone(),
                problem: problem.to_owned(),
            }
            .into());
        }
    }
    Ok(())
}

/// Returns how two values differ; `None` if they are the same.
fn describe_difference(found: &StateValue, expected: &StateValue) -> Result<Option<&'static str>> {
    let is_same = match (found, expected) {
        (StateValue::Tensor(found), StateValue::Tensor(expected)) => {
            if found.dims() != expected.dims() || found.dtype() != expected.dtype() {
                return Ok(Some("another shape or dtype"));
            }
            *HostBytes::read(&found.contiguous()?)? == *HostBytes::read(&expected.contiguous()?)?
        }
        (StateValue::Raw(found), StateValue::Raw(expected)) => found == expected,
        (StateValue::Plain(found), StateValue::Plain(expected)) => found.same_bits(expected),
        _ => return Ok(Some("another kind of value")),
    };
    Ok((!is_same).then_some("another value"))
}
