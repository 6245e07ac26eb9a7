//! The header of a file: keys and values, and the list of tensors.

use fsdp_layout::PlainValue;

use crate::budget::Budget;
use crate::error::FormatError;
use crate::limits::{MAX_KEY_BYTES, MAX_OBJECT_BYTES};
use crate::storage::read_at::{ReadAt, read_whole};

/// The bytes with which a file begins.
pub(crate) const MAGIC: &[u8; 4] = b"GGUF";

/// The most dimensions of a tensor.
const MAX_DIMENSIONS: u32 = 4;
/// The bytes that the start of the data is a multiple of, where the header says nothing else.
const DEFAULT_ALIGNMENT: u64 = 32;
/// The bytes that are read at once.
const BLOCK_BYTES: u64 = 1 << 20;
/// The bytes that may be built from a byte of the header: short texts and small numbers become
/// several times as many.
const MEMORY_FACTOR: u64 = 8;

/// The content of a header.
#[derive(Debug)]
pub(super) struct GgufHeader {
    /// Keys and values, in order.
    pub(super) entries: Vec<(String, PlainValue)>,
    /// The tensors, in order.
    pub(super) tensors: Vec<TensorInfo>,
    /// The start of the elements of all tensors in the file.
    pub(super) data_offset: u64,
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
fn malformed(reason: impl ToString) -> FormatError {
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
    budget: Budget,
}

impl HeaderReader<'_> {
    /// Returns how many bytes of the file follow.
    fn bytes_left(&self) -> u64 {
        self.file.len().saturating_sub(self.position)
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
            if !self.file.has_hole(self.position..self.position + length) {
                self.budget.allow(length * MEMORY_FACTOR);
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
        self.charge(size_of::<PlainValue>() as u64)?;
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
        // An array takes up to twice as much while it grows.
        self.charge(2 * size_of::<PlainValue>() as u64)?;
        Ok(match value_type {
            0 => PlainValue::Int(i64::from(u8::from_le_bytes(self.read_array()?))),
            1 => PlainValue::Int(i64::from(i8::from_le_bytes(self.read_array()?))),
            2 => PlainValue::Int(i64::from(u16::from_le_bytes(self.read_array()?))),
            3 => PlainValue::Int(i64::from(i16::from_le_bytes(self.read_array()?))),
            4 => PlainValue::Int(i64::from(self.read_u32()?)),
            5 => PlainValue::Int(i64::from(i32::from_le_bytes(self.read_array()?))),
            6 => PlainValue::Float(f64::from(f32::from_le_bytes(self.read_array()?))),
            7 => PlainValue::Bool(self.read_array::<1>()? != [0]),
            8 => PlainValue::Str(self.read_text(MAX_OBJECT_BYTES)?),
            9 => self.read_items(depth)?,
            10 => {
                let value = self.read_u64()?;
                // With a zero byte on top a large one is not taken for a negative number.
                match i64::try_from(value) {
                    Ok(value) => PlainValue::Int(value),
                    Err(_) => PlainValue::BigInt([&value.to_le_bytes()[..], &[0]].concat()),
                }
            }
            11 => PlainValue::Int(i64::from_le_bytes(self.read_array()?)),
            12 => PlainValue::Float(f64::from_le_bytes(self.read_array()?)),
            unknown => {
                let reason = format!("it has a value of the unknown type {unknown}");
                return Err(malformed(reason));
            }
        })
    }

    /// Reads an array: the type of its items, their number, and the items. Arrays that are nested
    /// too deep are an error.
    fn read_items(&mut self, depth: usize) -> Result<PlainValue, FormatError> {
        const MAX_DEPTH: usize = 4;
        if depth >= MAX_DEPTH {
            return Err(malformed("its arrays are nested too deep"));
        }
        let item_type = self.read_u32()?;
        let count = self.read_u64()?;
        // Each item takes a byte at least.
        if count > self.bytes_left() {
            return Err(malformed("an array in it is too long"));
        }
        let mut items = Vec::new();
        for _ in 0..count {
            items.push(self.read_value(item_type, depth + 1)?);
        }
        Ok(PlainValue::List(items))
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

impl GgufHeader {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// Another version or format; a header that is cut short, or takes more than the memory budget;
    /// an alignment that is no power of two.
    pub(super) fn read(file: &dyn ReadAt) -> Result<Self, FormatError> {
        let mut reader = HeaderReader {
            file,
            position: 0,
            block: Vec::new(),
            block_start: 0,
            budget: Budget::new(0, 1),
        };
        if reader.read_array::<4>()? != *MAGIC {
            return Err(malformed("it does not begin as one"));
        }
        let version = reader.read_u32()?;
        if ![2, 3].contains(&version) {
            let what = format!("version {version} of GGUF");
            return Err(FormatError::unsupported(what));
        }
        let tensor_count = reader.read_u64()?;
        let entry_count = reader.read_u64()?;
        let mut header = GgufHeader {
            entries: Vec::new(),
            tensors: Vec::new(),
            data_offset: 0,
        };
        for _ in 0..entry_count {
            let key = reader.read_text(MAX_KEY_BYTES as u64)?;
            let value_type = reader.read_u32()?;
            let value = reader.read_value(value_type, 0)?;
            header.entries.push((key, value));
        }
        for _ in 0..tensor_count {
            header.tensors.push(reader.read_tensor_info()?);
        }
        // The data of the tensors begins at the next aligned position after the header.
        let alignment = match header.value("general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some(value) => value
                .as_int()
                .and_then(|value| u64::try_from(value).ok())
                .filter(|value| value.is_power_of_two())
                .ok_or_else(|| malformed("its alignment is no power of two"))?,
        };
        header.data_offset = reader
            .position
            .checked_next_multiple_of(alignment)
            .ok_or_else(|| malformed("its alignment is too large"))?;
        Ok(header)
    }

    /// Returns the value of a key; `None` if the header lacks it.
    pub(super) fn value(&self, key: &str) -> Option<&PlainValue> {
        let entry = self.entries.iter().find(|(entry_key, _)| entry_key == key);
        entry.map(|(_, value)| value)
    }
}
