//! A rank's part of a round, through MPI's collectives, one window of bytes after the other.

use std::ops::Range;

use super::library::{self, Buffers, Communicator, Pending};
use crate::backend::{BLOCK_BYTES, Pattern, Plan};
use crate::error::CommError;

/// The approximate number of bytes of all ranks that one call moves: far below the largest count of
/// MPI.
const CALL_BYTES: usize = 16 << 20;

/// Moves the bytes of a round. `wait` waits for each call.
pub(super) fn transfer(
    communicator: &Communicator,
    send: &[u8],
    plan: Plan<'_>,
    wait: &mut dyn FnMut(library::Result<Pending>) -> Result<Buffers, CommError>,
) -> Result<(), CommError> {
    let Plan {
        pattern,
        longest,
        mut to,
        from,
        mut destination,
    } = plan;
    if let Pattern::AllGather | Pattern::Broadcast { .. } = pattern
        && let Some(first) = to.iter().position(|range| !range.is_empty())
    {
        // All ranks get the same bytes, which are sent once.
        to[first + 1..].fill(0..0);
    }
    let ranks = communicator.ranks();
    let window_bytes = (CALL_BYTES / ranks / BLOCK_BYTES * BLOCK_BYTES).max(BLOCK_BYTES);
    let mut buffers = Buffers::default();
    for start in (0..longest).step_by(window_bytes) {
        let window = start..start + window_bytes;
        let pieces: Vec<&[u8]> = to.iter().map(|range| &send[cut(range, &window)]).collect();
        let received: Vec<usize> = from.iter().map(|range| cut(range, &window).len()).collect();
        buffers = wait(communicator.begin(pattern, buffers, &pieces, &received))?;
        // The bytes of all ranks have arrived one after the other.
        let mut rest = &buffers.receive[..];
        let pieces: Vec<&[u8]> = received
            .iter()
            .map(|&len| {
                let (piece, others) = rest.split_at(len.min(rest.len()));
                rest = others;
                piece
            })
            .collect();
        destination.take(start, &pieces);
    }
    Ok(())
}

/// Returns the part of a range whose offsets in the range are in this window. It is empty if the
/// range ends before the window.
fn cut(range: &Range<usize>, window: &Range<usize>) -> Range<usize> {
    let start = range.start.saturating_add(window.start).min(range.end);
    let end = range.start.saturating_add(window.end).min(range.end);
    start..end
}
