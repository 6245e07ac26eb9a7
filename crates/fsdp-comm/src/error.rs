//! The error of collectives. It is the same on all ranks, names the ranks that caused it, and fits
//! in a message.

use std::fmt;
use std::time::Duration;

use fsdp_layout::{DType, ErrorKind, Failure};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::reduce::ReduceOp;

/// The longest message, in bytes, that is sent to other ranks about one rank's failure. Longer ones
/// are cut.
pub const MAX_MESSAGE_BYTES: usize = 4096;

/// The most bytes of the calls in an error, unless there are so many that each of them has
/// [`MIN_CALL_BYTES`] only. An error has to fit in a frame.
const MAX_CALLS_BYTES: usize = 1 << 20;

/// The fewest bytes to which a call in an error is cut.
pub(crate) const MIN_CALL_BYTES: usize = 64;

/// The reason why a collective failed. Ranks in errors are global ranks, even if the operation ran
/// in a subgroup.
///
/// [`Timeout`](Self::Timeout), [`RankLeft`](Self::RankLeft), [`Mismatch`](Self::Mismatch),
/// [`Aborted`](Self::Aborted) and [`Library`](Self::Library) end the group: every later operation
/// on it fails at once with the same error. After all other errors the group can still be used.
/// They reach every rank at the same operation, except for the error of an object that one rank
/// cannot decode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum CommError {
    /// Some ranks did not call an operation, or did not finish it, within the deadline.
    #[error(
        "`{operation}` (operation {sequence} of its group) timed out after {deadline:?} waiting for {}; \
         see what they were doing instead, or allow a longer deadline",
        rank_list(missing)
    )]
    Timeout {
        /// The operation, e.g. `all_gather`.
        operation: String,
        /// The number of operations that the group had done before.
        sequence: u64,
        /// The ranks that were waited for.
        missing: Vec<usize>,
        /// The time allowed.
        deadline: Duration,
    },
    /// A rank ended, or dropped its process group, while others still needed it.
    #[error("`{operation}` (operation {sequence} of its group) failed: rank {rank} {reason}")]
    RankLeft {
        /// The rank that is gone.
        rank: usize,
        /// The operation that needed it.
        operation: String,
        /// The number of operations that the group had done before.
        sequence: u64,
        /// The way in which it left, e.g. `has left the group`, or `panicked: …`.
        reason: String,
    },
    /// Some ranks failed before an operation, so no rank carried it out.
    #[error("`{operation}` failed on {}", failure_list(failures))]
    RankFailed {
        /// The operation, or the name given to `agree` or `broadcast_result`.
        operation: String,
        /// The failing ranks with their messages, in rank order.
        failures: Vec<RankFailure>,
    },
    /// Ranks called different operations, or the same with different arguments.
    #[error(
        "collectives do not match at operation {sequence} of their group: {}",
        call_list(calls)
    )]
    Mismatch {
        /// The number of operations that the group had done before.
        sequence: u64,
        /// The calls, each with the ranks that made it.
        calls: Vec<RankCall>,
    },
    /// Ranks called the same operation on data of different schemas.
    #[error(
        "`{operation}` needs the same schema on all ranks: {}",
        call_list(schemas)
    )]
    SchemaMismatch {
        /// The name given to `agree_on`.
        operation: String,
        /// The schemas, each with the ranks that have it.
        schemas: Vec<RankCall>,
    },
    /// The arguments of this rank are wrong by themselves. The other ranks get
    /// [`RankFailed`](Self::RankFailed).
    #[error("invalid arguments of `{operation}`: {message}")]
    InvalidArgument {
        /// The operation.
        operation: String,
        /// The mistake.
        message: String,
    },
    /// The reduction does not exist for the dtype: an average of integers is not an integer.
    #[error(
        "`{operation}` cannot reduce {dtype} with {op}: sum and divide in a floating-point type instead"
    )]
    UnsupportedReduction {
        /// The operation.
        operation: String,
        /// The dtype.
        dtype: DType,
        /// The reduction asked for.
        op: ReduceOp,
    },
    /// An object could not be written to bytes or read from them.
    #[error("`{operation}` failed to {action} an object: {message}")]
    Object {
        /// The operation.
        operation: String,
        /// `encode` or `decode`.
        action: String,
        /// The encoder's reason.
        message: String,
    },
    /// A rank ended the group with [`abort`](crate::ProcessGroup::abort).
    #[error("rank {rank} aborted the group: {message}")]
    Aborted {
        /// The rank that ended it.
        rank: usize,
        /// Its reason.
        message: String,
    },
    /// An environment variable that a launcher sets for a rank is missing or makes no sense.
    #[error("environment variable `{variable}` {message}")]
    Environment {
        /// Its name.
        variable: String,
        /// The mistake in it.
        message: String,
    },
    /// The ranks of a job could not connect to each other.
    #[error(
        "rendezvous at `{address}` failed: {message}{}",
        attendance(joined, missing)
    )]
    Rendezvous {
        /// The address of rank 0: MASTER_ADDR and MASTER_PORT.
        address: String,
        /// Ranks known to have connected.
        joined: Vec<usize>,
        /// Ranks known to be missing: they did not come in time, or have ended.
        missing: Vec<usize>,
        /// The reason.
        message: String,
    },
    /// A request to the key-value store failed.
    #[error("store at `{address}`: `{request}` failed: {message}")]
    Store {
        /// The address of the store.
        address: String,
        /// The request, e.g. `wait`.
        request: String,
        /// The reason.
        message: String,
    },
    /// This build, or this machine, does not have that backend.
    #[error("backend `{backend}` is not available: {message}")]
    BackendUnavailable {
        /// Its name.
        backend: String,
        /// The missing part, such as a library or a cargo feature.
        message: String,
    },
    /// A call of a library that the backend uses failed. The group ends.
    #[error("{library} failed in `{call}`: {message}")]
    Library {
        /// The library.
        library: String,
        /// Its function, or the operation that needed it.
        call: String,
        /// The library's reason.
        message: String,
    },
    /// A rank could not be started.
    #[error("failed to start rank {rank}: {message}")]
    Start {
        /// The rank.
        rank: usize,
        /// The system's reason.
        message: String,
    },
}

