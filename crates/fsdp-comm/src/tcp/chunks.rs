//! The transfer of bytes, chunk by chunk, through the two windows of a segment.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::segment::{Notification, ReaderWord, Segment, WINDOW_BYTES, Word};
use super::sockets::Member;
use super::watch::wait;
use crate::backend::Round;
use crate::error::CommError;

/// The alignment of chunks: whole elements of every type, and whole cache lines.
const ALIGNMENT: usize = 64;

/// The chunks that a rank has sent in a group so far.
#[derive(Debug, Default)]
pub(super) struct Published {
    chunks: u64,
    /// The readers of the last chunk in each window.
    readers: [Vec<usize>; 2],
}

/// The bytes that this rank sends in a round.
pub(super) struct Outgoing<'a> {
    member: Member<'a>,
    round: &'a Round<'a>,
    segment: &'a Segment,
    send: &'a [u8],
    published: &'a mut Published,
    /// The different ranges of `send` that ranks read. All are cut into chunks of one size. The
    /// chunks with the same number lie side by side in a window.
    places: Vec<Range<usize>>,
    /// The other ranks that read, each with its number of bytes.
    readers: Vec<(usize, usize)>,
    /// The size of a chunk.
    chunk: usize,
    /// The bytes of each place that have been sent.
    sent: usize,
}

impl<'a> Outgoing<'a> {
    /// Cuts the bytes into chunks, and tells each reader where its chunks will be.
    pub(super) fn new(
        member: Member<'a>,
        round: &'a Round<'a>,
        segment: &'a Segment,
        to: &[Range<usize>],
        send: &'a [u8],
        published: &'a mut Published,
    ) -> Self {
        // Ranks that read the same range share its chunks.
        let mut places: Vec<Range<usize>> = Vec::new();
        for range in to.iter().filter(|range| !range.is_empty()) {
            if !places.contains(range) {
                places.push(range.clone());
            }
        }
        // A window is divided equally among the places.
        let chunk = (WINDOW_BYTES / places.len().max(1) / ALIGNMENT * ALIGNMENT).max(ALIGNMENT);
        for (reader, range) in to.iter().enumerate() {
            if let Some(place) = places.iter().position(|place| place == range) {
                let words = [
                    (ReaderWord::First, published.chunks),
                    (ReaderWord::Offset, (place * chunk) as u64),
                    (ReaderWord::Size, chunk as u64),
                ];
                for (word, value) in words {
                    segment
                        .reader_word(reader, word)
                        .store(value, Ordering::Relaxed);
                }
            }
        }
        let readers: Vec<(usize, usize)> =
            to.iter().map(ExactSizeIterator::len).enumerate().collect();
        let readers = readers
            .into_iter()
            .filter(|&(reader, len)| reader != member.rank && len > 0)
            .collect();
        // Readers look at their words only after this store.
        segment
            .word(Word::Planned)
            .store(round.number + 1, Ordering::Release);
        segment.notify(Notification::ToReaders);
        // A place that only this rank reads is never written. But it counted above, because the
        // size of a chunk must be the same on all ranks.
        for place in &mut places {
            let is_read_by_others = to
                .iter()
                .enumerate()
                .any(|(reader, range)| reader != member.rank && *range == *place);
            if !is_read_by_others {
                *place = 0..0;
            }
        }
        Outgoing {
            member,
            round,
            segment,
            send,
            published,
            places,
            readers,
            chunk,
            sent: 0,
        }
    }

    /// Returns `true` if all chunks are published.
    pub(super) fn is_over(&self) -> bool {
        self.places.iter().all(|place| place.len() <= self.sent)
    }

    /// Publishes the next chunk of every place, once the window is free.
    pub(super) fn publish(&mut self) -> Result<(), CommError> {
        if self.is_over() {
            return Ok(());
        }
        let Outgoing {
            member,
            round,
            segment,
            ..
        } = *self;
        // Step 1: wait until the window of this chunk is free.
        let number = self.published.chunks;
        let window = (number % 2) as usize;
        for &reader in &self.published.readers[window] {
            // Chunk `number - 2` lies in this window. Its readers must have consumed it.
            let consumed = || {
                segment
                    .reader_word(reader, ReaderWord::Consumed)
                    .load(Ordering::Acquire)
                    + 1
                    >= number
            };
            wait(
                member,
                round,
                segment,
                Notification::ToOwner,
                consumed,
                || vec![member.ranks[reader]],
            )?;
        }
        // Step 2: nobody reads the window now, so write the next chunk of every place.
        for (index, place) in self.places.iter().enumerate() {
            let start = (place.start + self.sent).min(place.end);
            let end = (start + self.chunk).min(place.end);
            if start < end {
                let bytes = self.send.get(start..end).unwrap_or_default();
                segment.write_window(window, index * self.chunk, bytes);
            }
        }
        // Step 3: note who reads this chunk, and publish it.
        let reads = |&&(_, len): &&(usize, usize)| len > self.sent;
        self.published.readers[window] = self
            .readers
            .iter()
            .filter(reads)
            .map(|&(reader, _)| reader)
            .collect();
        // From this store on, readers read the window.
        self.published.chunks += 1;
        segment
            .word(Word::Published)
            .store(self.published.chunks, Ordering::Release);
        segment.notify(Notification::ToReaders);
        self.sent += self.chunk;
        Ok(())
    }
}

