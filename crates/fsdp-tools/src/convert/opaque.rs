//! Copies the items of opaque tensors from one DCP directory to another. Opaque tensors cannot be
//! cut, so their boxes stay as they are.

use std::collections::HashSet;

use fsdp_digest::Part;
use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::{FileIntegrity, block_length, digest_of_opaque, stream_stored};
use fsdp_formats::metadata::{Entry, Metadata, StorageInfo, TensorEntry};
use fsdp_formats::storage::Staging;
use fsdp_formats::writer::{RankWritten, WrittenFile, WrittenItem};
use twox_hash::XxHash3_64;

use super::output::ConvertOptions;

/// An item that is copied.
struct Item<'s> {
    fqn: &'s str,
    stored: &'s StorageInfo,
    entry: u32,
    chunk: u32,
    part: Part,
}

/// Copies the opaque tensors in `opaque` to separate files, divided among the ranks, and adds them
/// to the metadata and to the ranks' reports.
pub(super) fn copy(
    source: &dyn Checkpoint,
    staging: &Staging,
    opaque: &HashSet<&str>,
    options: ConvertOptions<'_>,
    metadata: &mut Metadata,
    written: &mut [RankWritten],
) -> Result<(), FileError> {
    let mut items: Vec<Vec<Item<'_>>> = written.iter().map(|_| Vec::new()).collect();
    for (fqn, tensor) in source
        .metadata()
        .tensors()
        .filter(|(fqn, _)| opaque.contains(fqn))
    {
        // A box without elements has no place in a file, and so no item.
        let chunks: Vec<_> = tensor
            .chunks
            .iter()
            .filter(|chunk| chunk.stored.is_some())
            .cloned()
            .collect();
        let entry = metadata.entries.len() as u32;
        let digest = digest_of_opaque(source, fqn)?;
        let stored = tensor
            .chunks
            .iter()
            .filter_map(|chunk| chunk.stored.as_ref());
        for (number, stored) in stored.enumerate() {
            let rank = number * items.len() / chunks.len();
            // The digest is that of the whole tensor, so it is reported with one of its items only.
            let part = if number == 0 {
                Part::Value(digest)
            } else {
                Part::default()
            };
            items[rank].push(Item {
                fqn,
                stored,
                entry,
                chunk: number as u32,
                part,
            });
        }
        let copied = TensorEntry {
            chunks,
            ..tensor.clone()
        };
        metadata
            .entries
            .insert(fqn.to_owned(), Entry::Tensor(copied));
        let path = source
            .metadata()
            .planner_data
            .as_ref()
            .and_then(|paths| paths.get(fqn));
        if let (Some(paths), Some(path)) = (&mut metadata.planner_data, path) {
            paths.insert(fqn.to_owned(), path.clone());
        }
    }
    for (rank, (items, written)) in items
        .iter()
        .zip(written)
        .enumerate()
        .filter(|(_, (items, _))| !items.is_empty())
    {
        write_file(source, staging, rank, items, options, written)?;
    }
    Ok(())
}

/// Writes one file of copied items.
fn write_file(
    source: &dyn Checkpoint,
    staging: &Staging,
    rank: usize,
    items: &[Item<'_>],
    options: ConvertOptions<'_>,
    written: &mut RankWritten,
) -> Result<(), FileError> {
    let name = staging.data_file_of(rank, written.files.len());
    let file = staging.create(&name, items.iter().map(|item| item.stored.length).sum())?;
    let mut integrity = FileIntegrity::default();
    let mut offset = 0;
    for item in items {
        let length = item.stored.length;
        let block = block_length(length);
        let (mut hashes, mut at) = (Vec::new(), offset);
        stream_stored(source, item.fqn, item.stored, block, &mut |bytes| {
            hashes.push(XxHash3_64::oneshot(bytes));
            file.write_at(at, bytes)?;
            at += bytes.len() as u64;
            if let Some(progress) = options.progress {
                progress(bytes.len() as u64);
            }
            Ok(())
        })?;
        integrity.push(length, block, hashes);
        written.items.push(WrittenItem {
            file: written.files.len() as u32,
            entry: item.entry,
            chunk: item.chunk,
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
