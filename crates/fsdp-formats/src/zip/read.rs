//! Reads the directory of a torch archive, without reading its storages.

use indexmap::IndexMap;

use super::{
    DIRECTORY_ENTRY, END, IN_ZIP64, LOCAL_HEADER, LOCAL_HEADER_BYTES, Result, ZIP64_END,
    ZIP64_EXTRA, ZIP64_LOCATOR,
};
use crate::budget::Budget;
use crate::error::FormatError;
use crate::limits::{MAX_OBJECT_BYTES, MAX_ZIP_DIRECTORY_BYTES, check_limit};
use crate::storage::read_at::{ReadAt, read_whole};

/// The records of an archive, by their name below its root.
#[derive(Debug, Clone)]
pub struct Directory {
    /// The one root directory, e.g. `archive`; empty if there is none.
    pub root: String,
    /// The records, in the order of the directory.
    pub records: IndexMap<String, Record>,
}

/// One stored record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// The start of its local header.
    pub header_offset: u64,
    /// Bytes of its data.
    pub length: u64,
    /// Bytes that it takes in the archive: fewer than its data, where that is compressed.
    pub stored_bytes: u64,
    /// `true` if it is compressed with DEFLATE. Only an archive [without a
    /// root](Directory::read_rootless) has such records.
    pub is_deflated: bool,
    /// CRC-32 of its data, as the directory claims. Some writers leave it 0.
    pub crc: u32,
    name_length: u16,
}

/// The end record without a comment: what all known writers leave.
const END_LENGTH: u64 = 22;
/// The length of the zip64 end record with its locator, which torch writes before each end record.
const ZIP64_LENGTH: u64 = 56 + 20;
/// The farthest from the end that these records may start: with the longest comment.
const LONGEST_END: u64 = ZIP64_LENGTH + END_LENGTH + u16::MAX as u64;

/// The method of a record that is stored as it is.
const STORED: u16 = 0;
/// The method of one that is compressed with DEFLATE.
const DEFLATED: u16 = 8;
/// The numbers of methods that are not read, and their names. Programs for zip archives know them.
const OTHER_METHODS: [(u16, &str); 3] = [(12, "bzip2"), (14, "LZMA"), (93, "Zstandard")];
/// The most bytes that DEFLATE makes of one.
const MAX_DEFLATION: u64 = 1032;

/// Makes the error of an archive that has a defect at this offset.
fn malformed(offset: u64, what: &'static str) -> FormatError {
    FormatError::Archive { offset, what }
}

/// Returns the `N` bytes at a position. The caller has checked that they are there.
fn array_at<const N: usize>(bytes: &[u8], position: usize) -> [u8; N] {
    *bytes[position..]
        .first_chunk()
        .expect("the length was checked before")
}

/// Returns the number of 16 bits at a position, little-endian as all numbers of an archive.
fn u16_at(bytes: &[u8], position: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, position))
}

fn u32_at(bytes: &[u8], position: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, position))
}

fn u64_at(bytes: &[u8], position: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, position))
}

/// Checks the CRC-32 of a record's data against the one that the directory claims. A claim of 0
/// says nothing: some writers leave it so, and torch accepts that.
pub(super) fn check_crc(claimed: u32, crc: u32) -> Result<()> {
    if claimed != 0 && claimed != crc {
        let reason = "its bytes are not those that were written: their CRC-32 differs";
        return Err(FormatError::malformed("record", reason));
    }
    Ok(())
}

/// Returns `true` if the size in a header is this length, or if the header says that the size is in
/// a zip64 field.
fn is_length(size: u32, length: u64) -> bool {
    size == IN_ZIP64 || u64::from(size) == length
}

