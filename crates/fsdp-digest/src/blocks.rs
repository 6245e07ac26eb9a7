//! The sums over blocks of bytes, computed with the widest vector instructions of this machine.
//!
//! The crate's documentation has the formula. The two *lanes* are the two sums of a digest: the
//! same formula with different factors. Words are processed in *pairs*, because two words of 4
//! bytes, or their two factors, fill a `u64`.

use crate::coefficients::{BLOCK_BYTES, BLOCK_PAIRS, TABLES, block_factor};

/// The low half of a pair of words.
const LOW: u64 = 0xffff_ffff;

/// Returns both lanes' sums over a part of a tensor's row-major bytes, which begins at byte
/// `offset` of the whole tensor.
#[cfg_attr(
    target_arch = "x86_64",
    expect(
        unsafe_code,
        reason = "a function that is compiled for a set of instructions is called where the machine has it"
    )
)]
pub(crate) fn compute_sums(offset: u64, bytes: &[u8]) -> [u64; 2] {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the machine has AVX-512F, and that is all that the function asks for.
            return unsafe { sums_with_avx512(offset, bytes) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the machine has AVX2, and that is all that the function asks for.
            return unsafe { sums_with_avx2(offset, bytes) };
        }
    }
    sums_one_by_one(offset, bytes)
}

/// Returns what [`sums_side_by_side`] returns, compiled for AVX2. For that, all functions below are
/// inlined into this one.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sums_with_avx2(offset: u64, bytes: &[u8]) -> [u64; 2] {
    // With 4 pairs in a vector, the sums, the factors and the words of the pairs just fit into the
    // 16 registers.
    sums_side_by_side::<4>(offset, bytes)
}

/// Returns what [`sums_side_by_side`] returns, compiled for AVX-512F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn sums_with_avx512(offset: u64, bytes: &[u8]) -> [u64; 2] {
    sums_side_by_side::<8>(offset, bytes)
}

/// The number of blocks that are summed together. They share what is loaded of the tables, and the
/// processor prefetches several streams of addresses faster than a single one.
const SIDE_BY_SIDE: usize = 4;
/// The number of bytes of [`SIDE_BY_SIDE`] blocks.
const GROUP_BYTES: usize = SIDE_BY_SIDE * BLOCK_BYTES;

/// Returns both lanes' sums, as [`compute_sums`] does. Whole blocks are summed [`SIDE_BY_SIDE`] at
/// a time, which takes more registers than x86 has without AVX2. `PAIRS` is the number of pairs in
/// a vector.
#[inline(always)]
fn sums_side_by_side<const PAIRS: usize>(offset: u64, bytes: &[u8]) -> [u64; 2] {
    // The bytes before the first whole block, and those after the last group of blocks, are summed
    // block by block.
    let until_block = (offset.wrapping_neg() % BLOCK_BYTES as u64) as usize;
    let (head, aligned) = bytes.split_at(bytes.len().min(until_block));
    let groups = aligned.chunks_exact(GROUP_BYTES);
    let tail = groups.remainder();
    let mut lanes = sums_one_by_one(offset, head);
    let mut tensor_offset = offset + head.len() as u64;
    for group in groups {
        add_blocks(
            &mut lanes,
            tensor_offset / BLOCK_BYTES as u64,
            &group_sums::<PAIRS>(group),
        );
        tensor_offset += GROUP_BYTES as u64;
    }
    add(&mut lanes, sums_one_by_one(tensor_offset, tail));
    lanes
}

/// Adds the sums of other bytes to the sums of both lanes.
#[inline(always)]
pub(crate) fn add(lanes: &mut [u64; 2], others: [u64; 2]) {
    for (lane, other) in lanes.iter_mut().zip(others) {
        *lane = lane.wrapping_add(other);
    }
}

/// Returns both lanes' sums, as [`compute_sums`] does, one block after the other.
#[inline(always)]
fn sums_one_by_one(mut offset: u64, bytes: &[u8]) -> [u64; 2] {
    let mut remaining = bytes;
    let mut lanes = [0u64; 2];
    while !remaining.is_empty() {
        // Only the first part may start within a block, and only the last may end within one.
        let block_offset = (offset % BLOCK_BYTES as u64) as usize;
        let (part, tail) = remaining.split_at(remaining.len().min(BLOCK_BYTES - block_offset));
        add_blocks(
            &mut lanes,
            offset / BLOCK_BYTES as u64,
            &[block_sums(block_offset, part)],
        );
        offset += part.len() as u64;
        remaining = tail;
    }
    lanes
}

/// Adds the sums of consecutive blocks, multiplied by the factors of their blocks, to the lanes.
/// The first of them is block number `first_block` of the tensor.
#[inline(always)]
fn add_blocks(lanes: &mut [u64; 2], first_block: u64, blocks: &[[u64; 2]]) {
    for (block, sums) in (first_block..).zip(blocks) {
        add(
            lanes,
            [
                block_factor(0, block).wrapping_mul(sums[0]),
                block_factor(1, block).wrapping_mul(sums[1]),
            ],
        );
    }
}

