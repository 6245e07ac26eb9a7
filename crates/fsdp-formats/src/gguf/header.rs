//! The header of a file: keys and values, and the list of tensors.

use std::ops::Range;

use fsdp_layout::PlainValue;

use crate::budget::Budget;
use crate::error::FormatError;
use crate::limits::{MAX_KEY_BYTES, MAX_OBJECT_BYTES};
use crate::storage::read_at::{ReadAt, read_whole};

/// The bytes with which a file begins.
pub(crate) const MAGIC: &[u8; 4] = b"GGUF";

/// The most dimensions of a tensor.
const MAX_DIMENSIONS: u32 = 4;
/// The alignment of a file whose header says nothing else.
const DEFAULT_ALIGNMENT: u64 = 32;
/// The bytes that are read at once.
const BLOCK_BYTES: u64 = 1 << 20;
/// The bytes that may be built from a byte of the header, without the items of arrays: short texts
/// and small numbers become several times as many.
const MEMORY_FACTOR: u64 = 8;
/// The bytes that may be built from a byte of an array. A number of four bytes becomes a value of
/// 56.
const ARRAY_MEMORY_FACTOR: u64 = 16;
/// The bytes that an allocation takes besides what is in it.
const ALLOCATION_COST_BYTES: u64 = 16;
/// The most arrays that may be in each other.
const MAX_ARRAY_DEPTH: usize = 4;
/// The number of the type of texts.
const TEXT_TYPE: u32 = 8;
/// The number of the type of arrays.
const ARRAY_TYPE: u32 = 9;

/// The content of a header.
#[derive(Debug)]
pub(super) struct GgufHeader {
    /// Keys and values, in order.
    pub(super) entries: Vec<(String, HeaderValue)>,
    /// The tensors, in order.
    pub(super) tensors: Vec<TensorInfo>,
    /// The bytes that the start of the data, and of each tensor in it, is a multiple of.
    pub(super) alignment: u64,
    /// The start of the elements of all tensors in the file.
    pub(super) data_offset: u64,
}

/// A value of the header.
#[derive(Debug)]
pub(super) enum HeaderValue {
    /// A number, a bool or a text.
    Plain(PlainValue),
    /// An array, and the bytes that [`read_array`] reads it from. It is read when it is wanted: a
    /// vocabulary has several arrays of hundreds of thousands of items.
    Array(Range<u64>),
}

/// One tensor of the list.
#[derive(Debug)]
pub(super) struct TensorInfo {
    pub(super) name: String,
    /// The shape, outermost dimension first.
    pub(super) shape: Vec<usize>,
    /// The number that ggml gives to the type of its elements.
    pub(super) ggml_type: u32,
    /// Its first byte, from the start of the data.
    pub(super) offset: u64,
}

impl TensorInfo {
    /// Makes the error of a file in which this tensor has a defect.
    pub(super) fn malformed(&self, defect: &str) -> FormatError {
        malformed(format!("the tensor `{}` {defect}", self.name))
    }
}

/// Makes the error of a file that is not what it should be.
pub(super) fn malformed(reason: impl ToString) -> FormatError {
    FormatError::malformed("GGUF file", reason)
}

/// A reader of numbers and texts, one after the other.
struct HeaderReader<'f> {
    file: &'f dyn ReadAt,
    /// The position of the next byte in the file.
    position: u64,
    /// The bytes of the file from `block_start` on that were read.
    block: Vec<u8>,
    block_start: u64,
    /// The first hole of the file from the position on at which it was looked for last, or
    /// `u64::MAX` if there is none; `None` before it was looked for.
    next_hole: Option<u64>,
    budget: Budget,
    /// The bytes that each byte that is read adds to the budget.
    memory_factor: u64,
}

impl<'f> HeaderReader<'f> {
    /// Begins to read a file.
    fn new(file: &'f dyn ReadAt, budget: Budget, memory_factor: u64) -> Self {
        HeaderReader {
            file,
            position: 0,
            block: Vec::new(),
            block_start: 0,
            next_hole: None,
            budget,
            memory_factor,
        }
    }

    /// Returns how many bytes of the file follow.
    fn bytes_left(&self) -> u64 {
        self.file.len().saturating_sub(self.position)
    }

