//! A checkpoint's file: read by position, counted, and checked wherever hashes are known.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use twox_hash::XxHash3_64;

use crate::error::FormatError;
use crate::integrity::FileIntegrity;
use crate::root::OpenFile;
use crate::source::{ReadAt, beyond_the_end};

/// A file whose bytes are checked against its hashes, if it has any.
#[derive(Debug)]
pub struct CheckedFile {
    file: OpenFile,
    /// Relative to the checkpoint.
    name: String,
    integrity: Option<Arc<FileIntegrity>>,
    bytes_read: Arc<AtomicU64>,
}

impl CheckedFile {
    /// Wraps an open file. `bytes_read` is raised by every byte read from it.
    pub(crate) fn new(
        file: OpenFile,
        name: &str,
        integrity: Option<Arc<FileIntegrity>>,
        bytes_read: Arc<AtomicU64>,
    ) -> Self {
        CheckedFile { file, name: name.to_owned(), integrity, bytes_read }
    }

    /// Reads without checking.
    fn read(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        let length = dst.len() as u64;
        self.file.read_exact_at(offset, dst)?;
        self.bytes_read.fetch_add(length, Ordering::Relaxed);
        Ok(())
    }

    fn corrupt(&self, range: Range<u64>) -> FormatError {
        FormatError::Corrupt { file: self.name.clone(), offset: range.start, end: range.end }
    }

    /// Reads and checks all of it, a block at a time; the first block that differs is the error.
    pub fn verify(&self, progress: Option<&(dyn Fn(u64) + Sync)>) -> Result<(), FormatError> {
        let Some(integrity) = &self.integrity else { return Ok(()) };
        if integrity.length() != self.len() {
            return Err(self.corrupt(self.len().min(integrity.length())..self.len().max(integrity.length())));
        }
        let mut buffer = Vec::new();
        for block in integrity.blocks() {
            buffer.resize((block.range.end - block.range.start) as usize, 0);
            self.read(block.range.start, &mut buffer)?;
            if XxHash3_64::oneshot(&buffer) != block.hash {
                return Err(self.corrupt(block.range));
            }
            if let Some(progress) = progress {
                progress(buffer.len() as u64);
            }
        }
        Ok(())
    }
}

impl ReadAt for CheckedFile {
    fn len(&self) -> u64 {
        self.file.len()
    }

    fn read_exact_at(&self, mut offset: u64, mut dst: &mut [u8]) -> Result<(), FormatError> {
        let end = offset.checked_add(dst.len() as u64).ok_or_else(|| beyond_the_end(offset, dst.len()))?;
        if end > self.len() {
            return Err(beyond_the_end(offset, dst.len()));
        }
        let Some(integrity) = &self.integrity else { return self.read(offset, dst) };
        let at_once = self.file.read_at_once();
        while offset < end {
            // Whole blocks, read together and then hashed one by one.
            let mut whole: Vec<(Range<u64>, u64)> = Vec::new();
            let mut at = offset;
            while let Some(block) =
                integrity.block_at(at).filter(|block| block.range.start == at && block.range.end <= end)
            {
                if !whole.is_empty() && block.range.end - offset > at_once {
                    break;
                }
                at = block.range.end;
                whole.push((block.range, block.hash));
            }
            let (now, rest) = std::mem::take(&mut dst).split_at_mut((at - offset) as usize);
            if !whole.is_empty() {
                self.read(offset, now)?;
                for (range, hash) in whole {
                    let bytes = &now[(range.start - offset) as usize..(range.end - offset) as usize];
                    if XxHash3_64::oneshot(bytes) != hash {
                        return Err(self.corrupt(range));
                    }
                }
                (offset, dst) = (at, rest);
                continue;
            }
            // A part of a block: the rest of it must be read to check it. A byte that no hash covers was added later.
            let block = integrity.block_at(offset).ok_or_else(|| self.corrupt(offset..self.len()))?;
            let mut scratch = vec![0; (block.range.end - block.range.start) as usize];
            if block.range.end > self.len() {
                return Err(self.corrupt(block.range));
            }
            self.read(block.range.start, &mut scratch)?;
            if XxHash3_64::oneshot(&scratch) != block.hash {
                return Err(self.corrupt(block.range));
            }
            let from = (offset - block.range.start) as usize;
            let take = rest.len().min(scratch.len() - from);
            let (now, rest) = rest.split_at_mut(take);
            now.copy_from_slice(&scratch[from..from + take]);
            (offset, dst) = (offset + take as u64, rest);
        }
        Ok(())
    }

    fn block_at(&self, offset: u64) -> Option<Range<u64>> {
        self.integrity.as_ref()?.block_at(offset).map(|block| block.range)
    }
}
