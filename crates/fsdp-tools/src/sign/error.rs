//! The errors of signatures.

use std::path::PathBuf;

use fsdp_formats::FileError;
use fsdp_layout::{ErrorKind, Failure};
use thiserror::Error;

/// A checkpoint that cannot be signed, or a signature that does not vouch for it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SignError {
    /// A file that cannot be read, or is damaged.
    #[error(transparent)]
    File(#[from] FileError),
    /// A private or public key that cannot be used.
    #[error("this is no {what}: {reason}")]
    Key {
        /// The kind of key that was wanted.
        what: &'static str,
        /// The defect.
        reason: String,
    },
    /// A file that is not a signature.
    #[error("this is not a model signature: {reason}")]
    Malformed {
        /// The defect.
        reason: String,
    },
    /// A signature of a kind that is not known here.
    #[error("this signature cannot be checked here: {reason}")]
    Unsupported {
        /// The kind.
        reason: String,
    },
    /// A bundle without a signature, or with several.
    #[error("it must contain exactly one signature, but has {found}")]
    SignatureCount {
        /// The number of signatures in the bundle.
        found: usize,
    },
    /// A signature that names another key.
    #[error(
        "it was signed with another key: the hash of that key is {signed}, and that of the given key {given}"
    )]
    WrongKey {
        /// The hash of the key that the signature names.
        signed: String,
        /// The hash of the key that was given.
        given: String,
    },
    /// A signature that was not made with the key, or not over the statement.
    #[error("the signature is not that of this key and this statement: one of them was changed")]
    InvalidSignature,
    /// Files that are not those that were signed.
    #[error("the files of `{}` are not those that were signed: {}", path.display(), list_files(changed, added, missing))]
    FilesDiffer {
        /// The checkpoint.
        path: PathBuf,
        /// Files with other bytes.
        changed: Vec<String>,
        /// Files that were not signed.
        added: Vec<String>,
        /// Files that are not there.
        missing: Vec<String>,
    },
    /// A checkpoint that is one file, with a file of values beside it, which is a part of it too.
    #[error("`{file}` beside `{}` is a part of the checkpoint, and a signature of one file does not cover it", path.display())]
    ValuesBeside {
        /// The checkpoint.
        path: PathBuf,
        /// The name of the file with values.
        file: String,
    },
}

impl SignError {
    /// Returns the error that a file is not a signature.
    pub(super) fn malformed(reason: impl ToString) -> Self {
        SignError::Malformed {
            reason: reason.to_string(),
        }
    }

    /// Returns the error that a signature is of a kind that is not known here.
    pub(super) fn unsupported(reason: impl Into<String>) -> Self {
        SignError::Unsupported {
            reason: reason.into(),
        }
    }
}

impl Failure for SignError {
    fn kind(&self) -> ErrorKind {
        match self {
            SignError::File(error) => error.kind(),
            SignError::Key { .. } | SignError::ValuesBeside { .. } => ErrorKind::Usage,
            SignError::Unsupported { .. } => ErrorKind::UnsupportedVersion,
            SignError::FilesDiffer { changed, added, .. }
                if changed.is_empty() && added.is_empty() =>
            {
                ErrorKind::Incomplete
            }
            SignError::FilesDiffer { .. } => ErrorKind::Corrupt,
            _ => ErrorKind::Unsafe,
        }
    }
}

/// Returns a list of the first few files for a message, with what became of each.
fn list_files(changed: &[String], added: &[String], missing: &[String]) -> String {
    const MAX_LISTED: usize = 4;
    let mut texts = Vec::new();
    for (names, became) in [
        (changed, "was changed"),
        (added, "was added"),
        (missing, "is missing"),
    ] {
        texts.extend(names.iter().map(|name| format!("`{name}` {became}")));
    }
    if texts.len() > MAX_LISTED {
        let more = texts.len() - MAX_LISTED;
        texts.truncate(MAX_LISTED);
        texts.push(format!("and {more} more"));
    }
    texts.join(", ")
}
