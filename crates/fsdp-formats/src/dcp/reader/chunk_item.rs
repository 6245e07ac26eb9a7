//! A chunk of a tensor, with the place of its item.

use fsdp_layout::boxes::checked_bytes;
use fsdp_layout::{DType, TensorBox};

use crate::error::FileError;
use crate::metadata::{Chunk, StorageInfo, TensorEntry};

/// The most bytes that an item may have around its payload.
const MAX_OVERHEAD_BYTES: u64 = 64 << 10;

/// A chunk of a tensor, and the item that it is stored in.
#[derive(Clone, Copy)]
pub(super) struct ChunkItem<'m> {
    pub(super) fqn: &'m str,
    pub(super) dtype: DType,
    /// The box of the chunk.
    pub(super) bounds: &'m TensorBox,
    pub(super) stored: &'m StorageInfo,
}

impl<'m> ChunkItem<'m> {
    /// Returns the item of a chunk. A chunk that is stored nowhere is an error.
    pub(super) fn new(
        fqn: &'m str,
        tensor: &TensorEntry,
        chunk: &'m Chunk,
    ) -> Result<Self, FileError> {
        let Some(stored) = &chunk.stored else {
            return Err(FileError::not_stored(fqn));
        };
        Ok(ChunkItem {
            fqn,
            dtype: tensor.properties.dtype,
            bounds: &chunk.bounds,
            stored,
        })
    }
}

/// Returns the most bytes that the item of a box may have. A box whose bytes cannot be counted fits
/// in no item.
pub(super) fn max_item_bytes(bounds: &TensorBox, dtype: DType) -> u64 {
    let payload_bytes = checked_bytes(&bounds.sizes, dtype).map_or(0, |bytes| bytes as u64);
    payload_bytes.saturating_add(MAX_OVERHEAD_BYTES)
}
