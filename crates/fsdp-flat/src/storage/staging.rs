//! Reading memory of a GPU through pinned memory, in pieces. While the caller uses one piece, the
//! GPU copies the next one.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DriverError};

use super::pinned::{PinnedMemory, copy_context, cuda_error, record_for_host};
use crate::error::FlatError;

/// The bytes that are copied at a time: enough for the speed of the bus, and few enough to be in
/// the processor's cache when they are used.
const PIECE_BYTES: usize = 4 << 20;

/// The most lanes of a GPU that are kept when nobody reads: as many threads as read at once.
const KEPT_LANES: usize = 16;

/// Memory of a GPU, and the stream of the device that its tensor is on.
///
/// As a rule that is the *per-thread* stream, which is another one for each thread. So only the
/// thread that computes can record the end of its work there, as an event that others wait for.
#[derive(Debug, Clone)]
pub(super) struct DeviceBytes {
    /// The CUDA ordinal of the GPU.
    pub(super) ordinal: usize,
    pub(super) address: u64,
    pub(super) len: usize,
    pub(super) stream: Arc<CudaStream>,
}

/// The stream and the two pinned buffers of one thread that reads memory of one GPU.
struct Lane {
    stream: Arc<CudaStream>,
    buffers: [PinnedMemory; 2],
}

impl Lane {
    /// Makes a lane of the GPU with this CUDA ordinal.
    fn new(ordinal: usize) -> Result<Lane, DriverError> {
        let context = copy_context(ordinal)?;
        Ok(Lane {
            stream: context.new_stream()?,
            buffers: [
                PinnedMemory::new(&context, PIECE_BYTES)?,
                PinnedMemory::new(&context, PIECE_BYTES)?,
            ],
        })
    }
}

/// The lanes that nobody uses now, by the ordinals of their GPUs.
fn idle_lanes() -> MutexGuard<'static, Option<HashMap<usize, Vec<Lane>>>> {
    static LANES: Mutex<Option<HashMap<usize, Vec<Lane>>>> = Mutex::new(None);
    LANES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a lane of a GPU that nobody uses, or makes one.
fn take_lane(ordinal: usize) -> Result<Lane, DriverError> {
    let idle = idle_lanes().as_mut().and_then(|lanes| {
        let lanes = lanes.get_mut(&ordinal)?;
        lanes.pop()
    });
    idle.map_or_else(|| Lane::new(ordinal), Ok)
}

/// Passes the bytes `range` of `source` to `sink`, in order and in pieces, after the work before
/// `ready`. All copies are over when this returns. Several threads may read at once, each with
/// buffers of its own.
///
/// # Errors
/// The driver's, and those of `sink`.
pub(super) fn read<E: From<FlatError>>(
    source: &DeviceBytes,
    ready: &CudaEvent,
    range: Range<usize>,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    assert!(range.start <= range.end && range.end <= source.len);
    // A lane that is being used is nobody else's, so a panic leaves none that is half used.
    let lane = take_lane(source.ordinal).map_err(cuda_error)?;
    let outcome = match lane.stream.wait(ready) {
        Ok(()) => read_on(&lane, source, range, sink),
        Err(error) => Err(cuda_error(error).into()),
    };
    // After an error a copy to the buffers may still be under way. It must have ended before
    // anybody else uses them; if the GPU has failed, nobody does.
    let has_ended = outcome.is_ok() || lane.stream.synchronize().is_ok();
    let mut idle = idle_lanes();
    let lanes = idle.get_or_insert_default();
    let lanes = lanes.entry(source.ordinal).or_default();
    if has_ended && lanes.len() < KEPT_LANES {
        lanes.push(lane);
    }
    outcome
}

/// A piece that the GPU is copying to a buffer of a lane.
struct PieceInFlight {
    buffer_index: usize,
    len: usize,
    arrived: CudaEvent,
}

/// Passes bytes to `sink` as [`read`] does, through the buffers of one lane. After an error a copy
/// may still be under way.
fn read_on<E: From<FlatError>>(
    lane: &Lane,
    source: &DeviceBytes,
    range: Range<usize>,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut in_flight: Option<PieceInFlight> = None;
    for (index, start) in range.clone().step_by(PIECE_BYTES).enumerate() {
        let len = PIECE_BYTES.min(range.end - start);
        let buffer_index = index % 2;
        // SAFETY: the caller holds the source. The piece that was in this buffer has arrived and
        // has been passed on one turn ago.
        unsafe {
            let address = source.address + start as u64;
            lane.buffers[buffer_index].begin_copy(0..len, address, &lane.stream)
        }
        .map_err(cuda_error)?;
        let arrived = record_for_host(&lane.stream)?;
        let piece = PieceInFlight {
            buffer_index,
            len,
            arrived,
        };
        // While this piece is on its way, the one before it is used.
        if let Some(earlier) = in_flight.replace(piece) {
            pass_on(lane, &earlier, sink)?;
        }
    }
    match in_flight {
        Some(last_piece) => pass_on(lane, &last_piece, sink),
        None => Ok(()),
    }
}

/// Waits until the GPU has copied a piece, and passes it to `sink`.
fn pass_on<E: From<FlatError>>(
    lane: &Lane,
    piece: &PieceInFlight,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    piece.arrived.synchronize().map_err(cuda_error)?;
    // SAFETY: the only copy to this buffer has ended, and the next one begins after the sink.
    sink(unsafe { lane.buffers[piece.buffer_index].bytes(0..piece.len) })
}
