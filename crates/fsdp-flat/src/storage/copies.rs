//! Copies of tensors on GPUs in the host's memory, which the GPUs make beside other work.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::Tensor;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};

use super::cuda::place_of;
use super::lend::{contiguous_bytes, released_error};
use super::pinned::{PinnedMemory, copy_context, cuda_error, record_for_host};
use super::staging::{self, DeviceBytes};
use super::storage_id;
use crate::error::FlatError;

/// The most bytes of a block. The first bytes of a copy can be used when their block has arrived.
const BLOCK_BYTES: usize = 32 << 20;

/// The lengths of blocks are multiples of this.
const BLOCK_STEP: usize = 64 << 10;

/// Pinned memory of the host for copies of tensors on GPUs. It is kept from one copy of a state to
/// the next, because pinning takes longer than copying.
#[derive(Debug, Clone)]
pub struct HostMemory(Arc<Mutex<Kept>>);

#[derive(Debug)]
struct Kept {
    /// The most bytes that may be pinned.
    limit: usize,
    /// The bytes that are pinned, those in use too.
    pinned_bytes: usize,
    /// The blocks that are not in use, by their lengths.
    free: Vec<PinnedMemory>,
    /// The streams that copy, by the ordinals of their GPUs.
    streams: BTreeMap<usize, Arc<CudaStream>>,
}

impl HostMemory {
    /// Makes a place for pinned memory, of which there is none yet. At most `limit` bytes are ever
    /// pinned; copies that need more are in other memory.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        HostMemory(Arc::new(Mutex::new(Kept {
            limit,
            pinned_bytes: 0,
            free: Vec::new(),
            streams: BTreeMap::new(),
        })))
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the stream that copies memory of this GPU.
    fn stream(&self, ordinal: usize) -> Result<Arc<CudaStream>, FlatError> {
        let mut kept = self.kept();
        if let Some(stream) = kept.streams.get(&ordinal) {
            return Ok(Arc::clone(stream));
        }
        let stream = copy_context(ordinal)
            .and_then(|context| context.new_stream())
            .map_err(cuda_error)?;
        kept.streams.insert(ordinal, Arc::clone(&stream));
        Ok(stream)
    }

    /// Returns memory for the next of so many bytes, and takes no more of them than a block has.
    /// Without `may_pin` it returns `None` if there is none that is kept.
    ///
    /// # Errors
    /// [`FlatError::OutOfMemory`].
    fn take(
        &self,
        ordinal: usize,
        needed_bytes: usize,
        may_pin: bool,
    ) -> Result<Option<Memory>, FlatError> {
        let mut kept = self.kept();
        if let Some(memory) = kept.free.pop() {
            return Ok(Some(Memory::Pinned(memory)));
        }
        if !may_pin {
            return Ok(None);
        }
        let len = needed_bytes
            .next_multiple_of(BLOCK_STEP)
            .min(BLOCK_BYTES)
            .min(kept.limit - kept.pinned_bytes);
        // A host that cannot pin any more still has other memory.
        if len >= needed_bytes.min(BLOCK_STEP)
            && let Ok(memory) =
                copy_context(ordinal).and_then(|context| PinnedMemory::new(&context, len))
        {
            kept.pinned_bytes += len;
            return Ok(Some(Memory::Pinned(memory)));
        }
        drop(kept);
        let len = needed_bytes.min(BLOCK_BYTES);
        let memory = super::zeroed_vec(len)?;
        Ok(Some(Memory::Pageable(memory)))
    }

    /// Takes back memory that nobody uses any more.
    fn give_back(&self, memory: PinnedMemory) {
        let mut kept = self.kept();
        let position = kept.free.partition_point(|free| free.len() < memory.len());
        kept.free.insert(position, memory);
    }

    /// Forgets memory that is not given back.
    fn forget(&self, memory: &PinnedMemory) {
        self.kept().pinned_bytes -= memory.len();
    }
}

