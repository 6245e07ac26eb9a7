//! Bytes that can be read by position: files, checked or not, memory, and windows into them.

use std::io::{Error, ErrorKind};
use std::ops::Range;

use crate::budget::FREE_BYTES;
use crate::error::FormatError;
use crate::limits::check_limit;

/// A source of bytes that several threads read by position.
pub trait ReadAt: Send + Sync {
    /// Returns the number of bytes.
    fn len(&self) -> u64;

    /// Returns `true` if there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `dst` with the bytes from `offset`, and checks them where hashes are known.
    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError>;

    /// Does the same as [`ReadAt::read_exact_at`], and calls `visit` with each piece, in order,
    /// while it is in the processor's cache: where it begins in `dst`, and its bytes.
    fn read_in_pieces(
        &self,
        offset: u64,
        dst: &mut [u8],
        visit: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), FormatError> {
        self.read_exact_at(offset, dst)?;
        visit(0, dst);
        Ok(())
    }

    /// Returns the first position at or behind `offset` that nothing was ever written to: the file
    /// is larger than what it takes on the disk. It may be the end of the file; `None` if no such
    /// position is known. The system may have to look at everything before the position.
    fn find_hole(&self, offset: u64) -> Option<u64> {
        let _ = offset;
        None
    }

    /// Returns `true` if it is known that nothing was ever written to some of a range.
    fn has_hole(&self, range: Range<u64>) -> bool {
        self.find_hole(range.start)
            .is_some_and(|hole| hole < range.end)
    }

    /// Returns the range around `offset` that one hash covers, if there is one: reading any of it
    /// costs reading it all.
    fn block_at(&self, offset: u64) -> Option<Range<u64>> {
        let _ = offset;
        None
    }
}

/// The length from which bytes that are read whole are looked at for holes. Values of zeros have
/// some after a copy that leaves out zeros.
const LARGE_BYTES: u64 = FREE_BYTES;

/// Reads a whole range into memory. It is for metadata, headers, directories and values, not for
/// elements of tensors.
///
/// A large range with a hole is refused. A sparse file takes no space on a disk, but reading it
/// could fill the memory.
pub fn read_whole<S: ReadAt + ?Sized>(
    source: &S,
    offset: u64,
    length: u64,
) -> Result<Vec<u8>, FormatError> {
    let end = end_within(source.len(), offset, length)?;
    if length >= LARGE_BYTES && source.has_hole(offset..end) {
        let reason = format!(
            "{length} bytes at byte {offset} are to be read, and nothing was ever written to some of them \
             (`cp --sparse=never` copies zeros too)"
        );
        return Err(FormatError::malformed("file", reason));
    }
    let mut bytes = vec![0; length as usize];
    source.read_exact_at(offset, &mut bytes)?;
    Ok(bytes)
}

/// Reads all of a file of at most `limit` bytes.
pub fn read_file(file: &dyn ReadAt, limit: u64) -> Result<Vec<u8>, FormatError> {
    check_limit("file length", file.len(), limit)?;
    read_whole(file, 0, file.len())
}

/// Returns the end of a range of a source that has `available` bytes. A range that goes beyond them
/// is an error.
pub(crate) fn end_within(available: u64, offset: u64, length: u64) -> Result<u64, FormatError> {
    match offset.checked_add(length) {
        Some(end) if end <= available => Ok(end),
        _ => Err(FormatError::Read {
            offset,
            length,
            source: Error::new(ErrorKind::UnexpectedEof, "the file ends before that"),
        }),
    }
}

impl ReadAt for &[u8] {
    fn len(&self) -> u64 {
        <[u8]>::len(self) as u64
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        let end = end_within(self.len(), offset, dst.len() as u64)?;
        dst.copy_from_slice(&self[offset as usize..end as usize]);
        Ok(())
    }
}

impl ReadAt for Vec<u8> {
    fn len(&self) -> u64 {
        Vec::len(self) as u64
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        self.as_slice().read_exact_at(offset, dst)
    }
}

/// A range of another source, with positions of its own.
#[derive(Clone, Copy)]
pub struct Window<'a> {
    source: &'a dyn ReadAt,
    start: u64,
    len: u64,
}

impl<'a> Window<'a> {
    /// Makes a window of bytes `start .. start + len` of `source`, which must hold them.
    pub fn new(source: &'a dyn ReadAt, start: u64, len: u64) -> Result<Self, FormatError> {
        end_within(source.len(), start, len)?;
        Ok(Window { source, start, len })
    }
}

