//! The errors of this crate: [`FormatError`] for the bytes of one file, and [`FileError`] for
//! operations on checkpoints.

use std::io;
use std::path::PathBuf;

use fsdp_digest::DigestError;
use fsdp_layout::count_text;
use thiserror::Error;

use crate::budget::OverBudget;
use crate::limits::BeyondLimit;
use crate::pickle::{PickleError, PickleErrorKind};
use crate::plan::{LoadPlanError, SavePlanError};

/// Bytes that could not be read, or are not as expected. Offsets count from the start of the item
/// or file that the enclosing error names.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The operating system refused, or the file ends too early.
    #[error("failed to read {} at byte {offset}", count_text(*length, "byte", "bytes"))]
    Read {
        /// First byte wanted.
        offset: u64,
        /// The number of bytes wanted.
        length: u64,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// Bytes do not have the hash that was recorded when they were written.
    #[error(
        "bytes {offset}..{end} of `{file}` are not those that were written: their hash differs"
    )]
    Corrupt {
        /// The file, relative to its checkpoint.
        file: String,
        /// First byte of the block.
        offset: u64,
        /// The byte after its last.
        end: u64,
    },
    /// The zip container is broken or unusual.
    #[error("malformed zip archive: {what} (at byte {offset})")]
    Archive {
        /// The place.
        offset: u64,
        /// The defect.
        what: &'static str,
    },
    /// A record that must be there is not.
    #[error("the archive has no record `{name}`")]
    MissingRecord {
        /// Its name, below the archive's root.
        name: String,
    },
    /// A length or count in the file is beyond its limit.
    #[error(transparent)]
    Limit(#[from] BeyondLimit),
    /// More than the budget of memory and work for an input allows. A file of which that is true
    /// may be sound.
    #[error(transparent)]
    TooLarge(#[from] OverBudget),
    /// The pickle inside was refused.
    #[error(transparent)]
    Pickle(#[from] PickleError),
    /// The item is of another kind, type or shape than was expected.
    #[error("expected {expected}, found {found}")]
    Unexpected {
        /// The item that was expected.
        expected: String,
        /// The item that is there.
        found: String,
    },
    /// Something that is legal, but not supported.
    #[error("{what} is not supported")]
    Unsupported {
        /// The thing that is not supported.
        what: String,
    },
    /// An opaque value: an object that only running code could build.
    #[error("it holds a `{of}`, an object that only running code could build")]
    Opaque {
        /// Its type.
        of: String,
    },
    /// A value of a kind that is not read: it is known by its bytes only.
    #[error("it is a `{of}`, which is not read")]
    NotRead {
        /// The kind.
        of: String,
    },
    /// JSON or text that is not what it should be.
    #[error("malformed {what}: {reason}")]
    Malformed {
        /// The kind of file or text.
        what: &'static str,
        /// The reason why it was refused.
        reason: String,
    },
}

impl FormatError {
    /// Makes the error of an item that is of another kind than expected.
    #[doc(hidden)]
    pub fn unexpected(expected: impl Into<String>, found: impl Into<String>) -> Self {
        FormatError::Unexpected {
            expected: expected.into(),
            found: found.into(),
        }
    }

    /// Makes the error of JSON or text that is not what it should be.
    #[doc(hidden)]
    pub fn malformed(what: &'static str, reason: impl ToString) -> Self {
        FormatError::Malformed {
            what,
            reason: reason.to_string(),
        }
    }

    /// Makes the error of something that is legal, but not supported.
    #[doc(hidden)]
    pub fn unsupported(what: impl Into<String>) -> Self {
        FormatError::Unsupported { what: what.into() }
    }

    /// Returns `true` if the content is more than the budget of memory and work for its size
    /// allows. It may be sound.
    #[must_use]
    pub fn is_over_budget(&self) -> bool {
        self.over_budget()
            .is_some_and(|over_budget| !over_budget.is_of_nesting())
    }

    /// Returns `true` if values in the content are nested too deep. It may be sound.
    #[must_use]
    pub fn is_nested_too_deep(&self) -> bool {
        self.over_budget().is_some_and(OverBudget::is_of_nesting)
    }

    /// Returns the charge that the budget does not cover, or the depth beyond its limit, if that is
    /// the error.
    fn over_budget(&self) -> Option<&OverBudget> {
        match self {
            FormatError::TooLarge(over_budget) => Some(over_budget),
            FormatError::Pickle(error) => match &error.kind {
                PickleErrorKind::TooLarge(over_budget) => Some(over_budget),
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns the type that makes a value opaque, if that is the error.
    pub(crate) fn opaque_type(&self) -> Option<String> {
        match self {
            FormatError::Pickle(error) => error.opaque_type(),
            FormatError::Opaque { of } | FormatError::NotRead { of } => Some(of.clone()),
            _ => None,
        }
    }

    /// Names the key that the error belongs to, in an error that says nothing else about the place.
    pub(crate) fn of_key(self, key: &str) -> Self {
        match self {
            FormatError::Malformed { what, reason } => {
                FormatError::malformed(what, format!("`{key}`: {reason}"))
            }
            FormatError::Unsupported { what } => {
                FormatError::unsupported(format!("`{key}`: {what}"))
            }
            other => other,
        }
    }

    /// Makes the error of the file at this path, or of the checkpoint there, from its reason.
    #[doc(hidden)]
    pub fn in_file(self, path: impl Into<PathBuf>) -> FileError {
        FileError::File {
            path: path.into(),
            source: self,
        }
    }
}

/// The error of this crate. A `path` in it may be the URL of something in an object store.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FileError {
    /// An operation on a file or directory failed.
    #[error("failed to {operation} `{}`", path.display())]
    Io {
        /// The operation.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A URL that cannot be used.
    #[error("`{}` is not a usable location", path.display())]
    Location {
        /// The URL, without parts that may be secret.
        path: PathBuf,
        /// The reason.
        #[source]
        source: LocationError,
    },
    /// There is no checkpoint, or not a whole one.
    #[error("`{}` is not a committed checkpoint: {reason}", path.display())]
    NotCommitted {
        /// The place.
        path: PathBuf,
        /// The reason why it is not a committed checkpoint.
        reason: &'static str,
    },
    /// Files of the checkpoint are missing.
    #[error("`{}` lacks {}", path.display(), listed(files, |file| format!("`{file}`")))]
    MissingFiles {
        /// The checkpoint.
        path: PathBuf,
        /// The files, relative to it; at least one.
        files: Vec<String>,
    },
    /// The destination exists already, and overwriting was not requested.
    #[error("`{}` exists already; request overwriting, or choose another destination", path.display())]
    Exists {
        /// The place.
        path: PathBuf,
    },
    /// Overwriting replaces files by files, and directories by directories.
    #[error("`{}` cannot be replaced by a {wanted}, because it is not one", path.display())]
    NotReplaceable {
        /// The place.
        path: PathBuf,
        /// The kind that would be put there.
        wanted: &'static str,
    },
    /// A destination that nothing is put in the place of, because it is neither a regular file nor
    /// a directory.
    #[error("`{}` is {what}, which is never replaced", path.display())]
    Irreplaceable {
        /// The place.
        path: PathBuf,
        /// The kind of the entry that is there, in words.
        what: &'static str,
    },
    /// A checkpoint's directory, or that of a checkpoint that is one file, holds something that
    /// does not belong to the checkpoint, and would be lost if the checkpoint were replaced or
    /// removed.
    #[error("`{}` contains `{name}`, which does not belong to the checkpoint and would be lost", path.display())]
    HoldsOthers {
        /// The directory.
        path: PathBuf,
        /// The file or directory in it.
        name: String,
    },
    /// There is something in an object store where a checkpoint of several objects should go: they
    /// cannot be replaced in one step.
    #[error("`{}` already holds something, and an object store cannot replace it as a whole; choose a new prefix", path.display())]
    Overwrite {
        /// The place.
        path: PathBuf,
    },
    /// The object store gave no answer that tells whether the object that commits a checkpoint was
    /// written.
    #[error("it is not known whether `{}` was written; look at the checkpoint once the store answers", path.display())]
    CommitUnknown {
        /// The object.
        path: PathBuf,
        /// The store's last answer.
        #[source]
        source: Box<FileError>,
    },
    /// A checkpoint was committed, but something failed after that: it may not survive a power
    /// loss, or files that are no longer needed are left.
    #[error("`{}` is in its place, but something failed after the commit", path.display())]
    AfterCommit {
        /// The checkpoint.
        path: PathBuf,
        /// The failure.
        #[source]
        source: Box<FileError>,
    },
    /// A file that one rank has made is not where another rank looks for it.
    #[error(
        "`{file}`, which a rank has made, is not in `{}`, or differs there: all ranks must save to the same place, on storage \
         that all hosts share",
        path.display()
    )]
    TargetMismatch {
        /// The place where it should be.
        path: PathBuf,
        /// The name of the file or directory there.
        file: String,
    },
    /// A path inside a checkpoint that leads out of it, or is no regular file.
    #[error("`{path}` is not a file inside the checkpoint `{}`: {reason}", root.display())]
    Path {
        /// The checkpoint.
        root: PathBuf,
        /// The path as the checkpoint's metadata gives it.
        path: String,
        /// The defect of the path.
        reason: &'static str,
    },
    /// A file could not be read, or is malformed.
    #[error("failed to read `{}`", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The defect.
        #[source]
        source: FormatError,
    },
    /// An item of a checkpoint is not what its metadata says.
    #[error("failed to read `{fqn}` from `{}` (item at byte {offset})", path.display())]
    Item {
        /// The flat key.
        fqn: String,
        /// The file.
        path: PathBuf,
        /// The start of the item.
        offset: u64,
        /// The defect; offsets count from there.
        #[source]
        source: FormatError,
    },
    /// Two files hold the same tensor or value, but not with the same content.
    #[error("`{fqn}` {what}: `{first}` and `{second}` should agree")]
    Differing {
        /// The flat key.
        fqn: String,
        /// The difference.
        what: String,
        /// The file that was read first.
        first: String,
        /// The other one.
        second: String,
    },
    /// Two checkpoints of a merge do not have the same keys, or not tensors of the same dtypes and
    /// shapes.
    #[error("cannot merge: `{fqn}` {what}: `{first}` and `{second}`")]
    Unlike {
        /// The flat key.
        fqn: String,
        /// The difference.
        what: String,
        /// The first checkpoint.
        first: String,
        /// The other one.
        second: String,
    },
    /// The metadata says there is an item, but not where.
    #[error("the metadata does not say where the bytes of `{fqn}` are stored")]
    NotStored {
        /// The flat key.
        fqn: String,
    },
    /// The checkpoint does not have what was requested.
    #[error(transparent)]
    LoadPlan(#[from] LoadPlanError),
    /// Tensors or values do not have the digests that the checkpoint recorded.
    #[error(
        "the contents of `{}` are not those that were saved: {} {} not the recorded digest",
        path.display(),
        listed(names, |name| format!("`{name}`")),
        if names.len() == 1 { "has" } else { "have" }
    )]
    Digests {
        /// The checkpoint.
        path: PathBuf,
        /// Their flat keys; at least one.
        names: Vec<String>,
    },
    /// The ranks' items do not make one checkpoint.
    #[error(transparent)]
    SavePlan(#[from] SavePlanError),
    /// Checkpoints cannot be merged.
    #[error("cannot merge: {reason}")]
    Merge {
        /// The reason.
        reason: String,
    },
    /// A tensor cannot be written as asked.
    #[error("cannot write `{fqn}`")]
    Encode {
        /// The flat key.
        fqn: String,
        /// The reason.
        #[source]
        source: FormatError,
    },
    /// Values hold objects that only running code could build, or are of kinds that are not read,
    /// so they cannot be written in another format.
    #[error(
        "cannot write opaque values (objects that only running code could build, and kinds of data that are not read): {}",
        listed(values, |(key, of)| format!("`{key}` ({of})"))
    )]
    Opaque {
        /// Their flat keys, and the type of each.
        values: Vec<(String, String)>,
    },
    /// The number of bytes provided for a tensor is not the planned one.
    #[error("{given} bytes were provided for `{fqn}`, but {planned} were planned")]
    PayloadLength {
        /// The flat key.
        fqn: String,
        /// The bytes that were provided.
        given: u64,
        /// The bytes that were planned.
        planned: u64,
    },
    /// The caller's code that provides or takes the bytes failed.
    #[error("failed to provide the bytes of `{fqn}`")]
    Payload {
        /// The flat key.
        fqn: String,
        /// Its error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Returns the error of a box that is not one of its tensor.
pub fn wrong_box(fqn: &str, error: &DigestError) -> FileError {
    let source = FormatError::unexpected("a box of the tensor", error.to_string());
    FileError::Encode {
        fqn: fqn.to_owned(),
        source,
    }
}

/// Returns the first few of some items for a message, as `show` writes each, and how many more
/// there are.
pub(crate) fn listed<T>(items: &[T], show: impl Fn(&T) -> String) -> String {
    // A checkpoint may have a million keys, of which a message can only give an impression.
    const LISTED: usize = 4;
    let names: Vec<String> = items.iter().take(LISTED).map(show).collect();
    let first = names.join(", ");
    match items.len().saturating_sub(LISTED) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

impl FileError {
    /// Returns the type that makes a value opaque, if that is the error: the value is sound, but
    /// holds an object that is never built.
    #[must_use]
    pub fn opaque_type(&self) -> Option<String> {
        let (FileError::Item { source, .. } | FileError::File { source, .. }) = self else {
            return None;
        };
        source.opaque_type()
    }

    /// Makes the error [`FileError::NotStored`] of the flat key `fqn`.
    #[must_use]
    pub fn not_stored(fqn: &str) -> Self {
        FileError::NotStored {
            fqn: fqn.to_owned(),
        }
    }

    /// Makes the error of this operation on this path.
    pub(crate) fn io(operation: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        FileError::Io {
            operation,
            path: path.into(),
            source,
        }
    }

    /// Returns `true` if the system has refused an operation that writes, such as to create a file.
    #[must_use]
    pub fn is_of_write(&self) -> bool {
        const READS: [&str; 5] = ["inspect", "list", "open", "open the directory", "read"];
        matches!(self, FileError::Io { operation, .. } if !READS.contains(operation))
    }

    /// Returns `true` if the error says that nothing is at a path. Where a name is too long for the
    /// file system, nothing can be.
    pub(crate) fn is_absence(&self) -> bool {
        matches!(self, FileError::Io { source, .. } if matches!(
            source.kind(),
            io::ErrorKind::NotFound
                | io::ErrorKind::NotADirectory
                | io::ErrorKind::InvalidFilename
        ))
    }
}

/// The outcome of an operation of the system.
pub(crate) trait IoOutcome<T> {
    /// Adds to the error, if there is one, the operation that failed and the path of what it was
    /// done to.
    fn during(self, operation: &'static str, path: impl Into<PathBuf>) -> Result<T, FileError>;
}

impl<T> IoOutcome<T> for io::Result<T> {
    fn during(self, operation: &'static str, path: impl Into<PathBuf>) -> Result<T, FileError> {
        self.map_err(|error| FileError::io(operation, path, error))
    }
}

/// The reason why a URL cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LocationError {
    /// The scheme is not one of those that are supported.
    #[error("its scheme is none of `file`, `s3`, `gs` and `az`")]
    Scheme,
    /// The program was built without object stores.
    #[error(
        "this program was built without object stores: build it with `--features object-store`"
    )]
    NotBuilt,
    /// `s3:///x`, `file://host/x`.
    #[error("it names no bucket, or a host where there can be none")]
    Host,
    /// A user name or a query, which may be credentials.
    #[error("it holds a user name or a query: credentials are taken from the environment only")]
    Credentials,
    /// `s3://bucket/a//b`, `s3://bucket/../b`.
    #[error("its path has an empty, `.` or `..` part")]
    Key,
}