    /// Returns `true` if the file has a hole between the position and `end`.
    fn has_hole_before(&mut self, end: u64) -> bool {
        if end <= self.position {
            return false;
        }
        // To find it the system may look at all of the file. So it is looked for once, and not for
        // each of many small arrays.
        let known_hole = self.next_hole.filter(|hole| *hole >= self.position);
        let hole = match known_hole {
            Some(hole) => hole,
            None => self.file.find_hole(self.position).unwrap_or(u64::MAX),
        };
        self.next_hole = Some(hole);
        hole < end
    }

    /// Reads the next `N` bytes.
    fn read_array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// Fills `dst` with the next bytes. The file is read in blocks, so that small fields cost no
    /// call each. Each block adds to the budget. A file that ends before `dst` is full is an error.
    fn fill(&mut self, dst: &mut [u8]) -> Result<(), FormatError> {
        let end = self.position.saturating_add(dst.len() as u64);
        if self.position < self.block_start || end > self.block_start + self.block.len() as u64 {
            let length = BLOCK_BYTES.max(dst.len() as u64).min(self.bytes_left());
            self.block.resize(length as usize, 0);
            self.file.read_exact_at(self.position, &mut self.block)?;
            self.block_start = self.position;
            // A file with holes costs whoever made it nothing.
            if !self.has_hole_before(self.position + length) {
                self.budget.allow(length * self.memory_factor);
            }
        }
        let start = (self.position - self.block_start) as usize;
        let bytes = self
            .block
            .get(start..start + dst.len())
            .ok_or_else(|| malformed("it is cut short"))?;
        dst.copy_from_slice(bytes);
        self.position = end;
        Ok(())
    }

    /// Reads a number of 32 bits.
    fn read_u32(&mut self) -> Result<u32, FormatError> {
        Ok(u32::from_le_bytes(self.read_array()?))
    }

    /// Reads a number of 64 bits.
    fn read_u64(&mut self) -> Result<u64, FormatError> {
        Ok(u64::from_le_bytes(self.read_array()?))
    }

    /// Charges memory for something that is built to the budget.
    fn charge(&mut self, bytes: u64) -> Result<(), FormatError> {
        Ok(self.budget.charge("memory for the header", bytes)?)
    }

    /// Reads a text of at most `max_bytes` bytes, with its length before it.
    fn read_text(&mut self, max_bytes: u64) -> Result<String, FormatError> {
        let length = self.read_u64()?;
        if length > max_bytes || length > self.bytes_left() {
            return Err(malformed("a text in it is too long"));
        }
        self.charge(ALLOCATION_COST_BYTES)?;
        let bytes = if length > BLOCK_BYTES {
            let text_bytes = read_whole(self.file, self.position, length)?;
            self.position += length;
            text_bytes
        } else {
            self.charge(length)?;
            let mut text_bytes = vec![0; length as usize];
            self.fill(&mut text_bytes)?;
            text_bytes
        };
        String::from_utf8(bytes).map_err(|_| malformed("a text in it is not UTF-8"))
    }

    /// Reads a value of this type, with `depth` arrays around it. An unknown type is an error.
    fn read_value(&mut self, value_type: u32, depth: usize) -> Result<PlainValue, FormatError> {
        Ok(match value_type {
            0 => PlainValue::Int(i64::from(u8::from_le_bytes(self.read_array()?))),
            1 => PlainValue::Int(i64::from(i8::from_le_bytes(self.read_array()?))),
            2 => PlainValue::Int(i64::from(u16::from_le_bytes(self.read_array()?))),
            3 => PlainValue::Int(i64::from(i16::from_le_bytes(self.read_array()?))),
            4 => PlainValue::Int(i64::from(self.read_u32()?)),
            5 => PlainValue::Int(i64::from(i32::from_le_bytes(self.read_array()?))),
            6 => PlainValue::Float(f64::from(f32::from_le_bytes(self.read_array()?))),
            7 => PlainValue::Bool(self.read_array::<1>()? != [0]),
            TEXT_TYPE => PlainValue::Str(self.read_text(MAX_OBJECT_BYTES)?),
            ARRAY_TYPE => self.read_items(depth)?,
            10 => PlainValue::unsigned(self.read_u64()?),
            11 => PlainValue::Int(i64::from_le_bytes(self.read_array()?)),
            12 => PlainValue::Float(f64::from_le_bytes(self.read_array()?)),
            unknown => return Err(unknown_type_error(unknown)),
        })
    }

