//! Writing a planned file of a rank, by several threads.

use crc32fast::Hasher;
use fsdp_digest::Sum;
use twox_hash::XxHash3_64;

use super::layout::{Content, FileLayout, ItemLayout};
use crate::error::FileError;
use crate::payload::source::PayloadSource;
use crate::payload::write::{
    Done, PartWriter, PlannedPayload, WRITE_BYTES, check_length, in_parallel, parts_of,
};
use crate::storage::StagedFile;
use crate::storage::integrity::{FileIntegrity, block_length};

/// A unit of work: some small items that follow each other, or a part of a large one.
#[derive(Debug, Clone, Copy)]
enum Task {
    Batch {
        first_item: usize,
        item_count: usize,
    },
    Part {
        item: usize,
        start: u64,
        end: u64,
    },
}

/// Writes all items, and returns the hashes of the file and each item's part in a digest.
pub(super) fn write(
    file: &dyn StagedFile,
    layout: &FileLayout<'_>,
    source: &dyn PayloadSource,
    threads: usize,
) -> Result<(FileIntegrity, Vec<Sum>), FileError> {
    // Large payloads are cut into parts, and small items are joined, so that threads have about
    // equal work.
    let tasks = make_tasks(layout);
    let outcomes = in_parallel(
        &tasks,
        file.writers(threads),
        |task| match task {
            Task::Batch { .. } => None,
            Task::Part { item, .. } => Some(*item),
        },
        |task, buffer| run_task(file, layout, source, *task, buffer),
        |item, crc| {
            bytes_around_payload(layout, item, crc)
                .iter()
                .try_for_each(|(offset, bytes)| file.write_at(*offset, bytes))
        },
    )?;
    Ok((
        make_integrity(layout, tasks.iter().zip(&outcomes)),
        digest_parts(layout, tasks.iter().zip(&outcomes)),
    ))
}

/// Cuts the work of a file into tasks, in the order of their places.
fn make_tasks(layout: &FileLayout<'_>) -> Vec<Task> {
    let mut tasks = Vec::new();
    for (index, placed) in layout.items.iter().enumerate() {
        if let Some((_, length)) = placed.segment_payload() {
            tasks.extend(parts_of(length).map(|part| Task::Part {
                item: index,
                start: part.start,
                end: part.end,
            }));
            continue;
        }
        // A small item joins the batch of the item before it, as long as one write can take both.
        match tasks.last_mut() {
            Some(Task::Batch {
                first_item,
                item_count,
            }) if *first_item + *item_count == index
                && placed.end() - layout.items[*first_item].offset <= WRITE_BYTES =>
            {
                *item_count += 1;
            }
            _ => tasks.push(Task::Batch {
                first_item: index,
                item_count: 1,
            }),
        }
    }
    tasks
}

/// Returns where the segment of an item starts: after the item before it, so that padding is
/// covered too.
fn segment_start(layout: &FileLayout<'_>, item: usize) -> u64 {
    item.checked_sub(1)
        .map_or(0, |previous| layout.items[previous].end())
}

/// Runs one task: reads its payloads, writes them, and returns their hashes and sums.
fn run_task(
    file: &dyn StagedFile,
    layout: &FileLayout<'_>,
    source: &dyn PayloadSource,
    task: Task,
    buffer: &mut Vec<u8>,
) -> Result<Done, FileError> {
    match task {
        Task::Batch {
            first_item,
            item_count,
        } => {
            let segment_offset = segment_start(layout, first_item);
            let mut hashes = Vec::with_capacity(item_count);
            let mut sums = Vec::with_capacity(item_count);
            buffer.clear();
            for placed in &layout.items[first_item..first_item + item_count] {
                let start = buffer.len();
                // Padding before an item is written and hashed with it.
                buffer.resize((placed.offset - segment_offset) as usize, 0);
                sums.push(append_small_item(placed, source, buffer)?);
                let segment = &buffer[start..];
                let blocks = segment.chunks(block_length(segment.len() as u64) as usize);
                hashes.extend(blocks.map(XxHash3_64::oneshot));
            }
            file.write_at(segment_offset, buffer)?;
            Ok(Done {
                hashes,
                sums,
                ..Done::default()
            })
        }
        Task::Part { item, start, end } => {
            let placed = &layout.items[item];
            let (Some((offset, length)), Content::Tensor { bounds, place, .. }) =
                (placed.segment_payload(), &placed.content)
            else {
                unreachable!("only a tensor with a payload of its own is written in parts");
            };
            let payload = PlannedPayload {
                fqn: placed.fqn,
                bounds,
                offset,
                length,
                place: place.as_ref(),
            };
            let writer = PartWriter {
                file,
                source,
                with_checksum: true,
            };
            writer.write(&payload, start..end, buffer)
        }
    }
}

