//! Writing a planned file: hashing, checksums and writing in one pass over pieces that fit the cache, by several threads.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crc32fast::Hasher;
use fsdp_layout::TensorBox;
use tracing::debug_span;
use twox_hash::XxHash3_64;

use super::PayloadSource;
use super::layout::{Content, FileLayout, Placed};
use crate::error::FileError;
use crate::storage::StagedFile;
use crate::storage::integrity::{FileIntegrity, block_length};
use crate::threads::on_threads;

/// Bytes that are hashed, then written, at once.
const AT_ONCE: u64 = 1 << 20;
/// The length of the parts in which threads share a payload: a multiple of every block length.
const PART: u64 = 32 << 20;

/// A unit of work: some small items that follow each other, or a part of a large one.
#[derive(Debug, Clone, Copy)]
enum Task {
    Batch { first: usize, count: usize },
    Part { item: usize, start: u64, end: u64 },
}

/// The outcome of a task.
#[derive(Debug, Default)]
struct Done {
    /// The checksum of a part, to be combined with those of the other parts; empty for a batch.
    crc: Hasher,
    /// The hashes of the blocks: of a part, or of the items of a batch one after the other.
    hashes: Vec<u64>,
}

/// Writes all items, and returns the hashes of the file.
pub(super) fn write(
    file: &StagedFile,
    layout: &FileLayout<'_>,
    source: &dyn PayloadSource,
    threads: usize,
) -> Result<FileIntegrity, FileError> {
    // Large payloads are cut into parts, and small items are put together, so that threads have about equal work.
    let tasks = tasks(layout);
    let item = |task: &Task| match task {
        Task::Batch { .. } => None,
        Task::Part { item, .. } => Some(*item),
    };
    let run = |task: &Task, buffer: &mut Vec<u8>| run(file, layout, source, *task, buffer);
    let frame = |item, crc| match Frame::new(layout, item, crc) {
        Some(frame) => frame.write(file),
        None => Ok(()),
    };
    let done = in_parallel(&tasks, file.writers(threads), item, run, frame)?;
    Ok(integrity(layout, tasks.into_iter().zip(done)))
}

/// A payload at a place of its own in a file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlannedPayload<'p> {
    pub(crate) fqn: &'p str,
    pub(crate) bounds: &'p TensorBox,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl PlannedPayload<'_> {
    /// Returns the length of its hash blocks.
    pub(crate) fn block_length(&self) -> u64 {
        block_length(self.length)
    }
}

/// The checksum and the hashes of a payload.
#[derive(Debug, Clone, Default)]
pub(crate) struct WrittenPayload {
    pub(crate) crc: u32,
    pub(crate) hashes: Vec<u64>,
}

