//! The sums over blocks of bytes, with the widest vector instructions that the machine has.

use crate::coefficients::{BLOCK_BYTES, TABLES, block_factor};

/// The low half of a pair of words.
const LOW: u64 = 0xffff_ffff;

/// Returns both lanes' sums over bytes that begin at an offset in the string of the whole tensor's bytes.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "a function that is compiled for AVX2 is called where there is AVX2")]
pub(crate) fn sums(offset: u64, bytes: &[u8]) -> [u64; 2] {
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the machine has AVX2, and that is all that the function asks for.
        return unsafe { sums_with_avx2(offset, bytes) };
    }
    sums_of_blocks(offset, bytes)
}

/// Returns both lanes' sums over bytes that begin at an offset in the string of the whole tensor's bytes.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn sums(offset: u64, bytes: &[u8]) -> [u64; 2] {
    sums_of_blocks(offset, bytes)
}

/// The same code as elsewhere, compiled for AVX2: everything in it is inlined.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sums_with_avx2(offset: u64, bytes: &[u8]) -> [u64; 2] {
    sums_of_blocks(offset, bytes)
}

#[inline(always)]
fn sums_of_blocks(mut offset: u64, bytes: &[u8]) -> [u64; 2] {
    let mut rest = bytes;
    let mut lanes = [0u64; 2];
    while !rest.is_empty() {
        let start = (offset % BLOCK_BYTES as u64) as usize;
        let (part, after) = rest.split_at(rest.len().min(BLOCK_BYTES - start));
        let sums = block_sums(start, part);
        for (lane, sum) in sums.into_iter().enumerate() {
            let weighted = block_factor(lane, offset / BLOCK_BYTES as u64).wrapping_mul(sum);
            lanes[lane] = lanes[lane].wrapping_add(weighted);
        }
        offset += part.len() as u64;
        rest = after;
    }
    lanes
}

/// Returns both lanes' sums over bytes of one block that begin at `start` in it.
#[inline(always)]
fn block_sums(start: usize, bytes: &[u8]) -> [u64; 2] {
    // Pairs of words are read at once. Bytes before the first whole pair, and after the last, come with zeros around them.
    let head = bytes.len().min((8 - start % 8) % 8);
    let (head, rest) = bytes.split_at(head);
    let pairs = rest.chunks_exact(8);
    let tail = pairs.remainder();
    let first = (start + head.len()) / 8;
    let count = rest.len() / 8;
    let mut sums = pair_sums(&rest[..count * 8], [&TABLES[0][first..first + count], &TABLES[1][first..first + count]]);
    for (edge, at, pair) in [(head, start % 8, start / 8), (tail, 0, first + count)] {
        if !edge.is_empty() {
            let mut bytes = [0; 8];
            bytes[at..at + edge.len()].copy_from_slice(edge);
            let of_edge = pair_sums(&bytes, [&TABLES[0][pair..=pair], &TABLES[1][pair..=pair]]);
            sums = [sums[0].wrapping_add(of_edge[0]), sums[1].wrapping_add(of_edge[1])];
        }
    }
    sums
}

/// Returns both lanes' sums over whole pairs of words. Written so that compilers use vector instructions for it.
#[inline(always)]
fn pair_sums(bytes: &[u8], tables: [&[u64]; 2]) -> [u64; 2] {
    let (mut first, mut second) = ([0u64; 2], [0u64; 2]);
    for ((pair, a), b) in bytes.chunks_exact(8).zip(tables[0]).zip(tables[1]) {
        let pair = pair.try_into().map_or(0, u64::from_le_bytes);
        let (even, odd) = (pair & LOW, pair >> 32);
        first[0] = first[0].wrapping_add(even.wrapping_mul(a & LOW));
        first[1] = first[1].wrapping_add(odd.wrapping_mul(a >> 32));
        second[0] = second[0].wrapping_add(even.wrapping_mul(b & LOW));
        second[1] = second[1].wrapping_add(odd.wrapping_mul(b >> 32));
    }
    [first[0].wrapping_add(first[1]), second[0].wrapping_add(second[1])]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_set_of_instructions_has_the_same_sums() {
        let bytes: Vec<u8> = (0..70_001u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for (offset, length) in [(0, 70_001), (1, 70_000), (4095, 2), (8_190, 4_099), (12_345, 0), (7, 65_536)] {
            assert_eq!(sums(offset, &bytes[..length]), sums_of_blocks(offset, &bytes[..length]), "{offset} {length}");
        }
    }
}
