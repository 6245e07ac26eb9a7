//! The exit code and the hint of an error, found in the chain of its causes.

use std::error::Error as StdError;
use std::io;

use anyhow::Error;
use fsdp_formats::{FileError, FormatError};
use fsdp_tools::map::MapError;
use fsdp_tools::sign::SignError;
use fsdp_tools::tensor_parallel::TensorParallelError;

use crate::exit_codes;
use crate::failure::{CommandError, kind_as, usage_error};
#[cfg(feature = "train")]
use crate::job_failure;
use crate::output::{StdoutClosed, StdoutFailed, error_messages};

/// Returns the exit code of an error: that of the command's own, or else of the first cause that
/// has one.
pub(crate) fn exit_code(error: &Error) -> u8 {
    match error.downcast_ref::<CommandError>() {
        Some(error) => error.exit_code,
        None => error
            .chain()
            .find_map(code_of_cause)
            .unwrap_or(exit_codes::INTERNAL),
    }
}

/// Returns advice on what to do about an error; `None` if there is none.
pub(crate) fn hint(error: &Error) -> Option<&'static str> {
    // Advice about one error is better than advice about all errors of its kind.
    match error.downcast_ref::<CommandError>() {
        Some(error) => error.hint,
        None => error
            .chain()
            .find_map(hint_of_cause)
            .or_else(|| hint_for_exit_code(exit_code(error))),
    }
}

/// Returns an error as the command reports it: with its exit code, the messages of its causes, and
/// a hint.
pub(crate) fn explain(error: &Error) -> CommandError {
    if let Some(error) = error.downcast_ref::<clap::Error>() {
        return explain_refusal(error);
    }
    CommandError {
        exit_code: exit_code(error),
        message: error_messages(error).join(": "),
        hint: hint(error),
    }
}

/// Returns the error of a command line that clap refuses, in one line. The rest of what clap says
/// is for those who have typed it.
pub(crate) fn explain_refusal(error: &clap::Error) -> CommandError {
    let text = error.to_string();
    let lines = text.trim_start_matches("error: ").lines().map(str::trim);
    let problem_lines = lines.take_while(|line| {
        !line.starts_with("Usage:") && !line.starts_with("For more information")
    });
    let problem = problem_lines
        .filter(|line| !line.is_empty() && !line.starts_with("tip:"))
        .collect::<Vec<_>>()
        .join(" ");
    usage_error(problem, None)
}

