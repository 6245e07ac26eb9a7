//! The errors of saving and loading checkpoints.

use std::io;

use fsdp_comm::{CommError, ProcessGroup};
use fsdp_flat::{FlatError, candle_message};
use fsdp_layout::with_causes;
use fsdp_layout::{ErrorKind, Failure};
use fsdp_nn::NnError;
use fsdp_state::{LoadError, StateError, WrongTensor};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// An error of this crate. Errors that concern all ranks are the same on every rank.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A collective failed, or another rank did.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A tensor does not fit.
    #[error(transparent)]
    Flat(#[from] FlatError),
    /// The model or optimizer refused.
    #[error(transparent)]
    Nn(NnError),
    /// A state dict is malformed.
    #[error(transparent)]
    State(#[from] StateError),
    /// candle refused.
    #[error("{}", candle_message(.0))]
    Candle(candle_core::Error),
    /// Files are missing, damaged or of another layout.
    #[error(transparent)]
    Files(#[from] fsdp_formats::FileError),
    /// A directory of checkpoints cannot be read.
    #[error("failed to list the checkpoints in `{}`", path.display())]
    Directory {
        /// The directory.
        path: std::path::PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A value that checkpoints cannot hold.
    #[error("cannot save `{fqn}`: {problem}")]
    Unsavable {
        /// The flat key.
        fqn: String,
        /// Why.
        problem: String,
    },
    /// Ranks have different plain values under one key, of which a checkpoint could hold one only.
    #[error(
        "cannot save `{key}`: rank {rank} has another value than rank {reference}; give values that differ between ranks a key \
         for each rank, such as `{key}.rank{rank}`"
    )]
    DifferingValues {
        /// The flat key.
        key: String,
        /// The first global rank that differs.
        rank: usize,
        /// The global rank that it differs from.
        reference: usize,
    },
    /// Loaded tensors do not have the digests that were recorded when they were saved.
    #[error("`{}` was not loaded as it was saved: {}", path.display(), WrongTensor::list(tensors))]
    NotAsSaved {
        /// The checkpoint.
        path: std::path::PathBuf,
        /// The tensors, and the ranks on which they are wrong; at least one.
        tensors: Vec<WrongTensor>,
    },
    /// A run that has gone back to an older step would save without digests, and so without the
    /// lineage that tells which of its checkpoints is the newest.
    #[error(
        "cannot save step {step} without digests: the run has gone back, and step {newest} would count as its newest; \
         set `WriteOptions::digests`, or save to another directory"
    )]
    BranchWithoutDigests {
        /// The step to be saved.
        step: u64,
        /// The step of the newest checkpoint of the run.
        newest: u64,
    },
    /// A save to the memory tier, but the run has none.
    #[error("the run has no memory tier: set `CheckpointerOptions::memory_tier` to a directory")]
    NoMemoryTier,
    /// All copies of some parts of a step in the memory tier are damaged.
    #[error(
        "step {step} in the memory tier is damaged: the parts of ranks {ranks:?} have no undamaged copy"
    )]
    DamagedMemory {
        /// Steps done when it was saved.
        step: u64,
        /// The ranks that saved these parts.
        ranks: Vec<usize>,
    },
    /// A file with the name of one of the memory tier's has other contents.
    #[error("`{}` is not a file of a memory tier: remove it, or give another directory", path.display())]
    NotAMemoryTier {
        /// The file.
        path: std::path::PathBuf,
    },
    /// A save in the background ended without an outcome.
    #[error("the save in the background ended without a result: {problem}")]
    Background {
        /// The way in which its thread ended.
        problem: String,
    },
}

impl Failure for CheckpointError {
    fn kind(&self) -> ErrorKind {
        match self {
            CheckpointError::Comm(error) => error.kind(),
            CheckpointError::Nn(error) => error.kind(),
            CheckpointError::State(error) => error.kind(),
            CheckpointError::Files(error) => error.kind(),
            CheckpointError::NoMemoryTier | CheckpointError::BranchWithoutDigests { .. } => {
                ErrorKind::Usage
            }
            CheckpointError::NotAsSaved { .. }
            | CheckpointError::DamagedMemory { .. }
            | CheckpointError::NotAMemoryTier { .. } => ErrorKind::Corrupt,
            CheckpointError::Directory { source, .. }
                if source.kind() == io::ErrorKind::NotFound =>
            {
                ErrorKind::Incomplete
            }
            CheckpointError::Directory { source, .. } => Failure::kind(source),
            _ => ErrorKind::Other,
        }
    }
}

/// Returns an error for other ranks. Only its text is sent, so that includes the causes, such as
/// the system's reason.
pub(crate) fn with_causes_in_text(error: &CheckpointError) -> StateError {
    StateError::Other {
        message: with_causes(error),
        kind: error.kind(),
    }
}

/// Copies the root's value to every rank, unless any rank has an error. Collective: a broadcast of
/// a result.
///
/// # Errors
/// Any rank's error, on every rank, with its causes.
pub(crate) fn broadcast_result<T: Serialize + DeserializeOwned>(
    group: &ProcessGroup,
    operation: &str,
    outcome: Result<Option<T>, CheckpointError>,
    root: usize,
) -> Result<T, CheckpointError> {
    let outcome = outcome.map_err(|error| with_causes_in_text(&error));
    Ok(group.broadcast_result(operation, outcome, root)?)
}

impl LoadError for CheckpointError {
    fn comm(&self) -> Option<&CommError> {
        match self {
            CheckpointError::Comm(error) => Some(error),
            CheckpointError::State(error) => error.comm(),
            CheckpointError::Nn(error) => error.comm(),
            _ => None,
        }
    }

    fn agree<T>(
        group: &ProcessGroup,
        operation: &str,
        hash: Option<u64>,
        outcome: Result<T, Self>,
    ) -> Result<T, Self> {
        // An error of an optimizer's state stays one on every rank, so all go by way of its
        // agreement.
        let outcome = outcome.map_err(|error| match error {
            CheckpointError::Nn(error) => error,
            error => NnError::State(with_causes_in_text(&error)),
        });
        Ok(NnError::agree(group, operation, hash, outcome)?)
    }
}

impl From<candle_core::Error> for CheckpointError {
    fn from(error: candle_core::Error) -> Self {
        CheckpointError::Candle(error)
    }
}

/// Errors of state dicts and of collectives become the variants of this type that hold them.
impl From<NnError> for CheckpointError {
    fn from(error: NnError) -> Self {
        match error {
            NnError::Comm(error) => CheckpointError::Comm(error),
            NnError::State(error) => CheckpointError::State(error),
            error => CheckpointError::Nn(error),
        }
    }
}
