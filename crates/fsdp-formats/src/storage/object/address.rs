//! The place of a prefix in an object store, or of one object.

use std::path::PathBuf;
use std::sync::Arc;

use super::client::Bucket;
use super::prefix::Prefix;
use crate::error::{FileError, IoOutcome as _};

/// A bucket and a key in it: that of one object, or a prefix of others.
pub(crate) struct ObjectStorage {
    pub(super) bucket: Arc<Bucket>,
    pub(super) prefix: String,
    /// The URL, for messages.
    pub(super) name: PathBuf,
}

impl ObjectStorage {
    pub(crate) fn new(bucket: Arc<Bucket>, prefix: String, name: PathBuf) -> Self {
        ObjectStorage {
            bucket,
            prefix,
            name,
        }
    }

    /// Connects to the store, if that was not done before.
    pub(super) fn open(&self) -> Result<Prefix, FileError> {
        Ok(Prefix {
            store: self.bucket.store().during("open", &self.name)?,
            prefix: self.prefix.clone(),
            name: self.name.clone(),
        })
    }
}