/// One rank's own error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFailure {
    /// The rank.
    pub rank: usize,
    /// The kind of its error.
    pub kind: ErrorKind,
    /// Its error, at most [`MAX_MESSAGE_BYTES`] long.
    pub message: String,
}

/// A call, and the ranks that made it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankCall {
    /// The ranks, ascending.
    pub ranks: Vec<usize>,
    /// Their call, e.g. `all_reduce(sum) of 8 float32`. It is cut if it is long.
    pub call: String,
}

impl RankCall {
    /// Groups ranks by their call, in the order of their first ranks. The texts of all calls
    /// together are not longer than fits in a frame.
    pub(crate) fn collect<C: PartialEq + fmt::Display>(
        calls: impl IntoIterator<Item = (usize, C)>,
    ) -> Vec<RankCall> {
        let mut collected: Vec<(Vec<usize>, C)> = Vec::new();
        for (rank, call) in calls {
            match collected
                .iter_mut()
                .find(|(_, known_call)| *known_call == call)
            {
                Some((ranks, _)) => ranks.push(rank),
                None => collected.push((vec![rank], call)),
            }
        }
        let limit =
            (MAX_CALLS_BYTES / collected.len().max(1)).clamp(MIN_CALL_BYTES, MAX_MESSAGE_BYTES);
        collected
            .into_iter()
            .map(|(ranks, call)| RankCall {
                ranks,
                call: truncate_text(&call, limit),
            })
            .collect()
    }
}

impl CommError {
    /// Returns the error of an object of `operation` that could not be written to bytes or read
    /// from them. `action` is the verb for that, such as `encode` or `decode`.
    pub(crate) fn object(operation: &str, action: &str, message: String) -> CommError {
        CommError::Object {
            operation: operation.to_owned(),
            action: action.to_owned(),
            message,
        }
    }

    /// Returns the error of a library whose function, or the operation that needed it, failed.
    #[cfg(any(feature = "mpi", feature = "nccl"))]
    pub(crate) fn library(library: &str, call: &str, message: String) -> CommError {
        CommError::Library {
            library: library.to_owned(),
            call: call.to_owned(),
            message,
        }
    }

    /// Returns the error of a rendezvous that lacks the `missing` ranks. It is not known who came.
    pub(crate) fn rendezvous(address: &str, missing: &[usize], message: String) -> CommError {
        CommError::Rendezvous {
            address: address.to_owned(),
            joined: Vec::new(),
            missing: missing.to_vec(),
            message,
        }
    }

    /// Returns the error of arguments that are wrong by themselves.
    pub(crate) fn invalid_argument(operation: &str, message: String) -> CommError {
        CommError::InvalidArgument {
            operation: operation.to_owned(),
            message,
        }
    }

    /// Returns `true` if the group cannot be used after this error.
    #[must_use]
    pub fn ends_group(&self) -> bool {
        matches!(
            self,
            CommError::Timeout { .. }
                | CommError::RankLeft { .. }
                | CommError::Mismatch { .. }
                | CommError::Aborted { .. }
                | CommError::Library { .. }
        )
    }
}

impl Failure for CommError {
    fn kind(&self) -> ErrorKind {
        match self {
            CommError::Timeout { .. }
            | CommError::RankLeft { .. }
            | CommError::Aborted { .. }
            | CommError::Rendezvous { .. }
            | CommError::Store { .. }
            | CommError::Library { .. } => ErrorKind::RankLost,
            CommError::Environment { .. } | CommError::BackendUnavailable { .. } => {
                ErrorKind::Usage
            }
            // The first rank whose error has a kind decides. Others may have failed because of that
            // rank.
            CommError::RankFailed { failures, .. } => {
                let mut kinds = failures.iter().map(|failure| failure.kind);
                kinds
                    .find(|kind| *kind != ErrorKind::Other)
                    .unwrap_or(ErrorKind::Other)
            }
            _ => ErrorKind::Other,
        }
    }
}