impl Directory {
    /// Reads the directory of the archive that is all of `source`. Records that do not all lie
    /// below one root are an error.
    pub fn read(source: &dyn ReadAt) -> Result<Self> {
        let mut root: Option<String> = None;
        let records = read_records(source, false, &mut |name, entry_offset| {
            let (top_name, path_below) = name.split_once('/').ok_or_else(|| {
                malformed(entry_offset, "a record lies outside the root directory")
            })?;
            if *root.get_or_insert_with(|| top_name.to_owned()) != top_name {
                return Err(malformed(
                    entry_offset,
                    "the archive has several root directories",
                ));
            }
            Ok(path_below.to_owned())
        })?;
        Ok(Directory {
            // An archive without records has no root.
            root: root.unwrap_or_default(),
            records,
        })
    }

    /// Reads the directory of an archive whose records need no root, as NumPy's have none, and may
    /// be compressed.
    pub(crate) fn read_rootless(source: &dyn ReadAt) -> Result<Self> {
        let records = read_records(source, true, &mut |name, _| Ok(name.to_owned()))?;
        Ok(Directory {
            root: String::new(),
            records,
        })
    }

    /// Returns the record of this name. If there is none, the error is
    /// [`FormatError::MissingRecord`].
    pub fn get(&self, name: &str) -> Result<&Record> {
        self.records
            .get(name)
            .ok_or_else(|| FormatError::MissingRecord {
                name: name.to_owned(),
            })
    }

    /// Returns where the data of a record starts, after checking its local header. A header that is
    /// not what the directory says, and data beyond the end of the archive are errors.
    pub fn data_offset(&self, source: &dyn ReadAt, name: &str, record: &Record) -> Result<u64> {
        let header = read_whole(
            source,
            record.header_offset,
            LOCAL_HEADER_BYTES + u64::from(record.name_length),
        )?;
        if u32_at(&header, 0) != LOCAL_HEADER {
            return Err(malformed(
                record.header_offset,
                "no local header where the directory says",
            ));
        }
        let root = match self.root.as_str() {
            "" => String::new(),
            root => format!("{root}/"),
        };
        let is_named = header[LOCAL_HEADER_BYTES as usize..]
            .strip_prefix(root.as_bytes())
            .is_some_and(|path_below| path_below == name.as_bytes());
        if u16_at(&header, 26) != record.name_length || !is_named {
            return Err(malformed(
                record.header_offset,
                "the local header is another record's",
            ));
        }
        if u16_at(&header, 8) != if record.is_deflated { DEFLATED } else { STORED } {
            return Err(malformed(
                record.header_offset,
                "the local header and the directory disagree on whether the record is compressed",
            ));
        }
        // With a data descriptor (bit 3) the header's own sizes are 0.
        let stored_length = u32_at(&header, 18);
        let full_length = u32_at(&header, 22);
        let are_deferred = u16_at(&header, 6) & 8 != 0 && stored_length == 0 && full_length == 0;
        let do_agree =
            is_length(stored_length, record.stored_bytes) && is_length(full_length, record.length);
        if !are_deferred && !do_agree {
            return Err(malformed(
                record.header_offset,
                "the local header and the directory disagree on the length",
            ));
        }
        let data_offset = record.header_offset
            + LOCAL_HEADER_BYTES
            + u64::from(record.name_length)
            + u64::from(u16_at(&header, 28));
        match data_offset.checked_add(record.stored_bytes) {
            Some(end) if end <= source.len() => Ok(data_offset),
            _ => Err(malformed(
                record.header_offset,
                "the record ends beyond the archive",
            )),
        }
    }

    /// Returns where the data of the record at a position in the directory starts, after checking
    /// its local header.
    pub(crate) fn data_offset_at(&self, source: &dyn ReadAt, index: usize) -> Result<u64> {
        let (name, record) = self
            .records
            .get_index(index)
            .expect("the position was found in this directory");
        self.data_offset(source, name, record)
    }

    /// Refuses archives of big-endian machines. Older torch wrote no record of it, and
    /// little-endian bytes.
    fn check_byte_order(&self, source: &dyn ReadAt) -> Result<()> {
        if self.records.contains_key("byteorder") {
            let order = self.read_record(source, "byteorder", 16)?;
            if order != b"little" {
                let what = format!(
                    "the byte order `{}` (on a little-endian machine, `torch.save` what `torch.load` returns)",
                    String::from_utf8_lossy(&order)
                );
                return Err(FormatError::unsupported(what));
            }
        }
        Ok(())
    }

