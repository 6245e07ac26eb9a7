//! Digests that identify state: of a tensor, however it is cut into boxes, and of a whole state
//! dict.
//!
//! If the same state is saved on different numbers of ranks, in different formats or with different
//! shards, the files have no bytes in common. The digests are equal all the same. So a digest tells
//! whether a model that has been loaded is the one that was saved.
//!
//! - A [`Sum`] covers some elements of a tensor. The sums of boxes that do not overlap add up, in
//!   any order, to the sum of all their elements. So threads, ranks and files can each compute a
//!   part.
//! - [`Sum::finish`] makes the [`Digest`] of a tensor from the sum of all its elements, its dtype
//!   and its shape. A value that has no elements is in one sum as a whole, by its digest.
//! - [`StateDigest`] holds the digests of many tensors and values by name, and
//!   [`StateDigest::root`] is the digest of all.
//!
//! # The format, version 1
//! A tensor is hashed as a string of bytes: its elements in row-major order, each little-endian.
//! The string is divided into words of 4 bytes, and into blocks of 1,024 words; the last word is
//! padded with zeros. A sum is two 64-bit numbers, `lane` 0 and 1:
//!
//! ```text
//! sum[lane] = Σ over blocks b of  block(lane, b) · Σ over words w of the block of  table(lane, w) · word      mod 2^64
//! ```
//!
//! `table(lane, w)` is an odd number of 32 bits and `block(lane, b)` an odd one of 64 bits; both
//! come from splitmix64 (the file `coefficients.rs`). A word is the sum of its shifted bytes, so a
//! box may begin and end inside of a word.
//!
//! The digest is XXH3 (128 bits) of `fsdp-digest-1`, a zero byte, the dtype's name, a zero byte,
//! the number of dimensions, their sizes, and both sums, all numbers as 8 bytes little-endian. The
//! digest of a plain value ([`Digest::of_value`]) is XXH3 of `fsdp-digest-1`, a zero byte, `value`,
//! a zero byte, a letter for the kind of value, and its content:
//!
//! | kind | letter | content |
//! |---|---|---|
//! | none, boolean | `n`, `b` | nothing; a byte |
//! | integer | `i`; `I` beyond 64 bits | length and decimal text; length and two's-complement bytes |
//! | float | `f` | 8 bytes |
//! | text, bytes | `s`, `y` | length and bytes |
//! | list, tuple, set | `l`, `t`, `S` | number of values, and the values; those of a set in the order of these bytes |
//! | dict | `d` | number of entries, and each one's key and value |
//! | tensor | `T` | the 16 bytes of its digest |
//! | object of a known Python type | `o` | length and name of the type, and the value that describes it |
//! | any other | `?` | length and a text that distinguishes it from others |
//!
//! The root of a state dict is XXH3 of `fsdp-digest-1-state`, a zero byte, and for each name in
//! order of its bytes: its length, itself, and its digest.
//!
//! # What it detects
//! A digest detects faults, not forgeries. A change of a single word always changes both sums: it
//! adds `change · odd · odd`, and the first factor is below 2^32. The probability that any other
//! change goes unnoticed is about 2^-66 for the worst known pattern (only the top bits of words
//! change), and 2^-128 for random changes.

mod blocks;
mod coefficients;
mod error;
mod place;
mod state;
mod sum;

pub use self::error::DigestError;
pub use self::place::BoxPlace;
pub use self::state::StateDigest;
pub use self::sum::{Digest, Sum};
