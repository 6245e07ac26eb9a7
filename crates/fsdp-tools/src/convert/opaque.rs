//! Copies the items of opaque tensors from one DCP directory to another. Opaque tensors cannot be
//! cut, so their boxes stay as they are.

use std::collections::HashSet;

use fsdp_digest::Sum;
use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::{FileIntegrity, block_length, digest_of_opaque, stream_stored};
use fsdp_formats::metadata::{Entry, Metadata, StorageInfo, TensorEntry};
use fsdp_formats::writer::{RankWritten, WrittenFile, WrittenItem};
use twox_hash::XxHash3_64;

use super::output::Conversion;

/// An item that is copied.
struct Item<'s> {
    fqn: &'s str,
    stored: &'s StorageInfo,
    entry_index: u32,
    chunk_index: u32,
    part: Sum,
}

/// Copies the tensors in `opaque` to separate files, divided among the ranks, and adds them to the
/// metadata and to the ranks' reports.
pub(super) fn copy_opaque(
    conversion: &Conversion<'_>,
    opaque: &HashSet<&str>,
    metadata: &mut Metadata,
    written: &mut [RankWritten],
) -> Result<(), FileError> {
    // Step 1: divide the items among the ranks, so that each writes about as many.
    let source = conversion.source;
    let mut items: Vec<Vec<Item<'_>>> = written.iter().map(|_| Vec::new()).collect();
    for (fqn, tensor) in source.metadata().tensors() {
        if opaque.contains(fqn) {
            add_tensor(source, fqn, tensor, metadata, &mut items)?;
        }
    }
    // Step 2: write a file for each rank that has some.
    for (rank, (items, written)) in items.iter().zip(written).enumerate() {
        if !items.is_empty() {
            write_file(conversion, rank, items, written)?;
        }
    }
    Ok(())
}

/// Adds a tensor to the metadata, and its items to those of the ranks.
fn add_tensor<'s>(
    source: &dyn Checkpoint,
    fqn: &'s str,
    tensor: &'s TensorEntry,
    metadata: &mut Metadata,
    items: &mut [Vec<Item<'s>>],
) -> Result<(), FileError> {
    // A box without elements has no place in a file, and so no item.
    let mut chunks = tensor.chunks.clone();
    chunks.retain(|chunk| chunk.stored.is_some());
    // The entry comes after those that were planned, so its index is their count.
    let entry_index = metadata.entries.len() as u32;
    let digest = digest_of_opaque(source, fqn)?;
    let stored = tensor
        .chunks
        .iter()
        .filter_map(|chunk| chunk.stored.as_ref());
    for (index, stored) in stored.enumerate() {
        let rank = index * items.len() / chunks.len();
        items[rank].push(Item {
            fqn,
            stored,
            entry_index,
            chunk_index: index as u32,
            // The digest is that of the whole tensor, so it is reported with one of its items
            // only.
            part: if index == 0 {
                Sum::of_value(digest)
            } else {
                Sum::default()
            },
        });
    }
    let copied = TensorEntry {
        chunks,
        ..tensor.clone()
    };
    metadata
        .entries
        .insert(fqn.to_owned(), Entry::Tensor(copied));
    if let Some(paths) = &mut metadata.planner_data
        && let Some(source_paths) = &source.metadata().planner_data
        && let Some(path) = source_paths.get(fqn)
    {
        paths.insert(fqn.to_owned(), path.clone());
    }
    Ok(())
}

/// Writes one file of copied items.
fn write_file(
    conversion: &Conversion<'_>,
    rank: usize,
    items: &[Item<'_>],
    written: &mut RankWritten,
) -> Result<(), FileError> {
    let Conversion {
        source, staging, ..
    } = conversion;
    let name = staging.data_file_of(rank, written.files.len());
    let length = items.iter().map(|item| item.stored.length).sum();
    let file = staging.create(&name, length)?;
    let mut integrity = FileIntegrity::default();
    let mut offset = 0;
    for item in items {
        let length = item.stored.length;
        // Each item is a segment of its own, so that reading it checks little else.
        let block_bytes = block_length(length);
        let mut hashes = Vec::new();
        let mut write_offset = offset;
        stream_stored(*source, item.fqn, item.stored, block_bytes, &mut |bytes| {
            hashes.push(XxHash3_64::oneshot(bytes));
            file.write_at(write_offset, bytes)?;
            write_offset += bytes.len() as u64;
            if let Some(progress) = conversion.options.progress {
                progress(bytes.len() as u64);
            }
            Ok(())
        })?;
        integrity.push(length, block_bytes, hashes);
        written.items.push(WrittenItem {
            file: written.files.len() as u32,
            entry: item.entry_index,
            chunk: item.chunk_index,
            offset,
            length,
            part: Some(item.part),
        });
        offset += length;
    }
    file.finish()?;
    written.files.push(WrittenFile { name, integrity });
    written.payload_bytes += offset;
    Ok(())
}