/// Returns both lanes' sums over each of [`SIDE_BY_SIDE`] whole blocks, which lie one after the
/// other in `group`. The factors of the blocks themselves are not multiplied in. `PAIRS` pairs of a
/// block are summed at once, in a vector.
#[inline(always)]
fn group_sums<const PAIRS: usize>(group: &[u8]) -> [[u64; 2]; SIDE_BY_SIDE] {
    let words = group.as_chunks::<8>().0;
    // Each block has a vector of sums for each lane. Those of one vector are added up at the end.
    let mut sums = [[[0u64; PAIRS]; 2]; SIDE_BY_SIDE];
    for first_pair in (0..BLOCK_PAIRS).step_by(PAIRS) {
        for (block_index, lanes) in sums.iter_mut().enumerate() {
            let start = block_index * BLOCK_PAIRS + first_pair;
            let pairs: [u64; PAIRS] =
                std::array::from_fn(|index| u64::from_le_bytes(words[start + index]));
            for (sums, table) in lanes.iter_mut().zip(&TABLES) {
                for (index, sum) in sums.iter_mut().enumerate() {
                    let pair = pairs[index];
                    let factors = table[first_pair + index];
                    let even = (pair & LOW).wrapping_mul(factors & LOW);
                    let odd = (pair >> 32).wrapping_mul(factors >> 32);
                    *sum = sum.wrapping_add(even).wrapping_add(odd);
                }
            }
        }
    }
    sums.map(|lanes| lanes.map(|sums| sums.into_iter().fold(0, u64::wrapping_add)))
}

/// Returns both lanes' sums over some bytes of one block, the first of which is byte `block_offset`
/// of the block. The factor of the block itself is not multiplied in.
#[inline(always)]
fn block_sums(block_offset: usize, bytes: &[u8]) -> [u64; 2] {
    // Words are processed in pairs, which have 8 bytes. The bytes before the first whole pair and
    // after the last are padded to a pair with zeros, which add nothing to the sums.
    let until_pair = (8 - block_offset % 8) % 8;
    let (head, aligned) = bytes.split_at(bytes.len().min(until_pair));
    let (pairs, tail) = aligned.as_chunks::<8>();
    let first_pair = (block_offset + head.len()) / 8;
    let mut sums = pair_sums(pairs, first_pair);
    // For each edge: its bytes, their position in the pair, and the number of the pair in the
    // block.
    for (edge, pair_offset, pair) in [
        (head, block_offset % 8, block_offset / 8),
        (tail, 0, first_pair + pairs.len()),
    ] {
        if !edge.is_empty() {
            let mut padded = [0; 8];
            padded[pair_offset..pair_offset + edge.len()].copy_from_slice(edge);
            add(&mut sums, pair_sums(&[padded], pair));
        }
    }
    sums
}

/// Returns both lanes' sums over whole pairs of words, the first of which is pair number
/// `first_pair` of the block.
///
/// The sums of even and of odd words are kept apart until the end, and there are no branches, so
/// that the compiler uses vector instructions.
#[inline(always)]
fn pair_sums(pairs: &[[u8; 8]], first_pair: usize) -> [u64; 2] {
    let table0 = &TABLES[0][first_pair..first_pair + pairs.len()];
    let table1 = &TABLES[1][first_pair..first_pair + pairs.len()];
    let mut lane0 = [0u64; 2];
    let mut lane1 = [0u64; 2];
    for ((pair, factors0), factors1) in pairs.iter().zip(table0).zip(table1) {
        let words = u64::from_le_bytes(*pair);
        let even = words & LOW;
        let odd = words >> 32;
        lane0[0] = lane0[0].wrapping_add(even.wrapping_mul(factors0 & LOW));
        lane0[1] = lane0[1].wrapping_add(odd.wrapping_mul(factors0 >> 32));
        lane1[0] = lane1[0].wrapping_add(even.wrapping_mul(factors1 & LOW));
        lane1[1] = lane1[1].wrapping_add(odd.wrapping_mul(factors1 >> 32));
    }
    [
        lane0[0].wrapping_add(lane0[1]),
        lane1[0].wrapping_add(lane1[1]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_set_of_instructions_has_the_same_sums() {
        let bytes: Vec<u8> = (0..70_001u32)
            .map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        for (offset, length) in [
            (0, 70_001),
            (1, 70_000),
            (4095, 2),
            (8_190, 4_099),
            (12_345, 0),
            (7, 65_536),
            (4096, 32_768),
            (3, 70_000),
        ] {
            let found = compute_sums(offset, &bytes[..length]);
            assert_eq!(
                found,
                sums_one_by_one(offset, &bytes[..length]),
                "{offset} {length}"
            );
            // Blocks side by side have the sums that they have one by one.
            let mut alone = [0u64; 2];
            for (index, byte) in bytes[..length].iter().enumerate() {
                let of_byte = sums_one_by_one(offset + index as u64, &[*byte]);
                alone = [
                    alone[0].wrapping_add(of_byte[0]),
                    alone[1].wrapping_add(of_byte[1]),
                ];
            }
            assert_eq!(found, alone, "{offset} {length}");
        }
    }
}
