//! The digest of a live run, which is that of its checkpoints.

use fsdp_comm::ProcessGroup;
use fsdp_digest::StateDigest;
use fsdp_state::{LoadError as _, digest_state_dict};

use crate::{CheckpointError, Stateful};

/// Returns the digests of everything in a run's state, by name: those that its checkpoint has, in any format and saved by
/// any number of ranks (`fsdp digest`, [`fsdp_dcp::digest::digest`]). The same on every rank.
///
/// Collectives: one agreement, and those of [`digest_state_dict`].
///
/// # Errors
/// The same on every rank: as [`Stateful::state_dict`] and [`digest_state_dict`].
pub fn state_digest(run: &impl Stateful, group: &ProcessGroup) -> Result<StateDigest, CheckpointError> {
    let state = CheckpointError::agree(group, "state_digest", None, run.state_dict())?;
    Ok(digest_state_dict(&state, group)?)
}
