//! Records that are stored as they are, whose checksum is compared once all of their bytes were
//! read.
//!
//! The bytes may come in any order, and from several threads. Each read adds the checksum of those
//! bytes that no other had read before, and the one after which none is missing compares. So a
//! record that is read in part is not checked. Only a conversion reads the rest of one of which at
//! least half was read.

use std::ops::Range;
use std::sync::{Mutex, OnceLock};

use crc32fast::Hasher;

use super::read::check_crc;
use super::{Directory, Record, Result};
use crate::storage::read_at::ReadAt;
use crate::threads::lock;

/// The most parts of a record of which checksums are kept. Reads that leave more gaps than that
/// between them take columns out of a large array; the array is not checked then.
const MAX_PARTS: usize = 1024;

/// An archive of stored records, and how much of their checksums is known.
#[derive(Debug)]
pub(crate) struct StoredRecords {
    pub(crate) directory: Directory,
    /// By the position in the directory; each is filled when the record is first read.
    records: Vec<OnceLock<Stored>>,
}

impl StoredRecords {
    /// Describes the records of an archive.
    pub(crate) fn new(directory: Directory) -> Self {
        let records = directory.records.iter().map(|_| OnceLock::new()).collect();
        StoredRecords { directory, records }
    }

    /// Returns the record at a position in the directory, after checking its local header.
    pub(crate) fn get(&self, file: &dyn ReadAt, index: usize) -> Result<&Stored> {
        if let Some(record) = self.records[index].get() {
            return Ok(record);
        }
        let start = self.directory.data_offset_at(file, index)?;
        let record = || Stored::new(start, &self.directory.records[index]);
        Ok(self.records[index].get_or_init(record))
    }

    /// Returns the record at a position in the directory, if it was read.
    pub(crate) fn if_read(&self, index: usize) -> Option<&Stored> {
        self.records[index].get()
    }
}

/// A stored record, and how much of its checksum is known.
#[derive(Debug)]
pub(crate) struct Stored {
    /// The place of its data in the file.
    range: Range<u64>,
    /// The checksum of its data, as the directory claims.
    crc: u32,
    progress: Mutex<Progress>,
}

/// The knowledge of a record's checksum.
#[derive(Debug)]
enum Progress {
    /// The parts that were read so far, in their order. They have no byte in common.
    Parts(Vec<Part>),
    /// The checksum of all bytes.
    Whole(u32),
    /// There were too many parts.
    GivenUp,
}

/// A part of a record that was read.
#[derive(Debug)]
struct Part {
    /// Its place in the file.
    range: Range<u64>,
    /// Its checksum; `None` while the thread that has read it computes that.
    crc: Option<Hasher>,
}

impl Stored {
    /// Describes a record whose data begins at `start` in the file.
    pub(crate) fn new(start: u64, record: &Record) -> Self {
        Stored {
            range: start..start + record.length,
            crc: record.crc,
            progress: Mutex::new(Progress::Parts(Vec::new())),
        }
    }

    /// Returns where its data begins in the file.
    pub(crate) const fn start(&self) -> u64 {
        self.range.start
    }

    /// Reads the bytes that were not read yet, so that the checksum is compared, if they are the
    /// smaller part: a storage may be longer than the tensor in it.
    pub(crate) fn read_rest(&self, file: &dyn ReadAt) -> Result<()> {
        /// The bytes that are read at once.
        const PIECE_BYTES: u64 = 1 << 20;
        let gaps = match &*lock(&self.progress) {
            Progress::Parts(parts) => find_gaps(parts, &self.range),
            Progress::Whole(_) | Progress::GivenUp => return Ok(()),
        };
        let missing_bytes: u64 = gaps.iter().map(|gap| gap.end - gap.start).sum();
        if missing_bytes > (self.range.end - self.range.start) / 2 {
            return Ok(());
        }
        let mut buffer = Vec::new();
        for gap in gaps {
            for start in gap.clone().step_by(PIECE_BYTES as usize) {
                buffer.resize(PIECE_BYTES.min(gap.end - start) as usize, 0);
                self.reader(file).read_exact_at(start, &mut buffer)?;
            }
        }
        Ok(())
    }