/// Writes payloads to their places in a file, and returns their checksums and hashes. `whole` is told of each one as soon
/// as it has been written, with its checksum; without it no checksums are made.
pub(crate) fn write_payloads(
    file: &StagedFile,
    payloads: &[PlannedPayload<'_>],
    source: &dyn PayloadSource,
    threads: usize,
    whole: Option<&(dyn Fn(usize, u32) -> Result<(), FileError> + Sync)>,
) -> Result<Vec<WrittenPayload>, FileError> {
    let parts = payloads.iter().enumerate().flat_map(|(index, payload)| {
        (0..payload.length.div_ceil(PART))
            .map(move |part| (index, part * PART, (part * PART + PART).min(payload.length)))
    });
    let parts: Vec<(usize, u64, u64)> = parts.collect();
    let run = |&(index, start, end): &(usize, u64, u64), buffer: &mut Vec<u8>| {
        write_part(file, &payloads[index], start..end, source, whole.is_some(), buffer)
    };
    let whole = |index, crc| whole.map_or(Ok(()), |whole| whole(index, crc));
    let done = in_parallel(&parts, file.writers(threads), |&(index, ..)| Some(index), run, whole)?;
    for (index, _) in payloads.iter().enumerate().filter(|(_, payload)| payload.length == 0) {
        whole(index, 0)?;
    }
    let mut written = vec![WrittenPayload::default(); payloads.len()];
    let mut crcs = vec![Hasher::new(); payloads.len()];
    for ((index, ..), done) in parts.into_iter().zip(done) {
        crcs[index].combine(&done.crc);
        written[index].hashes.extend(done.hashes);
    }
    for (written, crc) in written.iter_mut().zip(crcs) {
        written.crc = crc.finalize();
    }
    Ok(written)
}

/// Writes a part of a payload.
fn write_part(
    file: &StagedFile,
    payload: &PlannedPayload<'_>,
    range: Range<u64>,
    source: &dyn PayloadSource,
    with_checksum: bool,
    buffer: &mut Vec<u8>,
) -> Result<Done, FileError> {
    buffer.clear();
    let planned = range.end - range.start;
    let mut sink = PartSink {
        file,
        at: payload.offset + range.start,
        end: payload.offset + range.end,
        block: payload.block_length(),
        with_checksum,
        buffer,
        done: Done::default(),
    };
    let mut given = 0u64;
    source.payload(payload.fqn, payload.bounds, range, &mut |bytes| {
        given += bytes.len() as u64;
        check_length(payload.fqn, given, planned, false)?;
        sink.put(bytes)
    })?;
    check_length(payload.fqn, given, planned, true)?;
    Ok(sink.done)
}

/// Runs all tasks on some threads, each with a buffer of its own; the results are in the order of the tasks.
///
/// Tasks that follow each other may be parts of the same payload; `whole` is called when the last of them is done, with
/// the checksum of all. What stands around the payload is written then, not at the end: an object store takes files in
/// large parts, and those with holes in them have to wait in memory.
fn in_parallel<T: Sync>(
    tasks: &[T],
    threads: usize,
    payload: impl Fn(&T) -> Option<usize>,
    run: impl Fn(&T, &mut Vec<u8>) -> Result<Done, FileError> + Sync,
    whole: impl Fn(usize, u32) -> Result<(), FileError> + Sync,
) -> Result<Vec<Done>, FileError> {
    let payloads: Vec<Option<usize>> = tasks.iter().map(payload).collect();
    // The first task of a payload counts those that are not done.
    let parts = payloads.chunk_by(|a, b| a.is_some() && a == b);
    let parts: Vec<Range<usize>> =
        parts.scan(0, |at, part| Some(std::mem::replace(at, *at + part.len())..*at)).collect();
    let left: Vec<AtomicUsize> = parts.iter().map(|part| AtomicUsize::new(part.len())).collect();
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let results: Vec<Mutex<Done>> = tasks.iter().map(|_| Mutex::default()).collect();
    let work = || -> Result<(), FileError> {
        let mut buffer = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let (Some(task), Some(result)) = (tasks.get(index), results.get(index)) else { break };
            let done = run(task, &mut buffer);
            failed.fetch_or(done.is_err(), Ordering::Relaxed);
            *result.lock().unwrap_or_else(PoisonError::into_inner) = done?;
            let part = parts.partition_point(|part| part.end <= index);
            // The thread that ends the last part of a payload writes what stands around it.
            if left[part].fetch_sub(1, Ordering::AcqRel) == 1
                && let Some(payload) = payloads[index]
            {
                let mut crc = Hasher::new();
                for result in &results[parts[part].clone()] {
                    crc.combine(&result.lock().unwrap_or_else(PoisonError::into_inner).crc);
                }
                let written = whole(payload, crc.finalize());
                failed.fetch_or(written.is_err(), Ordering::Relaxed);
                written?;
            }
        }
        Ok(())
    };
    on_threads(threads.clamp(1, tasks.len().max(1)), work)?;
    Ok(results.into_iter().map(|done| done.into_inner().unwrap_or_else(PoisonError::into_inner)).collect())
}

/// Cuts the work of a file into tasks, in the order of their places.
fn tasks(layout: &FileLayout<'_>) -> Vec<Task> {
    let mut tasks = Vec::new();
    for (index, placed) in layout.items.iter().enumerate() {
        if let Some((_, length)) = placed.own_payload() {
            let parts = (0..length.div_ceil(PART)).map(|part| Task::Part {
                item: index,
                start: part * PART,
                end: (part * PART + PART).min(length),
            });
            tasks.extend(parts);
            continue;
        }
        match tasks.last_mut() {
            Some(Task::Batch { first, count })
                if *first + *count == index && placed.end() - layout.items[*first].offset <= AT_ONCE =>
            {
                *count += 1;
            }
            _ => tasks.push(Task::Batch { first: index, count: 1 }),
        }
    }
    tasks
}

/// Returns where the segment of an item starts: after the item before it, so that padding is covered too.
fn segment_start(layout: &FileLayout<'_>, item: usize) -> u64 {
    item.checked_sub(1).map_or(0, |before| layout.items[before].end())
}

/// Runs one task.
fn run(
    file: &StagedFile,
    layout: &FileLayout<'_>,
    source: &dyn PayloadSource,
    task: Task,
    buffer: &mut Vec<u8>,
) -> Result<Done, FileError> {
    match task {
        Task::Batch { first, count } => {
            let from = segment_start(layout, first);
            let mut hashes = Vec::with_capacity(count);
            buffer.clear();
            for placed in &layout.items[first..first + count] {
                let start = buffer.len();
                buffer.resize((placed.offset - from) as usize, 0);
                small_item(placed, source, buffer)?;
                hashes.extend(blocks(&buffer[start..]));
            }
            file.write_at(from, buffer)?;
            Ok(Done { crc: Hasher::new(), hashes })
        }
        Task::Part { item, start, end } => {
            let placed = &layout.items[item];
            let (Some((payload, length)), Content::Tensor { bounds, .. }) = (placed.own_payload(), &placed.content)
            else {
                return Ok(Done::default());
            };
            let payload = PlannedPayload { fqn: placed.fqn, bounds, offset: payload, length };
            write_part(file, &payload, start..end, source, true, buffer)
        }
    }
}

