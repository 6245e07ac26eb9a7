//! Safety limits: every length that a file claims is checked against one of these before anything is allocated for it.
//!
//! They bound what a hostile file can cost. All are far above what training writes.

/// Bytes of one pickle (a `.metadata` of a million chunks is about 150 MiB).
pub const MAX_PICKLE_BYTES: u64 = 2 << 30;
/// Nodes that one pickle may build; memory is at most about 48 bytes for each.
pub const MAX_PICKLE_NODES: usize = 1 << 28;
/// Nesting of values inside one pickle.
pub const MAX_DEPTH: usize = 200;
/// The number of values that one pickle may expand to, where it refers to shared ones many times (`billion laughs`):
/// this many, or [`EXPANSION_PER_BYTE`] for each of its bytes, whichever is more.
pub const MAX_EXPANSION: usize = 1 << 20;
/// See [`MAX_EXPANSION`].
pub const EXPANSION_PER_BYTE: usize = 16;
/// The distance that a memo index may have from the last one used (picklers number them one by one).
pub const MAX_MEMO_GAP: usize = 1024;
/// Bytes of one integer.
pub const MAX_INTEGER_BYTES: u64 = 1024;
/// Dimensions of a tensor.
pub const MAX_TENSOR_RANK: usize = 64;
/// Elements of a tensor, dimensions of 0 not counted: so that no product of sizes overflows.
pub const MAX_TENSOR_ELEMENTS: u64 = 1 << 58;
/// Bytes of one hashed block.
pub const MAX_BLOCK_BYTES: u64 = 16 << 20;
/// Bytes of one key (FQN).
pub const MAX_KEY_BYTES: usize = 1 << 20;
/// Bytes of a zip's central directory.
pub const MAX_ZIP_DIRECTORY_BYTES: u64 = 1 << 30;
/// Bytes of `data.pkl` plus whatever storages a non-tensor value holds.
pub const MAX_OBJECT_BYTES: u64 = 2 << 30;
/// Bytes of the integrity file.
pub const MAX_INTEGRITY_BYTES: u64 = 4 << 30;
/// Bytes of a safetensors header (the `safetensors` crate's own limit).
pub const MAX_SAFETENSORS_HEADER_BYTES: u64 = 100_000_000;
/// Bytes of a JSON index (`model.safetensors.index.json`).
pub const MAX_INDEX_BYTES: u64 = 256 << 20;

/// Returns `true` if some machine could hold a tensor of this shape.
pub(crate) fn is_sane_shape(shape: &[usize]) -> bool {
    let elements =
        shape.iter().filter(|&&size| size > 0).try_fold(1u64, |product, &size| product.checked_mul(size as u64));
    shape.len() <= MAX_TENSOR_RANK && elements.is_some_and(|elements| elements <= MAX_TENSOR_ELEMENTS)
}
