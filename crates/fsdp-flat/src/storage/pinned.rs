//! Pinned memory of the host, which a GPU reads and writes by itself while the host does other
//! things.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaEvent, CudaStream, DriverError, result, sys,
};

use crate::error::FlatError;

/// Returns candle's error for one of the driver's.
pub(super) fn cuda_error(error: DriverError) -> FlatError {
    FlatError::Candle(candle_core::Error::wrap(error))
}

/// Returns a context of the GPU with this CUDA ordinal for copies to and from the host.
///
/// A second stream in candle's context would make candle synchronize streams at every op, so
/// copies have a context of their own. It does not track which stream uses which memory: whoever
/// copies orders the streams by events.
pub(super) fn copy_context(ordinal: usize) -> Result<Arc<CudaContext>, DriverError> {
    static CONTEXTS: Mutex<Option<HashMap<usize, Arc<CudaContext>>>> = Mutex::new(None);
    let mut contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    let contexts = contexts.get_or_insert_default();
    if let Some(context) = contexts.get(&ordinal) {
        return Ok(Arc::clone(context));
    }
    let context = CudaContext::new(ordinal)?;
    // SAFETY: the little memory of GPUs that is allocated in this context is ordered by events.
    unsafe { context.disable_event_tracking() };
    contexts.insert(ordinal, Arc::clone(&context));
    Ok(context)
}

/// Records the end of a stream's work for a thread that waits for it, which sleeps meanwhile.
pub(super) fn record_for_host(stream: &CudaStream) -> Result<CudaEvent, FlatError> {
    let flags = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC;
    stream.record_event(Some(flags)).map_err(cuda_error)
}

/// A stretch of pinned memory. Its bytes are any bytes until something is copied there.
#[derive(Debug)]
pub(super) struct PinnedMemory {
    start: NonNull<u8>,
    len: usize,
    context: Arc<CudaContext>,
}

// SAFETY: the memory belongs to this value, and any thread may use and free pinned memory.
unsafe impl Send for PinnedMemory {}
// SAFETY: threads that share it only read it; a copy to it is begun by unsafe code only.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Pins `len` bytes of fresh memory.
    ///
    /// # Errors
    /// No bytes at all; the driver's.
    pub(super) fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self, DriverError> {
        context.bind_to_thread()?;
        // The flags are 0, so the memory is not write-combined: the host would read such memory
        // very slowly. SAFETY: the driver either gives `len` bytes or fails.
        let start = unsafe { result::malloc_host(len, 0) }?;
        let start = NonNull::new(start.cast()).expect("the driver has given memory");
        Ok(PinnedMemory {
            start,
            len,
            context: Arc::clone(context),
        })
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Begins to copy as many bytes as `range` has from an address of a GPU to this range. The
    /// copy is over when `stream` has got there.
    ///
    /// # Safety
    /// Until then, the memory at the address stays allocated, nobody reads or writes the range, and
    /// this value lives.
    pub(super) unsafe fn begin_copy(
        &self,
        range: Range<usize>,
        address: u64,
        stream: &CudaStream,
    ) -> Result<(), DriverError> {
        assert!(range.start <= range.end && range.end <= self.len);
        self.context.bind_to_thread()?;
        // SAFETY: the range is within the memory, and nobody else uses it now.
        let destination = unsafe {
            std::slice::from_raw_parts_mut(self.start.as_ptr().add(range.start), range.len())
        };
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_dtoh_async(destination, address, stream.cu_stream()) }
    }

    /// Returns the bytes of a range.
    ///
    /// # Safety
    /// No copy to the range is under way, and none begins while the bytes are borrowed.
    pub(super) unsafe fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: the range is within the memory. The rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(range.start), range.len()) }
    }

    /// Returns the bytes of a range, to be changed.
    ///
    /// # Safety
    /// Nobody else reads or writes the range while the bytes are borrowed, and no copy of it is
    /// under way.
    #[expect(
        clippy::mut_from_ref,
        reason = "several threads fill ranges of their own at once"
    )]
    pub(super) unsafe fn bytes_mut(&self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: the range is within the memory. The rest is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(range.start), range.len()) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // If the GPU has failed, nobody can do anything about the memory, and the next use of the
        // GPU tells.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: `new` got the memory from the driver, and nothing uses it any more.
            let _ = unsafe { result::free_host(self.start.as_ptr().cast::<c_void>()) };
        }
    }
}
