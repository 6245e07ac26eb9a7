//! Memory of the host that is filled, and then copied to tensors on GPUs while other memory is
//! filled.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::Tensor;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};

use super::cuda::{place_of, write, write_later};
use super::lend::{StorageMut, contiguous_bytes, with_storage_mut};
use super::pinned::{PinnedMemory, copy_context, cuda_error, record_for_host};
use crate::error::FlatError;

/// The bytes of a block of pinned memory that several tensors share. A tensor that is longer has a
/// block of its own.
const BLOCK_BYTES: usize = 32 << 20;

/// The most bytes of a process that are pinned: two windows of a load. Tensors that are longer get
/// other memory.
const MOST_BYTES: usize = 256 << 20;

/// The alignment of the memory of a tensor in its block.
const ALIGNMENT: usize = 64;

/// Memory of the host for the elements of a tensor on a GPU, which [`Self::finish`] copies there.
#[derive(Debug)]
pub struct Upload {
    target: Tensor,
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    /// A range of a block that is nobody else's.
    Pinned(Arc<Block>, Range<usize>),
    Pageable(Vec<u8>),
}

impl Upload {
    /// Returns memory for the elements of a contiguous tensor, to be filled: any bytes. The tensor
    /// stays as it is until [`Self::finish`].
    ///
    /// # Errors
    /// A tensor that is released, not contiguous or not on an NVIDIA GPU;
    /// [`FlatError::OutOfMemory`]; the driver's.
    pub fn begin(target: &Tensor) -> Result<Self, FlatError> {
        let place = place_of(target)?;
        let memory = match take(place.ordinal, place.len)? {
            Some((block, range)) => Memory::Pinned(block, range),
            None => Memory::Pageable(super::zeroed_vec(place.len)?),
        };
        Ok(Upload {
            target: target.clone(),
            memory,
        })
    }

    /// Returns the memory.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            // SAFETY: nobody else has this range, and its copy has not begun.
            Memory::Pinned(block, range) => unsafe { block.pinned().bytes_mut(range.clone()) },
            Memory::Pageable(bytes) => bytes,
        }
    }

    /// Gives the GPU the copy of the memory to the tensor. Work that it is given later sees the
    /// new elements, and [`finish_uploads`] waits for the copy.
    ///
    /// # Errors
    /// A tensor that was released meanwhile; the driver's.
    pub fn finish(self) -> Result<(), FlatError> {
        with_storage_mut(&self.target, |storage, layout| {
            let StorageMut::Cuda(storage) = storage else {
                return Err(FlatError::device(&self.target));
            };
            match &self.memory {
                Memory::Pinned(block, range) => {
                    // SAFETY: nobody changes this range until the block is taken again, which waits
                    // for the copy.
                    let bytes = unsafe { block.pinned().bytes(range.clone()) };
                    let stream = storage.device.cuda_stream();
                    write_later(&self.target, storage, layout, bytes)?;
                    block.record_end(&stream)
                }
                Memory::Pageable(bytes) => {
                    let range = contiguous_bytes(&self.target, layout)?;
                    write(&self.target, storage, range, bytes)
                }
            }
        })
    }
}

/// Waits until everything that [`Upload::finish`] has given to GPUs is in its place.
///
/// # Errors
/// The driver's.
pub fn finish_uploads() -> Result<(), FlatError> {
    let pool = pool();
    if let Some((block, _)) = &pool.open {
        wait(&lock(&block.ends))?;
    }
    pool.idle.iter().try_for_each(|(_, ends)| wait(ends))
}

/// The ends of copies from a block that may be under way.
type Ends = Vec<CudaEvent>;

/// Pinned memory for several tensors. When none of them is left, it goes back to the pool.
#[derive(Debug)]
struct Block {
    /// `None` only while the block is being dropped.
    memory: Option<PinnedMemory>,
    ends: Mutex<Ends>,
}

impl Block {
    fn new(memory: PinnedMemory) -> Arc<Self> {
        Arc::new(Block {
            memory: Some(memory),
            ends: Mutex::new(Ends::new()),
        })
    }

    const fn pinned(&self) -> &PinnedMemory {
        self.memory
            .as_ref()
            .expect("a block has its memory until it is dropped")
    }

    /// Records the end of a copy that the stream has been given.
    fn record_end(&self, stream: &Arc<CudaStream>) -> Result<(), FlatError> {
        let end = record_for_host(stream)?;
        let mut ends = lock(&self.ends);
        ends.retain(|end| !end.is_complete());
        ends.push(end);
        Ok(())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            let ends = std::mem::take(&mut *lock(&self.ends));
            pool().idle.push_back((memory, ends));
        }
    }
}

/// A range of a block that is nobody else's.
type BlockRange = (Arc<Block>, Range<usize>);

