//! Writing payloads to their places in a file: hashing, checksums and writing in one pass over
//! pieces that fit the cache, by several threads.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crc32fast::Hasher;
use fsdp_digest::{BoxPlace, Sum};
use fsdp_layout::TensorBox;
use tracing::debug_span;
use twox_hash::XxHash3_64;

use super::source::PayloadSource;
use crate::error::FileError;
use crate::storage::StagedFile;
use crate::storage::integrity::block_length;
use crate::threads::{lock, on_threads, unlocked};

/// The number of bytes that are hashed, and then written, at a time.
pub(crate) const WRITE_BYTES: u64 = 1 << 20;
/// The length of the parts in which threads share a payload: a multiple of every block length.
const PART_BYTES: u64 = 32 << 20;

/// The outcome of a task.
#[derive(Debug, Default)]
pub(crate) struct Done {
    /// The checksum of a part, to be combined with those of the other parts; empty for a batch.
    pub(crate) crc: Hasher,
    /// The hashes of the blocks: of a part, or of the items of a batch one after the other.
    pub(crate) hashes: Vec<u64>,
    /// The sum over a part, for the digest of its tensor.
    pub(crate) sum: Sum,
    /// The sums over the items of a batch.
    pub(crate) sums: Vec<Sum>,
}

/// A payload, and its place in the file.
#[derive(Debug, Clone, Copy)]
pub struct PlannedPayload<'p> {
    /// The flat key of its tensor.
    pub fqn: &'p str,
    /// The box of the tensor.
    pub bounds: &'p TensorBox,
    /// Where it begins in the file.
    pub offset: u64,
    /// Its length in bytes.
    pub length: u64,
    /// The place of the box in its tensor; without one, no sum for a digest is made.
    pub place: Option<&'p BoxPlace>,
}

impl PlannedPayload<'_> {
    /// Returns the length of its hash blocks.
    pub fn block_length(&self) -> u64 {
        block_length(self.length)
    }
}

/// The checksum, the hashes and the sum of a payload.
#[derive(Debug, Clone, Default)]
pub struct WrittenPayload {
    /// The checksum, if one was computed.
    pub crc: u32,
    /// The hashes of the blocks.
    pub hashes: Vec<u64>,
    /// The sum over the elements, for the digest of the tensor.
    pub sum: Sum,
}

/// Writes payloads to their places in a file, and returns their checksums and hashes. `on_written`
/// is called with the checksum of each payload as soon as that has been written; without it no
/// checksums are computed.
pub fn write_payloads(
    file: &dyn StagedFile,
    payloads: &[PlannedPayload<'_>],
    source: &dyn PayloadSource,
    threads: usize,
    on_written: Option<&(dyn Fn(usize, u32) -> Result<(), FileError> + Sync)>,
) -> Result<Vec<WrittenPayload>, FileError> {
    let writer = PartWriter {
        file,
        source,
        with_checksum: on_written.is_some(),
    };
    let on_written = on_written.unwrap_or(&|_, _| Ok(()));
    let parts: Vec<(usize, Range<u64>)> = payloads
        .iter()
        .enumerate()
        .flat_map(|(index, payload)| parts_of(payload.length).map(move |range| (index, range)))
        .collect();
    let results = in_parallel(
        &parts,
        file.writers(threads),
        |(index, _)| Some(*index),
        |(index, range), buffer| writer.write(&payloads[*index], range.clone(), buffer),
        on_written,
    )?;
    // Empty payloads have no parts, so `on_written` is called for them here.
    for (index, payload) in payloads.iter().enumerate() {
        if payload.length == 0 {
            on_written(index, 0)?;
        }
    }
    let mut written = vec![WrittenPayload::default(); payloads.len()];
    let mut crcs = vec![Hasher::new(); payloads.len()];
    for ((index, _), result) in parts.into_iter().zip(results) {
        crcs[index].combine(&result.crc);
        written[index].hashes.extend(result.hashes);
        written[index].sum.add(result.sum);
    }
    for (written, crc) in written.iter_mut().zip(crcs) {
        written.crc = crc.finalize();
    }
    Ok(written)
}

/// Returns the parts in which threads share a payload of this length.
pub(crate) fn parts_of(length: u64) -> impl Iterator<Item = Range<u64>> {
    (0..length)
        .step_by(PART_BYTES as usize)
        .map(move |start| start..length.min(start + PART_BYTES))
}

/// A writer of parts of payloads to a file.
pub(crate) struct PartWriter<'a> {
    pub(crate) file: &'a dyn StagedFile,
    pub(crate) source: &'a dyn PayloadSource,
    /// `true` if checksums are computed.
    pub(crate) with_checksum: bool,
}

impl PartWriter<'_> {
    /// Writes a part of a payload. A source that gives more or fewer bytes than planned is an
    /// error.
    pub(crate) fn write(
        &self,
        payload: &PlannedPayload<'_>,
        range: Range<u64>,
        buffer: &mut Vec<u8>,
    ) -> Result<Done, FileError> {
        buffer.clear();
        let planned_bytes = range.end - range.start;
        let mut sink = PartSink {
            writer: self,
            payload,
            file_offset: payload.offset + range.start,
            end: payload.offset + range.end,
            block_bytes: payload.block_length(),
            buffer,
            done: Done::default(),
        };
        let mut given_bytes = 0u64;
        self.source
            .payload(payload.fqn, payload.bounds, range, &mut |bytes| {
                given_bytes += bytes.len() as u64;
                check_length(payload.fqn, given_bytes, planned_bytes, false)?;
                sink.take(bytes)
            })?;
        check_length(payload.fqn, given_bytes, planned_bytes, true)?;
        Ok(sink.done)
    }
}