/// Appends a small item to the buffer, whole, and returns the sum over its elements, which is empty
/// for a value. A source that gives too few or too many bytes is an error.
fn append_small_item(
    placed: &ItemLayout<'_>,
    source: &dyn PayloadSource,
    buffer: &mut Vec<u8>,
) -> Result<Sum, FileError> {
    let (bounds, place, archive) = match &placed.content {
        Content::Value(bytes, _) => {
            buffer.extend_from_slice(bytes);
            return Ok(Sum::default());
        }
        Content::Tensor {
            bounds,
            place,
            archive,
        } => (bounds, place, archive),
    };
    let start = buffer.len();
    let head_length = archive.storage_offset(0) as usize;
    let payload_length = archive.storage_length(0);
    // The head has the checksum of the payload, so it is filled in after the payload.
    buffer.resize(start + head_length, 0);
    let mut given_bytes = 0u64;
    source.payload(placed.fqn, bounds, 0..payload_length, &mut |bytes| {
        given_bytes += bytes.len() as u64;
        check_length(placed.fqn, given_bytes, payload_length, false)?;
        buffer.extend_from_slice(bytes);
        Ok(())
    })?;
    check_length(placed.fqn, given_bytes, payload_length, true)?;
    let crc = crc32fast::hash(&buffer[start + head_length..]);
    buffer[start..start + head_length].copy_from_slice(&archive.head(crc));
    let mut sum = Sum::default();
    if let Some(place) = place {
        sum.add_piece(place, 0, &buffer[start + head_length..]);
    }
    buffer.extend_from_slice(&archive.tail(&[crc]));
    Ok(sum)
}

/// Returns the bytes before and after the payload of a tensor that is written in parts, each with
/// their place in the file. They contain the checksum `crc` of the payload, and the padding before
/// the item.
fn bytes_around_payload(layout: &FileLayout<'_>, item: usize, crc: u32) -> [(u64, Vec<u8>); 2] {
    let placed = &layout.items[item];
    let (Some((payload_offset, length)), Content::Tensor { archive, .. }) =
        (placed.segment_payload(), &placed.content)
    else {
        unreachable!("only a tensor with a payload of its own is written in parts");
    };
    let segment_offset = segment_start(layout, item);
    let mut head = vec![0; (placed.offset - segment_offset) as usize];
    head.extend_from_slice(&archive.head(crc));
    [
        (segment_offset, head),
        (payload_offset + length, archive.tail(&[crc])),
    ]
}

/// Returns the hashes of the file: those of all tasks, in the order of the bytes.
fn make_integrity<'t>(
    layout: &FileLayout<'_>,
    outcomes: impl Iterator<Item = (&'t Task, &'t Done)>,
) -> FileIntegrity {
    let mut integrity = FileIntegrity::default();
    // The large item whose parts are being joined.
    let mut crc = Hasher::new();
    let mut hashes = Vec::new();
    for (task, done) in outcomes {
        match *task {
            Task::Batch {
                first_item,
                item_count,
            } => {
                let mut batch_hashes = done.hashes.iter().copied();
                for item in first_item..first_item + item_count {
                    let length = layout.items[item].end() - segment_start(layout, item);
                    let block_bytes = block_length(length);
                    integrity.push(
                        length,
                        block_bytes,
                        batch_hashes
                            .by_ref()
                            .take(length.div_ceil(block_bytes) as usize)
                            .collect(),
                    );
                }
            }
            Task::Part { item, end, .. } => {
                let length = layout.items[item].payload_length();
                // The parts of a payload come in order, and end with the last one.
                crc.combine(&done.crc);
                hashes.extend_from_slice(&done.hashes);
                if end < length {
                    continue;
                }
                let crc = std::mem::take(&mut crc).finalize();
                let [(_, head), (_, tail)] = bytes_around_payload(layout, item, crc);
                integrity.push_bytes(&head);
                integrity.push(length, block_length(length), std::mem::take(&mut hashes));
                integrity.push_bytes(&tail);
            }
        }
    }
    integrity
}

/// Returns each item's part in the digest of its tensor or value.
fn digest_parts<'t>(
    layout: &FileLayout<'_>,
    outcomes: impl Iterator<Item = (&'t Task, &'t Done)>,
) -> Vec<Sum> {
    // The sums of a tensor are added to an empty part; the digest of a value is known already.
    let mut parts: Vec<Sum> = layout
        .items
        .iter()
        .map(|item| match item.content {
            Content::Value(_, digest) => Sum::of_value(digest),
            Content::Tensor { .. } => Sum::default(),
        })
        .collect();
    for (task, done) in outcomes {
        match *task {
            Task::Batch { first_item, .. } => {
                parts[first_item..]
                    .iter_mut()
                    .zip(&done.sums)
                    .for_each(|(part, sum)| part.add(*sum));
            }
            Task::Part { item, .. } => parts[item].add(done.sum),
        }
    }
    parts
}
