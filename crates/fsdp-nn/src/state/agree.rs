//! One rank's error on every rank, as the type that it is.

use fsdp_comm::{CommError, ProcessGroup};
use fsdp_state::{LoadError, StateError};

use super::OptimStateError;
use crate::{NnError, Result};

/// Makes any rank's error every rank's. An [`OptimStateError`] stays one, and tells which ranks met it if not all did;
/// others come as [`CommError::RankFailed`]. One agreement; on failure one object all-gather more.
pub(crate) fn agree<T>(group: &ProcessGroup, operation: &str, outcome: Result<T>) -> Result<T> {
    agree_with(group, operation, None, outcome)
}

/// Agrees as [`agree`]; all ranks must also bring the same hash, if they bring one.
fn agree_with<T>(group: &ProcessGroup, operation: &str, hash: Option<u64>, outcome: Result<T>) -> Result<T> {
    // An agreement carries text only, so that the error itself is kept for a second round.
    let typed = match &outcome {
        Err(NnError::OptimState { error, .. }) => Some(error.clone()),
        _ => None,
    };
    let agreed = match hash {
        Some(hash) => group.agree_on(operation, hash, outcome),
        None => group.agree(operation, outcome),
    };
    match agreed {
        Ok(value) => Ok(value),
        Err(error @ CommError::RankFailed { .. }) => {
            let errors: Vec<Option<OptimStateError>> = group.all_gather_object(&typed)?;
            Err(first_of(group, &errors, &error).unwrap_or(NnError::Comm(error)))
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns the first failed rank's error, with the ranks that met the same; `None` if it is no [`OptimStateError`].
fn first_of(group: &ProcessGroup, errors: &[Option<OptimStateError>], failure: &CommError) -> Option<NnError> {
    let CommError::RankFailed { failures, .. } = failure else { return None };
    let first = failures.first()?.rank;
    let position = group.global_ranks().iter().position(|&rank| rank == first)?;
    let error = errors.get(position)?.clone()?;
    let same = |other: &&(usize, &Option<OptimStateError>)| other.1.as_ref() == Some(&error);
    let ranks: Vec<(usize, &Option<OptimStateError>)> = group.global_ranks().iter().copied().zip(errors).collect();
    let mut ranks: Vec<usize> = ranks.iter().filter(same).map(|(rank, _)| *rank).collect();
    // An empty list stands for all ranks.
    if ranks.len() == group.world_size() {
        ranks.clear();
    }
    Some(NnError::OptimState { error, ranks })
}

impl LoadError for NnError {
    fn comm(&self) -> Option<&CommError> {
        match self {
            NnError::Comm(error) | NnError::State(StateError::Comm(error)) => Some(error),
            _ => None,
        }
    }

    fn agree<T>(group: &ProcessGroup, operation: &str, hash: Option<u64>, outcome: Result<T>) -> Result<T> {
        agree_with(group, operation, hash, outcome)
    }
}
