//! Shared memory that one rank of a group owns and all ranks of the group map.
//!
//! ```text
//! words of the owner: token, votes cast, chunks published, rounds planned, lengths of its two attachments | its two ballots
//! three notifications (futexes): a count that goes up at every change, and the number of ranks that wait for the next change
//! words of the group, in the segment of rank 0: ballots cast | the verdict
//! for each reader: chunks consumed | the place of its chunks of this round: number of the first, offset, size
//! two attachments, of votes with even and with odd numbers
//! two windows, of chunks with even and with odd numbers
//! ```
//!
//! The protocol, in the modules `shared` and `chunks`, says who writes and reads what at which
//! time. The owner writes attachments and windows only while nobody reads them. Each hand-over is a
//! release store of a word by one rank, which another rank sees with an acquire load.
//!
//! All processes of a job follow this protocol. A process that does not can make others compute
//! wrong values. It cannot make them read outside the mapping: all sizes are checked, and the
//! memory is sealed, so it cannot shrink.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::thread::futex;

use crate::ballot::{BALLOT_BYTES, Ballot};

/// The longest attachment. Attachments have a few words for each rank, and a small payload.
pub(super) const ATTACHMENT_BYTES: usize = 128 << 10;
/// The size of each of the two windows: small enough that the bytes are still in a cache when other
/// ranks read them.
pub(super) const WINDOW_BYTES: usize = 1 << 20;

/// The size of a cache line. Words that different ranks write at the same time have lines of their
/// own, as have the words about each reader.
const LINE_BYTES: usize = 64;

/// The numbers of the lines after the first one, which has words of the owner.
const BALLOT_LINE: usize = 1;
const NOTIFICATIONS_LINE: usize = 2;
const ALL_BALLOTS_LINE: usize = 5;
const VERDICT_LINE: usize = 6;
const READERS_LINE: usize = 7;

/// The number of words of a ballot.
const BALLOT_WORDS: usize = BALLOT_BYTES.div_ceil(8);

const PAGE_BYTES: usize = 4096;

/// A word of a segment. Its owner writes it, except for the words of the group: they are in the
/// segment of rank 0, and all ranks write them.
#[derive(Debug, Clone, Copy)]
pub(super) enum Word {
    /// The token of the owner. A process that finds another one has mapped the wrong memory.
    Token,
    /// The number of votes in which the owner has cast its ballot.
    Voted,
    /// The number of chunks that the owner has published, over all rounds.
    Published,
    /// The number of rounds for which the owner has told its readers where their chunks lie.
    Planned,
    /// The length of the owner's attachment in votes of this parity.
    AttachmentLen(usize),
    /// A part of the owner's ballot in votes of a parity: the parity, and the number of the part.
    Ballot(usize, usize),
    /// The number of ballots that all ranks of the group have cast, over all votes.
    AllBallots,
    /// The verdict on the group's votes.
    Verdict,
}

/// A word of a segment about one of its readers.
#[derive(Debug, Clone, Copy)]
pub(super) enum ReaderWord {
    /// The number of chunks consumed. Only this word is written by the reader.
    Consumed,
    /// The number of the first chunk of this round.
    First,
    /// The offset of each of its chunks in a window.
    Offset,
    /// The size of its chunks.
    Size,
}

/// One of the three notifications of a segment, named after the ranks that wait for it. It is a
/// futex: a count in memory, on which the kernel lets processes sleep until another one wakes them.
#[derive(Debug, Clone, Copy)]
pub(super) enum Notification {
    /// The owner has published.
    Readers,
    /// A reader has consumed a chunk.
    Owner,
    /// There is a verdict. Only the notification in the segment of rank 0 is used.
    Group,
}

/// The shared memory of one rank, as this process has mapped it.
#[derive(Debug)]
pub(super) struct Segment {
    map: MmapRaw,
    ranks: usize,
}

impl Segment {
    /// Returns the length of the words: the lines of the owner, of the notifications and of the
    /// group, and a line for each reader.
    fn header_bytes(ranks: usize) -> usize {
        (LINE_BYTES * (READERS_LINE + ranks)).next_multiple_of(PAGE_BYTES)
    }

    /// Returns the length of the whole segment.
    fn total_bytes(ranks: usize) -> usize {
        Self::header_bytes(ranks) + 2 * ATTACHMENT_BYTES + 2 * WINDOW_BYTES
    }

