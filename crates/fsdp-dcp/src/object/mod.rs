//! Object stores: their clients, and the few operations that checkpoints need, each one blocking.

mod client;
mod read;

pub(crate) use client::Bucket;
pub(crate) use read::ObjectFile;

use std::fmt;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use futures_util::TryStreamExt as _;
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{Error, GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, PutPayload};
use tokio::runtime::{Builder, Handle, Runtime};

use crate::error::CheckpointError;

/// A store that checkpoints can be read from and written to: those of [`object_store`] are all such.
pub trait Store: ObjectStore + MultipartStore {}

impl<S: ObjectStore + MultipartStore> Store for S {}

/// Threads that speak to object stores, whatever the number of checkpoints: they mostly wait.
const THREADS: usize = 2;

/// The runtime that object stores need.
fn runtime() -> io::Result<&'static Runtime> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let made = Builder::new_multi_thread().worker_threads(THREADS).thread_name("fsdp-object").enable_all().build()?;
    Ok(RUNTIME.get_or_init(|| made))
}

/// Waits for a future, also where this thread belongs to another runtime, which must not block on one.
pub(crate) fn wait<T: Send>(future: impl Future<Output = Result<T, Error>> + Send) -> io::Result<T> {
    let runtime = runtime()?;
    let outcome = match Handle::try_current() {
        Err(_) => runtime.block_on(future),
        Ok(_) => std::thread::scope(|scope| {
            let waiter = scope.spawn(|| runtime.block_on(future));
            waiter.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        }),
    };
    outcome.map_err(io_error)
}

/// Starts a future on the runtime's own threads.
pub(crate) fn spawn<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> io::Result<tokio::task::JoinHandle<T>> {
    Ok(runtime()?.spawn(future))
}

/// As what the file system would say, where it has a word for it.
pub(crate) fn io_error(error: Error) -> io::Error {
    let kind = match &error {
        Error::NotFound { .. } => io::ErrorKind::NotFound,
        Error::AlreadyExists { .. } => io::ErrorKind::AlreadyExists,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => io::ErrorKind::PermissionDenied,
        Error::NotSupported { .. } | Error::NotImplemented { .. } => io::ErrorKind::Unsupported,
        Error::InvalidPath { .. } | Error::UnknownConfigurationKey { .. } => io::ErrorKind::InvalidInput,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

/// A key below a prefix; either may be empty.
pub(crate) fn join(prefix: &str, below: &str) -> String {
    match (prefix, below) {
        ("", below) => below.to_owned(),
        (prefix, "") => prefix.to_owned(),
        (prefix, below) => format!("{prefix}/{below}"),
    }
}

/// A key in a store, and the keys below it.
#[derive(Clone)]
pub(crate) struct Prefix {
    store: Arc<dyn Store>,
    prefix: String,
    name: PathBuf,
}

// Stores know credentials.
impl fmt::Debug for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.name, f)
    }
}

impl Prefix {
    pub(crate) fn new(store: Arc<dyn Store>, prefix: String, name: PathBuf) -> Self {
        Prefix { store, prefix, name }
    }

    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// For messages.
    pub(crate) fn name(&self) -> &Path {
        &self.name
    }

    /// For messages: the name of what lies below.
    pub(crate) fn name_of(&self, below: &str) -> PathBuf {
        if below.is_empty() { self.name.clone() } else { self.name.join(below) }
    }

    pub(crate) fn key(&self, below: &str) -> Result<Key, CheckpointError> {
        Key::parse(join(&self.prefix, below)).map_err(|error| {
            let error = io::Error::new(io::ErrorKind::InvalidInput, error);
            CheckpointError::io("open", self.name_of(below))(error)
        })
    }

    /// Length and version of an object; `None` if there is none.
    pub(crate) fn head(&self, below: &str) -> Result<Option<ObjectMeta>, CheckpointError> {
        let key = self.key(below)?;
        // The root of a bucket is no object.
        if key.as_ref().is_empty() {
            return Ok(None);
        }
        match wait(self.store.head(&key)) {
            Ok(meta) => Ok(Some(meta)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(CheckpointError::io("look at", self.name_of(below))(error)),
        }
    }

    /// The names directly below, sorted: objects, and prefixes of others.
    pub(crate) fn names(&self) -> Result<Vec<String>, CheckpointError> {
        let prefix = self.key("")?;
        let listed = wait(self.store.list_with_delimiter(Some(&prefix)));
        let listed = listed.map_err(CheckpointError::io("list", &self.name))?;
        let objects = listed.objects.iter().filter_map(|meta| meta.location.filename());
        let prefixes = listed.common_prefixes.iter().filter_map(|prefix| prefix.filename());
        let mut names: Vec<String> = objects.chain(prefixes).map(str::to_owned).collect();
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// The names of all objects below, at any depth.
    pub(crate) fn all(&self) -> Result<Vec<String>, CheckpointError> {
        let prefix = self.key("")?;
        let all = async { self.store.list(Some(&prefix)).try_collect::<Vec<_>>().await };
        let all = wait(all).map_err(CheckpointError::io("list", &self.name))?;
        let below = |meta: &ObjectMeta| {
            let name = meta.location.as_ref().strip_prefix(prefix.as_ref())?;
            Some(name.trim_start_matches('/').to_owned())
        };
        Ok(all.iter().filter_map(below).collect())
    }

    /// Whether nothing lies below.
    pub(crate) fn is_empty(&self) -> Result<bool, CheckpointError> {
        let prefix = self.key("")?;
        let first = async { self.store.list(Some(&prefix)).try_next().await };
        Ok(wait(first).map_err(CheckpointError::io("list", &self.name))?.is_none())
    }

    /// All of an object that is known to be small; `None` if there is none.
    pub(crate) fn get(&self, below: &str) -> Result<Option<Bytes>, CheckpointError> {
        let key = self.key(below)?;
        match wait(async { self.store.get(&key).await?.bytes().await }) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(CheckpointError::io("read", self.name_of(below))(error)),
        }
    }

    /// Puts an object in one request: over whatever is there, or only where nothing is.
    pub(crate) fn put(&self, below: &str, bytes: PutPayload, mode: PutMode) -> Result<(), CheckpointError> {
        let key = self.key(below)?;
        let put = wait(self.store.put_opts(&key, bytes, mode.into()));
        put.map(|_| ()).map_err(CheckpointError::io("write", self.name_of(below)))
    }

    /// Removes an object, if it is there.
    pub(crate) fn delete(&self, below: &str) -> Result<(), CheckpointError> {
        let key = self.key(below)?;
        match wait(self.store.delete(&key)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(CheckpointError::io("remove", self.name_of(below))(error))
            }
            _ => Ok(()),
        }
    }
}

/// The options of a read of part of an object, of the version that was opened.
fn ranged(range: Range<u64>, version: Option<String>) -> GetOptions {
    GetOptions::new().with_range(Some(range)).with_if_match(version)
}
