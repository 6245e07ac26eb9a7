//! The kind of failure ([`ErrorKind`]) of each error of this crate.

use std::error::Error;
use std::io;

use fsdp_layout::{ErrorKind, Failure};

use crate::error::{FileError, FormatError};
use crate::plan::{LoadPlanError, SavePlanError};

impl Failure for FileError {
    fn kind(&self) -> ErrorKind {
        match self {
            FileError::NotCommitted { .. } | FileError::MissingFiles { .. } => {
                ErrorKind::Incomplete
            }
            // Most often the file is one that the checkpoint says it has. Where something was to be
            // written, nothing of a checkpoint is missing.
            FileError::Io { source, .. }
                if source.kind() == io::ErrorKind::NotFound && !self.is_of_write() =>
            {
                ErrorKind::Incomplete
            }
            // A name that is too long was chosen by whoever asked to write there.
            FileError::Io { source, .. }
                if source.kind() == io::ErrorKind::InvalidFilename && self.is_of_write() =>
            {
                ErrorKind::Usage
            }
            FileError::Exists { .. }
            | FileError::NotReplaceable { .. }
            | FileError::Irreplaceable { .. }
            | FileError::HoldsOthers { .. }
            | FileError::Overwrite { .. }
            | FileError::TargetMismatch { .. }
            | FileError::Location { .. }
            | FileError::Opaque { .. }
            | FileError::Merge { .. }
            | FileError::Encode { .. }
            | FileError::SavePlan(SavePlanError::LongKey { .. }) => ErrorKind::Usage,
            FileError::AfterCommit { .. } => ErrorKind::AfterCommit,
            FileError::Path { .. } => ErrorKind::Unsafe,
            FileError::NotStored { .. }
            | FileError::Digests { .. }
            | FileError::Differing { .. }
            | FileError::LoadPlan(
                LoadPlanError::Chunks { .. } | LoadPlanError::Incomplete { .. },
            ) => ErrorKind::Corrupt,
            FileError::LoadPlan(_) | FileError::Unlike { .. } => ErrorKind::Difference,
            _ => self.source().map_or(ErrorKind::Other, kind_of),
        }
    }
}

impl Failure for FormatError {
    fn kind(&self) -> ErrorKind {
        match self {
            FormatError::Read { source, .. } if source.kind() != io::ErrorKind::UnexpectedEof => {
                Failure::kind(source)
            }
            FormatError::Unsupported { .. } | FormatError::TooLarge(_) => {
                ErrorKind::UnsupportedVersion
            }
            FormatError::Pickle(error) if error.kind.is_unsupported() => {
                ErrorKind::UnsupportedVersion
            }
            _ if self.opaque_type().is_some() => ErrorKind::Unsafe,
            _ => ErrorKind::Corrupt,
        }
    }
}

impl Failure for SavePlanError {}

/// Returns the kind of an error, or of the first of its causes that has one; else
/// [`ErrorKind::Other`].
pub(crate) fn kind_of(error: &(dyn Error + 'static)) -> ErrorKind {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<FileError>() {
            return error.kind();
        }
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
