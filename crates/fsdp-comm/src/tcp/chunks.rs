//! The transfer of bytes, chunk by chunk, through the two windows of a segment.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::segment::{Notification, ReaderWord, Segment, WINDOW_BYTES, Word};
use super::watch::SharedRound;
use crate::error::CommError;

/// The alignment of chunks: whole elements of every type, and whole cache lines.
const ALIGNMENT_BYTES: usize = 64;

/// The chunks that a rank has sent in a group so far.
#[derive(Debug, Default)]
pub(super) struct PublishedChunks {
    chunks: u64,
    /// The readers of the last chunk in each window.
    readers: [Vec<usize>; 2],
}

/// The bytes that this rank sends in a round.
pub(super) struct OutgoingChunks<'a> {
    shared: SharedRound<'a>,
    send: &'a [u8],
    published: &'a mut PublishedChunks,
    /// The different ranges of `send` that ranks read. All are cut into chunks of one size. The
    /// chunks with the same number lie side by side in a window.
    places: Vec<Range<usize>>,
    /// The other ranks that read, each with its number of bytes.
    readers: Vec<(usize, usize)>,
    /// The size of a chunk.
    chunk_bytes: usize,
    /// The bytes of each place that have been sent.
    sent_bytes: usize,
}

impl<'a> OutgoingChunks<'a> {
    /// Cuts the bytes into chunks, and tells each reader where its chunks will be.
    pub(super) fn new(
        shared: SharedRound<'a>,
        sent_ranges: &[Range<usize>],
        send: &'a [u8],
        published: &'a mut PublishedChunks,
    ) -> Self {
        let segment = shared.own();
        let own_rank = shared.member.rank;
        // Ranks that read the same range share its chunks.
        let mut places: Vec<Range<usize>> = Vec::new();
        for range in sent_ranges.iter().filter(|range| !range.is_empty()) {
            if !places.contains(range) {
                places.push(range.clone());
            }
        }
        // A window is divided equally among the places.
        let chunk_bytes = (WINDOW_BYTES / places.len().max(1) / ALIGNMENT_BYTES * ALIGNMENT_BYTES)
            .max(ALIGNMENT_BYTES);
        for (reader, range) in sent_ranges.iter().enumerate() {
            if let Some(place) = places.iter().position(|place| place == range) {
                let words = [
                    (ReaderWord::First, published.chunks),
                    (ReaderWord::Offset, (place * chunk_bytes) as u64),
                    (ReaderWord::Size, chunk_bytes as u64),
                ];
                for (word, value) in words {
                    segment
                        .reader_word(reader, word)
                        .store(value, Ordering::Relaxed);
                }
            }
        }
        let readers = sent_ranges
            .iter()
            .map(ExactSizeIterator::len)
            .enumerate()
            .filter(|&(reader, len)| reader != own_rank && len > 0)
            .collect();
        // Readers look at their words only after this store.
        segment
            .word(Word::Planned)
            .store(shared.round.number + 1, Ordering::Release);
        segment.notify(Notification::Readers);
        // A place that only this rank reads is never written. But it counted above, because the
        // size of a chunk must be the same on all ranks.
        for place in &mut places {
            let is_read_by_others = sent_ranges
                .iter()
                .enumerate()
                .any(|(reader, range)| reader != own_rank && *range == *place);
            if !is_read_by_others {
                *place = 0..0;
            }
        }
        OutgoingChunks {
            shared,
            send,
            published,
            places,
            readers,
            chunk_bytes,
            sent_bytes: 0,
        }
    }

    /// Returns `true` if all chunks are published.
    pub(super) fn is_over(&self) -> bool {
        self.places
            .iter()
            .all(|place| place.len() <= self.sent_bytes)
    }

    /// Waits until the window is free, and publishes the next chunk of every place. Does nothing if
    /// all are published.
    pub(super) fn publish(&mut self) -> Result<(), CommError> {
        if self.is_over() {
            return Ok(());
        }
        let shared = self.shared;
        let segment = shared.own();
        // Step 1: wait until the window of this chunk is free.
        let chunk_number = self.published.chunks;
        let window = (chunk_number % 2) as usize;
        for &reader in &self.published.readers[window] {
            // Chunk `chunk_number - 2` lies in this window. Its readers must have consumed it.
            let consumed = segment.reader_word(reader, ReaderWord::Consumed);
            shared.wait(
                segment,
                Notification::Owner,
                || consumed.load(Ordering::Acquire) + 1 >= chunk_number,
                || vec![shared.member.ranks[reader]],
            )?;
        }
        // Step 2: nobody reads the window now, so write the next chunk of every place.
        for (index, place) in self.places.iter().enumerate() {
            let start = (place.start + self.sent_bytes).min(place.end);
            let end = (start + self.chunk_bytes).min(place.end);
            if start < end {
                segment.write_window(window, index * self.chunk_bytes, &self.send[start..end]);
            }
        }
        // Step 3: record who reads this chunk, and publish it.
        self.published.readers[window] = self
            .readers
            .iter()
            .filter(|(_, len)| *len > self.sent_bytes)
            .map(|&(reader, _)| reader)
            .collect();
        // From this store on, readers read the window.
        self.published.chunks += 1;
        segment
            .word(Word::Published)
            .store(self.published.chunks, Ordering::Release);
        segment.notify(Notification::Readers);
        self.sent_bytes += self.chunk_bytes;
        Ok(())
    }
}

