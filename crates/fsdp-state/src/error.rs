//! The errors of state dicts.

use fsdp_comm::CommError;
use fsdp_digest::DigestError;
use fsdp_flat::{FlatError, candle_message};
use fsdp_layout::{ErrorKind, Failure, MAX_DEPTH, TensorBox};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::report::{LoadReport, Mismatch};

/// An error of this crate.
///
/// A collective function returns the same error on every rank of its group: what one rank alone
/// meets comes as [`CommError::RankFailed`] in [`Comm`](Self::Comm), on that rank too. Ranks in
/// errors are global ranks.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StateError {
    /// A tensor does not fit.
    #[error(transparent)]
    Flat(#[from] FlatError),
    /// candle refused.
    #[error("{}", candle_message(.0))]
    Candle(candle_core::Error),
    /// A collective failed, or another rank did.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A digest of something that is not a part of its tensor.
    #[error(transparent)]
    Digest(#[from] DigestError),
    /// Two places of a nested state dict have one flat key.
    #[error("duplicated flatten key `{key}`: two values of the state dict would share it")]
    DuplicateKey {
        /// The flat key.
        key: String,
    },
    /// A path leads through something that is no container, or that is of another kind.
    #[error("`{path}` is not a {expected}")]
    WrongContainer {
        /// The flat key of the path up to the value.
        path: String,
        /// The container that it should be.
        expected: &'static str,
    },
    /// Ranks called a function with different arguments.
    #[error(
        "`{operation}` needs the same arguments on all ranks: rank {rank} was called with {found}, \
         rank {reference} with {expected}"
    )]
    ArgumentMismatch {
        /// The function.
        operation: &'static str,
        /// The first rank that differs.
        rank: usize,
        /// Its arguments.
        found: String,
        /// The rank it is compared with.
        reference: usize,
        /// The arguments of that rank.
        expected: String,
    },
    /// Ranks passed state dicts with different keys.
    #[error(
        "`{operation}` needs the same keys on all ranks: rank {rank} has no `{key}`, which rank {reference} has; \
         give it the value, or a sharded tensor without boxes"
    )]
    KeyMismatch {
        /// The function.
        operation: &'static str,
        /// The rank that lacks the key.
        rank: usize,
        /// The flat key of the value.
        key: String,
        /// A rank that has it.
        reference: usize,
    },
    /// Ranks passed values of different kinds, dtypes or global shapes for one key.
    #[error(
        "`{operation}` needs the same kind, dtype and shape on all ranks: `{key}` is a {found} on rank {rank}, \
         but a {expected} on rank {reference}"
    )]
    ValueMismatch {
        /// The function.
        operation: &'static str,
        /// The flat key of the value.
        key: String,
        /// The first rank that differs.
        rank: usize,
        /// Its value there, e.g. `sharded tensor of float32 [2, 3]`.
        found: String,
        /// The rank it is compared with.
        reference: usize,
        /// The value on that rank.
        expected: String,
    },
    /// Ranks passed different values where they must pass the same, because each loads its own.
    #[error(
        "`{operation}`: rank {rank} has different values for `{key}`: {found}, but rank {reference} has {expected}"
    )]
    DifferingOnRanks {
        /// The function.
        operation: &'static str,
        /// The flat key of the value.
        key: String,
        /// The first rank that differs.
        rank: usize,
        /// The value there.
        found: String,
        /// The rank it is compared with.
        reference: usize,
        /// The value there.
        expected: String,
    },
    /// Ranks that should hold the same elements hold others.
    #[error("replicas differ: {}", WrongTensor::list(tensors))]
    ReplicasDiffer {
        /// The tensors, and the ranks that hold something else than most; if there is no majority,
        /// all that should hold the same.
        tensors: Vec<WrongTensor>,
    },
    /// A target or a sink outside this crate failed.
    #[error("{message}")]
    Other {
        /// Its message.
        message: String,
        /// Its kind.
        kind: ErrorKind,
    },
    /// A load in place cannot put values into this tensor's memory.
    #[error("`{key}` cannot be loaded in place: {problem}; load into fresh tensors instead")]
    NotFillable {
        /// The flat key.
        key: String,
        /// The reason.
        problem: FlatError,
    },
    /// A load in place into the state dict of something live, in which the value is only a copy.
    #[error(
        "`{key}` cannot be loaded in place: it is a copy in this state dict, so what is loaded would be lost; {advice}"
    )]
    LostInSnapshot {
        /// The flat key.
        key: String,
        /// The way to load it.
        advice: &'static str,
    },
    /// Several values would be loaded into the same memory.
    #[error(
        "a tensor of shape {shape:?} cannot be filled: it shares elements with another that is loaded too"
    )]
    SharedMemory {
        /// The global shape of one of them.
        shape: Vec<usize>,
    },
    /// A load into live tensors was interrupted after it had begun to fill them.
    #[error(
        "the load broke off while it filled live values: some are new, others as they were; load a whole checkpoint before \
         going on{}: {reason}",
         if *can_be_staged { ", or load with `staged` to change all or nothing" } else { "" }
    )]
    PartlyLoaded {
        /// The failure, the same on every rank.
        reason: String,
        /// `true` if a load with [`LoadOptions::staged`](crate::LoadOptions::staged) would have
        /// changed nothing.
        can_be_staged: bool,
        /// Its kind.
        kind: ErrorKind,
    },
    /// Elements that a rank is to get are on no rank.
    #[error(
        "`{operation}`: no rank has {missing} of `{key}`, a tensor of shape {shape:?}, which rank {rank} needs"
    )]
    NotCovered {
        /// The function.
        operation: &'static str,
        /// The flat key of the tensor.
        key: String,
        /// Its global shape.
        shape: Vec<usize>,
        /// The first rank that needs elements that no rank has.
        rank: usize,
        /// The first box of such elements.
        missing: TensorBox,
    },
    /// A state dict does not fit what it is loaded into.
    #[error("`{operation}`: the state dict does not fit: {}", Summary(report))]
    Incompatible {
        /// The function.
        operation: &'static str,
        /// All that does not fit, the same on every rank.
        report: LoadReport,
    },
    /// Names that are one tensor in the target have different values in the source.
    #[error(
        "`{first}` and `{second}` are one tensor here, but {found}; leave out the one that is not wanted \
         (of a checkpoint with `fsdp convert --exclude`), or do not tie them"
    )]
    TiedNamesDiffer {
        /// The name that comes first.
        first: String,
        /// The other name.
        second: String,
        /// The difference, e.g. `they have different values in what is loaded`.
        found: String,
    },
    /// A value differs in structure, kind, dtype or shape from what it is copied into.
    #[error("`{key}` cannot be copied: it is a {found}, and its companion a {expected}")]
    CompanionMismatch {
        /// The flat key; empty for the whole dict.
        key: String,
        /// A description of the value.
        found: String,
        /// A description of its companion.
        expected: String,
    },
    /// A sharded tensor inside a tuple, which checkpoints hold as one value.
    #[error(
        "`{key}` is a tuple that holds a sharded tensor, which has no key of its own there: give it one"
    )]
    ShardedInTuple {
        /// The flat key of the tuple.
        key: String,
    },
    /// [`LoadOptions::only`](crate::LoadOptions::only) is a list of no keys.
    #[error(
        "`only` selects nothing, so that nothing would be loaded: name the keys, or leave it out"
    )]
    NothingSelected,
    /// A path has so many parts that its value would be nested too deep.
    #[error("`{path}…` is nested {depth} deep, and {} is the limit", MAX_DEPTH - 1)]
    TooDeep {
        /// The flat key of the beginning of the path.
        path: String,
        /// The number of its parts.
        depth: usize,
    },
    /// A tensor has more bytes than memory has addresses.
    #[error("`{key}` has the shape {shape:?}, which is too large for memory")]
    TooLarge {
        /// The flat key.
        key: String,
        /// Its global shape.
        shape: Vec<usize>,
    },
    /// A rank that the group does not have.
    #[error("there is no rank {rank} in a group of {world_size} ranks")]
    NoSuchRank {
        /// The rank asked for.
        rank: usize,
        /// Ranks of the group.
        world_size: usize,
    },
    /// The rank that should give the values brought none.
    #[error("rank {rank} of the group brought no state dict to take values from")]
    NoSource {
        /// The rank, in its group.
        rank: usize,
    },
}

