//! Kinds of failure. They are kept when an error is sent to other ranks as a message, and its type
//! is lost.

use std::fmt;
use std::io;

use serde::{Deserialize, Serialize};

/// A kind of failure. Each has an exit code of its own in the `fsdp` command.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A failure of no other kind.
    #[default]
    Other,
    /// The request cannot work.
    Usage,
    /// A checkpoint is corrupt.
    Corrupt,
    /// A checkpoint is incomplete or was never committed, or there is none.
    Incomplete,
    /// A checkpoint is of a version or a kind that is not supported.
    UnsupportedVersion,
    /// A checkpoint asks for something that would not be safe to do.
    Unsafe,
    /// The operating system refused to read or write.
    Io,
    /// No space is left.
    NoSpace,
    /// A rank was lost, or did not answer in time.
    RankLost,
    /// Two things that should match do not.
    Difference,
    /// A checkpoint is in its place, but something failed after that.
    AfterCommit,
}

/// An error that knows its kind. When an error is sent to other ranks as a message, its kind goes
/// with it.
pub trait Failure: fmt::Display {
    /// Returns the kind of this failure.
    fn kind(&self) -> ErrorKind {
        ErrorKind::Other
    }
}

impl Failure for str {}

impl Failure for String {}

impl Failure for std::convert::Infallible {}

impl Failure for io::Error {
    fn kind(&self) -> ErrorKind {
        match io::Error::kind(self) {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace,
            _ => ErrorKind::Io,
        }
    }
}

impl<F: Failure + ?Sized> Failure for &F {
    fn kind(&self) -> ErrorKind {
        (**self).kind()
    }
}

/// Returns an error and its causes in one line.
#[must_use]
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
