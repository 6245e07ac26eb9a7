//! Rounds over sockets: for groups whose ranks do not all share memory.

use std::ops::Range;

use super::frame::{CHUNK_BYTES, Kind};
use super::node::Node;
use crate::backend::{Destination, Filler, Plan, Planner, Round, reduce_blocks};
use crate::error::CommError;

/// The number of rounds in which a group is set up. The rounds of its operations come after these.
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

/// Shows this rank's record to the others, and waits for the records of all.
pub(super) fn exchange(
    Member { node, group, ranks, rank }: Member<'_>,
    round: &Round<'_>,
    record: &[u8],
) -> Result<Vec<Vec<u8>>, CommError> {
    for &to in others(ranks, rank) {
        node.send(to, Kind::Record, group, round, record)?;
    }
    node.wait(group, round, |state| {
        let is_missing = |from: &&usize| state.incoming(group, **from, round.number).record.is_none();
        let missing: Vec<usize> = others(ranks, rank).filter(is_missing).copied().collect();
        if !missing.is_empty() {
            return Err(missing);
        }
        let mut records = Vec::with_capacity(ranks.len());
        for &from in ranks {
            records.push(if from == node.rank {
                record.to_vec()
            } else {
                state.incoming(group, from, round.number).record.take().unwrap_or_default()
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
    let Member { node, group, ranks, rank } = member;
    let records = exchange(member, round, record)?;
    let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
    let plan = match plan(&records) {
        Ok(Some(plan)) => plan,
        // The round ends here, in the same way on all ranks, because all have the same records.
        ended => {
            node.inbox().lock().forget(group, round.number);
            return ended.map(drop);
        }
    };
    // Send to all others first, beginning with the next rank, so that not all ranks send to one.
    for k in 1..ranks.len() {
        let to = (rank + k) % ranks.len();
        let bytes = send.get(plan.to[to].clone()).unwrap_or_default();
        for chunk in bytes.chunks(CHUNK_BYTES) {
            node.send(ranks[to], Kind::Chunk, group, round, chunk)?;
        }
    }
    receive(member, round, send, plan)?;
    node.inbox().lock().forget(group, round.number);
    Ok(())
}

/// Fills the destination from this rank's own bytes and the chunks of the others.
fn receive(
    Member { node, group, ranks, rank }: Member<'_>,
    round: &Round<'_>,
    send: &[u8],
    plan: Plan<'_>,
) -> Result<(), CommError> {
    let chunk = |from: usize, range: Range<usize>| -> Result<Vec<u8>, CommError> {
        let chunk = node.wait(group, round, |state| {
            state.incoming(group, ranks[from], round.number).chunks.pop_front().ok_or_else(|| vec![ranks[from]])
        })?;
        if chunk.len() == range.len() {
            return Ok(chunk);
        }
        Err(CommError::RankLeft {
            rank: ranks[from],
            operation: round.operation.to_owned(),
            sequence: round.sequence,
            reason: format!("sent {} bytes where {} were due", chunk.len(), range.len()),
        })
    };
    let own = send.get(plan.from[rank].clone()).unwrap_or_default();
    match plan.destination {
        Destination::Copy(destinations) => {
            for (from, slices) in destinations.into_iter().enumerate() {
                let mut filler = Filler::new(slices);
                if from == rank {
                    filler.fill(own);
                    continue;
                }
                for range in chunks(&plan.from[from]) {
                    filler.fill(&chunk(from, range)?);
                }
            }
        }
        Destination::Reduce(mut reduce) => {
            for range in chunks(&(0..own.len())) {
                let received = (0..ranks.len())
                    .map(|from| if from == rank { Ok(Vec::new()) } else { chunk(from, range.clone()) })
                    .collect::<Result<Vec<_>, _>>()?;
                let mut pieces: Vec<&[u8]> = received.iter().map(Vec::as_slice).collect();
                pieces[rank] = &own[range.clone()];
                reduce_blocks(&mut reduce, range.start, &pieces);
            }
        }
    }
    Ok(())
}

fn others(ranks: &[usize], rank: usize) -> impl Iterator<Item = &usize> {
    ranks.iter().enumerate().filter(move |&(number, _)| number != rank).map(|(_, rank)| rank)
}

/// Returns the ranges, relative to the start of a range, in which it is sent.
fn chunks(range: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let len = range.len();
    (0..len).step_by(CHUNK_BYTES).map(move |start| start..len.min(start + CHUNK_BYTES))
}
