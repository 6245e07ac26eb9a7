//! An object that is being written: pieces in any order, from any thread, become parts that are sent as they fill up.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use object_store::multipart::PartId;
use object_store::path::Path as Key;
use object_store::{Error, MultipartId, PutMode, PutPayload};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use crate::error::CheckpointError;
use crate::object::{Prefix, Store, spawn, wait};

/// Bytes of a part, unless there would be more than [`MAX_PARTS`]. No object store takes less.
const PART: u64 = 5 << 20;
/// Most parts that an object may have.
const MAX_PARTS: u64 = 10_000;
/// Parts of an object that are under way at once.
const IN_FLIGHT: usize = 6;
/// Threads that write an object at once. Each holds up to three parts: with those under way 60 MiB in all.
pub(super) const WRITERS: usize = 2;

/// Where a finished upload waits for the commit, if its object is the checkpoint.
pub(super) type Slot = Arc<Mutex<Option<Upload>>>;

/// An object that is being written.
///
/// It appears when it is complete, or not at all. Memory: the parts that are begun (about two for each of [`WRITERS`]
/// threads, and one that waits), and [`IN_FLIGHT`] more that are being sent.
pub(super) struct Upload {
    store: Arc<dyn Store>,
    key: Key,
    /// For messages.
    name: PathBuf,
    length: u64,
    part: u64,
    /// `None`: it is small enough for one request.
    id: Option<MultipartId>,
    state: Mutex<State>,
    slots: Arc<Semaphore>,
    /// A part could not be sent.
    failed: Arc<AtomicBool>,
    /// Where it goes when it is finished, instead of to its place.
    park: Option<Slot>,
    /// Nothing is at its key but what it puts there.
    fresh: bool,
}

#[derive(Debug, Default)]
struct State {
    begun: BTreeMap<u64, Begun>,
    sent: BTreeMap<u64, JoinHandle<Result<PartId, Error>>>,
}

/// A part that has holes yet.
#[derive(Debug)]
struct Begun {
    bytes: Vec<u8>,
    filled: u64,
}

impl Upload {
    pub(super) fn new(prefix: &Prefix, below: &str, length: u64, fresh: bool) -> Result<Self, CheckpointError> {
        let (key, name, store) = (prefix.key(below)?, prefix.name_of(below), prefix.store().clone());
        let part = PART.max(length.div_ceil(MAX_PARTS));
        let id = match length > part {
            true => {
                Some(wait(store.create_multipart(&key)).map_err(CheckpointError::io("begin the upload of", &name))?)
            }
            false => None,
        };
        let (state, slots, failed) = (Mutex::default(), Arc::new(Semaphore::new(IN_FLIGHT)), Arc::default());
        Ok(Upload { store, key, name, length, part, id, state, slots, failed, park: None, fresh })
    }

    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// Finishing it only leaves it in the slot.
    pub(super) fn parked(mut self, slot: Slot) -> Self {
        self.park = Some(slot);
        self
    }