/// The memory of a block.
#[derive(Debug)]
enum Memory {
    Pinned(PinnedMemory),
    Pageable(Vec<u8>),
}

impl Memory {
    const fn len(&self) -> usize {
        match self {
            Memory::Pinned(memory) => memory.len(),
            Memory::Pageable(memory) => memory.len(),
        }
    }
}

/// A block of the host's memory, and what is copied there.
#[derive(Debug)]
struct Block {
    memory: Memory,
    /// The CUDA ordinal of the GPU whose memory is copied to the block.
    ordinal: usize,
    used: usize,
    /// The end of all copies to the block; `None` while there are some behind it.
    end: Option<CudaEvent>,
    /// `true` once somebody has seen that all copies so far have arrived, and that their sources
    /// were there until then.
    has_arrived: AtomicBool,
    sources: Vec<Source>,
}

/// A tensor that is copied, and where it was when the copy began.
#[derive(Debug, Clone)]
struct Source {
    tensor: Tensor,
    address: u64,
}

impl Block {
    /// Waits until all copies to this block have arrived.
    ///
    /// # Errors
    /// The driver's; memory that was released while it was copied.
    fn wait(&self) -> Result<(), FlatError> {
        if self.has_arrived.load(Ordering::Acquire) {
            return Ok(());
        }
        if let Some(end) = &self.end {
            end.synchronize().map_err(cuda_error)?;
        }
        // Memory that was released meanwhile may have been used for something else.
        for source in &self.sources {
            if place_of(&source.tensor)?.address != source.address {
                return Err(released_error(&source.tensor));
            }
        }
        self.has_arrived.store(true, Ordering::Release);
        Ok(())
    }

    /// Returns bytes that have arrived.
    fn bytes(&self, range: Range<usize>) -> &[u8] {
        match &self.memory {
            // SAFETY: `HostCopies` has all copies queued and waits for the block before it reads,
            // and gives the memory away only when nobody borrows it.
            Memory::Pinned(memory) => unsafe { memory.bytes(range) },
            Memory::Pageable(memory) => &memory[range],
        }
    }
}

/// The part of a stretch that lies in one block.
#[derive(Debug)]
struct Piece {
    block_index: usize,
    /// Its bytes in the block.
    range: Range<usize>,
}

/// A stretch of one storage, whose bytes are copied one after the other.
#[derive(Debug)]
struct Stretch {
    /// The end of its bytes in the storage.
    end: usize,
    pieces: Vec<Piece>,
}

/// A storage, and a byte in it.
type Place = (usize, usize);

/// The part of a stretch that is not queued yet.
#[derive(Debug)]
struct Rest {
    /// The start of the stretch.
    place: Place,
    source: Source,
    bytes: DeviceBytes,
    queued_bytes: usize,
}

/// Copies of tensors on GPUs in the host's memory.
///
/// The GPUs make them on streams of their own, beside other work. Tensors that lie side by side in
/// one storage are copied together, and elements of several tensors once. The tensors are kept
/// until this is dropped, which waits for the copies.
#[derive(Debug)]
pub struct HostCopies {
    memory: HostMemory,
    blocks: Vec<Block>,
    /// The stretches by where they begin. None lies within another.
    stretches: BTreeMap<Place, Stretch>,
    waiting: VecDeque<Rest>,
    /// The streams that copy, by the ordinals of their GPUs.
    streams: BTreeMap<usize, Arc<CudaStream>>,
    /// The streams of the tensors' devices, each with the end of the work that the thread which
    /// began the copies had given it.
    written_by: Vec<(Arc<CudaStream>, CudaEvent)>,
}

