//! Which kinds of failures this crate's errors are.

use std::error::Error;
use std::io;

use fsdp_layout::{ErrorKind, Failure};

use crate::error::{CheckpointError, FormatError};
use crate::pickle::PickleErrorKind;
use crate::plan::{LoadPlanError, SavePlanError};

impl Failure for CheckpointError {
    fn kind(&self) -> ErrorKind {
        match self {
            CheckpointError::NotCommitted { .. } => ErrorKind::Incomplete,
            // Most often a file that the checkpoint says it has.
            CheckpointError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => ErrorKind::Incomplete,
            CheckpointError::Exists { .. }
            | CheckpointError::NotReplaceable { .. }
            | CheckpointError::Overwrite { .. }
            | CheckpointError::Location { .. }
            | CheckpointError::Encode { .. } => ErrorKind::Usage,
            CheckpointError::Path { .. } => ErrorKind::Unsafe,
            CheckpointError::NotStored { .. } | CheckpointError::LoadPlan(LoadPlanError::Chunks { .. }) => {
                ErrorKind::Corrupt
            }
            CheckpointError::LoadPlan(_) => ErrorKind::Difference,
            _ => kind_of_cause(self),
        }
    }
}

impl Failure for FormatError {
    fn kind(&self) -> ErrorKind {
        match self {
            FormatError::Read { source, .. } if source.kind() != io::ErrorKind::UnexpectedEof => Failure::kind(source),
            FormatError::Unsupported { .. } => ErrorKind::UnsupportedVersion,
            FormatError::Pickle(error) if matches!(error.kind, PickleErrorKind::Global { .. }) => ErrorKind::Unsafe,
            _ => ErrorKind::Corrupt,
        }
    }
}

impl Failure for SavePlanError {}

/// The kind of the first cause that has one.
fn kind_of_cause(error: &(dyn Error + 'static)) -> ErrorKind {
    let mut cause = error.source();
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<FormatError>() {
            return error.kind();
        }
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return Failure::kind(error);
        }
        cause = error.source();
    }
    ErrorKind::Other
}
