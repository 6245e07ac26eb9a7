//! A key in an object store, and the keys below it.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::TryStreamExt as _;
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, PutPayload};

use super::runtime::wait;
use crate::error::{FileError, IoOutcome as _};

/// A store that checkpoints can be read from and written to. All stores of [`object_store`] are.
pub trait Store: ObjectStore + MultipartStore {}

impl<S: ObjectStore + MultipartStore> Store for S {}

/// Returns the key below a prefix; either may be empty.
pub(super) fn join(prefix: &str, below: &str) -> String {
    match (prefix, below) {
        ("", below) => below.to_owned(),
        (prefix, "") => prefix.to_owned(),
        (prefix, below) => format!("{prefix}/{below}"),
    }
}

/// A key in a store, and the keys below it.
#[derive(Clone)]
pub(super) struct Prefix {
    pub(super) store: Arc<dyn Store>,
    pub(super) prefix: String,
    /// The URL, for messages.
    pub(super) name: PathBuf,
}

// Not derived: the debug form of a store shows credentials.
impl fmt::Debug for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.name, f)
    }
}

impl Prefix {
    /// Returns the name for messages of what lies below.
    pub(super) fn name_of(&self, below: &str) -> PathBuf {
        if below.is_empty() {
            self.name.clone()
        } else {
            self.name.join(below)
        }
    }

    /// Returns the key of an object below the prefix.
    pub(super) fn key(&self, below: &str) -> Result<Key, FileError> {
        Key::parse(join(&self.prefix, below))
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
            .during("open", self.name_of(below))
    }

    /// Asks for the length and version of an object; `None` if there is none.
    pub(super) fn head(&self, below: &str) -> Result<Option<ObjectMeta>, FileError> {
        let key = self.key(below)?;
        // The root of a bucket is not an object.
        if key.as_ref().is_empty() {
            return Ok(None);
        }
        self.found("look at", below, wait(self.store.head(&key)))
    }

    /// Returns the names directly below, sorted: of objects, and of prefixes of others.
    pub(super) fn list_names(&self) -> Result<Vec<String>, FileError> {
        let prefix = self.key("")?;
        let listed =
            wait(self.store.list_with_delimiter(Some(&prefix))).during("list", &self.name)?;
        let objects = listed.objects.iter().map(|meta| &meta.location);
        let names: BTreeSet<&str> = objects
            .chain(&listed.common_prefixes)
            .filter_map(Key::filename)
            .collect();
        Ok(names.into_iter().map(str::to_owned).collect())
    }

    /// Returns the names of all objects below, at any depth, sorted.
    pub(super) fn list_all(&self) -> Result<Vec<String>, FileError> {
        let prefix = self.key("")?;
        let listed = wait(async { self.store.list(Some(&prefix)).try_collect::<Vec<_>>().await })
            .during("list", &self.name)?;
        let mut names: Vec<String> = listed
            .iter()
            .filter_map(|meta| meta.location.as_ref().strip_prefix(prefix.as_ref()))
            .map(|name| name.trim_start_matches('/').to_owned())
            .collect();
        names.sort();
        Ok(names)
    }

    /// Returns `true` if nothing lies below.
    pub(super) fn is_empty(&self) -> Result<bool, FileError> {
        let prefix = self.key("")?;
        let first = async { self.store.list(Some(&prefix)).try_next().await };
        Ok(wait(first).during("list", &self.name)?.is_none())
    }

    /// Reads all of an object that is known to be small; `None` if there is none.
    pub(super) fn get(&self, below: &str) -> Result<Option<Bytes>, FileError> {
        let key = self.key(below)?;
        let got = wait(async { self.store.get(&key).await?.bytes().await });
        self.found("read", below, got)
    }

    /// Puts an object in one request, either replacing an existing one or only if there is none.
    pub(super) fn put(
        &self,
        below: &str,
        bytes: PutPayload,
        mode: PutMode,
    ) -> Result<(), FileError> {
        let key = self.key(below)?;
        wait(self.store.put_opts(&key, bytes, mode.into()))
            .map(drop)
            .during("write", self.name_of(below))
    }

    /// Copies an object from another prefix of the same store. The store does this itself, so no
    /// bytes are transferred here.
    pub(super) fn copy(&self, from: &Prefix, name: &str, to: &str) -> Result<(), FileError> {
        let source = from.key(name)?;
        let target = self.key(to)?;
        wait(self.store.copy(&source, &target)).during("copy to", self.name_of(to))
    }

    /// Removes an object, if it is there.
    pub(super) fn delete(&self, below: &str) -> Result<(), FileError> {
        let key = self.key(below)?;
        self.found("remove", below, wait(self.store.delete(&key)))
            .map(drop)
    }

    /// Returns the outcome of an operation on an object; `None` if there is no such object.
    fn found<T>(
        &self,
        operation: &'static str,
        below: &str,
        outcome: io::Result<T>,
    ) -> Result<Option<T>, FileError> {
        match outcome {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            outcome => outcome.during(operation, self.name_of(below)).map(Some),
        }
    }
}