    /// Reads the pickle of `torch.save`. That of a big-endian machine is refused.
    pub(crate) fn read_pickle(&self, source: &dyn ReadAt) -> Result<Vec<u8>> {
        self.check_byte_order(source)?;
        self.read_record(source, "data.pkl", MAX_OBJECT_BYTES)
    }

    /// Reads all bytes of a record that is not compressed. One of more than `max_bytes` bytes, and
    /// one that does not have its checksum are errors.
    pub fn read_record(&self, source: &dyn ReadAt, name: &str, max_bytes: u64) -> Result<Vec<u8>> {
        let record = self.get(name)?;
        check_limit("record length", record.length, max_bytes)?;
        let data_offset = self.data_offset(source, name, record)?;
        let bytes = read_whole(source, data_offset, record.length)?;
        check_crc(record.crc, crc32fast::hash(&bytes))?;
        Ok(bytes)
    }
}

/// Reads all entries of a directory, and returns the records by their names, in its order.
/// `record_name` turns the name in the entry at an offset into that of the record. With
/// `may_deflate`, records may be compressed.
fn read_records(
    source: &dyn ReadAt,
    may_deflate: bool,
    record_name: &mut dyn FnMut(&str, u64) -> Result<String>,
) -> Result<IndexMap<String, Record>> {
    let (directory_offset, directory_length, entry_count) = find_directory(source)?;
    check_limit(
        "zip directory length",
        directory_length,
        MAX_ZIP_DIRECTORY_BYTES,
    )?;
    // Every entry takes at least 46 bytes, so the count cannot make us allocate more than the
    // directory itself.
    if entry_count > directory_length / 46 {
        return Err(malformed(
            directory_offset,
            "the directory is too short for its number of entries",
        ));
    }
    // A record takes about so much, besides its name.
    const RECORD_COST_BYTES: u64 = 128;
    Budget::new(directory_length, 1).charge(
        "memory for records",
        entry_count * RECORD_COST_BYTES + directory_length,
    )?;
    let bytes = read_whole(source, directory_offset, directory_length)?;
    let mut records = IndexMap::with_capacity(entry_count as usize);
    let mut position = 0usize;
    for _ in 0..entry_count {
        let (name, record, next_position) = read_entry(&bytes, position, directory_offset)?;
        let entry_offset = directory_offset + position as u64;
        if record.is_deflated && !may_deflate {
            let kind = if name.contains("/code/") {
                "TorchScript (`torch.save` the `state_dict` of what `torch.jit.load` returns)"
            } else {
                "torch (`torch.save` what `torch.load` returns: torch compresses nothing)"
            };
            let what = format!("the compressed record `{name}` in an archive of {kind}");
            return Err(FormatError::unsupported(what));
        }
        let end = record
            .header_offset
            .checked_add(LOCAL_HEADER_BYTES + u64::from(record.name_length))
            .and_then(|data_offset| data_offset.checked_add(record.stored_bytes));
        if end.is_none_or(|end| end > directory_offset) {
            return Err(malformed(
                entry_offset,
                "a record does not lie before the directory",
            ));
        }
        if records
            .insert(record_name(name, entry_offset)?, record)
            .is_some()
        {
            return Err(malformed(
                entry_offset,
                "a record stands twice in the directory",
            ));
        }
        position = next_position;
    }
    if position as u64 != directory_length {
        return Err(malformed(
            directory_offset + position as u64,
            "the directory's length is wrong",
        ));
    }
    // After the single records have been checked, so that their ranges cannot overflow.
    check_disjoint(records.values())?;
    Ok(records)
}

