//! The limits of the machine: raw writes, raw reads, copies.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

/// How much one raw read or write moves.
const AT_ONCE: usize = 8 << 20;
/// The block that is hashed.
const HASHED_AT_ONCE: usize = 256 << 10;
/// Raw writes take their bytes from a buffer of this size, again and again: larger than caches.
const SOURCE: usize = 64 << 20;

/// Returns the number of threads with which each of some ranks on this machine saves and loads.
pub(crate) fn threads(ranks: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / ranks).clamp(1, 4)
}

/// Writes a fresh file with some threads, and syncs it if asked to.
pub(crate) fn write(path: &Path, bytes: usize, threads: usize, sync: bool) -> Result<Duration> {
    let source: Vec<u8> = (0..SOURCE).map(|i| i as u8).collect();
    let start = Instant::now();
    let file = File::create_new(path)?;
    in_parallel(bytes, threads, |offset, length| {
        let from = offset % SOURCE;
        file.write_all_at(&source[from..from + length], offset as u64)
    })?;
    if sync {
        file.sync_all()?;
    }
    Ok(start.elapsed())
}

/// Reads a file into fresh memory with some threads.
pub(crate) fn read(path: &Path, bytes: usize, threads: usize) -> Result<Duration> {
    let start = Instant::now();
    let file = File::open(path)?;
    let mut memory = vec![0u8; bytes];
    let mut parts: Vec<(usize, &mut [u8])> = Vec::new();
    let mut at = 0;
    for part in memory.chunks_mut(AT_ONCE) {
        let length = part.len();
        parts.push((at, part));
        at += length;
    }
    let mut shares: Vec<Vec<(usize, &mut [u8])>> = (0..threads).map(|_| Vec::new()).collect();
    for (index, part) in parts.into_iter().enumerate() {
        shares[index % threads].push(part);
    }
    std::thread::scope(|scope| {
        let read = |share: Vec<(usize, &mut [u8])>| {
            share
                .into_iter()
                .try_for_each(|(offset, part)| file.read_exact_at(part, offset as u64))
        };
        let threads: Vec<_> = shares
            .into_iter()
            .map(|share| scope.spawn(move || read(share)))
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })?;
    let elapsed = start.elapsed();
    std::hint::black_box(&memory);
    Ok(elapsed)
}

/// Copies into memory that is written for the first time.
pub(crate) fn copy_fresh(source: &[u8]) -> Duration {
    let start = Instant::now();
    let copy = std::hint::black_box(source.to_vec());
    let elapsed = start.elapsed();
    drop(copy);
    elapsed
}

/// Copies into memory that has been written before.
pub(crate) fn copy_warm(source: &[u8], target: &mut [u8]) -> Duration {
    let start = Instant::now();
    std::hint::black_box(&mut *target).copy_from_slice(std::hint::black_box(source));
    start.elapsed()
}

/// Hashes as many bytes as a save does, in blocks that lie in the cache as they do there: it hashes
/// what it is about to write.
pub(crate) fn hash(bytes: usize, threads: usize) -> Result<()> {
    let source: Vec<u8> = (0..HASHED_AT_ONCE).map(|i| i as u8).collect();
    in_parallel(bytes, threads, |_, length| {
        for block in 0..length.div_ceil(HASHED_AT_ONCE) {
            let block = &source[..HASHED_AT_ONCE.min(length - block * HASHED_AT_ONCE)];
            std::hint::black_box(twox_hash::XxHash3_64::oneshot(std::hint::black_box(block)));
        }
        Ok(())
    })?;
    Ok(())
}

fn in_parallel(
    bytes: usize,
    threads: usize,
    run: impl Fn(usize, usize) -> std::io::Result<()> + Sync,
) -> std::io::Result<()> {
    let parts = bytes.div_ceil(AT_ONCE);
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..threads)
            .map(|first| {
                scope.spawn(move || {
                    (first..parts).step_by(threads).try_for_each(|part| {
                        let offset = part * AT_ONCE;
                        run(offset, AT_ONCE.min(bytes - offset))
                    })
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })
}
