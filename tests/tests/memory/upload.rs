//! The memory that a save to an object store takes beyond the state.

#![expect(clippy::panic, reason = "a test fails by panicking")]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use fsdp::checkpoint::{SaveOptions, save};
use fsdp::formats::Location;
use fsdp::formats::object_store::memory::InMemory;
use fsdp::formats::object_store::multipart::{MultipartStore, PartId};
use fsdp::formats::object_store::path::Path;
use fsdp::formats::object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartId, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use fsdp::formats::writer::WriteOptions;
use fsdp::state::StateDict;
use fsdp_tests::counting_allocator::{live_bytes, peak_bytes, reset_peak};
use futures_util::stream::BoxStream;

/// The memory that a save may take on each rank.
const LIMIT: usize = 64 << 20;

/// Keeps small objects, counts the bytes of parts and forgets them: the memory of a real store is
/// elsewhere. It is slower than who writes.
#[derive(Debug, Default)]
struct Forgetful {
    inner: InMemory,
    parts: AtomicUsize,
}

impl fmt::Display for Forgetful {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a store that forgets")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Forgetful {
    async fn put_opts(
        &self,
        key: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        self.inner.put_opts(key, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        panic!("parts are sent by their numbers")
    }

    async fn get_opts(&self, key: &Path, options: GetOptions) -> Result<GetResult> {
        self.inner.get_opts(key, options).await
    }

    fn delete_stream(
        &self,
        keys: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(keys)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        panic!("nothing is copied")
    }
}

#[async_trait::async_trait]
impl MultipartStore for Forgetful {
    async fn create_multipart(&self, key: &Path) -> Result<MultipartId> {
        self.inner.create_multipart(key).await
    }

    async fn put_part(
        &self,
        key: &Path,
        id: &MultipartId,
        index: usize,
        data: PutPayload,
    ) -> Result<PartId> {
        tokio::time::sleep(Duration::from_millis(20)).await;
        self.parts
            .fetch_add(data.content_length(), Ordering::SeqCst);
        drop(data);
        self.inner.put_part(key, id, index, PutPayload::new()).await
    }

    async fn complete_multipart(
        &self,
        key: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
    ) -> Result<PutResult> {
        self.inner.complete_multipart(key, id, parts).await
    }

    async fn abort_multipart(&self, key: &Path, id: &MultipartId) -> Result<()> {
        self.inner.abort_multipart(key, id).await
    }
}

#[test]
fn an_upload_holds_no_more_than_a_save_may_take_whatever_the_number_of_threads() {
    let _alone = crate::alone();
    // One tensor that several threads share, and some that each of them takes whole.
    let sizes = [128usize, 33, 33, 33, 33];
    let mut state = StateDict::new();
    for (index, mib) in sizes.iter().enumerate() {
        state.insert(
            format!("t{index}"),
            Tensor::zeros(mib << 20, DType::U8, &Device::Cpu).unwrap(),
        );
    }
    for threads in [1, 2, 4, 16] {
        let store = Arc::new(Forgetful::default());
        let location = Location::with_store(store.clone(), "memory://test", "checkpoint");
        let options = SaveOptions {
            write: WriteOptions {
                threads: Some(threads),
                ..WriteOptions::default()
            },
            ..SaveOptions::default()
        };
        let before = live_bytes();
        reset_peak();
        fsdp::comm::run_local(1, |group| {
            save(location.clone(), &state, &group, &options).map(drop)
        })
        .unwrap()
        .remove(0)
        .unwrap();
        let taken = peak_bytes() - before;
        let sent = store.parts.load(Ordering::SeqCst);
        assert!(
            sent > sizes.iter().sum::<usize>() << 20,
            "{sent} bytes were sent"
        );
        assert!(taken <= LIMIT, "{threads} threads: {} MiB", taken >> 20);
    }
}
