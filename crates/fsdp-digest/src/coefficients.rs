//! The constants of the format: pseudo-random odd factors for words and blocks.

/// The number of pairs of words of 4 bytes in a block. The table of one lane has 4 KiB, so that
/// both fit into a first-level cache together with the data.
pub(crate) const BLOCK_PAIRS: usize = 512;

/// The number of bytes in a block.
pub(crate) const BLOCK_BYTES: usize = BLOCK_PAIRS * 8;

/// The seeds of the two lanes' tables. They were taken from the hexadecimal digits of pi and of e.
/// (The first one has an additional digit 2 after `0x243`. Any number would do, but these are part
/// of the format and cannot change.)
const TABLE_SEEDS: [u64; 2] = [0x2432_f6a8_885a_308d, 0x2b7e_1516_28ae_d2a6];

/// The seeds of the two lanes' block factors: further digits of both.
const BLOCK_SEEDS: [u64; 2] = [0x3131_98a2_e037_0734, 0xabf7_1588_09cf_4f3c];

/// The factors of the words of a block for each lane, one entry for each pair of words. The factor
/// of the even word is in the low half of the entry, and that of the odd word in the high half.
pub(crate) static TABLES: [[u64; BLOCK_PAIRS]; 2] =
    [make_table(TABLE_SEEDS[0]), make_table(TABLE_SEEDS[1])];

/// Returns the odd factor by which a lane multiplies the sum of a block. Without it, two blocks
/// that change places would have the same sum.
pub(crate) const fn block_factor(lane: usize, block: u64) -> u64 {
    splitmix64(BLOCK_SEEDS[lane], block) | 1
}

/// Returns the factors of the words of a block for one lane, two 32-bit factors in each entry.
const fn make_table(seed: u64) -> [u64; BLOCK_PAIRS] {
    let mut table = [0; BLOCK_PAIRS];
    let mut pair = 0;
    // A `for` loop is not possible in a constant.
    while pair < table.len() {
        // Odd factors, so that no change of a word is lost in a product.
        table[pair] = splitmix64(seed, pair as u64) | 0x0000_0001_0000_0001;
        pair += 1;
    }
    table
}

/// Returns the `index`-th output of the generator splitmix64 from a seed, counted from 0.
const fn splitmix64(seed: u64, index: u64) -> u64 {
    // The generator adds this constant to its state before each output.
    let mut mixed = seed.wrapping_add((index.wrapping_add(1)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_splitmix64() {
        // The published first outputs for the seed 1234567.
        let outputs: Vec<u64> = (0..3).map(|index| splitmix64(1_234_567, index)).collect();
        assert_eq!(
            outputs,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
    }

    #[test]
    fn all_factors_are_odd() {
        for (lane, table) in TABLES.iter().enumerate() {
            assert!(
                table
                    .iter()
                    .all(|pair| pair & 1 == 1 && (pair >> 32) & 1 == 1)
            );
            assert!((0..1000).all(|block| block_factor(lane, block) & 1 == 1));
        }
    }
}