    /// Reads the start of an array: the type of its items, and their number. Arrays that are nested
    /// too deep are an error, and so is one that has more items than bytes follow.
    fn read_array_start(&mut self, depth: usize) -> Result<(u32, u64), FormatError> {
        if depth >= MAX_ARRAY_DEPTH {
            return Err(malformed("its arrays are nested too deep"));
        }
        let item_type = self.read_u32()?;
        let count = self.read_u64()?;
        // Each item takes a byte at least.
        if count > self.bytes_left() {
            return Err(malformed("an array in it is too long"));
        }
        Ok((item_type, count))
    }

    /// Reads an array with `depth` others around it.
    fn read_items(&mut self, depth: usize) -> Result<PlainValue, FormatError> {
        let (item_type, count) = self.read_array_start(depth)?;
        self.charge_items(count)?;
        let mut items = Vec::with_capacity(count as usize);
        for _ in 0..count {
            items.push(self.read_value(item_type, depth + 1)?);
        }
        Ok(PlainValue::List(items))
    }

    /// Charges memory for so many items of arrays to the budget.
    fn charge_items(&mut self, count: u64) -> Result<(), FormatError> {
        self.charge(count.saturating_mul(size_of::<PlainValue>() as u64))
    }

    /// Moves to the end of an array with `depth` others around it, of which no item is kept. An
    /// unknown type of its items and an end beyond that of the file are errors.
    fn skip_array(&mut self, depth: usize) -> Result<(), FormatError> {
        let (item_type, count) = self.read_array_start(depth)?;
        if let TEXT_TYPE | ARRAY_TYPE = item_type {
            for _ in 0..count {
                // Each has at least the eight bytes of a length, which add more to the budget.
                self.charge_items(1)?;
                if item_type == ARRAY_TYPE {
                    self.skip_array(depth + 1)?;
                } else {
                    let length = self.read_u64()?;
                    self.skip(length)?;
                }
            }
            return Ok(());
        }
        let item_bytes = number_bytes(item_type).ok_or_else(|| unknown_type_error(item_type))?;
        let length = count.saturating_mul(item_bytes);
        let end = self.position.saturating_add(length);
        // A file with holes costs whoever made it nothing, and would be refused when it is read.
        if self.has_hole_before(end) {
            self.charge_items(count)?;
        }
        self.skip(length)
    }

    /// Moves on by so many bytes. An end beyond that of the file is an error.
    fn skip(&mut self, length: u64) -> Result<(), FormatError> {
        if length > self.bytes_left() {
            return Err(malformed("it is cut short"));
        }
        self.position += length;
        Ok(())
    }

    /// Reads the entry of a tensor in the list.
    fn read_tensor_info(&mut self) -> Result<TensorInfo, FormatError> {
        self.charge(size_of::<TensorInfo>() as u64)?;
        let name = self.read_text(MAX_KEY_BYTES as u64)?;
        let dimensions = self.read_u32()?;
        if dimensions > MAX_DIMENSIONS {
            let reason = format!("the tensor `{name}` has {dimensions} dimensions");
            return Err(malformed(reason));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let size = usize::try_from(self.read_u64()?)
                .map_err(|_| malformed("a dimension is too large"))?;
            shape.push(size);
        }
        // GGUF counts dimensions from the innermost.
        shape.reverse();
        Ok(TensorInfo {
            name,
            shape,
            ggml_type: self.read_u32()?,
            offset: self.read_u64()?,
        })
    }
}

/// The versions of the format that are read.
const VERSIONS: [u32; 2] = [2, 3];

