//! The header of a file: keys and values, and the list of tensors.

use fsdp_layout::PlainValue;

use crate::budget::Budget;
use crate::error::FormatError;
use crate::limits::{MAX_KEY_BYTES, MAX_OBJECT_BYTES};
use crate::storage::read_at::{ReadAt, read_whole};

/// The bytes with which a file begins.
pub(crate) const START: &[u8; 4] = b"GGUF";

/// The most dimensions of a tensor.
const MAX_DIMENSIONS: u32 = 4;
/// The bytes that the start of the data is a multiple of, where the header says nothing else.
const ALIGNMENT: u64 = 32;
/// The bytes that are read at once.
const AT_ONCE: u64 = 1 << 20;
/// The bytes that may be built from a byte of the header: short texts and small numbers become
/// several times as many.
const FACTOR: u64 = 8;

/// The content of a header.
#[derive(Debug)]
pub(super) struct GgufHeader {
    /// Keys and values, in order.
    pub(super) values: Vec<(String, PlainValue)>,
    /// The tensors, in order.
    pub(super) tensors: Vec<TensorInfo>,
    /// The start of the data in the file.
    pub(super) data: u64,
}

/// One tensor of the list.
#[derive(Debug)]
pub(super) struct TensorInfo {
    pub(super) name: String,
    /// The shape, outermost dimension first.
    pub(super) shape: Vec<usize>,
    /// The number of its kind.
    pub(super) kind: u32,
    /// Its first byte, from the start of the data.
    pub(super) offset: u64,
}

fn malformed(reason: impl Into<String>) -> FormatError {
    FormatError::Malformed {
        what: "GGUF file",
        reason: reason.into(),
    }
}

/// A reader of numbers and texts, one after the other.
struct HeaderReader<'f> {
    file: &'f dyn ReadAt,
    at: u64,
    block: Vec<u8>,
    block_start: u64,
    budget: Budget,
}

impl HeaderReader<'_> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// Reads the next bytes. The file is read in blocks, so that small fields cost no call each.
    fn fill(&mut self, dst: &mut [u8]) -> Result<(), FormatError> {
        let end = self.at.saturating_add(dst.len() as u64);
        if self.at < self.block_start || end > self.block_start + self.block.len() as u64 {
            let length = AT_ONCE
                .max(dst.len() as u64)
                .min(self.file.len().saturating_sub(self.at));
            self.block.resize(length as usize, 0);
            self.file.read_exact_at(self.at, &mut self.block)?;
            self.block_start = self.at;
            // A file with holes costs whoever made it nothing.
            if !self.file.has_hole(self.at..self.at + length) {
                self.budget.allow(length * FACTOR);
            }
        }
        let start = (self.at - self.block_start) as usize;
        let bytes = self
            .block
            .get(start..start + dst.len())
            .ok_or_else(|| malformed("it is cut short"))?;
        dst.copy_from_slice(bytes);
        self.at = end;
        Ok(())
    }

    fn u32(&mut self) -> Result<u32, FormatError> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64, FormatError> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    /// Takes memory for something that is built.
    fn charge(&mut self, bytes: u64) -> Result<(), FormatError> {
        Ok(self.budget.charge("memory for the header", bytes)?)
    }

    /// Reads a text with its length before it.
    fn text(&mut self, limit: u64) -> Result<String, FormatError> {
        let length = self.u64()?;
        if length > limit || length > self.file.len().saturating_sub(self.at) {
            return Err(malformed("a text in it is too long"));
        }
        self.charge(size_of::<PlainValue>() as u64)?;
        let bytes = if length > AT_ONCE {
            let large = read_whole(self.file, self.at, length)?;
            self.at += length;
            large
        } else {
            self.charge(length)?;
            let mut small = vec![0; length as usize];
            self.fill(&mut small)?;
            small
        };
        String::from_utf8(bytes).map_err(|_| malformed("a text in it is not UTF-8"))
    }

    /// Reads a value of this type.
    fn value(&mut self, kind: u32, depth: usize) -> Result<PlainValue, FormatError> {
        // An array takes up to twice as much while it grows.
        self.charge(2 * size_of::<PlainValue>() as u64)?;
        Ok(match kind {
            0 => PlainValue::Int(i64::from(u8::from_le_bytes(self.bytes()?))),
            1 => PlainValue::Int(i64::from(i8::from_le_bytes(self.bytes()?))),
            2 => PlainValue::Int(i64::from(u16::from_le_bytes(self.bytes()?))),
            3 => PlainValue::Int(i64::from(i16::from_le_bytes(self.bytes()?))),
            4 => PlainValue::Int(i64::from(self.u32()?)),
            5 => PlainValue::Int(i64::from(i32::from_le_bytes(self.bytes()?))),
            6 => PlainValue::Float(f64::from(f32::from_le_bytes(self.bytes()?))),
            7 => PlainValue::Bool(self.bytes::<1>()? != [0]),
            8 => PlainValue::Str(self.text(MAX_OBJECT_BYTES)?),
            9 => self.array(depth)?,
            10 => {
                let value = self.u64()?;
                // With a zero byte on top a large one is not taken for a negative number.
                match i64::try_from(value) {
                    Ok(value) => PlainValue::Int(value),
                    Err(_) => PlainValue::BigInt([&value.to_le_bytes()[..], &[0]].concat()),
                }
            }
            11 => PlainValue::Int(i64::from_le_bytes(self.bytes()?)),
            12 => PlainValue::Float(f64::from_le_bytes(self.bytes()?)),
            kind => {
                return Err(malformed(format!(
                    "it has a value of the unknown type {kind}"
                )));
            }
        })
    }

    /// Reads an array: the kind of its items, their number, and the items.
    fn array(&mut self, depth: usize) -> Result<PlainValue, FormatError> {
        const MAX_DEPTH: usize = 4;
        if depth >= MAX_DEPTH {
            return Err(malformed("its arrays are nested too deep"));
        }
        let kind = self.u32()?;
        let count = self.u64()?;
        // Each item takes a byte at least.
        if count > self.file.len().saturating_sub(self.at) {
            return Err(malformed("an array in it is too long"));
        }
        let mut items = Vec::new();
        for _ in 0..count {
            items.push(self.value(kind, depth + 1)?);
        }
        Ok(PlainValue::List(items))
    }
}

