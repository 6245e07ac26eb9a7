//! Every format reads with as many threads as it is asked to, and the bytes do not depend on how
//! many those are.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use fsdp_layout::{DType, TensorBox};

use super::checkpoint::{Checkpoint, Format};
use super::read::{Destination, OpenOptions, ReadOptions};
use crate::error::{FileError, FormatError};
use crate::metadata::{
    Chunk, Entry, METADATA_FILE, Metadata, Replica, StorageInfo, TensorEntry, TensorProperties,
    encode,
};
use crate::open::open;
use crate::pickle::write;
use crate::plan::LoadRequest;
use crate::storage::backend::{EntryKind, Links, ReadDirectory, Stage, Storage, UnusableUrl};
use crate::storage::location::Location;
use crate::storage::read_at::ReadAt;
use crate::storage::{Durable, Staging};
use crate::torch::tensor_ref::write_tensor;
use crate::zip::{ArchiveLayout, ROOT};

/// The number of tensors in the checkpoint.
const TENSOR_COUNT: usize = 6;
/// The number of bytes of each tensor.
const TENSOR_BYTES: usize = 300_000;

fn name(tensor: usize) -> String {
    format!("layers.{tensor}.weight")
}

fn bytes_of(tensor: usize) -> Vec<u8> {
    (0..TENSOR_BYTES)
        .map(|index| (index * 31 + tensor * 7 + index / 251) as u8)
        .collect()
}

/// Writes a DCP directory by hand.
fn write_dcp(path: &Path) {
    let staging: Staging = Durable::new().prepare(path, false).unwrap();
    let item = crate::dcp::item::lay_out_tensor(DType::U8, &[TENSOR_BYTES]).unwrap();
    let file = staging
        .create("__0_0.distcp", item.length() * TENSOR_COUNT as u64)
        .unwrap();
    let mut metadata = Metadata::default();
    for tensor in 0..TENSOR_COUNT {
        let bytes = bytes_of(tensor);
        let (offset, crc) = (item.length() * tensor as u64, crc32fast::hash(&bytes));
        file.write_at(offset, &[item.head(crc), bytes, item.tail(&[crc])].concat())
            .unwrap();
        let stored = StorageInfo {
            relative_path: "__0_0.distcp".to_owned(),
            offset,
            length: item.length(),
            transforms: Vec::new(),
        };
        let chunks = vec![Chunk {
            bounds: TensorBox::whole(&[TENSOR_BYTES]),
            stored: Some(stored),
        }];
        let entry = TensorEntry {
            properties: TensorProperties::new(DType::U8),
            shape: vec![TENSOR_BYTES],
            chunks,
        };
        metadata.entries.insert(name(tensor), Entry::Tensor(entry));
    }
    file.finish().unwrap();
    staging.commit(METADATA_FILE, &encode(&metadata)).unwrap();
}

