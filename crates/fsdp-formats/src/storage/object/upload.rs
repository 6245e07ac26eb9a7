//! An object that is being written. Bytes arrive in any order, from any thread, and are collected
//! into parts, which are sent as they fill up.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use object_store::multipart::PartId;
use object_store::path::Path as Key;
use object_store::{Error, MultipartId, ObjectStoreExt as _, PutPayload};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::prefix::{Prefix, Store};
use super::runtime::{spawn, wait};
use crate::error::{FileError, IoOutcome as _};
use crate::storage::backend::{StagedFile, check_write};
use crate::threads::lock;

/// The bytes of a part, unless that would make more than [`MAX_PARTS`]. No object store takes
/// smaller parts.
const PART_BYTES: u64 = 5 << 20;
/// The most parts that an object may have.
const MAX_PARTS: u64 = 10_000;
/// The most parts of an object that are under way at once.
const PARTS_IN_FLIGHT: usize = 6;
/// The most threads that write an object at once. Each holds up to three parts: with those under
/// way 60 MiB in all.
const WRITERS: usize = 2;

/// The operation of sending a part, for errors.
const UPLOAD_PART: &str = "upload a part of";

/// A slot in which a finished upload waits for the commit.
pub(super) type FinishedUpload = Arc<Mutex<Option<Upload>>>;

/// An object that is being written.
///
/// It appears when it is complete, or not at all. It takes memory for the parts that are begun
/// (about two for each of [`WRITERS`] threads, and one that waits), and for the [`PARTS_IN_FLIGHT`]
/// parts that are being sent.
pub(super) struct Upload {
    store: Arc<dyn Store>,
    key: Key,
    /// The URL, for messages.
    name: PathBuf,
    /// The bytes of the whole object.
    pub(super) length: u64,
    /// The bytes of a part.
    part_bytes: u64,
    /// The upload in parts; `None` for an object that is small enough for one request.
    id: Option<MultipartId>,
    parts: Mutex<Parts>,
    /// Permits for the parts under way.
    permits: Arc<Semaphore>,
    /// `true` once a part could not be sent.
    has_failed: Arc<AtomicBool>,
    /// The slot in which [`StagedFile::finish`] leaves the upload, if it must not publish it.
    pub(super) parked_in: Option<FinishedUpload>,
    /// `true` if no other save writes to the key of this object. Then an object of the right length
    /// at the key must be this one.
    is_own_key: bool,
}

/// The parts of an upload.
#[derive(Debug, Default)]
struct Parts {
    begun: BTreeMap<u64, BegunPart>,
    in_flight: BTreeMap<u64, JoinHandle<Result<PartId, Error>>>,
}

/// A part that still has holes.
#[derive(Debug)]
struct BegunPart {
    bytes: Vec<u8>,
    filled: u64,
}

impl Upload {
    /// Begins the upload of an object below a prefix.
    pub(super) fn new(
        prefix: &Prefix,
        relative: &str,
        length: u64,
        is_own_key: bool,
    ) -> Result<Self, FileError> {
        let key = prefix.key(relative)?;
        let name = prefix.name_of(relative);
        let store = prefix.store.clone();
        // A store limits the number of parts, so those of a large object are larger. An object of
        // one part is put at once.
        let part_bytes = PART_BYTES.max(length.div_ceil(MAX_PARTS));
        let id = (length > part_bytes)
            .then(|| wait(store.create_multipart(&key)).during("begin the upload of", &name))
            .transpose()?;
        Ok(Upload {
            store,
            key,
            name,
            length,
            part_bytes,
            id,
            parts: Mutex::default(),
            permits: Arc::new(Semaphore::new(PARTS_IN_FLIGHT)),
            has_failed: Arc::default(),
            parked_in: None,
            is_own_key,
        })
    }