    /// Returns a reader of this file that takes note of what is read of the record. Its positions
    /// are those of the file.
    pub(crate) fn reader<'f>(&'f self, file: &'f dyn ReadAt) -> StoredReader<'f> {
        StoredReader { file, record: self }
    }

    /// Adds bytes that were read at an offset of the file. If none of the record is missing then,
    /// and it does not have its checksum, that is an error; so it is for all later reads.
    fn add(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        // A read may reach beyond the record: hashed blocks do.
        let start = self.range.start.max(offset);
        let end = self.range.end.min(offset + bytes.len() as u64);
        if start >= end {
            return Ok(());
        }
        for part in self.claim(start..end)? {
            let mut crc = Hasher::new();
            crc.update(&bytes[(part.start - offset) as usize..(part.end - offset) as usize]);
            self.complete(&part, crc)?;
        }
        Ok(())
    }

    /// Returns the parts of a range that no other read has claimed, and claims them. The caller
    /// must [complete](Self::complete) each.
    fn claim(&self, range: Range<u64>) -> Result<Vec<Range<u64>>> {
        let mut progress = lock(&self.progress);
        let parts = match &mut *progress {
            Progress::Parts(parts) => parts,
            Progress::Whole(crc) => {
                check_crc(self.crc, *crc)?;
                return Ok(Vec::new());
            }
            Progress::GivenUp => return Ok(Vec::new()),
        };
        let gaps = find_gaps(parts, &range);
        if parts.len() + gaps.len() > MAX_PARTS {
            *progress = Progress::GivenUp;
            return Ok(Vec::new());
        }
        for gap in &gaps {
            let index = parts.partition_point(|part| part.range.start < gap.start);
            let part = Part {
                range: gap.clone(),
                crc: None,
            };
            parts.insert(index, part);
        }
        Ok(gaps)
    }

    /// Adds the checksum of a part that was claimed. The one that completes the record compares the
    /// checksum of the whole.
    fn complete(&self, claimed: &Range<u64>, crc: Hasher) -> Result<()> {
        let mut progress = lock(&self.progress);
        let Progress::Parts(parts) = &mut *progress else {
            // Another read has left too many gaps meanwhile.
            return Ok(());
        };
        let index = parts.partition_point(|part| part.range.start < claimed.start);
        parts[index].crc = Some(crc);
        join_with_next(parts, index);
        if let Some(before) = index.checked_sub(1) {
            join_with_next(parts, before);
        }
        let whole = parts.first().filter(|part| part.range == self.range);
        let Some(crc) = whole.and_then(|part| part.crc.clone()) else {
            return Ok(());
        };
        let crc = crc.finalize();
        *progress = Progress::Whole(crc);
        check_crc(self.crc, crc)
    }
}

/// Returns the ranges within a range that lie in none of some parts, which are in order.
fn find_gaps(parts: &[Part], range: &Range<u64>) -> Vec<Range<u64>> {
    let mut gaps = Vec::new();
    let mut position = range.start;
    let first = parts.partition_point(|part| part.range.end <= range.start);
    for part in &parts[first..] {
        if part.range.start >= range.end {
            break;
        }
        if position < part.range.start {
            gaps.push(position..part.range.start);
        }
        position = part.range.end;
    }
    if position < range.end {
        gaps.push(position..range.end);
    }
    gaps
}

/// Makes one part of the one at an index and the next one, if there is no gap between them and the
/// checksums of both are known.
fn join_with_next(parts: &mut Vec<Part>, index: usize) {
    if let Some([part, next]) = parts.get_mut(index..index + 2)
        && part.range.end == next.range.start
        && let (Some(crc), Some(next_crc)) = (&mut part.crc, &next.crc)
    {
        crc.combine(next_crc);
        part.range.end = next.range.end;
        parts.remove(index + 1);
    }
}

/// A reader of a file that takes note of what is read of a record.
pub(crate) struct StoredReader<'f> {
    file: &'f dyn ReadAt,
    record: &'f Stored,
}

