//! A store in memory that counts its operations, and fails at any of them.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fsdp::formats::Location;
use fsdp::formats::object_store::memory::InMemory;
use fsdp::formats::object_store::multipart::{MultipartStore, PartId};
use fsdp::formats::object_store::path::Path;
use fsdp::formats::object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartId, MultipartUpload,
    ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use futures_util::stream::{self, BoxStream, StreamExt as _, TryStreamExt as _};

/// When an operation fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fail {
    Never,
    /// This one, before anything is done.
    Before(usize),
    /// This one, when all is done: the answer gets lost.
    After(usize),
    /// This one and all later ones.
    From(usize),
    /// None, but each list takes this long.
    SlowLists(Duration),
}

#[derive(Debug)]
pub(crate) struct Faulty {
    inner: Arc<InMemory>,
    fail: Fail,
    count: AtomicUsize,
    begun: Mutex<BTreeSet<MultipartId>>,
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a store that fails")
    }
}

/// An operation that is under way.
struct Step<'a> {
    store: &'a Faulty,
    number: usize,
}

fn failure() -> Error {
    Error::Generic {
        store: "Faulty",
        source: "the test wants it so".into(),
    }
}

impl Faulty {
    pub(crate) fn new(fail: Fail) -> Arc<Self> {
        Self::with(Arc::default(), fail)
    }

    /// A store that holds this already.
    pub(crate) fn with(inner: Arc<InMemory>, fail: Fail) -> Arc<Self> {
        let (count, begun) = Default::default();
        Arc::new(Faulty {
            inner,
            fail,
            count,
            begun,
        })
    }

    /// One that never fails, with the same objects.
    pub(crate) fn healed(&self) -> Arc<InMemory> {
        self.inner.clone()
    }

    pub(crate) fn location(self: &Arc<Self>, prefix: &str) -> Location {
        Location::with_store(self.clone(), "memory://test", prefix)
    }

    pub(crate) fn operations(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// Uploads that were begun, and neither completed nor aborted.
    pub(crate) fn unfinished(&self) -> usize {
        self.begun.lock().unwrap().len()
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        let all = self
            .inner
            .list(None)
            .map_ok(|meta| meta.location.to_string())
            .try_collect::<Vec<_>>();
        let mut keys = futures_util::FutureExt::now_or_never(all).unwrap().unwrap();
        keys.sort();
        keys
    }

    /// Begins a list.
    fn list_step(&self) -> Result<Step<'_>> {
        if let Fail::SlowLists(pause) = self.fail {
            std::thread::sleep(pause);
        }
        self.step()
    }

    fn step(&self) -> Result<Step<'_>> {
        let number = self.count.fetch_add(1, Ordering::SeqCst);
        match self.fail {
            Fail::Before(at) if number == at => Err(failure()),
            Fail::From(at) if number >= at => Err(failure()),
            _ => Ok(Step {
                store: self,
                number,
            }),
        }
    }
}

impl Step<'_> {
    fn done<T>(self, outcome: Result<T>) -> Result<T> {
        match self.store.fail {
            Fail::After(at) if self.number == at => Err(failure()),
            _ => outcome,
        }
    }
}

#[async_trait::async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(
        &self,
        key: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let step = self.step()?;
        step.done(self.inner.put_opts(key, payload, options).await)
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        panic!("parts are sent by their numbers")
    }

    async fn get_opts(&self, key: &Path, options: GetOptions) -> Result<GetResult> {
        let step = self.step()?;
        step.done(self.inner.get_opts(key, options).await)
    }

    fn delete_stream(
        &self,
        keys: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        match self.step() {
            Ok(_) => self.inner.delete_stream(keys),
            Err(error) => stream::once(async { Err(error) }).boxed(),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.list_step() {
            Ok(_) => self.inner.list(prefix),
            Err(error) => stream::once(async { Err(error) }).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let step = self.list_step()?;
        step.done(self.inner.list_with_delimiter(prefix).await)
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        panic!("nothing is copied")
    }
}

#[async_trait::async_trait]
impl MultipartStore for Faulty {
    async fn create_multipart(&self, key: &Path) -> Result<MultipartId> {
        let step = self.step()?;
        let begun = self.inner.create_multipart(key).await;
        let begun = step.done(begun)?;
        self.begun.lock().unwrap().insert(begun.clone());
        Ok(begun)
    }

    async fn put_part(
        &self,
        key: &Path,
        id: &MultipartId,
        index: usize,
        data: PutPayload,
    ) -> Result<PartId> {
        let step = self.step()?;
        step.done(self.inner.put_part(key, id, index, data).await)
    }

    async fn complete_multipart(
        &self,
        key: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
    ) -> Result<PutResult> {
        let step = self.step()?;
        let done = self.inner.complete_multipart(key, id, parts).await;
        if done.is_ok() {
            self.begun.lock().unwrap().remove(id);
        }
        step.done(done)
    }

    async fn abort_multipart(&self, key: &Path, id: &MultipartId) -> Result<()> {
        let step = self.step()?;
        self.begun.lock().unwrap().remove(id);
        step.done(self.inner.abort_multipart(key, id).await)
    }
}
