//! The digest of a live run, which equals the digest of its checkpoint, and the comparison of its
//! replicas.

use fsdp_comm::ProcessGroup;
use fsdp_digest::StateDigest;
use fsdp_nn::is_running_statistic;
use fsdp_state::{LoadError as _, StateDict, StateValue, digest_state_dict};

use crate::error::CheckpointError;
use crate::stateful::Stateful;

/// Returns the digests of everything in a run's state, by name: those that its checkpoint has, in
/// any format and saved by any number of ranks (`fsdp digest`,
/// [`fsdp_formats::digest::digest`]). The same on every rank.
///
/// Collectives: one agreement, and those of [`digest_state_dict`].
///
/// # Errors
/// The same on every rank: as [`Stateful::state_dict`] and [`digest_state_dict`].
pub fn state_digest(
    stateful: &impl Stateful,
    group: &ProcessGroup,
) -> Result<StateDigest, CheckpointError> {
    let (state, _guard) =
        CheckpointError::agree(group, "state_digest", None, stateful.state_to_save())?;
    Ok(digest_state_dict(&state, group)?)
}

/// Checks that ranks which hold the same part of a run hold the same bits: under [`NoShard`],
/// replicas of [`HybridShard`], and values that are on all ranks. Tied parameters share their
/// memory, so that there is nothing to compare. Running statistics of batch norm are not compared:
/// each rank has those of its own batches.
///
/// Call it now and then, such as after every 100 steps: memory errors and operations whose result
/// depends on the rank are found before they spread. Collectives: an agreement, and those of
/// [`fsdp_state::check_replicas`].
///
/// # Errors
/// The same on every rank: [`StateError::ReplicasDiffer`], which names the tensors and the ranks
/// that hold something else than most; as [`Stateful::state_dict`].
///
/// [`NoShard`]: fsdp_nn::ShardingStrategy::NoShard
/// [`HybridShard`]: fsdp_nn::ShardingStrategy::HybridShard
/// [`StateError::ReplicasDiffer`]: fsdp_state::StateError::ReplicasDiffer
pub fn check_replicas(
    stateful: &impl Stateful,
    group: &ProcessGroup,
) -> Result<(), CheckpointError> {
    let (mut state, _guard) =
        CheckpointError::agree(group, "check_replicas", None, stateful.state_to_save())?;
    remove_running_statistics(&mut state);
    Ok(fsdp_state::check_replicas(&state, group)?)
}

/// Removes the running statistics of batch norm from a state dict and those inside of it.
fn remove_running_statistics(state: &mut StateDict) {
    let names: Vec<String> = state.keys().map(str::to_owned).collect();
    for name in names.iter().filter(|name| is_running_statistic(name)) {
        state.remove(name);
    }
    for (_, value) in state.iter_mut() {
        if let StateValue::Dict(inner) = value {
            remove_running_statistics(inner);
        }
    }
}
