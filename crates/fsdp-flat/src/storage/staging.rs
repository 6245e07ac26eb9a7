//! Copies from the GPU to the host, through pinned memory and in pieces. While the GPU sends one
//! piece to a pinned buffer, the CPU copies the piece before it to its destination.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaEvent, CudaStream, CudaView, DriverError, PinnedHostSlice,
};

/// The bytes that are copied at a time. Each GPU that is read from takes twice as much of the
/// host's memory, for good.
const PIECE_BYTES: usize = 16 << 20;

/// The stream and the two pinned buffers that pieces of one GPU's memory go through.
struct Stage {
    stream: Arc<CudaStream>,
    buffers: [PinnedHostSlice<u8>; 2],
}

impl Stage {
    /// Makes the stage of the GPU with this CUDA ordinal.
    fn new(ordinal: usize) -> Result<Stage, DriverError> {
        // The stage has its own context. A second stream in candle's context would make candle
        // synchronize streams at every op.
        let context = CudaContext::new(ordinal)?;
        Ok(Stage {
            stream: context.new_stream()?,
            buffers: [pinned_buffer(&context)?, pinned_buffer(&context)?],
        })
    }
}

/// Makes a buffer of pinned memory for one piece.
fn pinned_buffer(context: &Arc<CudaContext>) -> Result<PinnedHostSlice<u8>, DriverError> {
    // The flags are 0, so the memory is not write-combined: the host would read such memory very
    // slowly. SAFETY: any bytes are a valid `u8`, and these are zeroed before anything reads them.
    let mut buffer = unsafe { context.alloc_pinned_with_flags::<u8>(PIECE_BYTES, 0) }?;
    // SAFETY: the buffer has `PIECE_BYTES` bytes, and nothing else uses it yet.
    unsafe { std::ptr::write_bytes(buffer.as_mut_ptr()?, 0, PIECE_BYTES) };
    Ok(buffer)
}

/// Copies `source`, which `stream` has written, to the host. The copy is complete when this
/// returns.
pub(super) fn read(
    stream: &CudaStream,
    source: &CudaView<'_, u8>,
    destination: &mut [u8],
) -> Result<(), DriverError> {
    static STAGES: Mutex<Option<HashMap<usize, Stage>>> = Mutex::new(None);
    let ordinal = stream.context().ordinal();
    // A stage is out of the map while it is used, so a panic leaves none that is half used.
    let mut lock = STAGES.lock().unwrap_or_else(PoisonError::into_inner);
    let stages = lock.get_or_insert_default();
    let mut stage = match stages.remove(&ordinal) {
        Some(stage) => stage,
        None => Stage::new(ordinal)?,
    };
    match copy_in_pieces(&mut stage, stream, source, destination) {
        Ok(()) => {
            stages.insert(ordinal, stage);
            Ok(())
        }
        Err(error) => {
            // A transfer into the buffers may still be under way. It must have ended before they
            // are dropped; the next call makes a new stage.
            stage.stream.synchronize().ok();
            Err(error)
        }
    }
}

/// A piece that the GPU is copying to a staging buffer.
struct PieceInFlight {
    /// The number of the buffer.
    buffer: usize,
    /// The place of the piece in the destination.
    range: Range<usize>,
    /// The end of the GPU's copy.
    arrived: CudaEvent,
}

/// Copies `source` to `destination` through the buffers of `stage`, after the work on `stream`: as
/// many bytes as the shorter of the two has.
fn copy_in_pieces(
    stage: &mut Stage,
    stream: &CudaStream,
    source: &CudaView<'_, u8>,
    destination: &mut [u8],
) -> Result<(), DriverError> {
    let copied_bytes = destination.len().min(source.len());
    // Wait for what `stream` still writes.
    stage.stream.join(stream)?;
    let mut in_flight: Option<PieceInFlight> = None;
    for (piece_index, start) in (0..copied_bytes).step_by(PIECE_BYTES).enumerate() {
        let range = start..copied_bytes.min(start + PIECE_BYTES);
        let buffer = &mut stage.buffers[piece_index % 2].as_mut_slice()?[..range.len()];
        // Nothing may touch the buffer before the event: only then has its piece arrived.
        stage
            .stream
            .memcpy_dtoh(&source.slice(range.clone()), buffer)?;
        let piece = PieceInFlight {
            buffer: piece_index % 2,
            range,
            arrived: stage.stream.record_event(None)?,
        };
        // While this piece is on its way, move the one before it out of the other buffer. So that
        // buffer is free one turn before it is used again.
        if let Some(earlier) = in_flight.replace(piece) {
            copy_to_destination(stage, earlier, destination)?;
        }
    }
    match in_flight {
        Some(last_piece) => copy_to_destination(stage, last_piece, destination),
        None => Ok(()),
    }
}

/// Waits until the GPU has copied a piece to its staging buffer, and copies it from there to its
/// range of `destination`.
fn copy_to_destination(
    stage: &Stage,
    piece: PieceInFlight,
    destination: &mut [u8],
) -> Result<(), DriverError> {
    piece.arrived.synchronize()?;
    let len = piece.range.len();
    destination[piece.range].copy_from_slice(&stage.buffers[piece.buffer].as_slice()?[..len]);
    Ok(())
}
