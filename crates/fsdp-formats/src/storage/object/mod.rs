//! Object stores: their clients, and the few operations that checkpoints need, each one blocking.

pub(super) mod address;
mod client;
mod prefix;
mod read;
mod runtime;
mod staging;
mod upload;

pub(crate) use address::ObjectStorage;
pub(crate) use client::Bucket;
pub use object_store;
pub use prefix::Store;

use std::path::Path;
use std::sync::Arc;

use self::prefix::{Prefix, join};
use self::staging::{ObjectStage, nonce_of};
use super::backend::{EntryKind, Links, ReadDirectory, Stage, Storage, UnusableUrl};
use super::fs::Durable;
use super::paths::check_relative;
use crate::error::{FileError, LocationError};
use crate::metadata::METADATA_FILE;

impl ObjectStorage {
    /// Returns the place of the prefix that this one lies in. That of the root of a bucket is the
    /// root.
    fn above(&self) -> ObjectStorage {
        let key = self.prefix.rsplit_once('/').map_or("", |(above, _)| above);
        let name = self.name.parent().unwrap_or(Path::new(""));
        ObjectStorage::new(self.bucket.clone(), key.to_owned(), name.to_owned())
    }

    /// Connects to the prefix that this one lies in; `None` for the root of a bucket.
    fn open_parent(&self) -> Result<Option<Prefix>, FileError> {
        let is_root = self.prefix.is_empty();
        (!is_root).then(|| self.above().open()).transpose()
    }
}

impl Storage for ObjectStorage {
    fn name(&self) -> &Path {
        &self.name
    }

    fn as_object_storage(&self) -> Option<&ObjectStorage> {
        Some(self)
    }

    fn child(&self, below: &str) -> Result<Arc<dyn Storage>, UnusableUrl> {
        let name = self.name.join(below);
        if !below.is_empty() && check_relative(below).is_err() {
            return Err(UnusableUrl {
                name,
                reason: LocationError::Key,
            });
        }
        Ok(Arc::new(ObjectStorage::new(
            self.bucket.clone(),
            join(&self.prefix, below),
            name,
        )))
    }

    fn parent(&self) -> Arc<dyn Storage> {
        Arc::new(self.above())
    }

    fn kind(&self) -> Result<Option<EntryKind>, FileError> {
        let prefix = self.open()?;
        // An object of this very key counts more than objects below it.
        if prefix.head("")?.is_some() {
            return Ok(Some(EntryKind::File));
        }
        Ok((!prefix.is_empty()?).then_some(EntryKind::Directory))
    }

    fn names(&self) -> Result<Vec<String>, FileError> {
        self.open()?.list_names()
    }

    fn files(&self) -> Result<Vec<String>, FileError> {
        self.open()?.list_all()
    }

    fn open(&self, _: Links) -> Result<Box<dyn ReadDirectory>, FileError> {
        Ok(Box::new(self.open()?))
    }

    fn prepare(&self, _: &Durable, overwrite: bool) -> Result<Box<dyn Stage>, FileError> {
        let stage = ObjectStage::prepare(self.open()?, self.open_parent()?, overwrite)?;
        Ok(Box::new(stage))
    }

    fn join(&self, _: &Durable, name: &str) -> Result<Box<dyn Stage>, FileError> {
        let stage = ObjectStage::join(self.open()?, self.open_parent()?, name)?;
        Ok(Box::new(stage))
    }

    fn remove_checkpoint(&self, _: &Durable) -> Result<bool, FileError> {
        let prefix = self.open()?;
        // Without its `.metadata` it is not a checkpoint, so a crash in the middle leaves nothing
        // that looks like one.
        let mut names = prefix.list_all()?;
        names.sort_by_key(|name| !name.ends_with(METADATA_FILE));
        for name in &names {
            prefix.delete(name)?;
        }
        Ok(true)
    }

    fn remove_uncommitted(&self) -> Result<bool, FileError> {
        let prefix = self.open()?;
        let all = prefix.list_all()?;
        // Only names that carry a nonce are those of a save; among them is no `.metadata`.
        if all.is_empty() || all.iter().any(|name| nonce_of(name).is_none()) {
            return Ok(false);
        }
        for name in &all {
            prefix.delete(name)?;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::location::Location;

    #[test]
    fn prefixes_have_parents_and_children() {
        for url in ["s3://b/a/x", "s3://b/a/x/", "gs://b/a/x"] {
            let location = Location::from(url);
            let (parent, name) = location.split().unwrap();
            assert_eq!((name, parent.join("x")), ("x", location.clone()));
            let outside = location.join("../y").exists().unwrap_err();
            assert!(
                matches!(
                    outside,
                    FileError::Location {
                        source: LocationError::Key,
                        ..
                    }
                ),
                "{outside}"
            );
        }
        let bucket = || Arc::new(Bucket::from_url("s3", "b", Vec::new()));
        let storage = ObjectStorage::new(bucket(), "a/x".to_owned(), "s3://b/a/x".into());
        let above = storage.above();
        assert_eq!(
            (above.prefix.as_str(), above.name()),
            ("a", Path::new("s3://b/a"))
        );
        let storage = ObjectStorage::new(bucket(), String::new(), "s3://b".into());
        assert_eq!(
            storage.child("x").ok().unwrap().name(),
            Path::new("s3://b/x")
        );
        assert!(storage.open_parent().unwrap().is_none());
    }
}
