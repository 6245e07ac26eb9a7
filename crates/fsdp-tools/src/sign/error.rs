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
    NotOne {
        /// Their number.
        found: usize,
    },
    /// A signature that names another key.
    #[error(
        "it was signed with another key: the hash of that key is {signed}, and that of the given key {given}"
    )]
    OtherKey {
        /// The hash of the key that the signature names.
        signed: String,
        /// The hash of the key that was given.
        given: String,
    },
    /// A signature that is not one of the key over the statement.
    #[error("the signature is not that of this key and this statement: one of them was changed")]
    Invalid,
    /// Files that are not those that were signed.
    #[error("the files of `{}` are not those that were signed: {}", path.display(), listed(changed, added, missing))]
    Differs {
        /// The checkpoint.
        path: PathBuf,
        /// Files with other bytes.
        changed: Vec<String>,
        /// Files that were not signed.
        added: Vec<String>,
        /// Files that are not there.
        missing: Vec<String>,
    },
    /// A file beside a checkpoint that is one file, which is a part of it.
    #[error("`{file}` beside `{}` is a part of the checkpoint, and a signature of one file does not cover it", path.display())]
    Beside {
        /// The checkpoint.
        path: PathBuf,
        /// The name of the file beside it.
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
            SignError::Key { .. } | SignError::Beside { .. } => ErrorKind::Usage,
            SignError::Unsupported { .. } => ErrorKind::UnsupportedVersion,
            SignError::Differs { changed, added, .. } if changed.is_empty() && added.is_empty() => {
                ErrorKind::Incomplete
            }
            SignError::Differs { .. } => ErrorKind::Corrupt,
            _ => ErrorKind::Unsafe,
        }
    }
}

/// Lists the first few files for a message, with what became of each.
fn listed(changed: &[String], added: &[String], missing: &[String]) -> String {
    const LISTED: usize = 4;
    let mut texts = Vec::new();
    for (names, became) in [
        (changed, "was changed"),
        (added, "was added"),
        (missing, "is missing"),
    ] {
        texts.extend(names.iter().map(|name| format!("`{name}` {became}")));
    }
    let first = texts[..texts.len().min(LISTED)].join(", ");
    if texts.len() > LISTED {
        format!("{first}, and {} more", texts.len() - LISTED)
    } else {
        first
    }
}
