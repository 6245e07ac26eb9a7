//! Opaque tensors: items that nothing here can read, but that can be named, compared and copied as
//! they are stored.

use fsdp_digest::Digest;
use fsdp_layout::PlainValue;
use twox_hash::XxHash3_128;

use super::checkpoint::Checkpoint;
use super::lookup::tensor_of;
use crate::error::FileError;
use crate::metadata::StorageInfo;
use crate::threads::on_each;

/// The bytes of an item that are read at once.
const PIECE_BYTES: u64 = 1 << 20;

/// Returns the keys of the values and tensors that are opaque, and the type of each, in the order
/// of the metadata.
pub fn opaque_entries(
    source: &dyn Checkpoint,
    threads: usize,
) -> Result<Vec<(String, String)>, FileError> {
    let keys: Vec<&String> = source.metadata().entries.keys().collect();
    let types = on_each(&keys, threads, |fqn| source.opaque_type(fqn));
    let mut opaque = Vec::new();
    for (fqn, found_type) in keys.into_iter().zip(types) {
        if let Some(opaque_type) = found_type? {
            opaque.push((fqn.clone(), opaque_type));
        }
    }
    Ok(opaque)
}

/// Gives `sink` the bytes of an item as they are stored, in order, in pieces of `piece_bytes`
/// bytes.
pub fn stream_stored(
    source: &dyn Checkpoint,
    fqn: &str,
    stored: &StorageInfo,
    piece_bytes: u64,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), FileError>,
) -> Result<(), FileError> {
    let mut buffer = vec![0; stored.length.min(piece_bytes) as usize];
    let mut offset = 0;
    while offset < stored.length {
        let piece = &mut buffer[..(stored.length - offset).min(piece_bytes) as usize];
        source.read_stored(fqn, stored, offset, piece)?;
        sink(piece)?;
        offset += piece.len() as u64;
    }
    Ok(())
}

/// Returns a description of bytes of a type of Python: `data` is what is known of them.
pub(crate) fn describe_bytes(type_name: String, data: PlainValue) -> PlainValue {
    PlainValue::Dict(vec![
        ("$type".into(), type_name.into()),
        ("data".into(), data),
    ])
}

/// Returns a hash over the bytes of an item as they are stored.
pub(crate) fn hash_of_item(
    source: &dyn Checkpoint,
    fqn: &str,
    stored: &StorageInfo,
) -> Result<u128, FileError> {
    let mut hasher = XxHash3_128::new();
    stream_stored(source, fqn, stored, PIECE_BYTES, &mut |bytes| {
        hasher.write(bytes);
        Ok(())
    })?;
    Ok(hasher.finish_128())
}

/// Returns the digest of an opaque tensor: over its boxes, and the bytes of each as they are
/// stored. Boxes that are stored nowhere do not count. A copy has the same digest, since opaque
/// tensors are never cut into other boxes.
pub fn digest_of_opaque(source: &dyn Checkpoint, fqn: &str) -> Result<Digest, FileError> {
    let mut chunks = Vec::new();
    for chunk in &tensor_of(source.metadata(), fqn)?.chunks {
        let Some(stored) = &chunk.stored else {
            continue;
        };
        let hash = hash_of_item(source, fqn, stored)?;
        chunks.push((chunk.bounds.clone(), hash));
    }
    // Copies list the chunks in other orders.
    chunks.sort_by(|(bounds, _), (other_bounds, _)| bounds.cmp(other_bounds));
    let mut descriptions = Vec::with_capacity(chunks.len());
    for (bounds, hash) in chunks {
        descriptions.push(PlainValue::Tuple(vec![
            list_of_sizes(&bounds.offsets),
            list_of_sizes(&bounds.sizes),
            PlainValue::Bytes(hash.to_le_bytes().to_vec()),
        ]));
    }
    Ok(Digest::of_value(&PlainValue::List(descriptions)))
}

/// Returns sizes or offsets as a value.
fn list_of_sizes(sizes: &[usize]) -> PlainValue {
    let sizes = sizes.iter().map(|&size| PlainValue::Int(size as i64));
    PlainValue::List(sizes.collect())
}
