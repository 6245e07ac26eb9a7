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
    rank: usize,
    send: &[u8],
    plan: Plan<'_>,
    wait: &mut dyn FnMut(library::Result<Pending>) -> Result<Buffers, CommError>,
) -> Result<(), CommError> {
    let Plan {
        pattern,
        longest,
        to,
        from,
        mut destination,
    } = plan;
    let ranks = communicator.ranks();
    let window_bytes = (CALL_BYTES / ranks / BLOCK_BYTES * BLOCK_BYTES).max(BLOCK_BYTES);
    let mut buffers = Buffers::default();
    for start in (0..longest).step_by(window_bytes) {
        let window = start..start + window_bytes;
        let received: Vec<usize> = from.iter().map(|range| cut(range, &window).len()).collect();
        buffers.send.clear();
        let call = match pattern {
            Pattern::AllGather => {
                buffers
                    .send
                    .extend_from_slice(&send[cut(&to[rank], &window)]);
                communicator.all_gather(buffers, &received)
            }
            Pattern::Broadcast { root } => {
                buffers.receive.clear();
                if rank == root {
                    buffers
                        .receive
                        .extend_from_slice(&send[cut(&(0..longest), &window)]);
                }
                communicator.broadcast(buffers, window_bytes.min(longest - start), root)
            }
            Pattern::Gather { root } => {
                buffers
                    .send
                    .extend_from_slice(&send[cut(&to[root], &window)]);
                // A rank that is not the root receives nothing. The call also takes the number of
                // bytes that it sends from the counts.
                let mut gathered = received.clone();
                gathered[rank] = buffers.send.len();
                communicator.gather(buffers, &gathered, root)
            }
            Pattern::Scatter { root } => {
                for range in &to {
                    buffers.send.extend_from_slice(&send[cut(range, &window)]);
                }
                let mut counts: Vec<usize> =
                    to.iter().map(|range| cut(range, &window).len()).collect();
                counts[rank] = received[root];
                communicator.scatter(buffers, &counts, root)
            }
            Pattern::AllToAll => {
                for range in &to {
                    buffers.send.extend_from_slice(&send[cut(range, &window)]);
                }
                let sent: Vec<usize> = to.iter().map(|range| cut(range, &window).len()).collect();
                communicator.all_to_all(buffers, &sent, &received)
            }
        };
        buffers = wait(call)?;
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
