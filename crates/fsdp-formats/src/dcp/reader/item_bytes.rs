//! Reads the bytes of items of a DCP checkpoint, and undoes their stream transforms.

use std::io::Read as _;

use fsdp_layout::{DType, PlainValue, TensorBox};

use super::chunk_item::max_item_bytes;
use crate::budget::Budget;
use crate::error::FormatError;
use crate::limits::{MAX_OBJECT_BYTES, PICKLE_FACTOR, check_limit};
use crate::metadata::StorageInfo;
use crate::storage::read_at::{ReadAt, Window, read_whole};
use crate::torch::value::quantizer_of;
use crate::zip::{Directory, check_records_in_memory};

/// Reads how the tensor in an item of at most `max_bytes` bytes is quantized; `None` if it is not.
pub(super) fn read_quantizer(
    file: &dyn ReadAt,
    stored: &StorageInfo,
    max_bytes: u64,
) -> Result<Option<PlainValue>, FormatError> {
    read_item(file, stored, max_bytes, |item| {
        match Directory::read(item) {
            Ok(archive) => quantizer_of(&archive, item),
            // torch's SAFETENSORS format has no archives, nor quantized tensors, nor transforms.
            Err(FormatError::Archive { .. }) if stored.transforms.is_empty() => Ok(None),
            Err(error) => Err(error),
        }
    })
}

/// Calls a function with an item. Stream transforms are undone in memory, where they may make at
/// most `max_bytes` bytes; without any, nothing is read before the function reads it.
pub(super) fn read_item<T>(
    file: &dyn ReadAt,
    stored: &StorageInfo,
    max_bytes: u64,
    read: impl FnOnce(&dyn ReadAt) -> Result<T, FormatError>,
) -> Result<T, FormatError> {
    if stored.transforms.is_empty() {
        read(&Window::new(file, stored.offset, stored.length)?)
    } else {
        read(&read_item_bytes(file, stored, max_bytes)?)
    }
}

/// Checks the checksum of each record of a transformed item, which is an archive once its
/// transforms are undone: that of a box of a tensor of this dtype, or of a value.
pub fn check_transformed(
    file: &dyn ReadAt,
    stored: &StorageInfo,
    tensor: Option<(&TensorBox, DType)>,
) -> Result<(), FormatError> {
    let max_bytes = match tensor {
        Some((bounds, dtype)) => max_item_bytes(bounds, dtype),
        // As much as a value of this length may become when it is read.
        None => Budget::new(stored.length, PICKLE_FACTOR).left() / 2,
    };
    check_records_in_memory(&read_item_bytes(file, stored, max_bytes)?)
}

/// Reads all bytes of an item, and undoes its stream transforms, after which it may have at most
/// `max_bytes` bytes.
pub(super) fn read_item_bytes(
    file: &dyn ReadAt,
    stored: &StorageInfo,
    max_bytes: u64,
) -> Result<Vec<u8>, FormatError> {
    let item = Window::new(file, stored.offset, stored.length)?;
    check_limit("item length", stored.length, MAX_OBJECT_BYTES)?;
    let mut bytes = read_whole(&item, 0, stored.length)?;
    // The transforms were applied one after the other, so the last one is undone first.
    for transform in stored.transforms.iter().rev() {
        bytes = match transform.split('/').next() {
            Some("stream.zstd") => decompress_zstd(&bytes, max_bytes.min(MAX_OBJECT_BYTES))?,
            _ => {
                let what = format!("the stream transform `{transform}`");
                return Err(FormatError::unsupported(what));
            }
        };
    }
    Ok(bytes)
}

/// Decompresses one zstd stream, to at most `max_bytes` bytes.
fn decompress_zstd(compressed: &[u8], max_bytes: u64) -> Result<Vec<u8>, FormatError> {
    const WHAT: &str = "zstd stream";
    let decoder = ruzstd::decoding::StreamingDecoder::new(compressed)
        .map_err(|error| FormatError::malformed(WHAT, error))?;
    let mut bytes = Vec::new();
    decoder
        .take(max_bytes + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| FormatError::malformed(WHAT, error))?;
    check_limit("decompressed length", bytes.len() as u64, max_bytes)?;
    Ok(bytes)
}
