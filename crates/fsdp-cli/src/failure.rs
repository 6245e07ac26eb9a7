//! The errors of the command itself, each with its exit code and a hint. Libraries have errors of
//! their own.

use std::error::Error;

use fsdp_layout::{ErrorKind, Failure};

use crate::exit_codes;

/// An error as the command reports it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CommandError {
    /// The exit code that it has; see [`exit_codes`].
    pub exit_code: u8,
    /// The problem, in a line.
    pub message: String,
    /// Advice on what to do, if there is any.
    pub hint: Option<&'static str>,
}

/// Returns the error of a request that cannot be carried out. Nothing has been changed.
pub(crate) fn usage_error(
    message: impl Into<String>,
    hint: impl Into<Option<&'static str>>,
) -> CommandError {
    CommandError {
        exit_code: exit_codes::USAGE,
        message: message.into(),
        hint: hint.into(),
    }
}

/// Returns the error of two things that should match and do not. The command's report has told what
/// to do about it.
pub(crate) fn difference_error(message: String) -> CommandError {
    CommandError {
        exit_code: exit_codes::DIFFERENCE,
        message,
        hint: None,
    }
}

/// Returns the error of a destination that is taken. `hint` says what to do.
pub(crate) fn exists_already_error(path: &str, hint: &'static str) -> CommandError {
    usage_error(format!("`{path}` exists already"), hint)
}

/// Returns the error of a destination at which something else is than `content`, such as `an HTML
/// page`, which is all that `--overwrite` replaces there.
pub(crate) fn not_of_content_error(path: &str, content: &str) -> CommandError {
    usage_error(
        format!("`{path}` cannot be replaced: it is not {content}, which `--overwrite` replaces"),
        "choose another destination, or move it away",
    )
}

/// Returns the error of a destination that `--overwrite` does not replace.
pub(crate) fn not_replaceable_error(path: &str) -> CommandError {
    usage_error(
        format!(
            "`{path}` cannot be replaced: `--overwrite` replaces only checkpoints, a file with a file \
             and a directory with a directory"
        ),
        "choose another destination, or move it away",
    )
}

/// Returns the error of a selection of keys that fits none.
pub(crate) fn no_such_keys_error(message: impl Into<String>) -> CommandError {
    usage_error(message, "`fsdp inspect` lists the keys")
}

/// Returns the error of globs that leave nothing.
pub(crate) fn nothing_selected_error() -> CommandError {
    no_such_keys_error("`--include` and `--exclude` select no key")
}

/// A run that a signal has stopped. It has told so itself.
#[derive(Debug, thiserror::Error)]
#[error("a signal stopped the run after it had saved; continue with `--resume`")]
pub(crate) struct Stopped;

/// Returns the kind of one cause of an error, if it is an error of this type; `None` otherwise.
pub(crate) fn kind_as<E: Failure + Error + 'static>(
    cause: &(dyn Error + 'static),
) -> Option<ErrorKind> {
    cause.downcast_ref::<E>().map(Failure::kind)
}
