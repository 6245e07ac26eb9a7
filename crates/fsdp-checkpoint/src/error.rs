//! What can go wrong with state dicts and checkpoints.

use std::io;

use fsdp_comm::CommError;
use fsdp_flat::FlatError;
use fsdp_layout::{ErrorKind, Failure};
use fsdp_nn::NnError;
use fsdp_state::{LoadReport, StateError};
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
    Nn(#[from] NnError),
    /// A state dict is malformed.
    #[error(transparent)]
    State(#[from] StateError),
    /// candle refused.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// Files are missing, damaged or of another layout.
    #[error(transparent)]
    Files(#[from] fsdp_dcp::FileError),
    /// A directory of checkpoints cannot be read.
    #[error("failed to list the checkpoints in `{}`", path.display())]
    Directory {
        /// The directory.
        path: std::path::PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A load in place cannot put values into this tensor's memory. Nothing has been changed.
    #[error("`{fqn}` cannot be loaded in place: {problem}; `load` makes new tensors")]
    NotFillable {
        /// The flat key.
        fqn: String,
        /// Why.
        problem: FlatError,
    },
    /// A load in place broke off after it had begun to fill the tensors.
    #[error(
        "the load broke off while it filled the tensors in place: some hold the checkpoint's values, others their own; \
         load a checkpoint that is whole before going on"
    )]
    PartlyLoaded {
        /// Why.
        #[source]
        source: Box<CheckpointError>,
    },
    /// A value that checkpoints cannot hold.
    #[error("cannot save `{fqn}`: {problem}")]
    Unsavable {
        /// The flat key.
        fqn: String,
        /// Why.
        problem: String,
    },
    /// A save in the background ended without an outcome.
    #[error("the save in the background broke off: {problem}")]
    Background {
        /// How.
        problem: String,
    },
    /// Options that contradict each other.
    #[error("{problem}")]
    Options {
        /// The contradiction, and what to set.
        problem: &'static str,
    },
    /// A flat optimizer state dict has a key that names no parameter of the model.
    #[error("`{key}` in the flat optimizer state dict names no parameter of the model")]
    UnknownFlatKey {
        /// The key.
        key: String,
    },
    /// A state dict of FlatParameters cannot be loaded by name.
    #[error("`{key}` is a FlatParameter: this is a state dict of type Local, or its model was not the root module")]
    FlatParameterKey {
        /// The key.
        key: String,
    },
    /// A full state dict holds what is not whole.
    #[error("`{fqn}` is a {kind}, but rank 0's state dict must be full")]
    NotFull {
        /// The flat key.
        fqn: String,
        /// What it is.
        kind: &'static str,
    },
    /// A state dict is not what it should be.
    #[error("state dicts differ at `{key}`: {problem}")]
    Differs {
        /// The flat key.
        key: String,
        /// How.
        problem: String,
    },
    /// The state dict is not of this model or optimizer; or, whether strict or not, ranks brought dicts with different
    /// names. Nothing has been changed.
    #[error("the {what} state dict{} does not fit: {}", of_ranks(ranks), describe(report))]
    Mismatch {
        /// `model` or `optimizer`.
        what: &'static str,
        /// What differs, on any rank.
        report: Box<LoadReport>,
        /// The global ranks whose dict does not fit; empty if it is every rank's.
        ranks: Vec<usize>,
    },
}

fn of_ranks(ranks: &[usize]) -> String {
    if ranks.is_empty() { String::new() } else { format!(" of ranks {ranks:?}") }
}

impl Failure for CheckpointError {
    fn kind(&self) -> ErrorKind {
        match self {
            CheckpointError::Comm(error) => error.kind(),
            CheckpointError::Nn(error) => error.kind(),
            CheckpointError::State(error) => error.kind(),
            CheckpointError::Files(error) => error.kind(),
            CheckpointError::PartlyLoaded { source } => source.kind(),
            CheckpointError::Mismatch { .. } => ErrorKind::Difference,
            CheckpointError::Directory { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                ErrorKind::Incomplete
            }
            CheckpointError::Directory { source, .. } => Failure::kind(source),
            _ => ErrorKind::Other,
        }
    }
}

/// How many names of each kind a message lists.
const NAMES_IN_A_MESSAGE: usize = 8;

/// The differences in one sentence, long lists cut.
fn describe(report: &LoadReport) -> String {
    let list = |names: &[String]| {
        let shown: Vec<String> = names.iter().take(NAMES_IN_A_MESSAGE).map(|name| format!("`{name}`")).collect();
        let rest = names.len().saturating_sub(NAMES_IN_A_MESSAGE);
        let rest = if rest > 0 { format!(" and {rest} more") } else { String::new() };
        shown.join(", ") + &rest
    };
    let mut parts = Vec::new();
    if !report.mismatched.is_empty() {
        let shown: Vec<String> =
            report.mismatched.iter().map(|m| format!("{}: saved {}, current {}", m.fqn, m.saved, m.current)).collect();
        parts.push(format!("mismatched {}", list(&shown)));
    }
    if !report.missing.is_empty() {
        parts.push(format!("missing key(s) {}", list(&report.missing)));
    }
    if !report.unexpected.is_empty() {
        parts.push(format!("unexpected key(s) {}", list(&report.unexpected)));
    }
    parts.join("; ")
}