/// Returns a message as a text, cut to [`MAX_MESSAGE_BYTES`] as [`truncate_text`] does.
pub(crate) fn bounded(message: &(impl fmt::Display + ?Sized)) -> String {
    truncate_text(message, MAX_MESSAGE_BYTES)
}

/// Returns a message as a text of at most `limit` bytes. A longer one is cut between characters,
/// and ends with `…`, which is within the limit; what is cut off is never formatted.
fn truncate_text(message: &(impl fmt::Display + ?Sized), limit: usize) -> String {
    let mut writer = Bounded {
        text: String::new(),
        limit,
    };
    // Writing fails where the message is cut.
    fmt::Write::write_fmt(&mut writer, format_args!("{message}")).ok();
    writer.text
}

/// A text of a limited length.
struct Bounded {
    text: String,
    limit: usize,
}

impl fmt::Write for Bounded {
    /// Appends a text. Fails once the limit is passed, so that nothing more is formatted.
    fn write_str(&mut self, text: &str) -> fmt::Result {
        const ELLIPSIS: &str = "…";
        let Bounded {
            text: written,
            limit,
        } = self;
        let room = *limit - written.len();
        if text.len() <= room {
            written.push_str(text);
            return Ok(());
        }
        written.push_str(&text[..text.floor_char_boundary(room)]);
        written.truncate(written.floor_char_boundary(*limit - ELLIPSIS.len()));
        written.push_str(ELLIPSIS);
        Err(fmt::Error)
    }
}

/// Returns some ranks for a message: `rank 3`, `ranks 0, 2`, or `no rank`.
fn rank_list(ranks: &[usize]) -> String {
    match ranks {
        [] => "no rank".to_owned(),
        [rank] => format!("rank {rank}"),
        ranks => {
            let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
            format!("ranks {}", ranks.join(", "))
        }
    }
}

/// Returns the ranks of a rendezvous for a message, or nothing if none is known: ` (connected: rank
/// 0; missing: ranks 1, 2)`.
fn attendance(joined: &[usize], missing: &[usize]) -> String {
    match (joined, missing) {
        ([], []) => String::new(),
        (_, []) => format!(" (connected: {})", rank_list(joined)),
        ([], _) => format!(" (missing: {})", rank_list(missing)),
        _ => format!(
            " (connected: {}; missing: {})",
            rank_list(joined),
            rank_list(missing)
        ),
    }
}

/// Returns failures for a message: `rank 0: …; rank 2: …`.
fn failure_list(failures: &[RankFailure]) -> String {
    let failures: Vec<String> = failures
        .iter()
        .map(|RankFailure { rank, message, .. }| format!("rank {rank}: {message}"))
        .collect();
    failures.join("; ")
}

/// Returns calls for a message, each with its ranks: `ranks 0, 2: …; rank 1: …`.
fn call_list(calls: &[RankCall]) -> String {
    let calls: Vec<String> = calls
        .iter()
        .map(|RankCall { ranks, call }| format!("{}: {call}", rank_list(ranks)))
        .collect();
    calls.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_are_cut_between_characters() {
        let message = bounded(&"é".repeat(10 << 20));
        assert!(message.len() <= MAX_MESSAGE_BYTES);
        assert!(message.ends_with("é…"));
        assert_eq!(bounded("short"), "short");
        assert_eq!(
            bounded(&"x".repeat(MAX_MESSAGE_BYTES)).len(),
            MAX_MESSAGE_BYTES
        );
    }

    #[test]
    fn a_rendezvous_names_the_ranks_that_it_knows_of() {
        let message = |joined: &[usize], missing: &[usize]| {
            CommError::Rendezvous {
                address: "a:1".to_owned(),
                joined: joined.to_vec(),
                missing: missing.to_vec(),
                message: "no".to_owned(),
            }
            .to_string()
        };
        assert_eq!(
            message(&[0, 2], &[1]),
            "rendezvous at `a:1` failed: no (connected: ranks 0, 2; missing: rank 1)"
        );
        assert_eq!(
            message(&[], &[3]),
            "rendezvous at `a:1` failed: no (missing: rank 3)"
        );
        assert_eq!(message(&[], &[]), "rendezvous at `a:1` failed: no");
    }

    #[test]
    fn messages_name_the_ranks() {
        let calls = RankCall::collect(
            [(0, "a"), (1, "b"), (2, "a")].map(|(rank, call)| (rank, call.to_owned())),
        );
        let error = CommError::Mismatch { sequence: 7, calls };
        assert_eq!(
            error.to_string(),
            "collectives do not match at operation 7 of their group: ranks 0, 2: a; rank 1: b"
        );
    }
}
