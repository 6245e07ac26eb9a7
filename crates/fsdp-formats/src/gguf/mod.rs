//! llama.cpp's files: a header of keys and values, the list of tensors, and their elements.
//!
//! Tensors of `F32`, `F16`, `BF16`, `F64` and of integers are read as they are, those of `Q8_0` and
//! `Q4_0` as `f32`. Tensors of other blocks are opaque values that name their kind. The header's
//! keys (`general.name`, the tokenizer's tokens) are values; arrays are read when they are wanted.
//! GGUF counts dimensions from the innermost; shapes here begin with the outermost.

mod header;

use std::ops::Range;
use std::sync::Arc;

use fsdp_layout::boxes::{checked_numel, row_major_strides};
use fsdp_layout::{DType, KeyPath, PlainValue, TensorBox};

pub(crate) use self::header::MAGIC;
use self::header::{GgufHeader, HeaderValue, TensorInfo, read_array};
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{
    Assembled, Assembler, Elements, Held, Piece, StorageStart, Unread,
};
use crate::formats::blocks::{BLOCK_ELEMENTS, BlockFormat};
use crate::formats::checkpoint::Format;
use crate::limits::is_sane_shape;
use crate::metadata::StorageInfo;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::storage::read_at::ReadAt;
use crate::strided::StridedLayout;

/// Opens a file.
pub(crate) fn open(
    location: &Location,
    directory: CheckedDirectory,
) -> Result<Assembled, FileError> {
    let (_, name) = location.split()?;
    let mut assembler = Assembler::new(Format::Gguf, location.name(), directory);
    let file = assembler.directory().file(name)?;
    let (header, ranges) = read_header(&*file).map_err(|source| source.in_file(location.name()))?;
    let name: Arc<str> = Arc::from(name);
    for (info, range) in header.tensors.into_iter().zip(ranges) {
        let path = KeyPath::from_key(info.name);
        if let Some((dtype, elements)) = readable_type(info.ggml_type) {
            let layout = StridedLayout {
                bounds: TensorBox::whole(&info.shape),
                offset: 0,
                strides: row_major_strides(&info.shape),
            };
            let piece = Piece {
                file: name.clone(),
                start: StorageStart::Offset(range.start),
                layout,
                elements,
            };
            assembler.add_tensor(&path, &name, dtype, &info.shape, vec![piece])?;
            continue;
        }
        let type_name = match opaque_type(info.ggml_type) {
            Some((type_name, ..)) => type_name.to_owned(),
            None => format!("kind {}", info.ggml_type),
        };
        let description = format!("GGUF tensor of {type_name} {:?}", info.shape);
        let stored = StorageInfo::new(&*name, range.start, range.end - range.start);
        assembler.add_value(&path, &name, Held::Stored(description, stored))?;
    }
    for (key, value) in header.entries {
        let held = match value {
            HeaderValue::Plain(value) => Held::Plain(value),
            HeaderValue::Array(range) => Held::Unread(Unread {
                stored: StorageInfo::new(&*name, range.start, range.end - range.start),
                read: read_array,
            }),
        };
        assembler.add_value(&KeyPath::from_key(key), &name, held)?;
    }
    Ok(assembler.finish(None))
}

/// Refuses one of several files into which a model was split: the tensors of the others would be
/// missing.
fn check_not_split(header: &GgufHeader) -> Result<(), FormatError> {
    match header.value("split.count").and_then(PlainValue::as_int) {
        Some(count) if count > 1 => Err(FormatError::unsupported(format!(
            "one of the {count} files of a split model (join them with `llama-gguf-split --merge`)"
        ))),
        _ => Ok(()),
    }
}