/// Writes a safetensors file with these tensors.
fn write_safetensors(path: &Path, tensors: std::ops::Range<usize>) {
    let named_tensors: Vec<(String, Vec<u8>)> = tensors
        .map(|tensor| (name(tensor), bytes_of(tensor)))
        .collect();
    let views = named_tensors.iter().map(|(name, bytes)| {
        let shape = vec![bytes.len()];
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::U8, shape, bytes);
        (name.clone(), view.unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// Writes a file of `torch.save`.
fn write_torch(path: &Path) {
    let mut pickle = Vec::new();
    write::proto(&mut pickle, 2);
    pickle.push(write::EMPTY_DICT);
    pickle.push(write::MARK);
    for tensor in 0..TENSOR_COUNT {
        write::text(&mut pickle, &name(tensor));
        write_tensor(&mut pickle, tensor, DType::U8, &[TENSOR_BYTES]);
    }
    pickle.push(write::SETITEMS);
    pickle.push(write::STOP);
    let layout = ArchiveLayout::new(ROOT, pickle, &[TENSOR_BYTES as u64; TENSOR_COUNT]);
    let storages: Vec<Vec<u8>> = (0..TENSOR_COUNT).map(bytes_of).collect();
    let crcs: Vec<u32> = storages
        .iter()
        .map(|bytes| crc32fast::hash(bytes))
        .collect();
    let file = std::fs::File::create_new(path).unwrap();
    file.write_all_at(&layout.head(crcs[0]), 0).unwrap();
    for (index, bytes) in storages.iter().enumerate() {
        let offset = layout.storage_offset(index);
        if index > 0 {
            let header = layout.storage_header(index, crcs[index]);
            file.write_all_at(&header, offset - header.len() as u64)
                .unwrap();
        }
        file.write_all_at(bytes, offset).unwrap();
    }
    file.write_all_at(&layout.tail(&crcs), layout.tail_offset())
        .unwrap();
}

/// Writes the same checkpoint in every format, and returns the paths.
fn write_every_format(parent: &Path) -> Vec<(Format, PathBuf)> {
    let dcp = parent.join("dcp");
    write_dcp(&dcp);
    let file = parent.join("one.safetensors");
    write_safetensors(&file, 0..TENSOR_COUNT);
    let directory = parent.join("directory");
    std::fs::create_dir(&directory).unwrap();
    write_safetensors(&directory.join("a.safetensors"), 0..TENSOR_COUNT / 2);
    write_safetensors(
        &directory.join("b.safetensors"),
        TENSOR_COUNT / 2..TENSOR_COUNT,
    );
    let torch = parent.join("one.pt");
    write_torch(&torch);
    vec![
        (Format::Dcp, dcp),
        (Format::SafetensorsFile, file),
        (Format::SafetensorsDirectory, directory),
        (Format::Torch, torch),
    ]
}

/// Reads a part of every tensor, and returns the bytes of each.
fn read_parts(checkpoint: &dyn Checkpoint, threads: usize) -> Vec<Vec<u8>> {
    let bounds = TensorBox::new(vec![1000], vec![TENSOR_BYTES - 5000]);
    let mut buffers = vec![vec![0; bounds.numel()]; TENSOR_COUNT];
    let destinations = buffers.iter_mut().enumerate().map(|(tensor, buffer)| {
        let (fqn, shape, boxes) = (name(tensor), vec![TENSOR_BYTES], vec![bounds.clone()]);
        Destination::new(
            LoadRequest {
                fqn,
                dtype: DType::U8,
                shape,
                boxes,
            },
            vec![buffer],
        )
    });
    checkpoint
        .read(
            destinations.collect(),
            ReadOptions {
                threads,
                ..ReadOptions::default()
            },
        )
        .unwrap();
    buffers
}

#[test]
fn one_thread_and_many_read_the_same_bytes_of_every_format() {
    let parent = tempfile::tempdir().unwrap();
    let mut first_bytes = None;
    for (format, path) in write_every_format(parent.path()) {
        let checkpoint = open(&path, OpenOptions::default()).unwrap();
        assert_eq!(checkpoint.format(), format);
        for threads in [1, 4] {
            let bytes = read_parts(&*checkpoint, threads);
            assert_eq!(
                *first_bytes.get_or_insert_with(|| bytes.clone()),
                bytes,
                "{format} with {threads} threads"
            );
        }
    }
}

#[test]
fn every_format_reads_with_several_threads_at_once() {
    let parent = tempfile::tempdir().unwrap();
    for (format, path) in write_every_format(parent.path()) {
        for (threads, expected) in [(1, false), (2, true)] {
            let meeting = Arc::new(Meeting::default());
            let inner: Arc<dyn Storage> =
                Arc::new(crate::storage::local::LocalStorage::new(path.clone()));
            let location = Location::with_storage(Arc::new(Watched {
                inner,
                meeting: meeting.clone(),
            }));
            let checkpoint = open(location, OpenOptions::default()).unwrap();
            // Reads while the checkpoint is opened are not watched.
            meeting.begin(expected);
            read_parts(&*checkpoint, threads);
            assert_eq!(
                meeting.have_met(),
                expected,
                "{format} with {threads} threads"
            );
        }
    }
}

/// A place where reads wait until two are under way at once.
#[derive(Debug, Default)]
struct Meeting {
    state: Mutex<MeetingState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct MeetingState {
    /// `true` once reads count.
    has_begun: bool,
    /// `true` if the first read waits for a second one.
    waits: bool,
    reads_under_way: usize,
    have_met: bool,
}

impl Meeting {
    fn begin(&self, waits: bool) {
        let mut state = self.state.lock().unwrap();
        (state.has_begun, state.waits) = (true, waits);
    }

    fn have_met(&self) -> bool {
        self.state.lock().unwrap().have_met
    }

    /// Runs a read. The first one waits for another, for so long that only a serial reader lets it
    /// wait in vain.
    fn attend<T>(&self, read: impl FnOnce() -> T) -> T {
        let mut state = self.state.lock().unwrap();
        if !state.has_begun {
            drop(state);
            return read();
        }
        state.reads_under_way += 1;
        state.have_met |= state.reads_under_way > 1;
        self.changed.notify_all();
        if state.waits {
            let timeout = Duration::from_secs(20);
            let wait_outcome = self
                .changed
                .wait_timeout_while(state, timeout, |state| !state.have_met && state.waits);
            state = wait_outcome.unwrap().0;
            // Waited in vain: the others need not.
            state.waits &= state.have_met;
        }
        drop(state);
        let outcome = read();
        self.state.lock().unwrap().reads_under_way -= 1;
        outcome
    }
}

/// A storage whose reads attend a meeting.
struct Watched {
    inner: Arc<dyn Storage>,
    meeting: Arc<Meeting>,
}

impl Watched {
    fn wrap(&self, inner: Arc<dyn Storage>) -> Arc<dyn Storage> {
        Arc::new(Watched {
            inner,
            meeting: self.meeting.clone(),
        })
    }
}

impl Storage for Watched {
    fn name(&self) -> &Path {
        self.inner.name()
    }

    fn child(&self, name: &str) -> Result<Arc<dyn Storage>, UnusableUrl> {
        Ok(self.wrap(self.inner.child(name)?))
    }

    fn parent(&self) -> Arc<dyn Storage> {
        self.wrap(self.inner.parent())
    }

    fn exists(&self) -> Result<bool, FileError> {
        self.inner.exists()
    }

    fn kind(&self) -> Result<Option<EntryKind>, FileError> {
        self.inner.kind()
    }

    fn names(&self) -> Result<Vec<String>, FileError> {
        self.inner.names()
    }

    fn files(&self) -> Result<Vec<String>, FileError> {
        self.inner.files()
    }

    fn open(&self, links: Links) -> Result<Box<dyn ReadDirectory>, FileError> {
        Ok(Box::new(WatchedDirectory {
            inner: self.inner.open(links)?,
            meeting: self.meeting.clone(),
        }))
    }

    fn prepare(&self, durable: &Durable, overwrite: bool) -> Result<Box<dyn Stage>, FileError> {
        self.inner.prepare(durable, overwrite)
    }

    fn join(&self, durable: &Durable, name: &str) -> Result<Box<dyn Stage>, FileError> {
        self.inner.join(durable, name)
    }

    fn remove_checkpoint(&self, durable: &Durable) -> Result<bool, FileError> {
        self.inner.remove_checkpoint(durable)
    }

    fn remove_uncommitted(&self) -> Result<bool, FileError> {
        self.inner.remove_uncommitted()
    }
}

#[derive(Debug)]
struct WatchedDirectory {
    inner: Box<dyn ReadDirectory>,
    meeting: Arc<Meeting>,
}

impl ReadDirectory for WatchedDirectory {
    fn name(&self) -> &Path {
        self.inner.name()
    }

    fn names(&self) -> Result<Vec<String>, FileError> {
        self.inner.names()
    }

    fn file(&self, relative: &str) -> Result<Box<dyn ReadAt>, FileError> {
        Ok(Box::new(WatchedFile {
            inner: self.inner.file(relative)?,
            meeting: self.meeting.clone(),
        }))
    }

    fn threads_per_reader(&self) -> usize {
        1
    }

    fn bytes_per_read(&self) -> u64 {
        self.inner.bytes_per_read()
    }
}

struct WatchedFile {
    inner: Box<dyn ReadAt>,
    meeting: Arc<Meeting>,
}

impl ReadAt for WatchedFile {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        self.meeting
            .attend(|| self.inner.read_exact_at(offset, dst))
    }
}

#[test]
fn a_copy_without_a_box_is_not_read_as_a_tensor_in_any_format() {
    let parent = tempfile::tempdir().unwrap();
    for (format, path) in write_every_format(parent.path()) {
        let checkpoint = open(&path, OpenOptions::default()).unwrap();
        let (_, _, stored) = checkpoint.metadata().stored().next().unwrap();
        let replica = Replica {
            fqn: name(0),
            bounds: None,
            stored: stored.clone(),
        };
        let bounds = TensorBox::whole(&[TENSOR_BYTES]);
        let error = checkpoint.read_replica(&replica, &bounds, &mut vec![0; TENSOR_BYTES]);
        assert!(
            matches!(error, Err(FileError::NotStored { .. })),
            "{format}: {error:?}"
        );
    }
}