    /// Creates zeroed memory for a group of `ranks` ranks, and the file through which others map
    /// it.
    pub(super) fn create(ranks: usize) -> io::Result<(Segment, File)> {
        let file = File::from(memfd_create(
            "fsdp",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )?);
        ftruncate(&file, Self::total_bytes(ranks) as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self::map(&file, ranks)?, file))
    }

    /// Maps the memory of another process of this host, given its id and the number of the file
    /// there.
    pub(super) fn open(process: u32, file: i32, ranks: usize) -> io::Result<Segment> {
        let file = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{process}/fd/{file}"))?;
        let needed_seals = SealFlags::SHRINK | SealFlags::GROW;
        if !rustix::fs::fcntl_get_seals(&file)?.contains(needed_seals)
            || file.metadata()?.len() != Self::total_bytes(ranks) as u64
        {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "it is not the memory of a rank",
            ));
        }
        Self::map(&file, ranks)
    }

    fn map(file: &File, ranks: usize) -> io::Result<Segment> {
        Ok(Segment {
            map: MmapOptions::new()
                .len(Self::total_bytes(ranks))
                .map_raw(file)?,
            ranks,
        })
    }

    /// Returns the word at `offset` of the header.
    fn word_at(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= Self::header_bytes(self.ranks));
        // SAFETY: inside the mapping, which lives as long as `self`, and aligned as the mapping
        // begins at a page; all processes use these eight bytes as an atomic only.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(offset).cast()) }
    }

    /// Returns a word of the owner.
    pub(super) fn word(&self, word: Word) -> &AtomicU64 {
        self.word_at(match word {
            Word::Token => 0,
            Word::Voted => 8,
            Word::Published => 16,
            Word::Planned => 24,
            Word::AttachmentLen(parity) => 32 + 8 * (parity % 2),
            Word::Ballot(parity, part) => {
                LINE_BYTES * BALLOT_LINE + LINE_BYTES / 2 * (parity % 2) + 8 * part
            }
            Word::AllBallots => LINE_BYTES * ALL_BALLOTS_LINE,
            Word::Verdict => LINE_BYTES * VERDICT_LINE,
        })
    }

    /// Returns a word about a reader.
    pub(super) fn reader_word(&self, reader: usize, word: ReaderWord) -> &AtomicU64 {
        assert!(reader < self.ranks);
        self.word_at(LINE_BYTES * (READERS_LINE + reader) + 8 * word as usize)
    }

    /// Returns the two words of a notification: its count, and the number of ranks that wait for
    /// it.
    fn notification_words(&self, notification: Notification) -> (&AtomicU32, &AtomicU64) {
        let line = LINE_BYTES * (NOTIFICATIONS_LINE + notification as usize);
        let count: *mut AtomicU64 = self.word_at(line).as_ptr().cast();
        // SAFETY: the first half of a word of the header, which all processes use as an atomic of
        // this size only.
        (
            unsafe { AtomicU32::from_ptr(count.cast()) },
            self.word_at(line + 8),
        )
    }

    /// Wakes the ranks that wait for a change. It is called after the change.
    pub(super) fn notify(&self, notification: Notification) {
        let (count, waiting) = self.notification_words(notification);
        count.fetch_add(1, Ordering::SeqCst);
        // A rank that counts as waiting only after this load looks at the memory still later, and
        // sees the change.
        if waiting.load(Ordering::SeqCst) > 0 {
            futex::wake(count, futex::Flags::empty(), i32::MAX as u32).ok();
        }
    }

    /// Sleeps until another rank notifies, but no longer than `timeout`, and not at all if
    /// `is_ready`.
    pub(super) fn wait_for_notification(
        &self,
        notification: Notification,
        timeout: Duration,
        is_ready: impl Fn() -> bool,
    ) {
        let (count, waiting) = self.notification_words(notification);
        // This rank counts as waiting before it checks, so that a change after the check wakes it.
        waiting.fetch_add(1, Ordering::SeqCst);
        let count_before = count.load(Ordering::SeqCst);
        if !is_ready() {
            let timespec = futex::Timespec {
                tv_sec: timeout.as_secs() as i64,
                tv_nsec: i64::from(timeout.subsec_nanos()),
            };
            // The caller checks again, whatever ended the sleep.
            futex::wait(count, futex::Flags::empty(), count_before, Some(&timespec)).ok();
        }
        waiting.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns the address of a part of the mapping.
    fn pointer_to(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset
                .checked_add(len)
                .is_some_and(|end| end <= Self::total_bytes(self.ranks))
        );
        // SAFETY: inside the mapping.
        unsafe { self.map.as_mut_ptr().add(offset) }
    }

    /// Returns the offset in the mapping of the attachment in votes of this parity.
    fn attachment_offset(&self, parity: usize) -> usize {
        Self::header_bytes(self.ranks) + parity % 2 * ATTACHMENT_BYTES
    }

    /// Returns the offset in the mapping of a place in a window.
    fn window_offset(&self, window: usize, offset: usize) -> usize {
        Self::header_bytes(self.ranks) + 2 * ATTACHMENT_BYTES + window % 2 * WINDOW_BYTES + offset
    }

    /// Copies `bytes` to `offset` of the mapping.
    fn write(&self, offset: usize, bytes: &[u8]) {
        let area = self.pointer_to(offset, bytes.len());
        // SAFETY: `area` has room for them, and nobody reads there now (the protocol). The caller's
        // slice is not in the mapping, to whose bytes no safe code has a reference outside the
        // closures of `read`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), area, bytes.len()) }
    }

    /// Returns the `len` bytes at `offset` of the mapping.
    fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        let area = self.pointer_to(offset, len);
        // SAFETY: inside the mapping, and not written to until this reader says that it has
        // consumed them or votes in the round after the next (the protocol), which it does after
        // the last use of the slice.
        unsafe { std::slice::from_raw_parts(area, len) }
    }

    /// Writes the owner's attachment.
    pub(super) fn write_attachment(&self, parity: usize, attachment: &[u8]) {
        assert!(attachment.len() <= ATTACHMENT_BYTES);
        self.write(self.attachment_offset(parity), attachment);
        self.word(Word::AttachmentLen(parity))
            .store(attachment.len() as u64, Ordering::Release);
    }

    /// Returns the owner's attachment, once the owner has voted.
    pub(super) fn attachment(&self, parity: usize) -> &[u8] {
        let len = self
            .word(Word::AttachmentLen(parity))
            .load(Ordering::Acquire) as usize;
        self.bytes(self.attachment_offset(parity), len.min(ATTACHMENT_BYTES))
    }

    /// Writes the owner's ballot in a vote of this parity.
    pub(super) fn write_ballot(&self, parity: usize, ballot: Ballot) {
        let mut bytes = [0; 8 * BALLOT_WORDS];
        bytes[..BALLOT_BYTES].copy_from_slice(&ballot.to_bytes());
        for (number, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
            let word = u64::from_le_bytes(*word);
            self.word(Word::Ballot(parity, number))
                .store(word, Ordering::Relaxed);
        }
    }

    /// Returns the owner's ballot in a vote of this parity.
    pub(super) fn ballot(&self, parity: usize) -> Ballot {
        let mut bytes = [0; 8 * BALLOT_WORDS];
        for (number, word) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *word = self
                .word(Word::Ballot(parity, number))
                .load(Ordering::Relaxed)
                .to_le_bytes();
        }
        Ballot::from_bytes(std::array::from_fn(|at| bytes[at]))
    }

    /// Writes to one of the owner's windows.
    pub(super) fn write_window(&self, window: usize, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= WINDOW_BYTES);
        self.write(self.window_offset(window, offset), bytes);
    }

    /// Returns a part of one of the owner's windows; an empty slice if the window has no such part.
    pub(super) fn window(&self, window: usize, offset: usize, len: usize) -> &[u8] {
        if offset.checked_add(len).is_none_or(|end| end > WINDOW_BYTES) {
            return &[];
        }
        self.bytes(self.window_offset(window, offset), len)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn another_mapping_shows_what_the_owner_wrote() {
        let (owner, file) = Segment::create(3).unwrap();
        let reader = Segment::open(std::process::id(), file.as_raw_fd(), 3).unwrap();
        owner.write_attachment(1, b"attachment");
        let ballot = Ballot::new(&"call");
        owner.write_ballot(1, ballot);
        owner.write_window(1, WINDOW_BYTES - 3, b"end");
        reader
            .reader_word(2, ReaderWord::Consumed)
            .store(7, Ordering::Release);
        assert_eq!(
            (reader.attachment(1), reader.attachment(0)),
            (&b"attachment"[..], &b""[..])
        );
        assert_eq!(reader.ballot(1), ballot);
        assert_ne!(reader.ballot(0), ballot);
        assert_eq!(reader.window(1, WINDOW_BYTES - 3, 3), b"end");
        assert_eq!(
            owner
                .reader_word(2, ReaderWord::Consumed)
                .load(Ordering::Acquire),
            7
        );
        assert_eq!(reader.window(0, usize::MAX, 2), b"");
    }

    #[test]
    fn other_memory_is_not_mapped() {
        let (_owner, file) = Segment::create(3).unwrap();
        assert!(Segment::open(std::process::id(), file.as_raw_fd(), 300).is_err());
        let plain = tempfile::tempfile().unwrap();
        plain.set_len(Segment::total_bytes(3) as u64).unwrap();
        assert!(Segment::open(std::process::id(), plain.as_raw_fd(), 3).is_err());
    }

    #[test]
    fn a_notification_wakes_the_rank_that_waits() {
        let (owner, file) = Segment::create(1).unwrap();
        let reader = Segment::open(std::process::id(), file.as_raw_fd(), 1).unwrap();
        let has_voted = || reader.word(Word::Voted).load(Ordering::Acquire) == 1;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !has_voted() {
                    reader.wait_for_notification(
                        Notification::Readers,
                        Duration::from_secs(60),
                        has_voted,
                    );
                }
            });
            std::thread::sleep(Duration::from_millis(20));
            owner.word(Word::Voted).store(1, Ordering::Release);
            owner.notify(Notification::Readers);
        });
    }
}