impl HostCopies {
    /// Begins to copy tensors, all of which are on GPUs and contiguous; `None` if there are none.
    ///
    /// Those `at_once` have been copied when this returns, so anybody may change them then. Those
    /// that are `kept` must stay as they are until [`Self::is_queued`], and on the GPUs until
    /// [`Self::end`]. They are copied to the memory that has been kept; [`Self::queue`] copies the
    /// rest. All get the values after the work that this thread has given to the GPUs. Nobody may
    /// free a tensor meanwhile, so keep a clone of each, and drop that in this thread: memory that
    /// another thread frees does not wait for the work of this one.
    ///
    /// # Errors
    /// Tensors that are released or not contiguous; no memory; the driver's.
    pub fn begin(
        memory: &HostMemory,
        at_once: &[Tensor],
        kept: &[Tensor],
    ) -> Result<Option<Self>, FlatError> {
        if at_once.is_empty() && kept.is_empty() {
            return Ok(None);
        }
        let mut copies = HostCopies {
            memory: memory.clone(),
            blocks: Vec::new(),
            stretches: BTreeMap::new(),
            waiting: VecDeque::new(),
            streams: BTreeMap::new(),
            written_by: Vec::new(),
        };
        if !at_once.is_empty() {
            copies.add(at_once)?;
            copies.queue()?;
            copies.blocks.iter().try_for_each(Block::wait)?;
        }
        copies.add(kept)?;
        copies.queue_in_memory(false)?;
        Ok(Some(copies))
    }

