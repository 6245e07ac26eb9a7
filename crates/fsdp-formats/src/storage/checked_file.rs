//! A checkpoint's file: read by position, counted, and checked wherever hashes are known.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use twox_hash::XxHash3_64;

use super::integrity::{FileIntegrity, HashedBlock};
use super::read_at::{ReadAt, end_within};
use crate::error::FormatError;

/// A file whose bytes are checked against its hashes, if it has any.
#[derive(Clone)]
pub struct CheckedFile {
    pub(super) file: Arc<dyn ReadAt>,
    /// The number of bytes that are read at once before they are hashed.
    pub(super) bytes_per_read: u64,
    /// Its path, relative to the checkpoint.
    pub(super) name: String,
    pub(super) integrity: Option<Arc<FileIntegrity>>,
    /// The count of all bytes read from the checkpoint.
    pub(super) bytes_read: Arc<AtomicU64>,
}

impl std::fmt::Debug for CheckedFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CheckedFile")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl CheckedFile {
    /// Reads without checking, and counts the bytes.
    fn read(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        self.file.read_exact_at(offset, dst)?;
        self.bytes_read
            .fetch_add(dst.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Makes the error of a range whose bytes do not have their hash.
    fn corrupt_error(&self, range: Range<u64>) -> FormatError {
        FormatError::Corrupt {
            file: self.name.clone(),
            offset: range.start,
            end: range.end,
        }
    }

    /// Checks the bytes of a whole block.
    fn check(&self, block: HashedBlock, bytes: &[u8]) -> Result<(), FormatError> {
        if XxHash3_64::oneshot(bytes) != block.hash {
            return Err(self.corrupt_error(block.range));
        }
        Ok(())
    }

    /// Checks that the file has the length that is in the integrity file, if there is one.
    pub(super) fn check_length(&self) -> Result<(), FormatError> {
        let length = self.len();
        let integrity = self.integrity.as_ref();
        let expected = integrity.map_or(length, |integrity| integrity.length());
        if expected != length {
            return Err(self.corrupt_error(length.min(expected)..length.max(expected)));
        }
        Ok(())
    }

    /// Returns the same file without its hashes, for bytes that are checked in another way.
    pub(crate) fn unchecked(&self) -> Self {
        CheckedFile {
            integrity: None,
            ..self.clone()
        }
    }

    /// Cuts the file into parts of whole blocks, which [`verify`](Self::verify) can check on
    /// different threads. There are none for a file without hashes. A file whose length is not that
    /// in the integrity file is an error.
    #[doc(hidden)]
    pub fn parts(&self) -> Result<Vec<Range<u64>>, FormatError> {
        const PART_BYTES: u64 = 64 << 20;
        let Some(integrity) = &self.integrity else {
            return Ok(Vec::new());
        };
        self.check_length()?;
        // A part ends with a block, because half a block cannot be checked.
        let mut parts = Vec::new();
        let mut start = 0;
        for block in integrity.blocks() {
            if block.range.end - start >= PART_BYTES || block.range.end == self.len() {
                parts.push(start..block.range.end);
                start = block.range.end;
            }
        }
        Ok(parts)
    }

    /// Reads the whole file, and checks it against its hashes. The first block that differs is the
    /// error.
    pub(crate) fn verify_whole(&self) -> Result<(), FormatError> {
        self.parts()?
            .into_iter()
            .try_for_each(|part| self.verify(part, None))
    }

    /// Reads and checks one of its [`parts`](Self::parts), a block at a time. Fails at the first
    /// block that does not have its hash. `progress` is called with the number of bytes of each
    /// block that has been checked.
    #[doc(hidden)]
    pub fn verify(
        &self,
        part: Range<u64>,
        progress: Option<&(dyn Fn(u64) + Sync)>,
    ) -> Result<(), FormatError> {
        let Some(integrity) = &self.integrity else {
            return Ok(());
        };
        let mut buffer = Vec::new();
        let mut offset = part.start;
        while let Some(block) = integrity
            .block_at(offset)
            .filter(|block| block.range.start < part.end)
        {
            offset = block.range.end;
            buffer.resize((block.range.end - block.range.start) as usize, 0);
            self.read(block.range.start, &mut buffer)?;
            self.check(block, &buffer)?;
            if let Some(progress) = progress {
                progress(buffer.len() as u64);
            }
        }
        Ok(())
    }

    /// Returns the whole blocks between `offset` and `end`, the first of which must begin at
    /// `offset`. They are at most as many as are read at once, but at least one if there is any.
    fn whole_blocks(&self, integrity: &FileIntegrity, offset: u64, end: u64) -> Vec<HashedBlock> {
        let mut blocks: Vec<HashedBlock> = Vec::new();
        let mut position = offset;
        while let Some(block) = integrity.block_at(position) {
            // A block that is longer than what is read at once is still read whole.
            let is_too_much = !blocks.is_empty() && block.range.end - offset > self.bytes_per_read;
            if block.range.start != position || block.range.end > end || is_too_much {
                break;
            }
            position = block.range.end;
            blocks.push(block);
        }
        blocks
    }
}

impl ReadAt for CheckedFile {
    fn len(&self) -> u64 {
        self.file.len()
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        if self.integrity.is_some() {
            return self.read_in_pieces(offset, dst, &mut |_, _| ());
        }
        end_within(self.len(), offset, dst.len() as u64)?;
        self.read(offset, dst)
    }

    fn read_in_pieces(
        &self,
        mut offset: u64,
        mut dst: &mut [u8],
        visit: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), FormatError> {
        let end = end_within(self.len(), offset, dst.len() as u64)?;
        let mut filled = 0;
        let Some(integrity) = &self.integrity else {
            for piece in dst.chunks_mut(self.bytes_per_read as usize) {
                self.read(offset + filled as u64, piece)?;
                visit(filled, piece);
                filled += piece.len();
            }
            return Ok(());
        };
        while offset < end {
            // Blocks that are wanted whole are read together, straight into their place, and then
            // hashed one by one.
            let whole_blocks = self.whole_blocks(integrity, offset, end);
            if let Some(last_block) = whole_blocks.last() {
                let (piece, remaining) = dst.split_at_mut((last_block.range.end - offset) as usize);
                let start = offset;
                offset = last_block.range.end;
                self.read(start, piece)?;
                for block in whole_blocks {
                    let bytes =
                        (block.range.start - start) as usize..(block.range.end - start) as usize;
                    self.check(block, &piece[bytes.clone()])?;
                    visit(filled + bytes.start, &piece[bytes]);
                }
                filled += piece.len();
                dst = remaining;
                continue;
            }
            // A block that is wanted in part must be read whole, so that its hash can be checked. A
            // byte that no hash covers was added later.
            let block = integrity
                .block_at(offset)
                .ok_or_else(|| self.corrupt_error(offset..self.len()))?;
            if block.range.end > self.len() {
                return Err(self.corrupt_error(block.range));
            }
            let block_offset = (offset - block.range.start) as usize;
            let mut scratch = vec![0; (block.range.end - block.range.start) as usize];
            self.read(block.range.start, &mut scratch)?;
            self.check(block, &scratch)?;
            let count = dst.len().min(scratch.len() - block_offset);
            let (piece, remaining) = dst.split_at_mut(count);
            piece.copy_from_slice(&scratch[block_offset..block_offset + count]);
            visit(filled, piece);
            filled += count;
            offset += count as u64;
            dst = remaining;
        }
        Ok(())
    }

    fn find_hole(&self, offset: u64) -> Option<u64> {
        self.file.find_hole(offset)
    }

    fn block_at(&self, offset: u64) -> Option<Range<u64>> {
        self.integrity
            .as_ref()?
            .block_at(offset)
            .map(|block| block.range)
    }
}