impl From<candle_core::Error> for StateError {
    fn from(error: candle_core::Error) -> Self {
        StateError::Candle(error)
    }
}

impl StateError {
    /// Returns the error of two names that are one tensor in the target, but have different values
    /// in the source.
    #[must_use]
    pub fn tied_values_differ(first: &str, second: &str) -> Self {
        StateError::TiedNamesDiffer {
            first: first.to_owned(),
            second: second.to_owned(),
            found: "they have different values in what is loaded".to_owned(),
        }
    }
}

impl Failure for StateError {
    fn kind(&self) -> ErrorKind {
        match self {
            // The cause decides, if there is one.
            StateError::Comm(error) => error.kind(),
            StateError::Incompatible { .. }
            | StateError::ReplicasDiffer { .. }
            | StateError::TiedNamesDiffer { .. } => ErrorKind::Difference,
            StateError::PartlyLoaded { kind, .. } | StateError::Other { kind, .. } => *kind,
            _ => ErrorKind::Other,
        }
    }
}

/// Most names of each list of a report that a message shows.
const MAX_LISTED: usize = 8;

/// A tensor whose elements are wrong on some ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrongTensor {
    /// The flat key.
    pub fqn: String,
    /// The global ranks whose elements are wrong. Where a digest of the whole of a sharded tensor
    /// does not tell which part is wrong, these are all ranks that hold a part.
    pub ranks: Vec<usize>,
}

