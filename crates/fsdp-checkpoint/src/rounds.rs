//! A gather of objects that takes several rounds, so that the root receives a bounded number of
//! bytes at a time.

use fsdp_comm::{CommError, ProcessGroup};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The number of bytes that the root receives in one round. The last piece of a round may go beyond
/// it.
pub(crate) const ROUND_BYTES: u64 = 64 << 20;

/// Gathers every rank's pieces on the root, in the order of the ranks, about `round_bytes` at a
/// time: [`ROUND_BYTES`] except in tests. Returns `None` on all other ranks. Collectives: one
/// object all-gather of sizes, and an object gather for each round.
///
/// `piece_bytes` estimates the encoded size of a piece.
pub(crate) fn gather_in_rounds<T: Serialize + DeserializeOwned>(
    round_bytes: u64,
    group: &ProcessGroup,
    pieces: Vec<T>,
    piece_bytes: impl Fn(&T) -> u64,
    root: usize,
) -> Result<Option<Vec<Vec<T>>>, CommError> {
    let rank_bytes = group.all_gather_object(&pieces.iter().map(&piece_bytes).sum::<u64>())?;
    // The pieces of all ranks are numbered by bytes, rank after rank. A piece is sent in the round
    // in which its first byte falls, so every rank knows the number of rounds without further
    // communication.
    let round_count = rank_bytes.iter().sum::<u64>().div_ceil(round_bytes).max(1);
    let mut offset: u64 = rank_bytes[..group.rank()].iter().sum();
    let mut pieces = pieces.into_iter().peekable();
    let mut gathered: Vec<Vec<T>> = Vec::new();
    for round in 1..=round_count {
        // The last round takes all that is left.
        let end = if round == round_count {
            u64::MAX
        } else {
            round * round_bytes
        };
        let mut round_pieces = Vec::new();
        while let Some(piece) = pieces.next_if(|_| offset < end) {
            offset += piece_bytes(&piece);
            round_pieces.push(piece);
        }
        // Only the root gets the pieces of the round.
        let Some(pieces_of_ranks) = group.gather_object(&round_pieces, root)? else {
            continue;
        };
        gathered.resize_with(pieces_of_ranks.len(), Vec::new);
        for (rank_pieces, round_pieces) in gathered.iter_mut().zip(pieces_of_ranks) {
            rank_pieces.extend(round_pieces);
        }
    }
    Ok((group.rank() == root).then_some(gathered))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fsdp_comm::{Operation, run_local};

    #[test]
    fn any_round_size_gathers_the_same_pieces_in_order() {
        for world in [1, 3] {
            for round_bytes in [1, 10, 33, 1000] {
                run_local(world, |group| {
                    // Rank 1 has none; the others' pieces are of different sizes, some larger than
                    // a round.
                    let count = if group.rank() == 1 { 0 } else { 20 };
                    let pieces: Vec<(usize, u64)> =
                        (0..count).map(|piece| (group.rank(), piece)).collect();
                    let before = group.traffic();
                    let bytes = |piece: &(usize, u64)| piece.1;
                    let gathered = gather_in_rounds(round_bytes, &group, pieces, bytes, 0).unwrap();
                    let total = (0..20).sum::<u64>() * if world == 1 { 1 } else { 2 };
                    let rounds = group
                        .traffic()
                        .since(&before)
                        .count(Operation::GatherObject);
                    assert_eq!(rounds, total.div_ceil(round_bytes));
                    assert_eq!(gathered.is_some(), group.rank() == 0);
                    for (rank, pieces) in gathered.iter().flatten().enumerate() {
                        let count = if rank == 1 { 0 } else { 20 };
                        assert_eq!(
                            *pieces,
                            (0..count).map(|piece| (rank, piece)).collect::<Vec<_>>()
                        );
                    }
                })
                .unwrap();
            }
        }
    }
}