    /// Adds tensors to what is waiting to be copied, after the work that the GPUs have now.
    fn add(&mut self, tensors: &[Tensor]) -> Result<(), FlatError> {
        let mut found = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let range = contiguous_bytes(tensor, tensor.layout())?;
            let place = (storage_id(tensor), range.start);
            // What has been copied at once already is not copied again.
            if !range.is_empty() && self.stretch_of(place.0, &range).is_none() {
                found.push((place, range.end, tensor));
            }
        }
        found.sort_by_key(|(place, end, _)| (*place, *end));
        for ((storage, start), end, tensor) in found {
            let bytes = place_of(tensor)?;
            self.order_after(&bytes)?;
            let source = Source {
                tensor: tensor.clone(),
                address: bytes.address,
            };
            // A tensor that begins within the stretch before it, or right behind it, makes that one
            // longer.
            if let Some(last) = self.waiting.back_mut()
                && last.place.0 == storage
                && start <= last.place.1 + last.bytes.len
            {
                last.bytes.len = last.bytes.len.max(end - last.place.1);
                continue;
            }
            self.waiting.push_back(Rest {
                place: (storage, start),
                source,
                bytes,
                queued_bytes: 0,
            });
        }
        for rest in &self.waiting {
            let (storage, start) = rest.place;
            let end = start + rest.bytes.len;
            // Stretches within this one were copied at once, and are kept unchanged as it is.
            self.stretches.retain(|place, stretch| {
                place.0 != storage || place.1 < start || stretch.end > end
            });
            let pieces = Vec::new();
            self.stretches.insert(rest.place, Stretch { end, pieces });
        }
        Ok(())
    }

    /// Makes the copies of a GPU wait for the work that has been queued to write these bytes.
    fn order_after(&mut self, bytes: &DeviceBytes) -> Result<(), FlatError> {
        let copying = match self.streams.get(&bytes.ordinal) {
            Some(stream) => Arc::clone(stream),
            None => {
                let stream = self.memory.stream(bytes.ordinal)?;
                self.streams.insert(bytes.ordinal, Arc::clone(&stream));
                stream
            }
        };
        if self.ready(&bytes.stream).is_none() {
            let ready = bytes.stream.record_event(None).map_err(cuda_error)?;
            copying.wait(&ready).map_err(cuda_error)?;
            self.written_by.push((Arc::clone(&bytes.stream), ready));
        }
        Ok(())
    }

    /// Returns the end of the work on a stream after which its memory is copied.
    fn ready(&self, stream: &Arc<CudaStream>) -> Option<&CudaEvent> {
        let mut found = self.written_by.iter();
        found
            .find(|(writer, _)| writer == stream)
            .map(|(_, ready)| ready)
    }

    /// Returns `true` if all copies have been given to the GPUs: from then on the tensors may be
    /// changed by work that the GPUs do after [`Self::end`].
    #[must_use]
    pub fn is_queued(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Gives the rest of the copies to the GPUs. It pins memory for them, and waits for copies that
    /// find no room there.
    ///
    /// # Errors
    /// No memory; the driver's.
    pub fn queue(&mut self) -> Result<(), FlatError> {
        self.queue_in_memory(true)
    }

    /// Gives copies to the GPUs, in memory that is kept or, with `may_pin`, in any.
    fn queue_in_memory(&mut self, may_pin: bool) -> Result<(), FlatError> {
        while let Some(rest) = self.waiting.front() {
            let (place, bytes, queued) = (rest.place, rest.bytes.clone(), rest.queued_bytes);
            let source = rest.source.clone();
            let Some(block_index) = self.open_block(bytes.ordinal, may_pin)? else {
                break;
            };
            let block = &mut self.blocks[block_index];
            let len = (bytes.len - queued).min(block.memory.len() - block.used);
            let range = block.used..block.used + len;
            match &mut block.memory {
                // SAFETY: the tensor is kept until all copies have ended, and `wait` finds out if
                // somebody released its memory. The range was not used before.
                Memory::Pinned(memory) => unsafe {
                    let address = bytes.address + queued as u64;
                    memory.begin_copy(range.clone(), address, &self.streams[&bytes.ordinal])
                }
                .map_err(cuda_error)?,
                Memory::Pageable(memory) => {
                    let mut destination = &mut memory[range.clone()];
                    let mut writers = self.written_by.iter();
                    let (_, ready) = writers
                        .find(|(writer, _)| *writer == bytes.stream)
                        .expect("the stream is recorded before its memory is copied");
                    staging::read(&bytes, ready, queued..queued + len, &mut |piece| {
                        let (now, later) =
                            std::mem::take(&mut destination).split_at_mut(piece.len());
                        now.copy_from_slice(piece);
                        destination = later;
                        Ok::<(), FlatError>(())
                    })?;
                }
            }
            block.used += len;
            block.end = None;
            *block.has_arrived.get_mut() = false;
            block.sources.push(source);
            let stretch = self.stretches.get_mut(&place);
            let stretch = stretch.expect("a stretch is recorded before it is copied");
            stretch.pieces.push(Piece { block_index, range });
            match self.waiting.front_mut() {
                Some(rest) if rest.queued_bytes + len < rest.bytes.len => rest.queued_bytes += len,
                _ => drop(self.waiting.pop_front()),
            }
        }
        self.record_end()
    }

    /// Returns the index of a block of this GPU in which there is room; `None` if there is none and
    /// none may be pinned.
    fn open_block(&mut self, ordinal: usize, may_pin: bool) -> Result<Option<usize>, FlatError> {
        if let Some(block) = self.blocks.last()
            && block.ordinal == ordinal
            && block.used < block.memory.len()
        {
            return Ok(Some(self.blocks.len() - 1));
        }
        let same_gpu = self
            .waiting
            .iter()
            .filter(|rest| rest.bytes.ordinal == ordinal);
        let needed_bytes = same_gpu
            .map(|rest| rest.bytes.len - rest.queued_bytes)
            .sum();
        let Some(memory) = self.memory.take(ordinal, needed_bytes, may_pin)? else {
            return Ok(None);
        };
        // The block before it gets no more copies.
        self.record_end()?;
        self.blocks.push(Block {
            memory,
            ordinal,
            used: 0,
            end: None,
            has_arrived: AtomicBool::new(false),
            sources: Vec::new(),
        });
        Ok(Some(self.blocks.len() - 1))
    }

    /// Records the end of the copies to the last block.
    fn record_end(&mut self) -> Result<(), FlatError> {
        if let Some(block) = self.blocks.last_mut()
            && block.end.is_none()
        {
            let stream = &self.streams[&block.ordinal];
            block.end = Some(record_for_host(stream)?);
        }
        Ok(())
    }

    /// Returns the end of all copies that have been given to the GPUs so far.
    ///
    /// # Errors
    /// The driver's.
    pub fn end(&self) -> Result<CopiesEnd, FlatError> {
        let mut events = Vec::new();
        for (writer, _) in &self.written_by {
            let copying = &self.streams[&writer.context().ordinal()];
            let event = copying.record_event(None).map_err(cuda_error)?;
            events.push((event, Arc::clone(writer)));
        }
        Ok(CopiesEnd { events })
    }

    /// Returns the stretch that has all of these bytes of a storage.
    fn stretch_of(&self, storage: usize, range: &Range<usize>) -> Option<(usize, &Stretch)> {
        let before = self.stretches.range(..=(storage, range.start)).next_back();
        let (place, stretch) = before?;
        (place.0 == storage && range.end <= stretch.end).then_some((place.1, stretch))
    }

    /// Passes the bytes `range` of the copy of a tensor to `sink`, in order and in pieces, each as
    /// soon as it has arrived. All copies must be queued. Returns `false` if the tensor was not
    /// copied.
    ///
    /// # Errors
    /// The driver's; memory that was released while it was copied; the errors of `sink`.
    pub fn read<E: From<FlatError>>(
        &self,
        tensor: &Tensor,
        range: Range<usize>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let whole = contiguous_bytes(tensor, tensor.layout())?;
        if whole.is_empty() {
            return Ok(true);
        }
        let Some((stretch_start, stretch)) = self.stretch_of(storage_id(tensor), &whole) else {
            return Ok(false);
        };
        if !self.is_queued() || range.end > whole.len() {
            return Ok(false);
        }
        let wanted_start = whole.start - stretch_start + range.start;
        let wanted_end = whole.start - stretch_start + range.end;
        let mut piece_start = 0;
        for piece in &stretch.pieces {
            let piece_end = piece_start + piece.range.len();
            let (start, end) = (wanted_start.max(piece_start), wanted_end.min(piece_end));
            if start < end {
                let block = &self.blocks[piece.block_index];
                block.wait()?;
                let offset = piece.range.start;
                sink(block.bytes(offset + start - piece_start..offset + end - piece_start))?;
            }
            piece_start = piece_end;
        }
        Ok(true)
    }
}

