//! A key in an object store, and the keys below it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures_util::TryStreamExt as _;
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, PutPayload};

use super::runtime::wait;
use crate::error::FileError;

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
    store: Arc<dyn Store>,
    prefix: String,
    name: PathBuf,
}

// Not derived: the debug form of a store shows credentials.
impl fmt::Debug for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.name, f)
    }
}

impl Prefix {
    pub(super) fn new(store: Arc<dyn Store>, prefix: String, name: PathBuf) -> Self {
        Prefix {
            store,
            prefix,
            name,
        }
    }

    pub(super) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Returns its name for messages.
    pub(super) fn name(&self) -> &Path {
        &self.name
    }

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
        Key::parse(join(&self.prefix, below)).map_err(|error| {
            let error = io::Error::new(io::ErrorKind::InvalidInput, error);
            FileError::io("open", self.name_of(below), error)
        })
    }

    /// Asks for the length and version of an object; `None` if there is none.
    pub(super) fn head(&self, below: &str) -> Result<Option<ObjectMeta>, FileError> {
        let key = self.key(below)?;
        // The root of a bucket is not an object.
        if key.as_ref().is_empty() {
            return Ok(None);
        }
        match wait(self.store.head(&key)) {
            Ok(meta) => Ok(Some(meta)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(FileError::io("look at", self.name_of(below), error)),
        }
    }

    /// Lists the names directly below, sorted: objects, and prefixes of others.
    pub(super) fn names(&self) -> Result<Vec<String>, FileError> {
        let prefix = self.key("")?;
        let listed = wait(self.store.list_with_delimiter(Some(&prefix)))
            .map_err(|error| FileError::io("list", &self.name, error))?;
        let objects = listed
            .objects
            .iter()
            .filter_map(|meta| meta.location.filename());
        let prefixes = listed
            .common_prefixes
            .iter()
            .filter_map(|prefix| prefix.filename());
        let mut names: Vec<String> = objects.chain(prefixes).map(str::to_owned).collect();
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// Lists the names of all objects below, at any depth.
    pub(super) fn all(&self) -> Result<Vec<String>, FileError> {
        let prefix = self.key("")?;
        let listed = wait(async { self.store.list(Some(&prefix)).try_collect::<Vec<_>>().await })
            .map_err(|error| FileError::io("list", &self.name, error))?;
        Ok(listed
            .iter()
            .filter_map(|meta| meta.location.as_ref().strip_prefix(prefix.as_ref()))
            .map(|name| name.trim_start_matches('/').to_owned())
            .collect())
    }

    /// Returns `true` if nothing lies below.
    pub(super) fn is_empty(&self) -> Result<bool, FileError> {
        let prefix = self.key("")?;
        let first = async { self.store.list(Some(&prefix)).try_next().await };
        Ok(wait(first)
            .map_err(|error| FileError::io("list", &self.name, error))?
            .is_none())
    }

    /// Reads all of an object that is known to be small; `None` if there is none.
    pub(super) fn get(&self, below: &str) -> Result<Option<Bytes>, FileError> {
        let key = self.key(below)?;
        match wait(async { self.store.get(&key).await?.bytes().await }) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(FileError::io("read", self.name_of(below), error)),
        }
    }

    /// Puts an object in one request, either replacing an existing one or only if there is none.
    pub(super) fn put(
        &self,
        below: &str,
        bytes: PutPayload,
        mode: PutMode,
    ) -> Result<(), FileError> {
        let key = self.key(below)?;
        let put = wait(self.store.put_opts(&key, bytes, mode.into()));
        put.map(|_| ())
            .map_err(|error| FileError::io("write", self.name_of(below), error))
    }

    /// Copies an object from another prefix of the same store. The store does this itself, so no
    /// bytes are transferred here.
    pub(super) fn copy(&self, from: &Prefix, name: &str, to: &str) -> Result<(), FileError> {
        let source = from.key(name)?;
        let target = self.key(to)?;
        wait(self.store.copy(&source, &target))
            .map_err(|error| FileError::io("copy to", self.name_of(to), error))
    }

    /// Removes an object, if it is there.
    pub(super) fn delete(&self, below: &str) -> Result<(), FileError> {
        let key = self.key(below)?;
        match wait(self.store.delete(&key)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(FileError::io("remove", self.name_of(below), error))
            }
            _ => Ok(()),
        }
    }
}
