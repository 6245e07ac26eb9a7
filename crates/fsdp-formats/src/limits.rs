//! Safety limits: every length that a file claims is checked against one of these before anything
//! is allocated for it.
//!
//! They bound what a hostile file can cost. All are far above what training writes:
//!
//! | of | at most |
//! |---|---|
//! | a pickle | 2 GiB, nested 200 deep |
//! | what is built from an input | 64 MiB, and 40 bytes for each byte of a pickle or of a trainer's JSON, 16 of an array in GGUF |
//! | values that get flat keys, below a dict or list without tensors | 10,000: a larger one is one value |
//! | attributes of an object in `.metadata`, flags of a tensor in a file of torch | 256 |
//! | an integer in it | 1024 bytes |
//! | the key of a storage of torch | 256 bytes |
//! | a tensor | 64 dimensions, 2^58 elements |
//! | a key | 1 MiB |
//! | a value that is not a tensor | 2 GiB ([`MAX_OBJECT_BYTES`]) |
//! | a zip's directory | 1 GiB |
//! | a safetensors header, a JSON index | 100 MB, 256 MiB |
//! | the integrity file, a hashed block | 4 GiB, 16 MiB |
//! | a signature, a key file | 256 MiB, 64 KiB |

use thiserror::Error;

/// An amount that is beyond its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{what} of {value} is beyond the limit of {limit}")]
pub struct BeyondLimit {
    /// The quantity.
    pub what: &'static str,
    /// The amount that a file claims, or that it takes to read it.
    pub value: u64,
    /// The limit.
    pub limit: u64,
}

/// Refuses a value that a file claims, if it is beyond its limit.
pub(crate) fn check_limit(what: &'static str, value: u64, limit: u64) -> Result<(), BeyondLimit> {
    if value > limit {
        return Err(BeyondLimit { what, value, limit });
    }
    Ok(())
}

/// The most bytes of one pickle (a `.metadata` of a million chunks is about 150 MiB).
pub(crate) const MAX_PICKLE_BYTES: u64 = 2 << 30;
/// The bytes that may be built from a byte of a pickle: a list of small numbers, two bytes each,
/// takes most.
pub(crate) const PICKLE_FACTOR: u64 = 40;
/// The most attributes of an object. Looking one up is a linear search.
pub(crate) const MAX_ATTRIBUTES: usize = 256;
/// The deepest nesting of values.
pub use fsdp_layout::MAX_DEPTH;
/// The farthest that a memo index may be from the last one used (picklers number them one by one).
pub(crate) const MAX_MEMO_GAP: usize = 1024;
/// The most bytes of one integer.
pub(crate) const MAX_INTEGER_BYTES: u64 = 1024;
/// The most bytes of the key of a storage in a file of torch, which is a number there.
pub(crate) const MAX_STORAGE_KEY_BYTES: usize = 256;
/// The most dimensions of a tensor.
pub(crate) const MAX_TENSOR_RANK: usize = 64;
/// The most elements of a tensor, where dimensions of 0 do not count. So no product of sizes
/// overflows.
pub(crate) const MAX_TENSOR_ELEMENTS: u64 = 1 << 58;
/// The most bytes of one hashed block.
pub(crate) const MAX_BLOCK_BYTES: u64 = 16 << 20;
/// The most values below a dict or list without tensors that get flat keys of their own, which take
/// about a kilobyte each. One that holds more, such as a log, is one value.
pub(crate) const MAX_FLAT_VALUES: usize = 10_000;
/// The most bytes of one key (FQN).
pub(crate) const MAX_KEY_BYTES: usize = 1 << 20;
/// The most bytes of a zip's central directory.
pub(crate) const MAX_ZIP_DIRECTORY_BYTES: u64 = 1 << 30;
/// The most bytes of a non-tensor value: of its `data.pkl`, and of the storages that it holds.
pub const MAX_OBJECT_BYTES: u64 = 2 << 30;
/// The most bytes of the integrity file.
pub(crate) const MAX_INTEGRITY_BYTES: u64 = 4 << 30;
/// The most bytes of a safetensors header (the `safetensors` crate's own limit).
pub(crate) const MAX_SAFETENSORS_HEADER_BYTES: u64 = 100_000_000;
/// The most bytes of a JSON index (`model.safetensors.index.json`).
pub const MAX_INDEX_BYTES: u64 = 256 << 20;
/// The most ranks of a save that are believed, where a file or its name tells their number.
pub(crate) const MAX_RANKS: usize = 1 << 20;
/// The most missing files that an error names: the number of files that are expected may come from
/// a file.
pub(crate) const MAX_LISTED_FILES: usize = 1000;

/// Returns `true` if some machine could hold a tensor of this shape.
pub fn is_sane_shape(shape: &[usize]) -> bool {
    let elements = shape
        .iter()
        .filter(|&&size| size > 0)
        .try_fold(1u64, |product, &size| product.checked_mul(size as u64));
    shape.len() <= MAX_TENSOR_RANK
        && elements.is_some_and(|elements| elements <= MAX_TENSOR_ELEMENTS)
}
