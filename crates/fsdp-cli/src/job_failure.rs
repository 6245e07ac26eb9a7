//! The errors of jobs (`fsdp train` and `fsdp launch`).

use std::fmt::Display;

use anyhow::Error;
use fsdp::checkpoint::{CheckpointError, Location};
use fsdp::comm::CommError;
use fsdp::layout::ErrorKind;
use fsdp::nn::NnError;
use fsdp::state::StateError;

use crate::failure::{CommandError, kind_as, usage_error};

/// A checkpoint that turned out to be damaged while it was loaded.
#[derive(Debug, thiserror::Error)]
#[error("failed to load `{path}`")]
pub(crate) struct UnreadableCheckpoint {
    pub(crate) path: Location,
}

/// Returns the kind of an error of a library that only jobs use; `None` for another error.
pub(crate) fn job_error_kind(cause: &(dyn std::error::Error + 'static)) -> Option<ErrorKind> {
    kind_as::<CheckpointError>(cause)
        .or_else(|| kind_as::<NnError>(cause))
        .or_else(|| kind_as::<StateError>(cause))
        .or_else(|| kind_as::<CommError>(cause))
}

/// Returns `true` for gradients that are NaN or infinite, which is no bug of the program.
pub(crate) fn is_not_finite(cause: &(dyn std::error::Error + 'static)) -> bool {
    matches!(
        cause.downcast_ref(),
        Some(NnError::NonFiniteGradients { .. })
    )
}

/// Returns the error of a run whose place holds the checkpoints of another.
pub(crate) fn out_is_taken_error(directory: impl Display, step: u64) -> CommandError {
    usage_error(
        format!("`{directory}` already holds a checkpoint, of step {step}"),
        "continue from it with `--resume`, or choose another `--out`",
    )
}

/// Returns the error of an option that a checkpoint has fixed.
pub(crate) fn changed_option_error(
    option: &str,
    saved_value: impl Display,
    requested_value: impl Display,
) -> CommandError {
    usage_error(
        format!("`{option}` cannot change from {saved_value} to {requested_value} on resume"),
        "leave the option out, or start a new run in another `--out`",
    )
}

/// The hint for a place in which no checkpoints can be saved.
pub(crate) const NO_PLACE_HINT: &str =
    "check `--out` and `--checkpoint-dir`: a run needs a directory that it may read and write";

/// Returns the hint for an error of a library that only jobs use; `None` if it has none.
pub(crate) fn job_error_hint(cause: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    if let Some(CheckpointError::Directory { .. }) = cause.downcast_ref() {
        return Some(NO_PLACE_HINT);
    }
    if is_not_finite(cause) {
        return Some(
            "a smaller `--lr` may help; `--nonfinite skip` leaves out the updates of such steps",
        );
    }
    None
}

/// Returns `true` if an error came from communication: mostly one that only passes on that another
/// rank failed or was lost.
pub(crate) fn is_about_others(error: &Error) -> bool {
    // Libraries wrap the error of a lost rank in their own types, so each of these is looked into.
    error.chain().any(|cause| {
        cause.is::<CommError>()
            || matches!(
                cause.downcast_ref(),
                Some(NnError::Comm(_) | NnError::State(StateError::Comm(_)))
            )
            || matches!(cause.downcast_ref(), Some(StateError::Comm(_)))
            || matches!(
                cause.downcast_ref(),
                Some(
                    CheckpointError::Comm(_)
                        | CheckpointError::Nn(NnError::Comm(_))
                        | CheckpointError::State(StateError::Comm(_))
                )
            )
    })
}

/// Returns `true` if an error says that no launcher has started this process.
pub(crate) fn is_without_launcher(error: &CommError) -> bool {
    let has_rank = std::env::var_os("RANK").is_some_and(|rank| !rank.is_empty());
    !has_rank && matches!(error, CommError::Environment { variable, .. } if variable == "RANK")
}
