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
    storages: usize,
    /// The position of the central directory.
    directory: u64,
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
    header: u64,
    /// The position of the data, behind the header.
    data: u64,
}

impl PlannedRecord {
    /// Returns `true` if its directory entry needs a zip64 field.
    fn is_zip64(&self) -> bool {
        self.length >= u64::from(IN_ZIP64) || self.header >= u64::from(IN_ZIP64)
    }

    /// Returns the length of the zip64 field in its local header.
    fn zip64_header_extra(&self) -> usize {
        if self.length >= u64::from(IN_ZIP64) {
            4 + 16
        } else {
            0
        }
    }
}

impl ArchiveLayout {
    /// Lays out the archive named `root`, with this `data.pkl` and storages of these lengths
    /// (`data/0`, `data/1`, …).
    #[must_use]
    pub fn new(root: &str, pickle: Vec<u8>, storages: &[u64]) -> Self {
        let mut records = Vec::with_capacity(5 + storages.len());
        let mut at = 0;
        let mut add = |name: String, body: Option<Vec<u8>>, length: u64| {
            let mut record = PlannedRecord {
                name,
                body,
                length,
                header: at,
                data: 0,
            };
            let unpadded = at
                + LOCAL_HEADER_BYTES
                + record.name.len() as u64
                + record.zip64_header_extra() as u64;
            // Storages are padded to the alignment, by an extra field in their header.
            record.data = match record.body {
                Some(_) => unpadded,
                None => {
                    match (STORAGE_ALIGNMENT - unpadded % STORAGE_ALIGNMENT) % STORAGE_ALIGNMENT {
                        // An extra field takes at least four bytes.
                        gap @ 1..=3 => unpadded + gap + STORAGE_ALIGNMENT,
                        gap => unpadded + gap,
                    }
                }
            };
            at = record.data + length;
            records.push(record);
        };
        for (name, body) in [
            ("data.pkl", pickle),
            (".format_version", b"1".to_vec()),
            (
                ".storage_alignment",
                STORAGE_ALIGNMENT.to_string().into_bytes(),
            ),
            ("byteorder", b"little".to_vec()),
            ("version", b"3\n".to_vec()),
        ] {
            let length = body.len() as u64;
            add(format!("{root}/{name}"), Some(body), length);
        }
        for (index, &length) in storages.iter().enumerate() {
            add(format!("{root}/data/{index}"), None, length);
        }
        // The tail's length depends on the places of the records, not on the checksums in it.
        let mut layout = ArchiveLayout {
            records,
            storages: storages.len(),
            directory: at,
            length: 0,
        };
        let zeros = vec![0; storages.len()];
        layout.length = at + layout.tail(&zeros).len() as u64;
        layout
    }

    /// Returns the bytes of the whole archive.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Returns where storage `index` starts.
    #[must_use]
    pub fn storage_offset(&self, index: usize) -> u64 {
        self.storage(index).data
    }

    /// Returns where [`ArchiveLayout::tail`] starts: right after the last storage.
    #[must_use]
    pub fn tail_offset(&self) -> u64 {
        self.directory
    }

    fn storage(&self, index: usize) -> &PlannedRecord {
        &self.records[self.records.len() - self.storages + index]
    }

    /// Returns everything before storage 0 (or, without storages, before the tail): the small
    /// records, and its header.
    #[must_use]
    pub fn head(&self, crc: u32) -> Vec<u8> {
        let small = self.records.len() - self.storages;
        let end = self
            .records
            .get(small)
            .map_or(self.directory, |storage| storage.data);
        let mut out = Vec::with_capacity(end as usize);
        for record in &self.records[..small] {
            let body = record.body.as_deref().unwrap_or_default();
            self.header(record, crc32fast::hash(body), &mut out);
            out.extend_from_slice(body);
        }
        if let Some(storage) = self.records.get(small) {
            self.header(storage, crc, &mut out);
        }
        out
    }

    /// Returns the bytes between the end of storage `index - 1` and the start of storage `index`,
    /// for `index` of at least 1.
    #[must_use]
    pub fn storage_header(&self, index: usize, crc: u32) -> Vec<u8> {
        let mut out = Vec::new();
        self.header(self.storage(index), crc, &mut out);
        out
    }