    /// Locks the parts.
    fn parts(&self) -> MutexGuard<'_, Parts> {
        lock(&self.parts)
    }

    /// Returns the length of a part: the last one may be shorter.
    fn part_length(&self, index: u64) -> u64 {
        self.part_bytes.min(self.length - index * self.part_bytes)
    }

    /// Waits until there is room for a part, and starts to send it. After a failure it returns the
    /// error instead.
    fn send(&self, index: u64, bytes: Vec<u8>) -> Result<(), FileError> {
        let Some(id) = self.id.clone() else {
            return Ok(());
        };
        // After a failure the rest need not be sent, and the error is returned early.
        if self.has_failed.load(Ordering::Relaxed) {
            return self.wait_for_parts().map(|_| ());
        }
        let has_failed = self.has_failed.clone();
        let permits = self.permits.clone();
        let store = self.store.clone();
        let key = self.key.clone();
        // This thread waits for a permit, so that it does not fill further parts meanwhile: memory
        // stays bounded.
        let permit = wait(async { Ok(permits.acquire_owned().await.ok()) })
            .during(UPLOAD_PART, &self.name)?;
        let sending = spawn(async move {
            let sent = store
                .put_part(&key, &id, index as usize, PutPayload::from(bytes))
                .await;
            has_failed.fetch_or(sent.is_err(), Ordering::Relaxed);
            drop(permit);
            sent
        })
        .during(UPLOAD_PART, &self.name)?;
        self.parts().in_flight.insert(index, sending);
        Ok(())
    }

    /// Sends what is left; holes are zeros. Afterwards only the last request is missing.
    fn flush(&self) -> Result<Vec<PartId>, FileError> {
        // An object of one request has no parts to send.
        if self.id.is_none() {
            return Ok(Vec::new());
        }
        let mut begun = std::mem::take(&mut self.parts().begun);
        for index in 0..self.length.div_ceil(self.part_bytes) {
            if let Some(part) = begun.remove(&index) {
                self.send(index, part.bytes)?;
            } else if !self.parts().in_flight.contains_key(&index) {
                self.send(index, vec![0; self.part_length(index) as usize])?;
            }
        }
        self.wait_for_parts()
    }

    /// Waits for all parts that are under way, and returns those that were sent, or the first
    /// error.
    fn wait_for_parts(&self) -> Result<Vec<PartId>, FileError> {
        let in_flight = std::mem::take(&mut self.parts().in_flight);
        let mut parts = Vec::with_capacity(in_flight.len());
        let mut outcome = Ok(());
        for sending in in_flight.into_values() {
            // After an error too, so that no part is under way when the upload is aborted.
            let part_outcome = wait(async {
                sending
                    .await
                    .unwrap_or_else(|error| Err(Error::JoinError { source: error }))
            });
            outcome = outcome.and(part_outcome.map(|part| parts.push(part)));
        }
        outcome.during(UPLOAD_PART, &self.name)?;
        Ok(parts)
    }

    /// Sends what is left, and publishes the object. If the answer is lost, an object of this
    /// length at a key of its own counts as published.
    pub(super) fn complete(mut self) -> Result<(), FileError> {
        let parts = self.flush()?;
        let outcome = match &self.id {
            Some(id) => wait(self.store.complete_multipart(&self.key, id, parts)).map(drop),
            None => {
                // An object without any bytes has no part.
                let only_part = self.parts().begun.remove(&0);
                let mut bytes = only_part.map_or_else(Vec::new, |part| part.bytes);
                bytes.resize(self.length as usize, 0);
                let bytes = PutPayload::from(bytes);
                wait(self.store.put(&self.key, bytes)).map(drop)
            }
        };
        // If the request failed, it may have succeeded, and only the answer was lost.
        if outcome.is_err() && !(self.is_own_key && self.exists()) {
            return outcome.during("upload", &self.name);
        }
        self.id = None;
        Ok(())
    }

    /// Returns `true` if an object of this length is at the key.
    fn exists(&self) -> bool {
        wait(self.store.head(&self.key)).is_ok_and(|meta| meta.size == self.length)
    }
}

impl StagedFile for Upload {
    fn writers(&self, threads: usize) -> usize {
        threads.min(WRITERS)
    }

    /// Takes bytes, each of which is written once.
    fn write_at(&self, mut offset: u64, mut bytes: &[u8]) -> Result<(), FileError> {
        check_write(&self.name, self.length, offset, bytes)?;
        while !bytes.is_empty() {
            let index = offset / self.part_bytes;
            let offset_in_part = (offset % self.part_bytes) as usize;
            let length = self.part_length(index);
            let (piece, remaining) =
                bytes.split_at(bytes.len().min(length as usize - offset_in_part));
            // The lock is held for the copy only, not while a full part waits to be sent.
            let full_part = {
                let mut parts = self.parts();
                let begun = parts.begun.entry(index).or_insert_with(|| BegunPart {
                    bytes: vec![0; length as usize],
                    filled: 0,
                });
                begun.bytes[offset_in_part..offset_in_part + piece.len()].copy_from_slice(piece);
                begun.filled += piece.len() as u64;
                let is_full = begun.filled >= length && self.id.is_some();
                if is_full {
                    parts.begun.remove(&index)
                } else {
                    None
                }
            };
            if let Some(full_part) = full_part {
                self.send(index, full_part.bytes)?;
            }
            (offset, bytes) = (offset + piece.len() as u64, remaining);
        }
        Ok(())
    }

    /// Publishes the object, or leaves it ready for that.
    fn finish(mut self: Box<Self>) -> Result<(), FileError> {
        match self.parked_in.take() {
            None => self.complete(),
            Some(slot) => {
                *lock(&slot) = Some(*self);
                Ok(())
            }
        }
    }
}

// Not derived: the debug form of a store shows credentials.
impl fmt::Debug for Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upload")
            .field("name", &self.name)
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(id) = self.id.take() else { return };
        let in_flight = std::mem::take(&mut self.parts().in_flight);
        // Best effort: stores can be told to forget uploads that were never completed.
        let _ = wait(async {
            for (_, sending) in in_flight {
                sending.abort();
                let _ = sending.await;
            }
            self.store.abort_multipart(&self.key, &id).await
        });
    }
}