/// Runs all tasks on some threads, each with a buffer of its own; the results are in the order of
/// the tasks.
///
/// Consecutive tasks may be parts of the same payload; `on_written` is called when the last of them
/// is done, with the checksum of all. The bytes around the payload are written then, and not at the
/// end, because an object store receives files in large parts, and parts with holes would have to
/// be kept in memory.
pub(crate) fn in_parallel<T: Sync>(
    tasks: &[T],
    threads: usize,
    payload_of: impl Fn(&T) -> Option<usize>,
    run: impl Fn(&T, &mut Vec<u8>) -> Result<Done, FileError> + Sync,
    on_written: impl Fn(usize, u32) -> Result<(), FileError> + Sync,
) -> Result<Vec<Done>, FileError> {
    let payloads: Vec<Option<usize>> = tasks.iter().map(payload_of).collect();
    // The tasks of each payload, and the number of them that are not done.
    let mut groups: Vec<(Range<usize>, AtomicUsize)> = Vec::new();
    for group in payloads.chunk_by(|a, b| a.is_some() && a == b) {
        let start = groups.last().map_or(0, |(tasks, _)| tasks.end);
        groups.push((start..start + group.len(), AtomicUsize::new(group.len())));
    }
    let next_task = AtomicUsize::new(0);
    let has_failed = AtomicBool::new(false);
    let results: Vec<Mutex<Done>> = tasks.iter().map(|_| Mutex::default()).collect();
    on_threads(threads.clamp(1, tasks.len().max(1)), || {
        let mut buffer = Vec::new();
        while !has_failed.load(Ordering::Relaxed) {
            let index = next_task.fetch_add(1, Ordering::Relaxed);
            let Some(task) = tasks.get(index) else {
                break;
            };
            let result = run(task, &mut buffer);
            has_failed.fetch_or(result.is_err(), Ordering::Relaxed);
            *lock(&results[index]) = result?;
            let (group, tasks_left) =
                &groups[groups.partition_point(|(tasks, _)| tasks.end <= index)];
            // The thread that ends the last part of a payload writes what stands around it.
            if tasks_left.fetch_sub(1, Ordering::AcqRel) == 1
                && let Some(payload) = payloads[index]
            {
                let mut crc = Hasher::new();
                for part in &results[group.clone()] {
                    crc.combine(&lock(part).crc);
                }
                let outcome = on_written(payload, crc.finalize());
                has_failed.fetch_or(outcome.is_err(), Ordering::Relaxed);
                outcome?;
            }
        }
        Ok(())
    })?;
    Ok(results.into_iter().map(unlocked).collect())
}

/// Checks that a source gave no more bytes than planned; and, once it is done (`is_complete`), no
/// fewer.
pub(crate) fn check_length(
    fqn: &str,
    given: u64,
    planned: u64,
    is_complete: bool,
) -> Result<(), FileError> {
    if given > planned || (is_complete && given < planned) {
        return Err(FileError::PayloadLength {
            fqn: fqn.to_owned(),
            given,
            planned,
        });
    }
    Ok(())
}

/// A sink that receives the bytes of a part in order, hashes and writes them. Pieces that are large
/// enough are written without a copy.
struct PartSink<'a> {
    writer: &'a PartWriter<'a>,
    payload: &'a PlannedPayload<'a>,
    /// The place in the file of the next byte to be written.
    file_offset: u64,
    /// The end of the part in the file.
    end: u64,
    /// The length of the hash blocks.
    block_bytes: u64,
    buffer: &'a mut Vec<u8>,
    done: Done,
}

impl PartSink<'_> {
    /// Takes the next bytes of the part. Whole blocks are written at once. Smaller pieces are
    /// collected in the buffer until there is enough for a write.
    fn take(&mut self, mut bytes: &[u8]) -> Result<(), FileError> {
        while !bytes.is_empty() {
            let part_left = self.end - self.file_offset;
            // A write has whole blocks, or all that is left of the part, so that no block is hashed
            // in two pieces.
            let write_bytes = part_left.min(WRITE_BYTES.max(self.block_bytes)) as usize;
            let available = bytes.len() as u64;
            let direct_bytes = if available >= part_left {
                part_left
            } else {
                available - available % self.block_bytes
            }
            .min(write_bytes as u64) as usize;
            // Bytes that were collected before go first.
            if self.buffer.is_empty() && direct_bytes > 0 {
                let (piece, remaining) = bytes.split_at(direct_bytes);
                self.write(piece)?;
                bytes = remaining;
                continue;
            }
            let count = (write_bytes - self.buffer.len()).min(bytes.len());
            let (piece, remaining) = bytes.split_at(count);
            self.buffer.extend_from_slice(piece);
            bytes = remaining;
            if self.buffer.len() == write_bytes {
                let collected = std::mem::take(self.buffer);
                self.write(&collected)?;
                *self.buffer = collected;
                self.buffer.clear();
            }
        }
        Ok(())
    }

    /// Hashes and writes bytes that are whole blocks, or end the part.
    fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        debug_span!("hash", bytes = bytes.len()).in_scope(|| {
            let mut payload_offset = self.file_offset - self.payload.offset;
            for block in bytes.chunks(self.block_bytes as usize) {
                self.done.hashes.push(XxHash3_64::oneshot(block));
                if self.writer.with_checksum {
                    self.done.crc.update(block);
                }
                // The block is in the processor's cache now.
                if let Some(place) = self.payload.place {
                    self.done.sum.add_piece(place, payload_offset, block);
                }
                payload_offset += block.len() as u64;
            }
        });
        self.writer.file.write_at(self.file_offset, bytes)?;
        self.file_offset += bytes.len() as u64;
        Ok(())
    }
}