/// Returns the exit code for one cause of an error; `None` if it tells none.
fn code_of_cause(cause: &(dyn StdError + 'static)) -> Option<u8> {
    if cause.is::<MapError>() || cause.is::<TensorParallelError>() {
        return Some(exit_codes::USAGE);
    }
    if let Some(FileError::Opaque { .. }) = cause.downcast_ref() {
        return Some(exit_codes::OPAQUE);
    }
    if cause.is::<StdoutClosed>() {
        return Some(exit_codes::IO);
    }
    #[cfg(feature = "train")]
    if job_failure::is_not_finite(cause) {
        return Some(exit_codes::NOT_FINITE);
    }
    // A cause of no known kind says nothing: the next one may.
    #[cfg(feature = "train")]
    let job_kind = job_failure::job_error_kind(cause);
    #[cfg(not(feature = "train"))]
    let job_kind = None;
    let kind = job_kind
        .or_else(|| kind_as::<FileError>(cause))
        .or_else(|| kind_as::<SignError>(cause))
        .or_else(|| kind_as::<FormatError>(cause))
        .or_else(|| kind_as::<io::Error>(cause))?;
    match exit_codes::for_kind(kind) {
        exit_codes::INTERNAL => None,
        code => Some(code),
    }
}

/// Returns the hint for one cause of an error; `None` if it has none.
fn hint_of_cause(cause: &(dyn StdError + 'static)) -> Option<&'static str> {
    if cause.is::<StdoutFailed>() {
        return Some("stdout leads to a file or a device that takes no more: send it elsewhere");
    }
    if let Some(MapError::Unnamed { .. }) = cause.downcast_ref() {
        return Some(
            "the model is another variant: write a map with rules for these keys too, or leave them out with `--exclude`",
        );
    }
    if cause.is::<MapError>() {
        return Some(
            "`fsdp inspect` lists the keys; the book's page on `convert` has the rules of maps",
        );
    }
    if let Some(error) = cause.downcast_ref::<TensorParallelError>() {
        return Some(hint_for_tensor_parallel_error(error));
    }
    if let Some(error) = cause.downcast_ref::<SignError>() {
        return hint_for_sign_error(error);
    }
    if cause
        .downcast_ref()
        .is_some_and(FormatError::is_over_budget)
    {
        return Some(
            "it would take more memory than is allowed for its size: `--exclude KEY` leaves it out of a conversion, \
             `--include` takes only what is wanted, and `--to dcp` or `--to torch` may hold what a file of values cannot",
        );
    }
    if cause
        .downcast_ref()
        .is_some_and(FormatError::is_nested_too_deep)
    {
        return Some("save it again with values that are nested less deep");
    }
    if let Some(FormatError::Corrupt { file, .. }) = cause.downcast_ref()
        && file == ".metadata"
    {
        return Some(
            "it is damaged, or another program has saved over this checkpoint: if torch has, remove `.integrity` and \
             the files that `.metadata` does not name",
        );
    }
    if let Some(error @ FileError::Io { source, .. }) = cause.downcast_ref()
        && error.is_of_write()
        && source.kind() == io::ErrorKind::InvalidFilename
    {
        return Some(
            "a name has at most 255 bytes in most file systems; values beside a safetensors file need up to 49 of them",
        );
    }
    if let Some(error @ FileError::Io { source, .. }) = cause.downcast_ref()
        && error.is_of_write()
        && source.kind() != io::ErrorKind::StorageFull
        && source.kind() != io::ErrorKind::QuotaExceeded
    {
        return Some("choose a place in which you may create and change files");
    }
    if let Some(FileError::Irreplaceable { .. }) = cause.downcast_ref() {
        return Some("choose another destination; in place of a link, name what it leads to");
    }
    if let Some(FileError::HoldsOthers { .. }) = cause.downcast_ref() {
        return Some("move it away, or choose another destination");
    }
    if let Some(FileError::Differing { .. }) = cause.downcast_ref() {
        return Some(
            "one of the two is damaged, or each rank had its own, such as the running statistics of a batch norm: \
             `--exclude KEY` leaves it out of a conversion",
        );
    }
    if let Some(FileError::MissingFiles { .. }) = cause.downcast_ref() {
        return Some("bring them along from where it was saved, or go on from another checkpoint");
    }
    #[cfg(feature = "train")]
    if let Some(hint) = job_failure::job_error_hint(cause) {
        return Some(hint);
    }
    None
}

/// Returns the hint for an error of `--tp`.
const fn hint_for_tensor_parallel_error(error: &TensorParallelError) -> &'static str {
    match error {
        TensorParallelError::Unknown { .. } => {
            "`--tp-rule 'PATTERN=colwise'` says how (or rowwise, vocab, replicate); `--include` and `--exclude` leave keys out"
        }
        TensorParallelError::NoValue { .. } => {
            "give it by `--set NAME=N`; `--with DIR` names a directory with `config.json`"
        }
        TensorParallelError::Tensor { .. } => {
            "choose another `--tp`; `--set` and `--tp-rule` change how a tensor is cut"
        }
        _ => "`fsdp inspect` lists the keys; the book's page on `convert` has the rules of `--tp`",
    }
}

/// Returns the hint for an error of signatures; `None` if it has none.
fn hint_for_sign_error(error: &SignError) -> Option<&'static str> {
    match error {
        SignError::Key { .. } => Some(
            "`openssl ecparam -name prime256v1 -genkey -noout -out KEY` makes one, `openssl ec -in KEY -pubout` its public key",
        ),
        SignError::WrongKey { .. }
        | SignError::InvalidSignature
        | SignError::SignatureCount { .. } => {
            Some("do not load it: nobody you know vouches for it")
        }
        SignError::FilesDiffer { .. } => {
            Some("do not load it: it is not what was signed; sign again what you changed yourself")
        }
        SignError::ValuesBeside { .. } => {
            Some("sign a directory: `fsdp convert --to dcp` writes one")
        }
        _ => None,
    }
}

/// Returns the hint for an exit code, where the error itself has none; `None` for codes without
/// advice.
const fn hint_for_exit_code(code: u8) -> Option<&'static str> {
    match code {
        exit_codes::INCOMPLETE => Some("name the directory of a checkpoint that was saved whole"),
        exit_codes::NO_SPACE => {
            Some("make room there: `fsdp prune` removes old checkpoints of a run")
        }
        exit_codes::CORRUPT => Some("go on from an older checkpoint: move the damaged one away"),
        exit_codes::AFTER_COMMIT => Some(
            "the checkpoint is whole, and replaces the old one; what is left beside it goes with the next save",
        ),
        exit_codes::OPAQUE => Some(
            "`--drop-opaque` leaves them out; `fsdp cat` shows them; `--to dcp` keeps those of a DCP directory",
        ),
        exit_codes::RANK_LOST => {
            Some("see the first error above; a slow machine may need a longer `--timeout`")
        }
        _ => None,
    }
}