    /// Appends the local header of a record, with its padding.
    fn header(&self, record: &PlannedRecord, crc: u32, out: &mut Vec<u8>) {
        let zip64 = record.zip64_header_extra();
        let extra = record.data - record.header - LOCAL_HEADER_BYTES - record.name.len() as u64;
        let length32 = if zip64 > 0 {
            IN_ZIP64
        } else {
            record.length as u32
        };
        out.extend_from_slice(&LOCAL_HEADER.to_le_bytes());
        for value in [if zip64 > 0 { 45u16 } else { 20 }, FLAGS, 0, 0, DATE] {
            out.extend_from_slice(&value.to_le_bytes());
        }
        for value in [crc, length32, length32] {
            out.extend_from_slice(&value.to_le_bytes());
        }
        out.extend_from_slice(&(record.name.len() as u16).to_le_bytes());
        out.extend_from_slice(&(extra as u16).to_le_bytes());
        out.extend_from_slice(record.name.as_bytes());
        if zip64 > 0 {
            out.extend_from_slice(&ZIP64_EXTRA.to_le_bytes());
            out.extend_from_slice(&16u16.to_le_bytes());
            out.extend_from_slice(&record.length.to_le_bytes());
            out.extend_from_slice(&record.length.to_le_bytes());
        }
        let padding = extra as usize - zip64;
        if padding > 0 {
            out.extend_from_slice(&PADDING_EXTRA.to_le_bytes());
            out.extend_from_slice(&(padding as u16 - 4).to_le_bytes());
            out.resize(out.len() + padding - 4, b'Z');
        }
    }

    /// Returns the central directory and the end records, given the storages' CRCs.
    #[must_use]
    pub fn tail(&self, crcs: &[u32]) -> Vec<u8> {
        let small = self.records.len() - self.storages;
        let mut out = Vec::with_capacity(self.records.len() * 72 + 128);
        for (index, record) in self.records.iter().enumerate() {
            let crc = match &record.body {
                Some(body) => crc32fast::hash(body),
                None => crcs.get(index - small).copied().unwrap_or(0),
            };
            let zip64 = record.is_zip64();
            let (length32, header32) = if zip64 {
                (IN_ZIP64, IN_ZIP64)
            } else {
                (record.length as u32, record.header as u32)
            };
            out.extend_from_slice(&DIRECTORY_ENTRY.to_le_bytes());
            let version = if zip64 { 45u16 } else { 20 };
            for value in [version, version, FLAGS, 0, 0, DATE] {
                out.extend_from_slice(&value.to_le_bytes());
            }
            for value in [crc, length32, length32] {
                out.extend_from_slice(&value.to_le_bytes());
            }
            // Lengths of the name, the extra field and the comment; disk number; internal
            // attributes.
            for value in [
                record.name.len() as u16,
                if zip64 { 28 } else { 0 },
                0,
                0,
                0,
            ] {
                out.extend_from_slice(&value.to_le_bytes());
            }
            out.extend_from_slice(&0u32.to_le_bytes());
            out.extend_from_slice(&header32.to_le_bytes());
            out.extend_from_slice(record.name.as_bytes());
            if zip64 {
                out.extend_from_slice(&ZIP64_EXTRA.to_le_bytes());
                out.extend_from_slice(&24u16.to_le_bytes());
                for value in [record.length, record.length, record.header] {
                    out.extend_from_slice(&value.to_le_bytes());
                }
            }
        }
        let directory_length = out.len() as u64;
        let count = self.records.len() as u64;
        let large = u64::from(IN_ZIP64);
        if self.directory >= large || directory_length >= large || count >= u64::from(u16::MAX) {
            let end = self.directory + directory_length;
            out.extend_from_slice(&ZIP64_END.to_le_bytes());
            out.extend_from_slice(&44u64.to_le_bytes());
            out.extend_from_slice(&45u16.to_le_bytes());
            out.extend_from_slice(&45u16.to_le_bytes());
            out.extend_from_slice(&[0; 8]);
            for value in [count, count, directory_length, self.directory] {
                out.extend_from_slice(&value.to_le_bytes());
            }
            out.extend_from_slice(&ZIP64_LOCATOR.to_le_bytes());
            out.extend_from_slice(&0u32.to_le_bytes());
            out.extend_from_slice(&end.to_le_bytes());
            out.extend_from_slice(&1u32.to_le_bytes());
        }
        let count16 = u16::try_from(count).unwrap_or(u16::MAX);
        out.extend_from_slice(&END.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&count16.to_le_bytes());
        out.extend_from_slice(&count16.to_le_bytes());
        out.extend_from_slice(
            &u32::try_from(directory_length)
                .unwrap_or(IN_ZIP64)
                .to_le_bytes(),
        );
        out.extend_from_slice(
            &u32::try_from(self.directory)
                .unwrap_or(IN_ZIP64)
                .to_le_bytes(),
        );
        out.extend_from_slice(&0u16.to_le_bytes());
        out
    }
}