/// The bytes that this rank reads from another in a round.
pub(super) struct Incoming<'a> {
    member: Member<'a>,
    round: &'a Round<'a>,
    segment: &'a Segment,
    /// The rank that sends them.
    pub(super) from: usize,
    /// The bytes that are still to come.
    left: usize,
    /// `None` until the sender has told where the chunks lie.
    cut: Option<Cut>,
}

/// The place of this rank's chunks in a segment.
#[derive(Clone, Copy)]
struct Cut {
    /// The number of the next chunk, which tells in which window it lies.
    number: u64,
    /// The offset of each chunk in its window.
    offset: usize,
    /// The size of each chunk but the last.
    size: usize,
}

impl<'a> Incoming<'a> {
    pub(super) fn new(
        member: Member<'a>,
        round: &'a Round<'a>,
        segment: &'a Segment,
        from: usize,
        len: usize,
    ) -> Self {
        Incoming {
            member,
            round,
            segment,
            from,
            left: len,
            cut: None,
        }
    }

    /// Returns `true` if all bytes have been consumed.
    pub(super) fn is_over(&self) -> bool {
        self.left == 0
    }

    /// Waits for the next chunk, and returns it. It stays in place until
    /// [`consumed`](Self::consumed) is called.
    pub(super) fn chunk(&mut self) -> Result<&'a [u8], CommError> {
        let Cut {
            number,
            offset,
            size,
        } = match self.cut {
            Some(cut) => cut,
            None => self.plan()?,
        };
        self.wait(|segment| segment.word(Word::Published).load(Ordering::Acquire) > number)?;
        let len = size.min(self.left);
        let chunk = self.segment.window((number % 2) as usize, offset, len);
        if chunk.len() == len {
            return Ok(chunk);
        }
        // Offset and size come from another process, and need not lie in the window.
        Err(CommError::RankLeft {
            rank: self.member.ranks[self.from],
            operation: self.round.operation.to_owned(),
            sequence: self.round.sequence,
            reason: format!("published {len} bytes at {offset} of a window that has not so many"),
        })
    }

    /// Tells the sender that this rank is done with the chunk, so that its window can be written
    /// again.
    pub(super) fn consumed(&mut self) {
        if let Some(Cut { number, size, .. }) = &mut self.cut {
            *number += 1;
            self.left = self.left.saturating_sub(*size);
            self.segment
                .reader_word(self.member.rank, ReaderWord::Consumed)
                .store(*number, Ordering::Release);
            self.segment.notify(Notification::ToOwner);
        }
    }

    /// Waits until the sender has written where this rank's chunks will be, and reads that.
    fn plan(&mut self) -> Result<Cut, CommError> {
        let planned = self.round.number + 1;
        self.wait(|segment| segment.word(Word::Planned).load(Ordering::Acquire) >= planned)?;
        let word = |word| {
            self.segment
                .reader_word(self.member.rank, word)
                .load(Ordering::Relaxed)
        };
        let (offset, size) = (
            word(ReaderWord::Offset) as usize,
            word(ReaderWord::Size).max(1) as usize,
        );
        let cut = Cut {
            number: word(ReaderWord::First),
            offset,
            size,
        };
        self.cut = Some(cut);
        Ok(cut)
    }

    /// Waits until the sender has made a change of its segment after which `is_ready` is true.
    fn wait(&self, is_ready: impl Fn(&Segment) -> bool) -> Result<(), CommError> {
        let missing = || vec![self.member.ranks[self.from]];
        wait(
            self.member,
            self.round,
            self.segment,
            Notification::ToReaders,
            || is_ready(self.segment),
            missing,
        )
    }
}