/// Appends a small item to the buffer, whole.
fn small_item(placed: &Placed<'_>, source: &dyn PayloadSource, buffer: &mut Vec<u8>) -> Result<(), FileError> {
    let (bounds, around) = match &placed.content {
        Content::Value(bytes) => {
            buffer.extend_from_slice(bytes);
            return Ok(());
        }
        Content::Tensor { bounds, around } => (bounds, around),
    };
    let start = buffer.len();
    let head = around.payload_offset() as usize;
    let length = around.payload_length();
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
    buffer.extend_from_slice(&around.tail(crc));
    Ok(())
}

/// Checks that a source gave no more bytes than planned; and, once it is done (`whole`), no fewer.
fn check_length(fqn: &str, given: u64, planned: u64, whole: bool) -> Result<(), FileError> {
    if given > planned || (whole && given < planned) {
        return Err(FileError::PayloadLength { fqn: fqn.to_owned(), given, planned });
    }
    Ok(())
}

/// Hashes the blocks of a segment.
fn blocks(segment: &[u8]) -> impl Iterator<Item = u64> {
    segment.chunks(block_length(segment.len() as u64) as usize).map(XxHash3_64::oneshot)
}

/// A sink of a part's bytes, in order: it hashes and writes them, from where they lie if they come in pieces that are
/// large enough.
struct PartSink<'a> {
    file: &'a StagedFile,
    at: u64,
    end: u64,
    block: u64,
    with_checksum: bool,
    buffer: &'a mut Vec<u8>,
    done: Done,
}

impl PartSink<'_> {
    fn put(&mut self, mut bytes: &[u8]) -> Result<(), FileError> {
        while !bytes.is_empty() {
            let left = self.end - self.at;
            // Written at once are whole blocks, or all that is left.
            let wanted = left.min(AT_ONCE.max(self.block)) as usize;
            let have = bytes.len() as u64;
            let direct = if have >= left { left } else { have - have % self.block }.min(wanted as u64) as usize;
            if self.buffer.is_empty() && direct > 0 {
                let (now, rest) = bytes.split_at(direct);
                self.write(now)?;
                bytes = rest;
                continue;
            }
            let take = (wanted - self.buffer.len()).min(bytes.len());
            let (now, rest) = bytes.split_at(take);
            self.buffer.extend_from_slice(now);
            bytes = rest;
            if self.buffer.len() == wanted {
                let gathered = std::mem::take(self.buffer);
                self.write(&gathered)?;
                *self.buffer = gathered;
                self.buffer.clear();
            }
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        debug_span!("hash", bytes = bytes.len()).in_scope(|| {
            for block in bytes.chunks(self.block as usize) {
                self.done.hashes.push(XxHash3_64::oneshot(block));
                if self.with_checksum {
                    self.done.crc.update(block);
                }
            }
        });
        self.file.write_at(self.at, bytes)?;
        self.at += bytes.len() as u64;
        Ok(())
    }
}

/// The bytes around a large payload, which tell its checksum.
struct Frame {
    /// Where the head starts: after the item before it, so that padding is part of it.
    from: u64,
    head: Vec<u8>,
    /// Where the payload ends.
    end: u64,
    tail: Vec<u8>,
}

impl Frame {
    fn new(layout: &FileLayout<'_>, item: usize, crc: u32) -> Option<Self> {
        let placed = &layout.items[item];
        let (Some((payload, length)), Content::Tensor { around, .. }) = (placed.own_payload(), &placed.content) else {
            return None;
        };
        let from = segment_start(layout, item);
        let mut head = vec![0; (placed.offset - from) as usize];
        head.extend_from_slice(&around.head(crc));
        Some(Frame { from, head, end: payload + length, tail: around.tail(crc) })
    }

    fn write(&self, file: &StagedFile) -> Result<(), FileError> {
        file.write_at(self.from, &self.head)?;
        file.write_at(self.end, &self.tail)
    }
}

/// Puts all hashes in order.
fn integrity(layout: &FileLayout<'_>, done: impl Iterator<Item = (Task, Done)>) -> FileIntegrity {
    let mut integrity = FileIntegrity::default();
    // The large item whose parts are being put together.
    let mut crc = Hasher::new();
    let mut hashes = Vec::new();
    for (task, done) in done {
        match task {
            Task::Batch { first, count } => {
                let mut each = done.hashes.into_iter();
                for item in first..first + count {
                    let length = layout.items[item].end() - segment_start(layout, item);
                    let block = block_length(length);
                    integrity.push(length, block, each.by_ref().take(length.div_ceil(block) as usize).collect());
                }
            }
            Task::Part { item, end, .. } => {
                let length = layout.items[item].payload_length();
                crc.combine(&done.crc);
                hashes.extend(done.hashes);
                if end < length {
                    continue;
                }
                let crc = std::mem::take(&mut crc).finalize();
                if let Some(frame) = Frame::new(layout, item, crc) {
                    integrity.push_bytes(&frame.head);
                    integrity.push(length, block_length(length), std::mem::take(&mut hashes));
                    integrity.push_bytes(&frame.tail);
                }
            }
        }
    }
    integrity
}
