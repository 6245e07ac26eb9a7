//! Records that are compressed with DEFLATE, read by position.
//!
//! Such a record can only be read from its beginning. So that reads one after the other do not each
//! begin there, the state of the last ones is kept: a read that goes on where one has ended costs
//! what it reads.
//!
//! A read of a record's last bytes has decompressed all of them, so it compares their checksum too.

use std::sync::{Arc, Mutex};

use crc32fast::Hasher;
use miniz_oxide::inflate::TINFLStatus;

use super::decoder::Decoder;
use super::read::check_crc;
use super::{Record, Result};
use crate::error::FormatError;
use crate::storage::read_at::{ReadAt, end_within};
use crate::threads::lock;

/// The bytes of input that are read at once.
const INPUT_BYTES: u64 = 64 << 10;
/// The bytes of output that are skipped at once.
const SKIPPED_BYTES: u64 = 64 << 10;
/// The most reads of an archive whose state is kept.
const MAX_STATES: usize = 16;

/// A compressed record.
#[derive(Debug, Clone)]
pub(crate) struct Deflated {
    /// The first byte of what is stored.
    stored_start: u64,
    /// The bytes that are stored.
    stored_bytes: u64,
    /// The bytes that they become.
    output_bytes: u64,
    /// The checksum of these, as the directory claims.
    crc: u32,
    states: ReadStates,
}

/// The states of an archive's last reads.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReadStates(Arc<Mutex<Vec<ReadState>>>);

/// The state of a read that is under way, or has ended.
struct ReadState {
    /// The record, by where it starts.
    record_start: u64,
    /// The position in what the record becomes.
    output_position: u64,
    /// The checksum of all bytes before that position.
    crc: Hasher,
    /// The bytes of input that were used up.
    used_input: u64,
    decoder: Decoder,
    /// Input that was read already, of which the first `consumed` bytes were used up.
    input: Vec<u8>,
    consumed: usize,
}

impl std::fmt::Debug for ReadState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadState")
            .field("record", &self.record_start)
            .field("at", &self.output_position)
            .finish_non_exhaustive()
    }
}

impl ReadStates {
    /// Takes out the state of the read that has ended closest before a position of a record; `None`
    /// if there is none.
    fn take(&self, record_start: u64, position: u64) -> Option<ReadState> {
        let mut states = lock(&self.0);
        let earlier = states.iter().enumerate().filter(|(_, state)| {
            state.record_start == record_start && state.output_position <= position
        });
        let (index, _) = earlier.max_by_key(|(_, state)| state.output_position)?;
        Some(states.remove(index))
    }

    /// Inserts a state, in place of the oldest one if there are many.
    fn insert(&self, state: ReadState) {
        let mut states = lock(&self.0);
        if states.len() >= MAX_STATES {
            states.remove(0);
        }
        states.push(state);
    }
}

impl Deflated {
    /// Describes a record whose stored bytes begin at `start` in the file.
    pub(crate) fn new(stored_start: u64, record: &Record, states: &ReadStates) -> Self {
        Deflated {
            stored_start,
            stored_bytes: record.stored_bytes,
            output_bytes: record.length,
            crc: record.crc,
            states: states.clone(),
        }
    }

    /// Returns where the stored bytes begin in the file, and how many they are.
    pub(crate) fn stored_range(&self) -> (u64, u64) {
        (self.stored_start, self.stored_bytes)
    }

    /// Returns a reader of the bytes that the record in this file becomes.
    pub(crate) fn reader<'f>(&'f self, file: &'f dyn ReadAt) -> Inflated<'f> {
        Inflated {
            file,
            record: self,
            current: Mutex::default(),
        }
    }
}

/// The bytes that a compressed record becomes.
pub(crate) struct Inflated<'f> {
    file: &'f dyn ReadAt,
    record: &'f Deflated,
    /// The read that continues with the next bytes.
    current: Mutex<Option<ReadState>>,
}

/// Makes the error of a record that cannot be decompressed.
fn malformed(reason: &str) -> FormatError {
    FormatError::malformed("compressed record", reason)
}