/// The bytes that this rank reads from another in a round.
pub(super) struct IncomingChunks<'a> {
    shared: SharedRound<'a>,
    /// The rank that sends them.
    pub(super) sender: usize,
    /// The bytes that are still to come.
    remaining_len: usize,
    /// `None` until the sender has told where the chunks lie.
    place: Option<ChunkPlace>,
}

/// The place of this rank's chunks in a segment.
#[derive(Clone, Copy)]
struct ChunkPlace {
    /// The number of the next chunk, which tells in which window it lies.
    next_chunk: u64,
    /// The offset of each chunk in its window.
    offset: usize,
    /// The size of each chunk but the last.
    chunk_bytes: usize,
}

impl<'a> IncomingChunks<'a> {
    /// Prepares to read `len` bytes of the rank `sender`, without a wait.
    pub(super) fn new(shared: SharedRound<'a>, sender: usize, len: usize) -> Self {
        IncomingChunks {
            shared,
            sender,
            remaining_len: len,
            place: None,
        }
    }

    /// Returns `true` if all bytes have been consumed.
    pub(super) fn is_over(&self) -> bool {
        self.remaining_len == 0
    }

    /// Waits for the next chunk, and returns it. It stays in place until
    /// [`release_chunk`](Self::release_chunk) is called.
    pub(super) fn wait_for_chunk(&mut self) -> Result<&'a [u8], CommError> {
        let ChunkPlace {
            next_chunk,
            offset,
            chunk_bytes,
        } = self.wait_for_place()?;
        self.wait(|segment| segment.word(Word::Published).load(Ordering::Acquire) > next_chunk)?;
        let len = chunk_bytes.min(self.remaining_len);
        let chunk = self
            .segment()
            .window((next_chunk % 2) as usize, offset, len);
        if chunk.len() == len {
            return Ok(chunk);
        }
        // Offset and size come from another process, and need not lie in the window.
        let SharedRound { member, round, .. } = self.shared;
        let reason = format!("published {len} bytes at {offset} of a window that has not so many");
        Err(round.rank_left_error(member.ranks[self.sender], reason))
    }

    /// Tells the sender that this rank is done with the chunk, so that its window can be written
    /// again.
    pub(super) fn release_chunk(&mut self) {
        let place = self.place.as_mut().expect("a chunk has been read");
        place.next_chunk += 1;
        self.remaining_len = self.remaining_len.saturating_sub(place.chunk_bytes);
        let segment = &self.shared.segments[self.sender];
        segment
            .reader_word(self.shared.member.rank, ReaderWord::Consumed)
            .store(place.next_chunk, Ordering::Release);
        segment.notify(Notification::Owner);
    }

    /// Returns the segment of the sender.
    fn segment(&self) -> &'a Segment {
        &self.shared.segments[self.sender]
    }

    /// Returns where this rank's chunks lie. At first this waits until the sender has written that.
    fn wait_for_place(&mut self) -> Result<ChunkPlace, CommError> {
        if let Some(place) = self.place {
            return Ok(place);
        }
        let SharedRound { member, round, .. } = self.shared;
        let planned_rounds = round.number + 1;
        self.wait(|segment| segment.word(Word::Planned).load(Ordering::Acquire) >= planned_rounds)?;
        let [number, offset, size] =
            [ReaderWord::First, ReaderWord::Offset, ReaderWord::Size].map(|word| {
                self.segment()
                    .reader_word(member.rank, word)
                    .load(Ordering::Relaxed)
            });
        let place = ChunkPlace {
            next_chunk: number,
            offset: offset as usize,
            // A chunk without bytes would never end.
            chunk_bytes: size.max(1) as usize,
        };
        self.place = Some(place);
        Ok(place)
    }

    /// Waits until the sender has made a change of its segment after which `is_ready` is true.
    fn wait(&self, is_ready: impl Fn(&Segment) -> bool) -> Result<(), CommError> {
        let segment = self.segment();
        self.shared.wait(
            segment,
            Notification::Readers,
            || is_ready(segment),
            || vec![self.shared.member.ranks[self.sender]],
        )
    }
}
