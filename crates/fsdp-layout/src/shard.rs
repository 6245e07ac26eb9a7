//! Torch's rule for cutting `n` elements over `world_size` ranks: chunks of `ceil(n / world_size)`,
//! not balanced ones. The last ranks may get fewer elements, or none, and are padded on the right
//! to the length of rank 0's chunk.

use std::ops::Range;

/// Returns the elements of `0..numel` that this rank owns, by the rule of `torch.chunk`.
///
/// The range of a rank without elements is empty and starts at `numel`.
///
/// ```
/// use fsdp_layout::shard::chunk_range;
/// let sizes: Vec<usize> = (0..4).map(|rank| chunk_range(9, 4, rank).len()).collect();
/// assert_eq!(sizes, [3, 3, 3, 0]);
/// ```
#[must_use]
pub fn chunk_range(numel: usize, world_size: usize, rank: usize) -> Range<usize> {
    let chunk_len = numel.div_ceil(world_size.max(1));
    // The chunks are rounded up, so they may be used up before the last rank.
    let start = chunk_len.saturating_mul(rank).min(numel);
    start..start.saturating_add(chunk_len).min(numel)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn unpadded_shards_as_torch_cuts_them() {
        // Elements, ranks, and for each rank (elements, padding).
        type Row<'a> = (usize, usize, &'a [(usize, usize)]);
        let table: &[Row<'_>] = &[
            (10, 4, &[(3, 0), (3, 0), (3, 0), (1, 2)]),
            (5, 4, &[(2, 0), (2, 0), (1, 1), (0, 2)]),
            (2, 4, &[(1, 0), (1, 0), (0, 1), (0, 1)]),
            (1, 3, &[(1, 0), (0, 1), (0, 1)]),
            (9, 4, &[(3, 0), (3, 0), (3, 0), (0, 3)]),
            (12, 5, &[(3, 0), (3, 0), (3, 0), (3, 0), (0, 3)]),
            (0, 2, &[(0, 0), (0, 0)]),
        ];
        for &(numel, world_size, expected) in table {
            for (rank, &(len, padding)) in expected.iter().enumerate() {
                let range = chunk_range(numel, world_size, rank);
                let longest = chunk_range(numel, world_size, 0).len();
                assert_eq!(
                    (range.len(), longest - range.len()),
                    (len, padding),
                    "{numel} over {world_size}, rank {rank}"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn shards_partition_exactly_and_none_is_longer_than_the_first(numel in 0usize..500, world_size in 1usize..70) {
            let shards: Vec<_> = (0..world_size).map(|rank| chunk_range(numel, world_size, rank)).collect();
            let elements: Vec<usize> = shards.iter().flat_map(Clone::clone).collect();
            prop_assert_eq!(elements, (0..numel).collect::<Vec<_>>());
            for shard in &shards {
                prop_assert!(shard.len() <= shards[0].len());
            }
        }
    }
}