impl Inflated<'_> {
    /// Returns the state of a read that stands at or before a position: that of an earlier read, or
    /// else of one from the beginning.
    fn start_reading(&self, position: u64) -> ReadState {
        let record_start = self.record.stored_start;
        match self.record.states.take(record_start, position) {
            Some(state) => state,
            None => ReadState {
                record_start,
                output_position: 0,
                crc: Hasher::new(),
                used_input: 0,
                decoder: Decoder::new(),
                input: Vec::new(),
                consumed: 0,
            },
        }
    }

    /// Reads the next compressed bytes into `reading.input`, up to the end of the hashed block,
    /// because checking its hash takes the whole block anyway. At the end of the record there are
    /// none.
    fn read_input(&self, reading: &mut ReadState) -> Result<()> {
        let file_offset = self.record.stored_start + reading.used_input;
        let bytes_left = self.record.stored_bytes - reading.used_input;
        reading.consumed = 0;
        if bytes_left == 0 {
            reading.input.clear();
            return Ok(());
        }
        let block_bytes = self
            .file
            .block_at(file_offset)
            .map_or(INPUT_BYTES, |block| block.end - file_offset);
        reading
            .input
            .resize(bytes_left.min(block_bytes) as usize, 0);
        self.file.read_exact_at(file_offset, &mut reading.input)
    }

    /// Decodes more of the record, once all that was decoded has been taken. Returns `false` if the
    /// stream has ended. A stream that is damaged or cut short is an error.
    fn decode_more(&self, reading: &mut ReadState) -> Result<bool> {
        if reading.consumed == reading.input.len() {
            self.read_input(reading)?;
        }
        let input = &reading.input[reading.consumed..];
        let (used, status) = reading.decoder.decode(input);
        reading.consumed += used;
        reading.used_input += used as u64;
        // These bytes were decoded before a defect, if there is one, so they are handed out first.
        if reading.decoder.has_waiting() {
            return Ok(true);
        }
        match status {
            TINFLStatus::Done => Ok(false),
            TINFLStatus::NeedsMoreInput | TINFLStatus::HasMoreOutput if used > 0 => Ok(true),
            TINFLStatus::NeedsMoreInput if reading.used_input == self.record.stored_bytes => {
                Err(malformed("its DEFLATE stream is cut short"))
            }
            _ => Err(malformed("it is no DEFLATE stream")),
        }
    }

    /// Fills `dst` with the next bytes. A stream that is damaged, or ends before `dst` is full, is
    /// an error.
    fn read_next(&self, reading: &mut ReadState, dst: &mut [u8]) -> Result<()> {
        let mut filled = 0;
        loop {
            let count = reading.decoder.take(&mut dst[filled..]);
            reading.crc.update(&dst[filled..filled + count]);
            reading.output_position += count as u64;
            filled += count;
            if filled == dst.len() {
                return Ok(());
            }
            if !self.decode_more(reading)? {
                return Err(malformed("it becomes fewer bytes than it says"));
            }
        }
    }

    /// Checks, after all bytes of the record were read, that its stream ends there, and that the
    /// bytes have their checksum.
    fn check_end(&self, reading: &mut ReadState) -> Result<()> {
        loop {
            if reading.decoder.has_waiting() {
                return Err(malformed("it becomes more bytes than it says"));
            }
            if !self.decode_more(reading)? {
                return check_crc(self.record.crc, reading.crc.clone().finalize());
            }
        }
    }

    /// Fills `dst` with the bytes from `offset`, with a read that stands at or before it. If these
    /// are the last bytes of the record, all of the record is checked.
    fn fill(&self, reading: &mut ReadState, offset: u64, dst: &mut [u8]) -> Result<()> {
        let mut skipped = Vec::new();
        while reading.output_position < offset {
            skipped.resize(
                (offset - reading.output_position).min(SKIPPED_BYTES) as usize,
                0,
            );
            self.read_next(reading, &mut skipped)?;
        }
        self.read_next(reading, dst)?;
        if reading.output_position == self.record.output_bytes {
            self.check_end(reading)?;
        }
        Ok(())
    }
}

impl ReadAt for Inflated<'_> {
    fn len(&self) -> u64 {
        self.record.output_bytes
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<()> {
        end_within(self.record.output_bytes, offset, dst.len() as u64)?;
        if dst.is_empty() {
            return Ok(());
        }
        let mut current = lock(&self.current);
        let earlier = current
            .take()
            .filter(|reading| reading.output_position <= offset);
        let mut reading = earlier.unwrap_or_else(|| self.start_reading(offset));
        self.fill(&mut reading, offset, dst)?;
        *current = Some(reading);
        Ok(())
    }
}

