//! From the GPU to the host through pinned memory: one piece is copied on a stream of its own while the one before it
//! moves on to where it belongs.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaEvent, CudaStream, CudaView, DriverError, PinnedHostSlice,
};

/// The bytes that are copied at a time. Each GPU that is read from takes twice as much of the host's memory, for good.
const PIECE_BYTES: usize = 16 << 20;

struct Stage {
    stream: Arc<CudaStream>,
    buffers: [PinnedHostSlice<u8>; 2],
}

impl Stage {
    fn new(ordinal: usize) -> Result<Stage, DriverError> {
        // Of its own: with a second stream in candle's context, candle would look out for other streams at every op.
        let context = CudaContext::new(ordinal)?;
        let buffer = || -> Result<PinnedHostSlice<u8>, DriverError> {
            // SAFETY: bytes, which are zeroed before anything reads them. Not write-combined: the host reads it.
            let mut buffer = unsafe { context.alloc_pinned_with_flags::<u8>(PIECE_BYTES, 0) }?;
            // SAFETY: it is as long as it says, and is this function's.
            unsafe { std::ptr::write_bytes(buffer.as_mut_ptr()?, 0, PIECE_BYTES) };
            Ok(buffer)
        };
        Ok(Stage { stream: context.new_stream()?, buffers: [buffer()?, buffer()?] })
    }
}

/// Copies `from`, which `stream` has written, to the host. The copy is complete when this returns.
pub(super) fn read(stream: &CudaStream, from: &CudaView<'_, u8>, to: &mut [u8]) -> Result<(), DriverError> {
    static STAGES: Mutex<Option<HashMap<usize, Stage>>> = Mutex::new(None);
    let ordinal = stream.context().ordinal();
    let mut stages = STAGES.lock().unwrap_or_else(PoisonError::into_inner);
    let stages = stages.get_or_insert_default();
    let stage = match stages.remove(&ordinal) {
        Some(stage) => stage,
        None => Stage::new(ordinal)?,
    };
    // After an error the next call makes a new stage: a transfer into the memory of this one may still be under way.
    let stage = through(stage, stream, from, to)?;
    stages.insert(ordinal, stage);
    Ok(())
}

fn through(
    mut stage: Stage,
    stream: &CudaStream,
    from: &CudaView<'_, u8>,
    to: &mut [u8],
) -> Result<Stage, DriverError> {
    let len = to.len().min(from.len());
    let copied = (|| {
        stage.stream.join(stream)?;
        let mut before: Option<(usize, Range<usize>, CudaEvent)> = None;
        for (k, start) in (0..len).step_by(PIECE_BYTES).enumerate() {
            let range = start..len.min(start + PIECE_BYTES);
            let buffer = &mut stage.buffers[k % 2].as_mut_slice()?[..range.len()];
            // Nothing touches the buffer until the event has come.
            stage.stream.memcpy_dtoh(&from.slice(range.clone()), buffer)?;
            let event = stage.stream.record_event(None)?;
            if let Some(piece) = before.replace((k % 2, range, event)) {
                take(&stage, piece, to)?;
            }
        }
        before.map_or(Ok(()), |piece| take(&stage, piece, to))
    })();
    if copied.is_err() {
        // Before the buffers go.
        stage.stream.synchronize().ok();
    }
    copied.map(|()| stage)
}

fn take(
    stage: &Stage,
    (buffer, range, event): (usize, Range<usize>, CudaEvent),
    to: &mut [u8],
) -> Result<(), DriverError> {
    event.synchronize()?;
    let len = range.len();
    to[range].copy_from_slice(&stage.buffers[buffer].as_slice()?[..len]);
    Ok(())
}
