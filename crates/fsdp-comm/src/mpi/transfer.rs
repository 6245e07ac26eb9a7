//! A rank's part of a round, through MPI's collectives, one window of bytes after the other.

use std::ops::Range;

use super::library::{self, Buffers, Communicator, Pending};
use crate::backend::{BLOCK_BYTES, Direction, Plan};
use crate::error::CommError;

/// The approximate number of bytes of all ranks that one call moves: far below the largest count of
/// MPI.
const CALL_BYTES: usize = 16 << 20;

/// Moves the bytes of a round, in as many calls as it takes. `wait` waits for each call and returns
/// its buffers; its error ends the transfer.
pub(super) fn transfer(
    communicator: &Communicator,
    send: &[u8],
    plan: Plan<'_>,
    wait: &mut dyn FnMut(library::Result<Pending>) -> Result<Buffers, CommError>,
) -> Result<(), CommError> {
    let Plan {
        direction,
        largest_transfer_bytes,
        mut sent_ranges,
        received_ranges,
        mut destination,
    } = plan;
    if let Direction::AllGather | Direction::Broadcast { .. } = direction
        && let Some(first_receiver) = sent_ranges.iter().position(|range| !range.is_empty())
    {
        // All ranks get the same bytes, which are sent once.
        sent_ranges[first_receiver + 1..].fill(0..0);
    }
    let ranks = communicator.ranks;
    let window_bytes = (CALL_BYTES / ranks / BLOCK_BYTES * BLOCK_BYTES).max(BLOCK_BYTES);
    let mut buffers = Buffers::default();
    for start in (0..largest_transfer_bytes).step_by(window_bytes) {
        let window = start..start + window_bytes;
        let pieces: Vec<&[u8]> = sent_ranges
            .iter()
            .map(|range| &send[part_in_window(range, &window)])
            .collect();
        let received_lens: Vec<usize> = received_ranges
            .iter()
            .map(|range| part_in_window(range, &window).len())
            .collect();
        buffers = wait(communicator.begin(direction, buffers, &pieces, &received_lens))?;
        // The bytes of all ranks have arrived one after the other.
        let mut remaining = &buffers.receive[..];
        let pieces: Vec<&[u8]> = received_lens
            .iter()
            .map(|&len| {
                let (piece, tail) = remaining.split_at(len.min(remaining.len()));
                remaining = tail;
                piece
            })
            .collect();
        destination.take(start, &pieces);
    }
    Ok(())
}

/// Returns the part of a range whose offsets in the range are in this window. It is empty if the
/// range ends before the window.
fn part_in_window(range: &Range<usize>, window: &Range<usize>) -> Range<usize> {
    let start = range.start.saturating_add(window.start).min(range.end);
    let end = range.start.saturating_add(window.end).min(range.end);
    start..end
}