impl ReadAt for Window<'_> {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        end_within(self.len, offset, dst.len() as u64)?;
        self.source.read_exact_at(self.start + offset, dst)
    }

    fn find_hole(&self, offset: u64) -> Option<u64> {
        let hole = self.source.find_hole(self.start.saturating_add(offset))?;
        Some(hole.saturating_sub(self.start))
    }

    fn block_at(&self, offset: u64) -> Option<Range<u64>> {
        // Cut to the window. The source reads the rest of the block all the same, to check it.
        let block = self.source.block_at(self.start + offset)?;
        Some(block.start.saturating_sub(self.start)..(block.end - self.start).min(self.len))
    }
}

/// A reader of many small pieces in ascending order, which reads each underlying byte once: it
/// keeps the last block.
#[derive(Debug)]
pub(crate) struct BlockReader<'a, S: ?Sized> {
    source: &'a S,
    block: Vec<u8>,
    block_start: u64,
}

/// The size from which pieces are read straight into their destination, where no hash asks for
/// more.
const DIRECT_BYTES: usize = 32 << 10;
/// The number of bytes that are read at once around small pieces.
const READ_AHEAD_BYTES: u64 = 256 << 10;

impl<'a, S: ReadAt + ?Sized> BlockReader<'a, S> {
    /// Makes a reader that has read nothing yet.
    pub(crate) fn new(source: &'a S) -> Self {
        BlockReader {
            source,
            block: Vec::new(),
            block_start: 0,
        }
    }

    /// Fills `dst` with the bytes from `offset`. Nothing at or beyond `limit` is read ahead.
    /// `visit` is called with each piece, as [`ReadAt::read_in_pieces`] does.
    pub(crate) fn read(
        &mut self,
        mut offset: u64,
        mut dst: &mut [u8],
        limit: u64,
        visit: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), FormatError> {
        let mut filled = 0;
        while !dst.is_empty() {
            let kept_range = self.block_start..self.block_start + self.block.len() as u64;
            if kept_range.contains(&offset) {
                let block_offset = (offset - kept_range.start) as usize;
                let count = dst.len().min(self.block.len() - block_offset);
                dst[..count].copy_from_slice(&self.block[block_offset..block_offset + count]);
                visit(filled, &dst[..count]);
                filled += count;
                offset += count as u64;
                dst = &mut dst[count..];
                continue;
            }
            let end = offset + dst.len() as u64;
            let direct_end = match self.source.block_at(offset) {
                // The piece begins with a whole block: read that block, and the whole blocks after
                // it, straight to their destination.
                Some(block) if block.start == offset && block.end <= end => {
                    self.find_blocks_end(block.end, end)
                }
                // The piece begins with a part of a block: read the whole block, because only that
                // can be checked, and keep it for the next piece.
                Some(block) => {
                    self.load(block)?;
                    continue;
                }
                None if dst.len() >= DIRECT_BYTES => end,
                None => {
                    let read_end = (offset + READ_AHEAD_BYTES)
                        .min(limit)
                        .min(self.source.len())
                        .max(end);
                    self.load(offset..read_end)?;
                    continue;
                }
            };
            let count = (direct_end - offset) as usize;
            self.source
                .read_in_pieces(offset, &mut dst[..count], &mut |piece_offset, piece| {
                    visit(filled + piece_offset, piece)
                })?;
            filled += count;
            offset = direct_end;
            dst = &mut dst[count..];
        }
        Ok(())
    }

    /// Returns where the blocks end that lie one after the other from `start`, all of them before
    /// `end`.
    fn find_blocks_end(&self, start: u64, end: u64) -> u64 {
        let mut position = start;
        while let Some(next) = self
            .source
            .block_at(position)
            .filter(|next| next.end <= end)
        {
            if next.start != position || next.is_empty() {
                break;
            }
            position = next.end;
        }
        position
    }

    /// Reads a range into the buffer that is kept.
    fn load(&mut self, block: Range<u64>) -> Result<(), FormatError> {
        self.block.clear();
        self.block.resize((block.end - block.start) as usize, 0);
        self.block_start = block.start;
        let read = self.source.read_exact_at(block.start, &mut self.block);
        if read.is_err() {
            self.block.clear();
        }
        read
    }
}