    /// Each byte is written once.
    pub(super) fn write_at(&self, mut offset: u64, mut bytes: &[u8]) -> Result<(), CheckpointError> {
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > self.length) {
            let error = std::io::Error::other("the write reaches beyond the planned length");
            return Err(CheckpointError::io("write", &self.name)(error));
        }
        while !bytes.is_empty() {
            let (index, from) = (offset / self.part, (offset % self.part) as usize);
            let length = self.part.min(self.length - index * self.part);
            let (now, rest) = bytes.split_at(bytes.len().min(length as usize - from));
            let whole = {
                let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                let begun = state.begun.entry(index);
                let begun = begun.or_insert_with(|| Begun { bytes: vec![0; length as usize], filled: 0 });
                begun.bytes[from..from + now.len()].copy_from_slice(now);
                begun.filled += now.len() as u64;
                let is_whole = begun.filled >= length && self.id.is_some();
                if is_whole { state.begun.remove(&index) } else { None }
            };
            if let Some(whole) = whole {
                self.send(index, whole.bytes)?;
            }
            (offset, bytes) = (offset + now.len() as u64, rest);
        }
        Ok(())
    }

    /// Starts to send a part, once there is room for it.
    fn send(&self, index: u64, bytes: Vec<u8>) -> Result<(), CheckpointError> {
        let Some(id) = self.id.clone() else { return Ok(()) };
        // Better to hear of a failure now than when all is written.
        if self.failed.load(Ordering::Relaxed) {
            return self.sent().map(|_| ());
        }
        let failed = || CheckpointError::io("upload a part of", &self.name);
        let has_failed = self.failed.clone();
        let (store, key, slots) = (self.store.clone(), self.key.clone(), self.slots.clone());
        let permit = wait(async { Ok(slots.acquire_owned().await.ok()) }).map_err(failed())?;
        let sending = spawn(async move {
            let sent = store.put_part(&key, &id, index as usize, PutPayload::from(bytes)).await;
            has_failed.fetch_or(sent.is_err(), Ordering::Relaxed);
            drop(permit);
            sent
        });
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.sent.insert(index, sending.map_err(failed())?);
        Ok(())
    }

    /// Sends what is left; holes are zeros. Afterwards only the last request is missing.
    fn flush(&self) -> Result<Vec<PartId>, CheckpointError> {
        let mut begun = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if self.id.is_none() {
                return Ok(Vec::new());
            }
            std::mem::take(&mut state.begun)
        };
        let is_sent = |index| self.state.lock().unwrap_or_else(PoisonError::into_inner).sent.contains_key(&index);
        for index in 0..self.length.div_ceil(self.part) {
            match begun.remove(&index) {
                Some(part) => self.send(index, part.bytes)?,
                None if is_sent(index) => {}
                None => self.send(index, vec![0; self.part.min(self.length - index * self.part) as usize])?,
            }
        }
        self.sent()
    }

    /// Waits for the parts that are under way.
    fn sent(&self) -> Result<Vec<PartId>, CheckpointError> {
        let sent = std::mem::take(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner).sent);
        let mut parts = Vec::with_capacity(sent.len());
        let mut outcome = Ok(());
        for (_, sending) in sent {
            // All are waited for, so that none is under way when the upload is aborted.
            match wait(async { sending.await.unwrap_or_else(|error| Err(Error::JoinError { source: error })) }) {
                Ok(part) => parts.push(part),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome.map_err(CheckpointError::io("upload a part of", &self.name))?;
        Ok(parts)
    }

    /// Puts the object in its place, or leaves it ready for that.
    pub(super) fn finish(mut self) -> Result<(), CheckpointError> {
        match self.park.take() {
            None => self.complete(PutMode::Overwrite),
            Some(slot) => {
                *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(self);
                Ok(())
            }
        }
    }

    /// Puts the object in its place. The mode is that of an object of one request.
    pub(super) fn complete(mut self, mode: PutMode) -> Result<(), CheckpointError> {
        let parts = self.flush()?;
        let done = match &self.id {
            Some(id) => wait(self.store.complete_multipart(&self.key, id, parts)),
            None => {
                let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                let mut bytes = state.begun.remove(&0).map(|begun| begun.bytes).unwrap_or_default();
                drop(state);
                bytes.resize(self.length as usize, 0);
                wait(self.store.put_opts(&self.key, PutPayload::from(bytes), mode.into()))
            }
        };
        match done {
            Ok(_) => {}
            // The answer may have been lost, not the request.
            Err(_) if self.fresh && self.is_there() => {}
            Err(error) => return Err(CheckpointError::io("upload", &self.name)(error)),
        }
        self.id = None;
        Ok(())
    }

    fn is_there(&self) -> bool {
        use object_store::ObjectStoreExt as _;
        wait(self.store.head(&self.key)).is_ok_and(|meta| meta.size == self.length)
    }
}

impl fmt::Debug for Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upload").field("name", &self.name).field("length", &self.length).finish_non_exhaustive()
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(id) = self.id.take() else { return };
        let sent = std::mem::take(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner).sent);
        // Best effort: stores can be told to forget uploads that were never completed.
        let _ = wait(async {
            for (_, sending) in sent {
                sending.abort();
                let _ = sending.await;
            }
            self.store.abort_multipart(&self.key, &id).await
        });
    }
}
