//! A rank's part of a round, through MPI's collectives, one window of bytes after the other.

use std::ops::Range;

use super::library::{self, Buffers, Communicator, Pending};
use crate::backend::{BLOCK_BYTES, Pattern, Plan, Sink};
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
        destination,
    } = plan;
    let ranks = communicator.ranks();
    let window = (CALL_BYTES / ranks / BLOCK_BYTES * BLOCK_BYTES).max(BLOCK_BYTES);
    let mut sink = Sink::new(destination);
    let mut buffers = Buffers::default();
    for start in (0..longest).step_by(window) {
        // `cut` returns the part of a range in this window, which is empty if the range ends before
        // it, and `own` this rank's bytes there.
        let cut = |range: &Range<usize>| {
            let at = |offset: usize| range.end.min(range.start.saturating_add(offset));
            at(start)..at(start + window)
        };
        let own = |range: &Range<usize>| send.get(cut(range)).unwrap_or_default();
        let received: Vec<usize> = from.iter().map(|range| cut(range).len()).collect();
        buffers.send.clear();
        let call = match pattern {
            Pattern::AllGather => {
                buffers.send.extend_from_slice(own(&to[rank]));
                communicator.all_gather(buffers, &received)
            }
            Pattern::Broadcast { root } => {
                buffers.receive.clear();
                if rank == root {
                    buffers.receive.extend_from_slice(own(&(0..longest)));
                }
                communicator.broadcast(buffers, window.min(longest - start), root)
            }
            Pattern::Gather { root } => {
                buffers.send.extend_from_slice(own(&to[root]));
                // A rank that is not the root receives nothing. The call also takes the number of
                // bytes that it sends from the counts.
                let mut counts = received.clone();
                counts[rank] = buffers.send.len();
                communicator.gather(buffers, &counts, root)
            }
            Pattern::Scatter { root } => {
                to.iter()
                    .for_each(|range| buffers.send.extend_from_slice(own(range)));
                let mut counts: Vec<usize> = to.iter().map(|range| cut(range).len()).collect();
                counts[rank] = received[root];
                communicator.scatter(buffers, &counts, root)
            }
            Pattern::AllToAll => {
                to.iter()
                    .for_each(|range| buffers.send.extend_from_slice(own(range)));
                let sent: Vec<usize> = to.iter().map(|range| cut(range).len()).collect();
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
        sink.take(start, &pieces);
    }
    Ok(())
}
