//! Agreements in which the own error of a rank keeps its type.

use fsdp_comm::{CommError, ProcessGroup};

use crate::error::Result;

/// Turns one rank's error into an error on every rank. Collective: one agreement.
pub(crate) fn agree<T>(group: &ProcessGroup, operation: &str, outcome: Result<T>) -> Result<T> {
    let agreed = group.agree(operation, outcome.as_ref().map(|_| ()));
    resolve_agreement(agreed, outcome)
}

/// Returns `outcome` if all ranks agreed or this rank failed, and otherwise the error of the
/// agreement.
pub(crate) fn resolve_agreement<T>(agreed: Result<(), CommError>, outcome: Result<T>) -> Result<T> {
    match agreed {
        // This rank's own error keeps its type.
        Err(_) if outcome.is_err() => outcome,
        Err(error) => Err(error.into()),
        Ok(()) => outcome,
    }
}
