//! Rounds over sockets: for groups whose ranks do not all share memory.

use std::ops::Range;

use bytes::Bytes;

use super::frame::{CHUNK_BYTES, Kind};
use super::node::{Node, Outgoing};
use crate::backend::{Plan, Planner, Round, Sink};
use crate::error::CommError;

/// The number of rounds in which a group is set up: two for shared memory, and one for the backends
/// that build on this one. The rounds of its operations come after these.
pub(super) const SETUP_ROUNDS: u64 = 3;
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(super) const LAST_SETUP_ROUND: u64 = SETUP_ROUNDS - 1;

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

/// Shows this rank's record to the others, and waits for the records of all. Returns them in rank
/// order.
pub(super) fn exchange(
    Member {
        node,
        group,
        ranks,
        rank,
    }: Member<'_>,
    round: &Round<'_>,
    record: &[u8],
) -> Result<Vec<Bytes>, CommError> {
    if ranks.len() > node.direct_up_to {
        return node.gather(group, round, record);
    }
    for &to in others(ranks, rank) {
        node.send(Outgoing {
            to,
            kind: Kind::Record,
            group,
            round,
            body: record,
        })?;
    }
    // Wait until every rank's record is in the inbox, and take them.
    node.wait(group, round, |state| {
        let is_missing =
            |from: &&usize| state.incoming(group, **from, round.number).record.is_none();
        let missing: Vec<usize> = others(ranks, rank).filter(is_missing).copied().collect();
        if !missing.is_empty() {
            return Err(missing);
        }
        let mut records = Vec::with_capacity(ranks.len());
        for &from in ranks {
            records.push(if from == node.rank {
                Bytes::copy_from_slice(record)
            } else {
                state
                    .incoming(group, from, round.number)
                    .record
                    .take()
                    .unwrap_or_default()
                    .into()
            });
        }
        Ok(records)
    })
}

/// Carries out a round.
pub(super) fn round(
    member: Member<'_>,
    round: &Round<'_>,
    record: &[u8],
    send: &[u8],
    plan: Planner<'_, '_>,
) -> Result<(), CommError> {
    let Member { node, group, .. } = member;
    let records = exchange(member, round, record)?;
    let records: Vec<&[u8]> = records.iter().map(|record| &record[..]).collect();
    let plan = match plan(&records) {
        Ok(Some(plan)) => plan,
        // The round ends here, in the same way on all ranks, because all have the same records.
        ended => {
            node.inbox().lock().forget(group, round.number);
            return ended.map(drop);
        }
    };
    transfer(member, round, send, plan)?;
    node.inbox().lock().forget(group, round.number);
    Ok(())
}

/// Sends this rank's bytes chunk by chunk, and takes the chunks of the others in between.
///
/// The chunks of the others are in memory until this rank takes them. If every rank first sent
/// everything, that could be as much as they send. With sending and taking by turns, at most four
/// chunks of another rank wait here: before the other rank sends a chunk, it takes all but the last
/// two chunks of this rank, which in turn has taken all but the last two of the other's chunks
/// before it sent those. For that, a rank that has nothing to send answers with empty chunks.
fn transfer(
    member: Member<'_>,
    round: &Round<'_>,
    send: &[u8],
    plan: Plan<'_>,
) -> Result<(), CommError> {
    let Plan {
        to,
        from,
        destination,
        ..
    } = plan;
    let own = send.get(from[member.rank].clone()).unwrap_or_default();
    let mut sink = Sink::new(destination);
    let (to_send, to_receive) = (most_chunks(&to), most_chunks(&from));
    for index in 0..=to_send.max(to_receive) {
        send_chunks(member, round, send, (&to, &from), index)?;
        // A chunk is taken one turn after the chunk of the same number was sent. So this rank
        // copies its own bytes, and sends its next chunk, while the chunks of the others are on
        // their way.
        let Some(before) = index.checked_sub(1) else {
            if let Sink::Copy(fillers) = &mut sink {
                fillers[member.rank].fill(own);
            }
            continue;
        };
        let chunks = receive_chunks(member, round, (&to, &from), before)?;
        if before < to_receive {
            let mut pieces: Vec<&[u8]> = chunks.iter().map(Vec::as_slice).collect();
            if let Sink::Reduce(_) = sink {
                // A reduction takes the bytes of this rank together with those of the others.
                pieces[member.rank] = &own[chunk_range(own.len(), before)];
            }
            sink.take(before * CHUNK_BYTES, &pieces);
        }
    }
    Ok(())
}

