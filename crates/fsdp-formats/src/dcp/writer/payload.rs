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
    Batch { first: usize, count: usize },
    Part { item: usize, start: u64, end: u64 },
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
    let tasks = tasks(layout);
    let done = in_parallel(
        &tasks,
        file.writers(threads),
        |task| match task {
            Task::Batch { .. } => None,
            Task::Part { item, .. } => Some(*item),
        },
        |task, buffer| run(file, layout, source, *task, buffer),
        |item, crc| {
            bytes_around(layout, item, crc)
                .iter()
                .try_for_each(|(offset, bytes)| file.write_at(*offset, bytes))
        },
    )?;
    Ok((
        integrity(layout, tasks.iter().zip(&done)),
        parts(layout, tasks.iter().zip(&done)),
    ))
}

/// Cuts the work of a file into tasks, in the order of their places.
fn tasks(layout: &FileLayout<'_>) -> Vec<Task> {
    let mut tasks = Vec::new();
    for (index, placed) in layout.items.iter().enumerate() {
        if let Some((_, length)) = placed.own_payload() {
            tasks.extend(parts_of(length).map(|part| Task::Part {
                item: index,
                start: part.start,
                end: part.end,
            }));
            continue;
        }
        // A small item joins the batch of the item before it, as long as one write can take both.
        match tasks.last_mut() {
            Some(Task::Batch { first, count })
                if *first + *count == index
                    && placed.end() - layout.items[*first].offset <= WRITE_BYTES =>
            {
                *count += 1;
            }
            _ => tasks.push(Task::Batch {
                first: index,
                count: 1,
            }),
        }
    }
    tasks
}

/// Returns where the segment of an item starts: after the item before it, so that padding is
/// covered too.
fn segment_start(layout: &FileLayout<'_>, item: usize) -> u64 {
    item.checked_sub(1)
        .map_or(0, |before| layout.items[before].end())
}

/// Runs one task.
fn run(
    file: &dyn StagedFile,
    layout: &FileLayout<'_>,
    source: &dyn PayloadSource,
    task: Task,
    buffer: &mut Vec<u8>,
) -> Result<Done, FileError> {
    match task {
        Task::Batch { first, count } => {
            let from = segment_start(layout, first);
            let mut hashes = Vec::with_capacity(count);
            let mut sums = Vec::with_capacity(count);
            buffer.clear();
            for placed in &layout.items[first..first + count] {
                let start = buffer.len();
                // Padding before an item is written and hashed with it.
                buffer.resize((placed.offset - from) as usize, 0);
                sums.push(small_item(placed, source, buffer)?);
                let segment = &buffer[start..];
                let blocks = segment.chunks(block_length(segment.len() as u64) as usize);
                hashes.extend(blocks.map(XxHash3_64::oneshot));
            }
            file.write_at(from, buffer)?;
            Ok(Done {
                hashes,
                sums,
                ..Done::default()
            })
        }
        Task::Part { item, start, end } => {
            let placed = &layout.items[item];
            let (Some((offset, length)), Content::Tensor { bounds, place, .. }) =
                (placed.own_payload(), &placed.content)
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

/// Appends a small item to the buffer, whole, and returns the sum over its elements.
fn small_item(
    placed: &ItemLayout<'_>,
    source: &dyn PayloadSource,
    buffer: &mut Vec<u8>,
) -> Result<Sum, FileError> {
    let (bounds, place, around) = match &placed.content {
        Content::Value(bytes, _) => {
            buffer.extend_from_slice(bytes);
            return Ok(Sum::default());
        }
        Content::Tensor {
            bounds,
            place,
            around,
        } => (bounds, place, around),
    };
    let start = buffer.len();
    let head = around.storage_offset(0) as usize;
    let length = around.storage_length(0);
    // The head has the checksum of the payload, so it is filled in after the payload.
    buffer.resize(start + head, 0);
    let mut given = 0u64;
    source.payload(placed.fqn, bounds, 0..length, &mut |bytes| {
        given += bytes.len() as u64;
        check_length(placed.fqn, given, length, false)?;
        buffer.extend_from_slice(bytes);
        Ok(())
    })?;
    check_length(placed.fqn, given, length, true)?;
    let crc = crc32fast::hash(&buffer[start + head..]);
    buffer[start..start + head].copy_from_slice(&around.head(crc));
    let mut sum = Sum::default();
    if let Some(place) = place {
        sum.add_piece(place, 0, &buffer[start + head..]);
    }
    buffer.extend_from_slice(&around.tail(&[crc]));
    Ok(sum)
}

/// Returns the bytes before and after the payload of a tensor that is written in parts, each with
/// their place in the file. They contain the checksum `crc` of the payload, and the padding before
/// the item.
fn bytes_around(layout: &FileLayout<'_>, item: usize, crc: u32) -> [(u64, Vec<u8>); 2] {
    let placed = &layout.items[item];
    let (Some((payload, length)), Content::Tensor { around, .. }) =
        (placed.own_payload(), &placed.content)
    else {
        unreachable!("only a tensor with a payload of its own is written in parts");
    };
    let from = segment_start(layout, item);
    let mut head = vec![0; (placed.offset - from) as usize];
    head.extend_from_slice(&around.head(crc));
    [(from, head), (payload + length, around.tail(&[crc]))]
}

/// Puts all hashes in order.
fn integrity<'t>(
    layout: &FileLayout<'_>,
    done: impl Iterator<Item = (&'t Task, &'t Done)>,
) -> FileIntegrity {
    let mut integrity = FileIntegrity::default();
    // The large item whose parts are being joined.
    let mut crc = Hasher::new();
    let mut hashes = Vec::new();
    for (task, done) in done {
        match *task {
            Task::Batch { first, count } => {
                let mut each = done.hashes.iter().copied();
                for item in first..first + count {
                    let length = layout.items[item].end() - segment_start(layout, item);
                    let block = block_length(length);
                    integrity.push(
                        length,
                        block,
                        each.by_ref()
                            .take(length.div_ceil(block) as usize)
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
                let [(_, head), (_, tail)] = bytes_around(layout, item, crc);
                integrity.push_bytes(&head);
                integrity.push(length, block_length(length), std::mem::take(&mut hashes));
                integrity.push_bytes(&tail);
            }
        }
    }
    integrity
}

/// Returns each item's part in the digest of its tensor or value.
fn parts<'t>(
    layout: &FileLayout<'_>,
    done: impl Iterator<Item = (&'t Task, &'t Done)>,
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
    for (task, done) in done {
        match *task {
            Task::Batch { first, .. } => {
                parts[first..]
                    .iter_mut()
                    .zip(&done.sums)
                    .for_each(|(part, sum)| part.add(*sum));
            }
            Task::Part { item, .. } => parts[item].add(done.sum),
        }
    }
    parts
}