/// Finds the directory of an archive by the records at its end, and returns where the directory
/// starts, its length in bytes, and the number of its entries.
fn find_directory(source: &dyn ReadAt) -> Result<(u64, u64, u64)> {
    let archive_length = source.len();
    // Mostly there is no comment, and the end record is the last bytes; only otherwise more is
    // read.
    let mut tail_length = (ZIP64_LENGTH + END_LENGTH).min(archive_length);
    let mut tail = read_whole(source, archive_length - tail_length, tail_length)?;
    let ends_without_comment = tail
        .last_chunk::<{ END_LENGTH as usize }>()
        .is_some_and(|end| u32_at(end, 0) == END && u16_at(end, 20) == 0);
    if !ends_without_comment {
        tail_length = LONGEST_END.min(archive_length);
        tail = read_whole(source, archive_length - tail_length, tail_length)?;
    }
    // The end record is the last one, and its comment reaches exactly to the end.
    let tail_position = (0..tail.len().saturating_sub(END_LENGTH as usize - 1))
        .rev()
        .find(|&tail_position| {
            u32_at(&tail, tail_position) == END
                && tail_position
                    + END_LENGTH as usize
                    + usize::from(u16_at(&tail, tail_position + 20))
                    == tail.len()
        })
        .ok_or_else(|| {
            malformed(
                archive_length,
                "no zip end record: the archive is cut short, or is none",
            )
        })?;
    let end_offset = archive_length - tail_length + tail_position as u64;
    let end_record = &tail[tail_position..];
    let mut entry_count = u64::from(u16_at(end_record, 10));
    let mut length = u64::from(u32_at(end_record, 12));
    let mut start = u64::from(u32_at(end_record, 16));
    let mut expected_end = end_offset;
    // If one of these values is too large for the end record, all are in the zip64 end record. A
    // locator just before the end record says where that is.
    if entry_count == u64::from(u16::MAX)
        || length == u64::from(IN_ZIP64)
        || start == u64::from(IN_ZIP64)
    {
        let locator_offset = end_offset
            .checked_sub(20)
            .ok_or_else(|| malformed(end_offset, "no zip64 locator"))?;
        let locator = read_whole(source, locator_offset, 20)?;
        if u32_at(&locator, 0) != ZIP64_LOCATOR {
            return Err(malformed(locator_offset, "no zip64 locator"));
        }
        expected_end = u64_at(&locator, 8);
        if expected_end
            .checked_add(56)
            .is_none_or(|end| end > locator_offset)
        {
            return Err(malformed(
                locator_offset,
                "the zip64 locator points nowhere",
            ));
        }
        let record = read_whole(source, expected_end, 56)?;
        if u32_at(&record, 0) != ZIP64_END {
            return Err(malformed(
                expected_end,
                "no zip64 end record where the locator says",
            ));
        }
        entry_count = u64_at(&record, 32);
        length = u64_at(&record, 40);
        start = u64_at(&record, 48);
    }
    // If several archives follow each other, as in a file of DCP, the last one counts positions
    // from its own start. Its directory would then be looked for in another archive, so it must end
    // where the end record begins.
    let zip64_offset = end_offset.checked_sub(ZIP64_LENGTH);
    let has_zip64 = tail_position
        .checked_sub(ZIP64_LENGTH as usize)
        .is_some_and(|zip64_position| u32_at(&tail, zip64_position) == ZIP64_END);
    let directory_end = start.checked_add(length);
    if directory_end != Some(expected_end) && !(has_zip64 && directory_end == zip64_offset) {
        return Err(malformed(
            end_offset,
            "the directory does not lie just before its end record",
        ));
    }
    Ok((start, length, entry_count))
}

/// Returns the error of a directory that ends inside the entry at an offset.
fn cut_short_error(entry_offset: u64) -> FormatError {
    malformed(entry_offset, "the directory is cut short")
}