/// Sends the chunk of this number to each rank that gets so many, and an empty one to each other
/// rank whose chunk of this number is answered. Each rank begins with the rank after it, so that
/// not all send to the same one at once.
fn send_chunks(
    Member {
        node,
        group,
        ranks,
        rank,
    }: Member<'_>,
    round: &Round<'_>,
    send: &[u8],
    (to, from): (&[Range<usize>], &[Range<usize>]),
    index: usize,
) -> Result<(), CommError> {
    for other in (1..ranks.len()).map(|k| (rank + k) % ranks.len()) {
        let bytes = send.get(to[other].clone()).unwrap_or_default();
        let chunk = &bytes[chunk_range(bytes.len(), index)];
        if !chunk.is_empty() || is_answered(&from[other], index) {
            node.send(Outgoing {
                to: ranks[other],
                kind: Kind::Chunk,
                group,
                round,
                body: chunk,
            })?;
        }
    }
    Ok(())
}

/// Waits for the chunk of this number from each rank. It is empty for this rank, and for ranks that
/// send fewer chunks.
fn receive_chunks(
    Member {
        node,
        group,
        ranks,
        rank,
    }: Member<'_>,
    round: &Round<'_>,
    (to, from): (&[Range<usize>], &[Range<usize>]),
    index: usize,
) -> Result<Vec<Vec<u8>>, CommError> {
    let mut received = vec![Vec::new(); ranks.len()];
    for (other, range) in from.iter().enumerate() {
        let due = chunk_range(range.len(), index).len();
        if other == rank || (due == 0 && !is_answered(&to[other], index)) {
            continue;
        }
        let chunk = node.wait(group, round, |state| {
            state
                .incoming(group, ranks[other], round.number)
                .chunks
                .pop_front()
                .ok_or_else(|| vec![ranks[other]])
        })?;
        if chunk.len() != due {
            return Err(CommError::RankLeft {
                rank: ranks[other],
                operation: round.operation.to_owned(),
                sequence: round.sequence,
                reason: format!("sent {} bytes where {due} were due", chunk.len()),
            });
        }
        received[other] = chunk;
    }
    Ok(received)
}

/// Returns `true` if the receiver of a range answers its chunk of this number with a chunk of the
/// same number, which is empty if it has nothing else to send. The sender waits for the answer two
/// chunks later. So the last two chunks, and with them everything that is short, need no answer,
/// and about three chunks are under way at a time.
fn is_answered(range: &Range<usize>, index: usize) -> bool {
    range.len() > (index + 2) * CHUNK_BYTES
}

fn others(ranks: &[usize], rank: usize) -> impl Iterator<Item = &usize> {
    ranks
        .iter()
        .enumerate()
        .filter(move |&(number, _)| number != rank)
        .map(|(_, rank)| rank)
}

/// Returns the largest number of chunks of these ranges.
fn most_chunks(ranges: &[Range<usize>]) -> usize {
    ranges
        .iter()
        .map(|range| range.len().div_ceil(CHUNK_BYTES))
        .max()
        .unwrap_or(0)
}

/// Returns the range of the chunk of this number in so many bytes. It is empty if there are not so
/// many chunks.
fn chunk_range(len: usize, index: usize) -> Range<usize> {
    let start = len.min(index * CHUNK_BYTES);
    start..len.min(start + CHUNK_BYTES)
}