/// Reads the header, and returns it with the range of each tensor in the file.
///
/// The tensors lie one after the other in the order of the list, each at the next aligned position
/// after the one before it. llama.cpp reads no other files.
///
/// # Errors
/// A split model; a tensor that lies elsewhere, or reaches beyond the end of the file.
fn read_header(file: &dyn ReadAt) -> Result<(GgufHeader, Vec<Range<u64>>), FormatError> {
    let header = GgufHeader::read(file)?;
    check_not_split(&header)?;
    // A file without tensors may end before the data would begin.
    let data_bytes = file.len().checked_sub(header.data_offset);
    let mut ranges = Vec::with_capacity(header.tensors.len());
    // The end of the tensor before, counted from the start of the data.
    let mut data_end = 0;
    for (index, info) in header.tensors.iter().enumerate() {
        check_offset(info, data_end, header.alignment)?;
        // Blocks of an unknown kind may take all bytes up to the next tensor, or up to the end of
        // the file.
        let next_offset = header.tensors.get(index + 1).map(|next| next.offset);
        let max_bytes = next_offset
            .or(data_bytes)
            .unwrap_or(0)
            .saturating_sub(info.offset);
        let length = tensor_bytes(info, max_bytes)?;
        data_end = info
            .offset
            .checked_add(length)
            .filter(|end| data_bytes.is_some_and(|data_bytes| *end <= data_bytes))
            .ok_or_else(|| info.malformed("reaches beyond the end of the file"))?;
        let start = header.data_offset + info.offset;
        ranges.push(start..start + length);
    }
    Ok((header, ranges))
}

/// Checks that a tensor lies at the next aligned position after the one before it, which ends at
/// `previous_end`; this is 0 for the first one.
fn check_offset(info: &TensorInfo, previous_end: u64, alignment: u64) -> Result<(), FormatError> {
    let offset = info.offset;
    if !offset.is_multiple_of(alignment) {
        return Err(info.malformed(&format!(
            "begins at byte {offset} of the data, which is no multiple of {alignment}"
        )));
    }
    if offset < previous_end {
        return Err(info.malformed(&format!(
            "begins at byte {offset} of the data, in the tensor before it, which ends at {previous_end}"
        )));
    }
    if offset - previous_end >= alignment {
        return Err(info.malformed(&format!(
            "begins at byte {offset} of the data, too far from the end of what is before it at {previous_end}"
        )));
    }
    Ok(())
}

/// Returns how many bytes a tensor takes in the file: `max_bytes` if its type is not known.
fn tensor_bytes(info: &TensorInfo, max_bytes: u64) -> Result<u64, FormatError> {
    let element_count = checked_numel(&info.shape)
        .filter(|_| is_sane_shape(&info.shape))
        .ok_or_else(|| info.malformed("has too many elements"))? as u64;
    let (block_elements, block_bytes) =
        match (readable_type(info.ggml_type), opaque_type(info.ggml_type)) {
            // No sane shape is so large that its bytes overflow.
            (Some((dtype, Elements::Plain | Elements::BigEndian)), _) => {
                return Ok(element_count * dtype.size_in_bytes());
            }
            (Some((_, Elements::Blocks(format))), _) => (
                BLOCK_ELEMENTS as u64,
                format.bytes_of_elements(BLOCK_ELEMENTS as u64),
            ),
            (None, Some((_, block_elements, block_bytes))) => (block_elements, block_bytes),
            (None, None) => return Ok(max_bytes),
        };
    match info.shape.last() {
        Some(size) if (*size as u64).is_multiple_of(block_elements) => {
            Ok(element_count / block_elements * block_bytes)
        }
        _ => Err(info.malformed("is not made of whole blocks")),
    }
}

/// Returns the dtype as which tensors of a type of ggml are read, and how their elements are
/// stored; `None` for a type that cannot be read.
fn readable_type(ggml_type: u32) -> Option<(DType, Elements)> {
    let dtype = match ggml_type {
        2 => return Some((DType::F32, Elements::Blocks(BlockFormat::Q4_0))),
        8 => return Some((DType::F32, Elements::Blocks(BlockFormat::Q8_0))),
        0 => DType::F32,
        1 => DType::F16,
        24 => DType::I8,
        25 => DType::I16,
        26 => DType::I32,
        27 => DType::I64,
        28 => DType::F64,
        30 => DType::BF16,
        _ => return None,
    };
    Some((dtype, Elements::Plain))
}

/// Returns the name of a type of ggml that is not read, the elements of one of its blocks, and the
/// bytes of a block; `None` if the type is not known.
fn opaque_type(ggml_type: u32) -> Option<(&'static str, u64, u64)> {
    const TYPES: [(u32, &str, u64, u64); 24] = [
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (9, "Q8_1", 32, 36),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (29, "IQ1_M", 256, 56),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    ];
    let entry = TYPES.iter().find(|(number, ..)| *number == ggml_type);
    entry.map(|(_, name, block_elements, block_bytes)| (*name, *block_elements, *block_bytes))
}