/// The blocks of a process.
struct Pool {
    /// The block that the next tensors get memory of, and the bytes of it that are taken.
    open: Option<(Arc<Block>, usize)>,
    /// The blocks that nobody fills, the oldest first. GPUs may still copy from them.
    idle: VecDeque<(PinnedMemory, Ends)>,
    /// The bytes of all blocks.
    pinned_bytes: usize,
}

fn pool() -> MutexGuard<'static, Pool> {
    static POOL: Mutex<Pool> = Mutex::new(Pool {
        open: None,
        idle: VecDeque::new(),
        pinned_bytes: 0,
    });
    lock(&POOL)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until the copies from a block are over.
fn wait(ends: &Ends) -> Result<(), FlatError> {
    ends.iter()
        .try_for_each(|end| end.synchronize().map_err(cuda_error))
}

impl Pool {
    /// Returns the memory of a block of at least so many bytes, from which no GPU copies any more;
    /// `None` if there is none, because others are being filled or no more memory can be pinned.
    ///
    /// # Errors
    /// The driver's.
    fn take_memory(
        &mut self,
        ordinal: usize,
        len: usize,
    ) -> Result<Option<PinnedMemory>, FlatError> {
        let is_over = |(_, ends): &(PinnedMemory, Ends)| ends.iter().all(CudaEvent::is_complete);
        if let Some(position) = self.find_idle(len, is_over) {
            return self.take_idle(position).map(Some);
        }
        if let Some(memory) = self.pin(ordinal, len) {
            return Ok(Some(memory));
        }
        if let Some(position) = self.find_idle(len, |_| true) {
            return self.take_idle(position).map(Some);
        }
        // All that are idle are too short: they make room.
        while self.pinned_bytes + block_len(len) > MOST_BYTES && !self.idle.is_empty() {
            let shorter = self.take_idle(0)?;
            self.pinned_bytes -= shorter.len();
        }
        Ok(self.pin(ordinal, len))
    }

    /// Returns the position of the shortest idle block of at least so many bytes that
    /// `may_be_taken` selects, and the oldest of several.
    fn find_idle(
        &self,
        len: usize,
        may_be_taken: impl Fn(&(PinnedMemory, Ends)) -> bool,
    ) -> Option<usize> {
        let blocks = self.idle.iter().enumerate();
        let long_enough = blocks.filter(|(_, block)| block.0.len() >= len && may_be_taken(block));
        long_enough
            .min_by_key(|(_, (memory, _))| memory.len())
            .map(|(position, _)| position)
    }

    /// Takes an idle block, and waits until no GPU copies from it.
    ///
    /// # Errors
    /// The driver's.
    fn take_idle(&mut self, position: usize) -> Result<PinnedMemory, FlatError> {
        let (memory, ends) = self.idle.remove(position).expect("the block is idle");
        wait(&ends).inspect_err(|_| self.pinned_bytes -= memory.len())?;
        Ok(memory)
    }

    /// Pins memory for a block of at least so many bytes; `None` if that would be too much, or if
    /// the host cannot.
    fn pin(&mut self, ordinal: usize, len: usize) -> Option<PinnedMemory> {
        let len = block_len(len);
        if self.pinned_bytes + len > MOST_BYTES {
            return None;
        }
        let context = copy_context(ordinal).ok()?;
        let memory = PinnedMemory::new(&context, len).ok()?;
        self.pinned_bytes += len;
        Some(memory)
    }
}

/// Returns the length of a block for so many bytes.
fn block_len(len: usize) -> usize {
    len.max(BLOCK_BYTES)
}

/// Returns a range of so many bytes of a block; `None` if there is no room.
///
/// # Errors
/// The driver's.
fn take(ordinal: usize, len: usize) -> Result<Option<BlockRange>, FlatError> {
    if len > MOST_BYTES {
        return Ok(None);
    }
    let mut pool = pool();
    // The block of a long tensor is not shared.
    if len > BLOCK_BYTES {
        let memory = pool.take_memory(ordinal, len)?;
        return Ok(memory.map(|memory| (Block::new(memory), 0..len)));
    }
    if let Some((block, used)) = &mut pool.open {
        let start = used.next_multiple_of(ALIGNMENT);
        if start + len <= BLOCK_BYTES {
            *used = start + len;
            return Ok(Some((Arc::clone(block), start..start + len)));
        }
    }
    // The block goes back to the pool with the last of its tensors. Perhaps that is now, so the
    // pool must not be locked.
    let full = pool.open.take();
    drop(pool);
    drop(full);
    let mut pool = self::pool();
    let Some(memory) = pool.take_memory(ordinal, len)? else {
        return Ok(None);
    };
    let block = Block::new(memory);
    let replaced = pool.open.replace((Arc::clone(&block), len));
    drop(pool);
    // Another thread may have opened a block meanwhile.
    drop(replaced);
    Ok(Some((block, 0..len)))
}
