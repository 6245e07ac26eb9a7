//! The layout of a torch archive: the place of every byte, and the bytes around the storages.

use super::{
    DIRECTORY_ENTRY, END, IN_ZIP64, LOCAL_HEADER, LOCAL_HEADER_BYTES, ZIP64_END, ZIP64_EXTRA,
    ZIP64_LOCATOR,
};

/// Storages start at multiples of this many bytes, from the start of the archive.
pub(super) const STORAGE_ALIGNMENT: u64 = 64;

/// The flags of a record: its name is UTF-8.
const FLAGS: u16 = 0x0800;
/// The date of all records, so that equal tensors give equal bytes: 1 January 1980, the earliest
/// that zip knows.
const DATE: u16 = 0x21;
/// The number of the extra field that torch pads with.
const PADDING_EXTRA: u16 = 0x4246;

/// The layout of one archive: pure arithmetic of its pickle and the lengths of its storages.
#[derive(Debug, Clone)]
pub struct ArchiveLayout {
    records: Vec<PlannedRecord>,
    /// The number of storages among the records; they come last.
    storage_count: usize,
    /// The position of the central directory.
    directory_offset: u64,
    /// The number of bytes of the archive.
    length: u64,
}

/// A record and its place in the archive.
#[derive(Debug, Clone)]
struct PlannedRecord {
    name: String,
    /// The bytes of a small record; `None` for a storage.
    body: Option<Vec<u8>>,
    /// The number of bytes of the data.
    length: u64,
    /// The position of the local header in the archive.
    header_offset: u64,
    /// The position of the data, behind the header.
    data_offset: u64,
}

impl PlannedRecord {
    /// Places a record whose header begins at this position.
    fn new(name: String, body: Option<Vec<u8>>, length: u64, header_offset: u64) -> Self {
        let mut record = PlannedRecord {
            name,
            body,
            length,
            header_offset,
            data_offset: 0,
        };
        record.data_offset = header_offset
            + LOCAL_HEADER_BYTES
            + record.name.len() as u64
            + record.zip64_extra_bytes() as u64;
        // Storages are padded to the alignment, by an extra field in their header.
        if record.body.is_none() {
            record.data_offset +=
                match record.data_offset.next_multiple_of(STORAGE_ALIGNMENT) - record.data_offset {
                    // An extra field takes at least four bytes.
                    gap @ 1..=3 => gap + STORAGE_ALIGNMENT,
                    gap => gap,
                };
        }
        record
    }

    /// Returns `true` if its directory entry needs a zip64 field.
    fn is_zip64(&self) -> bool {
        self.length >= u64::from(IN_ZIP64) || self.header_offset >= u64::from(IN_ZIP64)
    }

    /// Returns the length of the zip64 field in its local header.
    fn zip64_extra_bytes(&self) -> usize {
        if self.length >= u64::from(IN_ZIP64) {
            4 + 16
        } else {
            0
        }
    }

    /// Appends its local header, with the padding.
    fn append_header(&self, crc: u32, output: &mut Vec<u8>) {
        let zip64_bytes = self.zip64_extra_bytes();
        let extra_bytes =
            self.data_offset - self.header_offset - LOCAL_HEADER_BYTES - self.name.len() as u64;
        let (version, length32) = if zip64_bytes > 0 {
            (45, IN_ZIP64)
        } else {
            (20, self.length as u32)
        };
        append_u32s(output, &[LOCAL_HEADER]);
        append_u16s(output, &[version, FLAGS, 0, 0, DATE]);
        append_u32s(output, &[crc, length32, length32]);
        append_u16s(output, &[self.name.len() as u16, extra_bytes as u16]);
        output.extend_from_slice(self.name.as_bytes());
        if zip64_bytes > 0 {
            append_u16s(output, &[ZIP64_EXTRA, 16]);
            append_u64s(output, &[self.length, self.length]);
        }
        // The padding is an extra field of its own: its number, its length, and bytes that nobody
        // reads.
        let padding_bytes = extra_bytes as usize - zip64_bytes;
        if padding_bytes > 0 {
            append_u16s(output, &[PADDING_EXTRA, padding_bytes as u16 - 4]);
            output.resize(output.len() + padding_bytes - 4, b'Z');
        }
    }

    /// Appends its entry in the central directory.
    fn append_entry(&self, crc: u32, output: &mut Vec<u8>) {
        let is_zip64 = self.is_zip64();
        let (version, length32, header32, extra_bytes) = if is_zip64 {
            (45, IN_ZIP64, IN_ZIP64, 28)
        } else {
            (20, self.length as u32, self.header_offset as u32, 0)
        };
        append_u32s(output, &[DIRECTORY_ENTRY]);
        append_u16s(output, &[version, version, FLAGS, 0, 0, DATE]);
        append_u32s(output, &[crc, length32, length32]);
        // Lengths of the name, the extra field and the comment; disk number; internal attributes.
        append_u16s(output, &[self.name.len() as u16, extra_bytes, 0, 0, 0]);
        // External attributes, and the place of the local header.
        append_u32s(output, &[0, header32]);
        output.extend_from_slice(self.name.as_bytes());
        if is_zip64 {
            append_u16s(output, &[ZIP64_EXTRA, 24]);
            append_u64s(output, &[self.length, self.length, self.header_offset]);
        }
    }
}

