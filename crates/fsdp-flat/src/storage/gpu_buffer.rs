//! Bytes in a GPU's memory in which parts of tensors are put one after the other, to be sent to
//! other ranks, and in which those of other ranks arrive.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr as _, result,
};

use super::cuda::{place_of, with_device_bytes_mut};
use super::pinned::{copy_context, cuda_error};
use super::staging::{self, DeviceBytes};
use crate::error::FlatError;

/// Bytes in the memory of one GPU.
///
/// They are filled and read in a stream of their own, which is ordered with those of tensors by
/// events: to the stream of a tensor a copy is like a kernel, so it may be changed or freed there
/// as soon as the call has returned. The host does not wait, except in methods that say so.
#[derive(Debug)]
pub struct GpuBuffer {
    stream: Arc<CudaStream>,
    /// `None` until there is something to hold.
    memory: Option<CudaSlice<u8>>,
}

/// A copy from a buffer to a tensor, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferCopy {
    /// Where it begins in the buffer.
    pub source: usize,
    /// Where it begins in the tensor, whose elements are row-major.
    pub target: usize,
    /// How many bytes it has.
    pub len: usize,
}

impl GpuBuffer {
    /// Makes a buffer without memory on the GPU with this CUDA ordinal.
    ///
    /// # Errors
    /// CUDA's.
    pub fn new(ordinal: usize) -> Result<Self, FlatError> {
        let stream = copy_context(ordinal)
            .and_then(|context| context.new_stream())
            .map_err(cuda_error)?;
        Ok(GpuBuffer {
            stream,
            memory: None,
        })
    }

    /// Makes a second buffer without memory, which is used in the stream of this one.
    #[must_use]
    pub fn beside(&self) -> Self {
        GpuBuffer {
            stream: Arc::clone(&self.stream),
            memory: None,
        }
    }

