//! The address of a prefix in an object store, or of one object.

use std::path::PathBuf;
use std::sync::Arc;

use super::client::Bucket;
use super::prefix::Prefix;
use crate::error::FileError;

/// A bucket and a key in it, which may be a prefix of others.
pub(crate) struct Address {
    pub(super) bucket: Arc<Bucket>,
    pub(super) prefix: String,
    /// The URL, for messages.
    pub(super) name: PathBuf,
}

impl Address {
    /// Connects to the store, if that was not done before.
    pub(super) fn open(&self) -> Result<Prefix, FileError> {
        let store = self
            .bucket
            .store()
            .map_err(FileError::io("open", &self.name))?;
        Ok(Prefix::new(store, self.prefix.clone(), self.name.clone()))
    }
}