impl GgufHeader {
    /// Reads the header of a file.
    pub(super) fn read(file: &dyn ReadAt) -> Result<Self, FormatError> {
        let mut reader = HeaderReader {
            file,
            at: 0,
            block: Vec::new(),
            block_start: 0,
            budget: Budget::new(0, 1),
        };
        if reader.bytes::<4>()? != *START {
            return Err(malformed("it does not begin as one"));
        }
        let version = reader.u32()?;
        if ![2, 3].contains(&version) {
            return Err(FormatError::Unsupported {
                what: format!("version {version} of GGUF"),
            });
        }
        let tensor_count = reader.u64()?;
        let value_count = reader.u64()?;
        let mut values = Vec::new();
        let mut alignment = ALIGNMENT;
        for _ in 0..value_count {
            let key = reader.text(MAX_KEY_BYTES as u64)?;
            let kind = reader.u32()?;
            let value = reader.value(kind, 0)?;
            if key == "general.alignment" {
                alignment = value
                    .as_int()
                    .and_then(|value| u64::try_from(value).ok())
                    .filter(|value| value.is_power_of_two())
                    .ok_or_else(|| malformed("its alignment is no power of two"))?;
            }
            values.push((key, value));
        }
        let mut tensors = Vec::new();
        for _ in 0..tensor_count {
            reader.charge(size_of::<TensorInfo>() as u64)?;
            let name = reader.text(MAX_KEY_BYTES as u64)?;
            let dimensions = reader.u32()?;
            if dimensions > MAX_DIMENSIONS {
                return Err(malformed(format!(
                    "the tensor `{name}` has {dimensions} dimensions"
                )));
            }
            let mut shape = Vec::new();
            for _ in 0..dimensions {
                let size = usize::try_from(reader.u64()?)
                    .map_err(|_| malformed("a dimension is too large"))?;
                shape.push(size);
            }
            // GGUF counts dimensions from the innermost.
            shape.reverse();
            tensors.push(TensorInfo {
                name,
                shape,
                kind: reader.u32()?,
                offset: reader.u64()?,
            });
        }
        // The data of the tensors begins at the next aligned position after the header.
        let data = reader
            .at
            .checked_next_multiple_of(alignment)
            .ok_or_else(|| malformed("its alignment is too large"))?;
        Ok(GgufHeader {
            values,
            tensors,
            data,
        })
    }
}