impl GgufHeader {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// Another version or format; a header that is cut short, or takes more than the memory budget;
    /// an alignment that is no power of two.
    pub(super) fn read(file: &dyn ReadAt) -> Result<Self, FormatError> {
        let mut reader = HeaderReader::new(file, Budget::new(0, 1), MEMORY_FACTOR);
        if reader.read_array::<4>()? != *MAGIC {
            return Err(malformed("it does not begin as one"));
        }
        let version = reader.read_u32()?;
        if !VERSIONS.contains(&version) {
            let what = if VERSIONS.contains(&version.swap_bytes()) {
                "a big-endian file (`gguf-convert-endian` of the package `gguf` converts it),"
                    .to_owned()
            } else {
                format!("version {version} of GGUF")
            };
            return Err(FormatError::unsupported(what));
        }
        let tensor_count = reader.read_u64()?;
        let entry_count = reader.read_u64()?;
        let mut header = GgufHeader {
            entries: Vec::new(),
            tensors: Vec::new(),
            alignment: DEFAULT_ALIGNMENT,
            data_offset: 0,
        };
        for _ in 0..entry_count {
            // A list takes up to twice as much while it grows.
            reader.charge(2 * size_of::<(String, HeaderValue)>() as u64)?;
            let key = reader.read_text(MAX_KEY_BYTES as u64)?;
            let value_type = reader.read_u32()?;
            let value = if value_type == ARRAY_TYPE {
                let start = reader.position;
                reader.skip_array(0)?;
                HeaderValue::Array(start..reader.position)
            } else {
                HeaderValue::Plain(reader.read_value(value_type, 0)?)
            };
            header.entries.push((key, value));
        }
        for _ in 0..tensor_count {
            header.tensors.push(reader.read_tensor_info()?);
        }
        if let Some(value) = header.value("general.alignment") {
            header.alignment = value
                .as_int()
                .and_then(|value| u64::try_from(value).ok())
                .filter(|value| value.is_power_of_two())
                .ok_or_else(|| malformed("its alignment is no power of two"))?;
        }
        // The data of the tensors begins at the next aligned position after the header.
        header.data_offset = reader
            .position
            .checked_next_multiple_of(header.alignment)
            .ok_or_else(|| malformed("its alignment is too large"))?;
        Ok(header)
    }

    /// Returns the value of a key; `None` if the header lacks it, or has an array there.
    pub(super) fn value(&self, key: &str) -> Option<&PlainValue> {
        let entry = self.entries.iter().find(|(entry_key, _)| entry_key == key);
        match entry {
            Some((_, HeaderValue::Plain(value))) => Some(value),
            _ => None,
        }
    }
}

/// Reads an array from its bytes, the type of its items first.
///
/// # Errors
/// Items that are malformed, or that take more than the memory budget for so many bytes.
pub(super) fn read_array(source: &dyn ReadAt) -> Result<PlainValue, FormatError> {
    let length = source.len();
    let counted_bytes = if source.has_hole(0..length) {
        0
    } else {
        length
    };
    let budget = Budget::new(counted_bytes, ARRAY_MEMORY_FACTOR);
    HeaderReader::new(source, budget, 0).read_items(0)
}

/// Returns the bytes of a number or a bool of this type; `None` for other types.
fn number_bytes(value_type: u32) -> Option<u64> {
    Some(match value_type {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        _ => return None,
    })
}

/// Returns the error of a value whose type has no such number.
fn unknown_type_error(unknown: u32) -> FormatError {
    malformed(format!("it has a value of the unknown type {unknown}"))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A file in memory that counts how often a hole is looked for in it.
    struct CountedFile {
        bytes: Vec<u8>,
        hole: Option<u64>,
        lookups: AtomicUsize,
    }

    impl ReadAt for CountedFile {
        fn len(&self) -> u64 {
            self.bytes.len() as u64
        }

        fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
            self.bytes.read_exact_at(offset, dst)
        }

        fn find_hole(&self, offset: u64) -> Option<u64> {
            self.lookups.fetch_add(1, Ordering::Relaxed);
            self.hole.filter(|hole| *hole >= offset)
        }
    }

    /// Returns how often a hole is looked for in a header with many arrays of so many bytes.
    fn count_lookups(array_bytes: u64, hole: Option<u64>) -> usize {
        const ARRAYS: u64 = 100_000;
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(0u64.to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
        bytes.extend([&1u64.to_le_bytes()[..], b"k"].concat());
        bytes.extend([ARRAY_TYPE.to_le_bytes(), ARRAY_TYPE.to_le_bytes()].concat());
        bytes.extend(ARRAYS.to_le_bytes());
        for _ in 0..ARRAYS {
            bytes.extend(0u32.to_le_bytes());
            bytes.extend(array_bytes.to_le_bytes());
            bytes.extend(vec![7; array_bytes as usize]);
        }
        let file = CountedFile {
            bytes,
            hole,
            lookups: AtomicUsize::new(0),
        };
        let header = GgufHeader::read(&file).unwrap();
        assert_eq!(header.entries.len(), 1);
        file.lookups.into_inner()
    }

    #[test]
    fn a_hole_is_looked_for_once_and_not_for_each_array() {
        for array_bytes in [0, 3] {
            assert_eq!(count_lookups(array_bytes, None), 1, "{array_bytes}");
            // Behind the hole there may be another one.
            let hole = Some(600_000);
            assert_eq!(count_lookups(array_bytes, hole), 2, "{array_bytes}");
        }
    }
}