impl WrongTensor {
    /// Lists the first few tensors, and the first few ranks of each, for a message.
    #[must_use]
    pub fn list(tensors: &[WrongTensor]) -> String {
        let mut items = Vec::new();
        for WrongTensor { fqn, ranks } in tensors.iter().take(MAX_LISTED) {
            let shown: Vec<String> = ranks
                .iter()
                .take(MAX_LISTED)
                .map(usize::to_string)
                .collect();
            let others = if ranks.len() > MAX_LISTED {
                " and others"
            } else {
                ""
            };
            items.push(format!("`{fqn}` on rank {}{others}", shown.join(", ")));
        }
        if tensors.len() > MAX_LISTED {
            items.push(format!("and {} more", tensors.len() - MAX_LISTED));
        }
        items.join("; ")
    }
}

/// A report in one sentence, long lists cut: ``missing key(s) `a`, `b`; unexpected key(s) `c` ``.
struct Summary<'a>(&'a LoadReport);

impl std::fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let LoadReport {
            missing,
            unexpected,
            mismatched,
        } = self.0;
        let differences: Vec<String> = mismatched
            .iter()
            .map(
                |Mismatch {
                     fqn,
                     saved,
                     current,
                 }| { format!("{fqn}: saved {saved}, current {current}") },
            )
            .collect();
        let lists = [
            ("mismatched", &differences),
            ("missing key(s)", missing),
            ("unexpected key(s)", unexpected),
        ];
        // Values that do not fit come first: they fail every load, and names only a strict one.
        let mut separator = "";
        for (name, list) in lists.into_iter().filter(|(_, list)| !list.is_empty()) {
            let shown: Vec<String> = list
                .iter()
                .take(MAX_LISTED)
                .map(|name| format!("`{name}`"))
                .collect();
            write!(f, "{separator}{name} {}", shown.join(", "))?;
            if list.len() > MAX_LISTED {
                write!(f, " and {} more", list.len() - MAX_LISTED)?;
            }
            separator = "; ";
        }
        Ok(())
    }
}