    /// Returns the CUDA ordinal of the GPU.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.stream.context().ordinal()
    }

    /// Returns the stream in which the buffer is used.
    #[must_use]
    pub fn stream(&self) -> &CudaStream {
        &self.stream
    }

    /// Makes room for so many bytes, all of which are undefined then.
    ///
    /// # Errors
    /// CUDA's, when there is no memory.
    pub fn reserve(&mut self, bytes: usize) -> Result<(), FlatError> {
        if self
            .memory
            .as_ref()
            .is_some_and(|memory| memory.len() >= bytes)
        {
            return Ok(());
        }
        // The old memory goes first, so that there is never memory for both.
        self.memory = None;
        // The driver does not allocate zero bytes. SAFETY: whoever uses the bytes fills them.
        let memory = unsafe { self.stream.alloc::<u8>(bytes.max(1)) };
        self.memory = Some(memory.map_err(cuda_error)?);
        Ok(())
    }

    /// Returns the first bytes.
    ///
    /// # Errors
    /// [`FlatError::OutOfMemory`] if there are fewer: [`Self::reserve`] has not made room.
    pub fn view(&self, bytes: usize) -> Result<CudaView<'_, u8>, FlatError> {
        let memory = self.memory.as_ref();
        memory
            .and_then(|memory| memory.try_slice(0..bytes))
            .ok_or_else(|| no_room(bytes))
    }

    /// Returns the first bytes, to be changed.
    ///
    /// # Errors
    /// The same as [`Self::view`].
    pub fn view_mut(&mut self, bytes: usize) -> Result<CudaViewMut<'_, u8>, FlatError> {
        let memory = self.memory.as_mut();
        memory
            .and_then(|memory| memory.try_slice_mut(0..bytes))
            .ok_or_else(|| no_room(bytes))
    }

    /// Returns the address of a range.
    fn address(&self, range: &Range<usize>) -> Result<u64, FlatError> {
        let view = self.view(range.end)?;
        let (address, _order) = view.device_ptr(&self.stream);
        Ok(address + range.start as u64)
    }

    /// Copies all of a contiguous tensor, which is on the same GPU, to the bytes from `offset` on.
    ///
    /// # Errors
    /// A tensor that is released, not contiguous or not on an NVIDIA GPU; no room; CUDA's.
    pub fn put_tensor(&mut self, offset: usize, tensor: &Tensor) -> Result<(), FlatError> {
        let source = place_of(tensor)?;
        if source.len == 0 {
            return Ok(());
        }
        let target = self.address(&(offset..offset + source.len))?;
        self.between(&source.stream, |stream| {
            // SAFETY: both have as many bytes, and stay until the copy is over: the tensor's
            // stream comes to whatever frees it only then.
            unsafe {
                result::memcpy_dtod_async(target, source.address, source.len, stream.cu_stream())
            }
            .map_err(cuda_error)
        })
    }

    /// Copies bytes of the host to those from `offset` on. Returns when that is done.
    ///
    /// # Errors
    /// No room; CUDA's.
    pub fn put_bytes(&mut self, offset: usize, bytes: &[u8]) -> Result<(), FlatError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let stream = Arc::clone(&self.stream);
        let mut view = self.view_mut(offset + bytes.len())?;
        let mut target = view.slice_mut(offset..offset + bytes.len());
        stream
            .memcpy_htod(bytes, &mut target)
            .and_then(|()| stream.synchronize())
            .map_err(cuda_error)
    }

    /// Sets bytes to zero.
    ///
    /// # Errors
    /// No room; CUDA's.
    pub fn put_zeros(&mut self, range: Range<usize>) -> Result<(), FlatError> {
        if range.is_empty() {
            return Ok(());
        }
        let stream = Arc::clone(&self.stream);
        let mut view = self.view_mut(range.end)?;
        stream
            .memset_zeros(&mut view.slice_mut(range))
            .map_err(cuda_error)
    }

    /// Fills the start of the buffer with `count` copies of its first `len` bytes, one after the
    /// other: the same bytes, once for each of `count` receivers.
    ///
    /// # Errors
    /// No room; CUDA's.
    pub fn repeat_first_bytes(&mut self, len: usize, count: usize) -> Result<(), FlatError> {
        if len == 0 {
            return Ok(());
        }
        let first = self.address(&(0..len * count))?;
        let context = self.stream.context();
        context.bind_to_thread().map_err(cuda_error)?;
        for index in 1..count {
            // SAFETY: there is room, and the parts do not overlap.
            unsafe {
                let next = first + (index * len) as u64;
                result::memcpy_dtod_async(next, first, len, self.stream.cu_stream())
            }
            .map_err(cuda_error)?;
        }
        Ok(())
    }

    /// Copies parts of the buffer into the memory of a contiguous tensor on the same GPU.
    ///
    /// # Errors
    /// A tensor that is released, not contiguous or not on an NVIDIA GPU; parts that are not there;
    /// CUDA's.
    pub fn copy_to_tensor(&self, copies: &[BufferCopy], tensor: &Tensor) -> Result<(), FlatError> {
        with_device_bytes_mut(tensor, |target| {
            self.between(&target.stream, |stream| {
                for copy in copies {
                    let source = self.address(&(copy.source..copy.source + copy.len))?;
                    if copy.target + copy.len > target.len {
                        return Err(no_room(copy.target + copy.len));
                    }
                    // SAFETY: both have as many bytes. The storage is locked, and its stream comes
                    // to whatever uses it next only when the copy is over.
                    unsafe {
                        result::memcpy_dtod_async(
                            target.address + copy.target as u64,
                            source,
                            copy.len,
                            stream.cu_stream(),
                        )
                    }
                    .map_err(cuda_error)?;
                }
                Ok(())
            })
        })
    }

    /// Gives the buffer's stream work that comes after what the stream of a tensor has now, and
    /// before what that one gets later.
    fn between(
        &self,
        other: &CudaStream,
        work: impl FnOnce(&CudaStream) -> Result<(), FlatError>,
    ) -> Result<(), FlatError> {
        let ready = other.record_event(None).map_err(cuda_error)?;
        self.stream.wait(&ready).map_err(cuda_error)?;
        let outcome = work(&self.stream);
        // Also after an error: some of the work may have been queued.
        let done = self.stream.record_event(None).map_err(cuda_error)?;
        other.wait(&done).map_err(cuda_error)?;
        outcome
    }

    /// Passes bytes to `sink`, in order and in pieces of pinned memory.
    ///
    /// # Errors
    /// No room; CUDA's; the errors of `sink`.
    pub fn read<E: From<FlatError>>(
        &self,
        range: Range<usize>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let source = DeviceBytes {
            ordinal: self.ordinal(),
            address: self.address(&(0..range.end))?,
            len: range.end,
            stream: Arc::clone(&self.stream),
        };
        let ready = self.stream.record_event(None).map_err(cuda_error)?;
        staging::read(&source, &ready, range, sink)
    }
}

/// Returns the error of a range that is not there.
fn no_room(bytes: usize) -> FlatError {
    FlatError::OutOfMemory {
        dtype: "U8".to_owned(),
        shape: vec![bytes],
    }
}