impl ReadAt for StoredReader<'_> {
    fn len(&self) -> u64 {
        self.file.len()
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(offset, dst)?;
        self.record.add(offset, dst)
    }

    fn read_in_pieces(
        &self,
        offset: u64,
        dst: &mut [u8],
        visit: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        self.file.read_in_pieces(offset, dst, visit)?;
        self.record.add(offset, dst)
    }

    fn find_hole(&self, offset: u64) -> Option<u64> {
        self.file.find_hole(offset)
    }

    fn block_at(&self, offset: u64) -> Option<Range<u64>> {
        self.file.block_at(offset)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    /// The bytes of a file before its record, and after it.
    const AROUND: usize = 7;

    /// Returns a file with a record of so many bytes, and the record.
    fn stored_record(length: usize) -> (Vec<u8>, Stored) {
        let bytes: Vec<u8> = (0..length).map(|index| (index * index / 7) as u8).collect();
        let record = Stored {
            range: AROUND as u64..(AROUND + length) as u64,
            crc: crc32fast::hash(&bytes),
            progress: Mutex::new(Progress::Parts(Vec::new())),
        };
        let around = [0xee; AROUND];
        ([&around[..], &bytes[..], &around[..]].concat(), record)
    }

    /// Reads a range of a file, and returns `true` if that succeeds.
    fn is_read(reader: &StoredReader<'_>, range: Range<usize>) -> bool {
        let mut dst = vec![0; range.len()];
        reader.read_exact_at(range.start as u64, &mut dst).is_ok()
    }

    proptest! {
        #[test]
        fn a_changed_byte_is_found_when_the_last_byte_of_the_record_was_read(
            length in 1usize..3000,
            changed in any::<Index>(),
            ranges in prop::collection::vec((any::<Index>(), any::<Index>()), 0..30),
        ) {
            let (mut file, record) = stored_record(length);
            let (_, sound_record) = stored_record(length);
            let sound_file = file.clone();
            file[AROUND + changed.index(length)] ^= 4;
            let reader = record.reader(&file);
            let sound_reader = sound_record.reader(&sound_file);
            let mut was_read = vec![false; file.len()];
            let ranges = ranges.iter().map(|(a, b)| {
                let (a, b) = (a.index(file.len()), b.index(file.len()));
                a.min(b)..a.max(b) + 1
            });
            for range in ranges.chain([0..file.len(), AROUND..AROUND + 1]) {
                was_read[range.clone()].fill(true);
                let is_complete = was_read[AROUND..AROUND + length].iter().all(|&was| was);
                // Beside the record nothing is checked.
                let is_beside = range.end <= AROUND || range.start >= AROUND + length;
                prop_assert!(is_read(&sound_reader, range.clone()), "{:?}", range);
                prop_assert_eq!(
                    is_read(&reader, range.clone()),
                    !is_complete || is_beside,
                    "{:?}", range
                );
            }
        }
    }

    #[test]
    fn threads_that_read_the_same_bytes_at_once_find_a_changed_one() {
        let (mut file, record) = stored_record(100_000);
        file[AROUND + 1234] ^= 1;
        let reader = record.reader(&file);
        let failed_count: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|thread| {
                    let reader = &reader;
                    scope.spawn(move || {
                        // Each begins elsewhere, and reads all of the record in pieces.
                        let starts = (0..100).map(|piece| (piece + 25 * thread) % 100 * 1000);
                        let reads = starts.map(|start| AROUND + start..AROUND + start + 1000);
                        reads
                            .filter(|range| !is_read(reader, range.clone()))
                            .count()
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("reading does not panic"))
                .sum()
        });
        assert!(failed_count > 0);
        assert!(!is_read(&reader, AROUND..AROUND + 1));
    }

    #[test]
    fn a_claim_of_0_says_nothing() {
        let (file, record) = stored_record(100);
        let unclaimed = Stored { crc: 0, ..record };
        assert!(is_read(&unclaimed.reader(&file), 0..file.len()));
    }

    #[test]
    fn reads_that_leave_very_many_gaps_take_no_memory() {
        let (mut file, record) = stored_record(4 * MAX_PARTS);
        file[AROUND] ^= 1;
        let reader = record.reader(&file);
        for part in 0..2 * MAX_PARTS {
            assert!(is_read(&reader, AROUND + 2 * part..AROUND + 2 * part + 1));
        }
        assert!(matches!(*lock(&record.progress), Progress::GivenUp));
        // The changed byte is not noticed, because no checksum is kept any more.
        assert!(is_read(&reader, 0..file.len()));
    }
}