impl Drop for Inflated<'_> {
    /// Keeps the state of the read, unless that is at the end: a later read goes on from it.
    fn drop(&mut self) {
        let current = lock(&self.current).take();
        if let Some(mut state) =
            current.filter(|state| state.output_position < self.record.output_bytes)
        {
            // A state that is kept must not take much memory.
            state.input = Vec::new();
            state.consumed = 0;
            self.record.states.insert(state);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns a file with these bytes in a compressed record, and the record.
    fn deflated(bytes: &[u8]) -> (Vec<u8>, Deflated) {
        let mut file = vec![0xee; 7];
        file.extend(miniz_oxide::deflate::compress_to_vec(bytes, 6));
        let stored_bytes = file.len() as u64 - 7;
        file.extend([0xee; 9]);
        (
            file,
            Deflated {
                stored_start: 7,
                stored_bytes,
                output_bytes: bytes.len() as u64,
                crc: crc32fast::hash(bytes),
                states: ReadStates::default(),
            },
        )
    }

    proptest! {
        #[test]
        fn any_part_is_read_in_any_order(
            runs in prop::collection::vec((any::<u8>(), 1usize..5000), 1..60),
            parts in prop::collection::vec((0.0..1.0, 0.0..1.0), 1..20),
        ) {
            let bytes: Vec<u8> = runs.iter().flat_map(|&(byte, count)| {
                (0..count).map(move |index| byte.wrapping_add((index * index / 7) as u8))
            }).collect();
            let (file, record) = deflated(&bytes);
            // Each part by itself, and all with one reader.
            let reader = record.reader(&file);
            for (start, length) in parts {
                let start = (start * bytes.len() as f64) as usize;
                let length = (length * (bytes.len() - start) as f64) as usize;
                let mut dst = vec![0; length];
                record.reader(&file).read_exact_at(start as u64, &mut dst).unwrap();
                prop_assert_eq!(&dst, &bytes[start..start + length]);
                dst.fill(0);
                reader.read_exact_at(start as u64, &mut dst).unwrap();
                prop_assert_eq!(&dst, &bytes[start..start + length]);
            }
        }
    }

    #[test]
    fn a_record_that_becomes_less_or_is_cut_or_is_noise_is_an_error() {
        let bytes: Vec<u8> = (0..200_000u32)
            .flat_map(|index| index.wrapping_mul(index).to_le_bytes())
            .collect();
        let (file, record) = deflated(&bytes);
        let mut dst = vec![0; bytes.len() + 1];
        let longer = Deflated {
            output_bytes: record.output_bytes + 1,
            ..record.clone()
        };
        longer.reader(&file).read_exact_at(0, &mut dst).unwrap_err();
        dst.pop();
        let cut = Deflated {
            stored_bytes: record.stored_bytes / 2,
            ..record.clone()
        };
        cut.reader(&file).read_exact_at(0, &mut dst).unwrap_err();
        let noise = Deflated {
            stored_start: 0,
            ..record.clone()
        };
        noise.reader(&file).read_exact_at(0, &mut dst).unwrap_err();
        assert!(
            record.reader(&file).read_exact_at(1, &mut dst).is_err(),
            "beyond the end"
        );
        record.reader(&file).read_exact_at(0, &mut dst).unwrap();
        assert!(dst == bytes);
    }

    /// Returns what is wrong with a record in a file, if all of it is read in two parts.
    fn defect(file: &[u8], record: &Deflated) -> Option<String> {
        let mut dst = vec![0; record.output_bytes as usize];
        let (first, second) = dst.split_at_mut(record.output_bytes as usize / 2);
        let reader = record.reader(&file);
        let outcome = reader
            .read_exact_at(0, first)
            .and_then(|()| reader.read_exact_at(first.len() as u64, second));
        outcome.err().map(|error| error.to_string())
    }

    #[test]
    fn all_bytes_of_a_record_have_its_checksum() {
        let bytes: Vec<u8> = (0..50_000u32)
            .flat_map(|index| (index % 977).to_le_bytes())
            .collect();
        let (file, mut record) = deflated(&bytes);
        assert_eq!(defect(&file, &record), None);
        record.crc ^= 1;
        let found = defect(&file, &record).unwrap();
        assert!(found.contains("CRC-32"), "{found}");
        // The end is not reached, so nothing is known of the checksum.
        let mut dst = vec![0; bytes.len() - 1];
        record.reader(&file).read_exact_at(0, &mut dst).unwrap();
        // Nor does a read that goes on from there miss what came before.
        let end = bytes.len() as u64 - 1;
        let last = record.reader(&file).read_exact_at(end, &mut [0]);
        assert!(last.is_err());
        // A checksum of 0 says nothing.
        record.crc = 0;
        assert_eq!(defect(&file, &record), None);
    }

    #[test]
    fn a_stream_that_ends_before_its_record_or_after_it_is_an_error() {
        let bytes: Vec<u8> = (0..500u32).flat_map(u32::to_le_bytes).collect();
        let (file, record) = deflated(&bytes);
        assert_eq!(defect(&file, &record), None);
        for stored_bytes in 0..record.stored_bytes {
            let cut = Deflated {
                stored_bytes,
                ..record.clone()
            };
            let found = defect(&file, &cut).unwrap();
            assert!(found.contains("cut short"), "{stored_bytes}: {found}");
        }
        let shorter = Deflated {
            output_bytes: record.output_bytes - 1,
            ..record.clone()
        };
        let found = defect(&file, &shorter).unwrap();
        assert!(found.contains("more bytes"), "{found}");
    }

    #[test]
    fn a_changed_bit_of_a_stream_is_found_or_changes_nothing() {
        let bytes: Vec<u8> = (0..300u32)
            .flat_map(|index| (index * index).to_le_bytes())
            .collect();
        let (file, record) = deflated(&bytes);
        let mut found_count = 0;
        for bit in 0..record.stored_bytes as usize * 8 {
            let mut changed = file.clone();
            changed[7 + bit / 8] ^= 1 << (bit % 8);
            if defect(&changed, &record).is_some() {
                found_count += 1;
                continue;
            }
            let mut dst = vec![0; bytes.len()];
            record.reader(&changed).read_exact_at(0, &mut dst).unwrap();
            assert!(dst == bytes, "bit {bit}");
        }
        // The bits after the end of the stream mean nothing, and a repetition may come from another
        // place with the same bytes.
        assert!(found_count > record.stored_bytes as usize * 4);
    }
}