impl Drop for HostCopies {
    fn drop(&mut self) {
        // Copies that are under way use the memory of both sides until they end.
        let have_ended = self
            .streams
            .values()
            .all(|stream| stream.synchronize().is_ok());
        for block in self.blocks.drain(..) {
            match block.memory {
                Memory::Pinned(memory) if have_ended => self.memory.give_back(memory),
                Memory::Pinned(memory) => self.memory.forget(&memory),
                Memory::Pageable(_) => {}
            }
        }
    }
}

/// The end of some copies, for which changes of their tensors have to wait.
#[derive(Debug)]
pub struct CopiesEnd {
    /// For each stream that writes tensors, the event that it has to wait for.
    events: Vec<(CudaEvent, Arc<CudaStream>)>,
}

impl CopiesEnd {
    /// Returns `true` if the copies are over, so that nothing has to wait for them.
    #[must_use]
    pub fn has_come(&self) -> bool {
        self.events.iter().all(|(event, _)| event.is_complete())
    }

    /// Makes all work that this thread gives to the GPUs from now on wait for the end of the
    /// copies. The host does not wait.
    ///
    /// # Errors
    /// The driver's.
    pub fn order_before_changes(&self) -> Result<(), FlatError> {
        self.events
            .iter()
            .try_for_each(|(event, writer)| writer.wait(event).map_err(cuda_error))
    }
}