/// Reads the entry at `position` in `bytes`, a directory that begins at `directory_offset` in the
/// archive. Returns the name, the record, and the position of the next entry.
fn read_entry(
    bytes: &[u8],
    position: usize,
    directory_offset: u64,
) -> Result<(&str, Record, usize)> {
    let entry_offset = directory_offset + position as u64;
    let fixed_fields = bytes
        .get(position..position + 46)
        .ok_or_else(|| cut_short_error(entry_offset))?;
    if u32_at(fixed_fields, 0) != DIRECTORY_ENTRY {
        return Err(malformed(entry_offset, "not a directory entry"));
    }
    let name_length = u16_at(fixed_fields, 28);
    let name_end = position + 46 + usize::from(name_length);
    let extra_end = name_end + usize::from(u16_at(fixed_fields, 30));
    let next_position = extra_end + usize::from(u16_at(fixed_fields, 32));
    let name_bytes = bytes
        .get(position + 46..name_end)
        .ok_or_else(|| cut_short_error(entry_offset))?;
    let mut extra = bytes
        .get(name_end..extra_end)
        .ok_or_else(|| cut_short_error(entry_offset))?;
    if next_position > bytes.len() {
        return Err(cut_short_error(entry_offset));
    }
    let name = std::str::from_utf8(name_bytes)
        .map_err(|_| malformed(entry_offset, "a record's name is not UTF-8"))?;
    let is_plain = !name.contains(['\\', '\0'])
        && name
            .split('/')
            .all(|part| !part.is_empty() && part != "." && part != "..");
    if !is_plain {
        return Err(malformed(
            entry_offset,
            "a record's name is not a plain relative path",
        ));
    }
    let is_deflated = match u16_at(fixed_fields, 10) {
        STORED => false,
        DEFLATED => true,
        method => {
            let other = OTHER_METHODS.iter().find(|(number, _)| *number == method);
            return Err(match other {
                Some((_, method_name)) => FormatError::unsupported(format!(
                    "the record `{name}`, which is compressed with {method_name},"
                )),
                None => malformed(entry_offset, "the record is compressed in an unknown way"),
            });
        }
    };
    let stored32 = u32_at(fixed_fields, 20);
    let full32 = u32_at(fixed_fields, 24);
    let header32 = u32_at(fixed_fields, 42);
    let mut stored_length = u64::from(stored32);
    let mut full_length = u64::from(full32);
    let mut header_offset = u64::from(header32);
    while extra.len() >= 4 {
        let length = usize::from(u16_at(extra, 2));
        let Some(field) = extra.get(4..4 + length) else {
            break;
        };
        if u16_at(extra, 0) == ZIP64_EXTRA {
            let mut large_values = field.chunks_exact(8);
            // Values that do not fit 32 bits are here, in this order.
            for (value, value32) in [
                (&mut full_length, full32),
                (&mut stored_length, stored32),
                (&mut header_offset, header32),
            ] {
                if value32 == IN_ZIP64 {
                    let large_bytes = large_values
                        .next()
                        .ok_or_else(|| malformed(entry_offset, "a zip64 value is missing"))?;
                    *value = u64_at(large_bytes, 0);
                }
            }
        }
        extra = &extra[4 + length..];
    }
    if !is_deflated && stored_length != full_length {
        return Err(malformed(entry_offset, "a stored record has two lengths"));
    }
    if full_length > stored_length.saturating_mul(MAX_DEFLATION) {
        return Err(malformed(
            entry_offset,
            "a record is longer than what is stored of it can become",
        ));
    }
    Ok((
        name,
        Record {
            header_offset,
            length: full_length,
            stored_bytes: stored_length,
            is_deflated,
            crc: u32_at(fixed_fields, 16),
            name_length,
        },
        next_position,
    ))
}

/// Refuses records that share bytes: they make an archive larger than it is, or mean two things at
/// once.
fn check_disjoint<'r>(records: impl Iterator<Item = &'r Record>) -> Result<()> {
    let mut ranges: Vec<_> = records
        .map(|record| {
            (
                record.header_offset,
                record.header_offset
                    + LOCAL_HEADER_BYTES
                    + u64::from(record.name_length)
                    + record.stored_bytes,
            )
        })
        .collect();
    ranges.sort_unstable();
    match ranges.windows(2).find(|pair| pair[1].0 < pair[0].1) {
        Some(pair) => Err(malformed(pair[1].0, "two records overlap")),
        None => Ok(()),
    }
}
