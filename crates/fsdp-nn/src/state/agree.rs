//! Agreements that return one rank's error on every rank with its own type, not only as text.

use fsdp_comm::{CommError, ProcessGroup};
use fsdp_state::{LoadError, StateError};

use super::OptimStateError;
use crate::error::{NnError, Result};

impl LoadError for NnError {
    fn comm(&self) -> Option<&CommError> {
        match self {
            NnError::Comm(error) | NnError::State(StateError::Comm(error)) => Some(error),
            _ => None,
        }
    }

    /// Makes any rank's error every rank's. An [`OptimStateError`] keeps its type, and names the
    /// ranks that met it unless all did. Other errors become a [`CommError::RankFailed`].
    /// Collective: one agreement, and after a failure an object all-gather.
    fn agree<T>(
        group: &ProcessGroup,
        operation: &str,
        hash: Option<u64>,
        outcome: Result<T>,
    ) -> Result<T> {
        // An agreement sends errors as text only. So keep this rank's error, for the round that
        // follows a failure.
        let own_error = match &outcome {
            Err(NnError::OptimState { error, .. }) => Some(error.clone()),
            _ => None,
        };
        let agreed = match hash {
            Some(hash) => group.agree_on(operation, hash, outcome),
            None => group.agree(operation, outcome),
        };
        match agreed {
            Ok(value) => Ok(value),
            // Every rank has this error, so every rank takes part in the second round.
            Err(error @ CommError::RankFailed { .. }) => {
                let errors: Vec<Option<OptimStateError>> = group.all_gather_object(&own_error)?;
                Err(error_of_first_failed_rank(group, &errors, &error)
                    .unwrap_or(NnError::Comm(error)))
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Returns the error of the first rank that failed, and the ranks that met the same error. Returns
/// `None` if that error is not an [`OptimStateError`].
fn error_of_first_failed_rank(
    group: &ProcessGroup,
    errors: &[Option<OptimStateError>],
    failure: &CommError,
) -> Option<NnError> {
    let CommError::RankFailed { failures, .. } = failure else {
        return None;
    };
    let failed_rank = failures.first()?.rank;
    let position = group
        .global_ranks()
        .iter()
        .position(|&rank| rank == failed_rank)?;
    let error = errors.get(position)?.clone()?;
    let mut ranks: Vec<usize> = group
        .global_ranks()
        .iter()
        .zip(errors)
        .filter(|(_, rank_error)| rank_error.as_ref() == Some(&error))
        .map(|(rank, _)| *rank)
        .collect();
    // An empty list stands for all ranks.
    if ranks.len() == group.world_size() {
        ranks.clear();
    }
    Some(NnError::OptimState { error, ranks })
}