/// Appends numbers of 16 bits, as all numbers of a zip archive little-endian.
fn append_u16s(output: &mut Vec<u8>, values: &[u16]) {
    output.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

/// Appends numbers of 32 bits.
fn append_u32s(output: &mut Vec<u8>, values: &[u32]) {
    output.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

/// Appends numbers of 64 bits.
fn append_u64s(output: &mut Vec<u8>, values: &[u64]) {
    output.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

impl ArchiveLayout {
    /// Lays out the archive named `root`, with this `data.pkl` and storages of these lengths
    /// (`data/0`, `data/1`, …).
    #[must_use]
    pub fn new(root: &str, pickle: Vec<u8>, storages: &[u64]) -> Self {
        let small_records = [
            ("data.pkl", pickle),
            // From version 1 on, torch may compute where the storages are, as its own writer places
            // them: it has a descriptor behind each, and other paddings.
            (".format_version", b"0".to_vec()),
            (
                ".storage_alignment",
                STORAGE_ALIGNMENT.to_string().into_bytes(),
            ),
            ("byteorder", b"little".to_vec()),
            ("version", b"3\n".to_vec()),
        ];
        let mut records = Vec::with_capacity(small_records.len() + storages.len());
        let mut position = 0;
        for (name, body) in small_records {
            let length = body.len() as u64;
            let record = PlannedRecord::new(format!("{root}/{name}"), Some(body), length, position);
            position = record.data_offset + length;
            records.push(record);
        }
        // The storages come last, so that the small records before them can be read at once.
        for (index, &length) in storages.iter().enumerate() {
            let record = PlannedRecord::new(format!("{root}/data/{index}"), None, length, position);
            position = record.data_offset + length;
            records.push(record);
        }
        let mut layout = ArchiveLayout {
            records,
            storage_count: storages.len(),
            directory_offset: position,
            length: 0,
        };
        // The tail's length depends on the places of the records, not on the checksums in it.
        let zeros = vec![0; storages.len()];
        layout.length = position + layout.tail(&zeros).len() as u64;
        layout
    }

    /// Returns how many bytes the whole archive has.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Returns where storage `index` starts.
    #[must_use]
    pub fn storage_offset(&self, index: usize) -> u64 {
        self.storage(index).data_offset
    }

    /// Returns how many bytes storage `index` has.
    #[must_use]
    pub fn storage_length(&self, index: usize) -> u64 {
        self.storage(index).length
    }

    /// Returns where [`ArchiveLayout::tail`] starts: right after the last storage.
    #[must_use]
    pub fn tail_offset(&self) -> u64 {
        self.directory_offset
    }

    /// Returns the record of storage `index`.
    fn storage(&self, index: usize) -> &PlannedRecord {
        &self.records[self.records.len() - self.storage_count + index]
    }

    /// Returns everything before storage 0, whose CRC is `crc`: the small records, and the header
    /// of that storage. Without storages, it is everything before the tail.
    #[must_use]
    pub fn head(&self, crc: u32) -> Vec<u8> {
        let (small_records, storages) = self
            .records
            .split_at(self.records.len() - self.storage_count);
        let end = storages
            .first()
            .map_or(self.directory_offset, |storage| storage.data_offset);
        let mut output = Vec::with_capacity(end as usize);
        for record in small_records {
            let body = record.body.as_deref().expect("a small record has a body");
            record.append_header(crc32fast::hash(body), &mut output);
            output.extend_from_slice(body);
        }
        if let Some(storage) = storages.first() {
            storage.append_header(crc, &mut output);
        }
        output
    }

    /// Returns the bytes between the end of storage `index - 1` and the start of storage `index`,
    /// for `index` of at least 1. `crc` is that of storage `index`.
    #[must_use]
    pub fn storage_header(&self, index: usize, crc: u32) -> Vec<u8> {
        let mut output = Vec::new();
        self.storage(index).append_header(crc, &mut output);
        output
    }

    /// Returns the central directory and the end records, given the CRC of each storage.
    #[must_use]
    pub fn tail(&self, crcs: &[u32]) -> Vec<u8> {
        let mut output = Vec::with_capacity(self.records.len() * 72 + 128);
        let mut storage_crcs = crcs.iter();
        for record in &self.records {
            let crc = match &record.body {
                Some(body) => crc32fast::hash(body),
                None => *storage_crcs.next().expect("each storage has a CRC"),
            };
            record.append_entry(crc, &mut output);
        }
        // The end record has 32 bits for a position and 16 for a count. Larger ones need a zip64
        // record, and a locator that says where it lies.
        let directory_length = output.len() as u64;
        let count = self.records.len() as u64;
        let too_large = u64::from(IN_ZIP64);
        if self.directory_offset >= too_large
            || directory_length >= too_large
            || count >= u64::from(u16::MAX)
        {
            append_u32s(&mut output, &[ZIP64_END]);
            append_u64s(&mut output, &[44]);
            append_u16s(&mut output, &[45, 45]);
            append_u32s(&mut output, &[0, 0]);
            append_u64s(
                &mut output,
                &[count, count, directory_length, self.directory_offset],
            );
            append_u32s(&mut output, &[ZIP64_LOCATOR, 0]);
            append_u64s(&mut output, &[self.directory_offset + directory_length]);
            append_u32s(&mut output, &[1]);
        }
        // A number that is too large for its field is in the zip64 record.
        let count16 = u16::try_from(count).unwrap_or(u16::MAX);
        let directory_length32 = u32::try_from(directory_length).unwrap_or(IN_ZIP64);
        let directory32 = u32::try_from(self.directory_offset).unwrap_or(IN_ZIP64);
        append_u32s(&mut output, &[END, 0]);
        append_u16s(&mut output, &[count16, count16]);
        append_u32s(&mut output, &[directory_length32, directory32]);
        append_u16s(&mut output, &[0]);
        output
    }
}
