//! Rounds over sockets: for groups whose ranks do not all share memory.

use std::ops::Range;

use bytes::Bytes;

use super::frame::{CHUNK_BYTES, Kind, OutgoingFrame};
use super::node::Node;
use crate::backend::{Destination, Plan, Round, Tally, Vote};
use crate::ballot::Ballot;
use crate::error::CommError;

/// One rank of one group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Member<'a> {
    pub(super) node: &'a Node,
    pub(super) group: u64,
    /// The global rank of each rank of the group.
    pub(super) ranks: &'a [usize],
    /// This rank in the group.
    pub(super) rank: usize,
}

impl Member<'_> {
    /// Returns the global ranks of all others.
    #[cfg(any(feature = "mpi", feature = "nccl"))]
    pub(super) fn others(&self) -> impl Iterator<Item = usize> {
        let own_rank = self.ranks[self.rank];
        self.ranks
            .iter()
            .copied()
            .filter(move |&rank| rank != own_rank)
    }

    /// Votes in a round with all other ranks of the group.
    pub(super) fn vote(&self, round: &Round<'_>, vote: &Vote<'_>) -> Result<Tally, CommError> {
        self.node.vote(self.group, round, vote)
    }

    /// Shows a message to all other ranks, in a setup round of this number, which is otherwise like
    /// `round`. Returns the messages of all ranks, in rank order.
    pub(super) fn exchange(
        &self,
        round: &Round<'_>,
        number: u64,
        message: &[u8],
    ) -> Result<Vec<Bytes>, CommError> {
        let round = Round { number, ..*round };
        let vote = Vote {
            ballot: Ballot::blank(),
            attachment: message,
        };
        Ok(self.vote(&round, &vote)?.attachments)
    }
}

/// Sends this rank's bytes chunk by chunk, and takes the chunks of the others in between.
///
/// The chunks of the others are in memory until this rank takes them. If every rank first sent
/// everything, that could be as much as they send. With sending and taking by turns, at most four
/// chunks of another rank wait here: before the other rank sends a chunk, it takes all but the last
/// two chunks of this rank, which in turn has taken all but the last two of the other's chunks
/// before it sent those. For that, a rank that has nothing to send answers with empty chunks.
pub(super) fn transfer(
    member: Member<'_>,
    round: &Round<'_>,
    send: &[u8],
    plan: Plan<'_>,
) -> Result<(), CommError> {
    let Plan {
        sent_ranges,
        received_ranges,
        mut destination,
        ..
    } = plan;
    let own_bytes = &send[received_ranges[member.rank].clone()];
    let send_chunk_count = max_chunk_count(&sent_ranges);
    let receive_chunk_count = max_chunk_count(&received_ranges);
    for index in 0..=send_chunk_count.max(receive_chunk_count) {
        send_chunks(member, round, send, [&sent_ranges, &received_ranges], index)?;
        // A chunk is taken one turn after the chunk of the same number was sent. So this rank
        // copies its own bytes, and sends its next chunk, while the chunks of the others are on
        // their way.
        let Some(previous_index) = index.checked_sub(1) else {
            if let Destination::Copy(fillers) = &mut destination {
                fillers[member.rank].fill(own_bytes);
            }
            continue;
        };
        let chunks = receive_chunks(
            member,
            round,
            [&sent_ranges, &received_ranges],
            previous_index,
        )?;
        if previous_index < receive_chunk_count {
            let mut pieces: Vec<&[u8]> = chunks.iter().map(Vec::as_slice).collect();
            if let Destination::Reduce(_) = destination {
                // A reduction takes the bytes of this rank together with those of the others.
                pieces[member.rank] = &own_bytes[chunk_range(own_bytes.len(), previous_index)];
            }
            destination.take(previous_index * CHUNK_BYTES, &pieces);
        }
    }
    let mut inbox = member.node.inbox().lock();
    inbox.discard_chunks(member.group, round.number);
    Ok(())
}

/// Sends the chunk number `index` to each rank that gets so many, and an empty one to each other
/// rank whose chunk of that number is answered. Each rank begins with the rank after it, so that
/// not all send to the same one at once.
fn send_chunks(
    member: Member<'_>,
    round: &Round<'_>,
    send: &[u8],
    [sent_ranges, received_ranges]: [&[Range<usize>]; 2],
    index: usize,
) -> Result<(), CommError> {
    let ranks = member.ranks.len();
    for receiver in (1..ranks).map(|distance| (member.rank + distance) % ranks) {
        let bytes = &send[sent_ranges[receiver].clone()];
        let chunk = &bytes[chunk_range(bytes.len(), index)];
        if !chunk.is_empty() || is_answered(&received_ranges[receiver], index) {
            let frame = OutgoingFrame {
                receiver: member.ranks[receiver],
                kind: Kind::Chunk,
                group: member.group,
                round: round.number,
                body: chunk,
            };
            member.node.send(&frame, round)?;
        }
    }
    Ok(())
}

/// Waits for the chunk number `index` from each rank. It is empty for this rank, and for ranks that
/// send fewer chunks.
fn receive_chunks(
    member: Member<'_>,
    round: &Round<'_>,
    [sent_ranges, received_ranges]: [&[Range<usize>]; 2],
    index: usize,
) -> Result<Vec<Vec<u8>>, CommError> {
    let mut chunks = vec![Vec::new(); member.ranks.len()];
    for (sender_index, range) in received_ranges.iter().enumerate() {
        let due_bytes = chunk_range(range.len(), index).len();
        if sender_index == member.rank
            || (due_bytes == 0 && !is_answered(&sent_ranges[sender_index], index))
        {
            continue;
        }
        let sender = member.ranks[sender_index];
        let chunk = member.node.wait(member.group, round, |state| {
            let chunks = state.chunks(member.group, sender, round.number);
            chunks.pop_front().ok_or_else(|| vec![sender])
        })?;
        if chunk.len() != due_bytes {
            let reason = format!("sent {} bytes where {due_bytes} were due", chunk.len());
            return Err(round.rank_left_error(sender, reason));
        }
        chunks[sender_index] = chunk;
    }
    Ok(chunks)
}

/// Returns `true` if the receiver of a range answers its chunk number `index` with a chunk of the
/// same number, which is empty if it has nothing else to send. The sender waits for the answer two
/// chunks later. So the last two chunks, and with them everything that is short, need no answer,
/// and about three chunks are under way at a time.
fn is_answered(range: &Range<usize>, index: usize) -> bool {
    range.len() > (index + 2) * CHUNK_BYTES
}

/// Returns the largest number of chunks of any of `ranges`.
fn max_chunk_count(ranges: &[Range<usize>]) -> usize {
    ranges
        .iter()
        .map(|range| range.len().div_ceil(CHUNK_BYTES))
        .max()
        .expect("there is a range for each rank")
}

/// Returns the range of the chunk number `index` in `len` bytes. It is empty if there are not so
/// many chunks.
fn chunk_range(len: usize, index: usize) -> Range<usize> {
    let start = len.min(index * CHUNK_BYTES);
    start..len.min(start + CHUNK_BYTES)
}
