//! llama.cpp's files: a header of keys and values, the list of tensors, and their elements.
//!
//! Tensors of `F32`, `F16`, `BF16`, `F64` and of integers are read as they are, those of `Q8_0` and
//! `Q4_0` as `f32`. Tensors of other blocks are opaque values that name their kind. The header's
//! keys (`general.name`, the tokenizer's tokens) are values. GGUF counts dimensions from the
//! innermost; shapes here begin with the outermost.

mod header;

use std::sync::Arc;

use fsdp_layout::boxes::{checked_numel, row_major_strides};
use fsdp_layout::{DType, KeyPath, PathPart, TensorBox};

pub(crate) use self::header::START;
use self::header::{Header, Info};
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Assembled, Assembler, Elements, Held, Piece, Start};
use crate::formats::blocks::{BLOCK, BlockFormat};
use crate::formats::checkpoint::Format;
use crate::limits::is_sane_shape;
use crate::metadata::StorageInfo;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::storage::read_at::ReadAt as _;
use crate::strided::StridedLayout;

/// Opens a file.
pub(crate) fn open(
    location: &Location,
    directory: CheckedDirectory,
) -> Result<Assembled, FileError> {
    let (_, name) = location.split()?;
    let mut assembler = Assembler::new(Format::Gguf, location.name(), directory);
    let file = assembler.directory().file(name)?;
    let error = |source| FileError::File {
        path: location.name().to_owned(),
        source,
    };
    let header = Header::read(&*file).map_err(error)?;
    check_not_split(&header).map_err(error)?;
    let name: Arc<str> = Arc::from(name);
    let mut starts: Vec<u64> = header.tensors.iter().map(|info| info.offset).collect();
    starts.sort_unstable();
    for info in header.tensors {
        let path = KeyPath(vec![PathPart::Key(info.name.clone())]);
        match kind(info.kind) {
            Some((dtype, elements)) => {
                let piece =
                    piece(&name, &info, dtype, elements, header.data, file.len()).map_err(error)?;
                assembler.add_tensor(&path, &name, dtype, &info.shape, vec![piece])?;
            }
            None => {
                let next = starts
                    .get(starts.partition_point(|start| *start <= info.offset))
                    .copied();
                let stored =
                    opaque_place(&name, &info, header.data, next, file.len()).map_err(error)?;
                let kind = blocks_of(info.kind).map_or_else(
                    || format!("kind {}", info.kind),
                    |(name, ..)| name.to_owned(),
                );
                let of = format!("GGUF tensor of {kind} {:?}", info.shape);
                assembler.add_value(&path, &name, Held::Stored(of, stored))?;
            }
        }
    }
    for (key, value) in header.values {
        assembler.add_value(
            &KeyPath(vec![PathPart::Key(key)]),
            &name,
            Held::Plain(value),
        )?;
    }
    Ok(assembler.finish(None))
}

/// Refuses one of several files into which a model was split: the tensors of the others would be
/// missing.
fn check_not_split(header: &Header) -> Result<(), FormatError> {
    let count = header
        .values
        .iter()
        .find(|(key, _)| key == "split.count")
        .and_then(|(_, count)| count.as_int());
    match count {
        Some(count) if count > 1 => Err(FormatError::Unsupported {
            what: format!(
                "one of the {count} files of a split model (join them with `llama-gguf-split --merge`)"
            ),
        }),
        _ => Ok(()),
    }
}

/// Returns where a tensor lies, after a check that it lies in the file.
fn piece(
    file: &Arc<str>,
    info: &Info,
    dtype: DType,
    elements: Elements,
    data: u64,
    length: u64,
) -> Result<Piece, FormatError> {
    let numel = numel(info)?;
    let bytes = match elements {
        Elements::Plain => numel.checked_mul(dtype.size_in_bytes()),
        Elements::Blocks(_)
            if !info
                .shape
                .last()
                .is_some_and(|size| size.is_multiple_of(BLOCK)) =>
        {
            return Err(malformed(info, "is not made of whole blocks"));
        }
        Elements::Blocks(format) => Some(format.bytes(numel)),
    };
    let start = start_in(info, data, bytes, length)?;
    let layout = StridedLayout {
        bounds: TensorBox::whole(&info.shape),
        offset: 0,
        strides: row_major_strides(&info.shape),
    };
    Ok(Piece {
        file: file.clone(),
        start: Start::At(start),
        layout,
        elements,
    })
}

/// Returns the type as which a kind of tensors is read; `None` for a kind that cannot be read.
fn kind(kind: u32) -> Option<(DType, Elements)> {
    let plain = |dtype| Some((dtype, Elements::Plain));
    match kind {
        0 => plain(DType::F32),
        1 => plain(DType::F16),
        2 => Some((DType::F32, Elements::Blocks(BlockFormat::Q4_0))),
        8 => Some((DType::F32, Elements::Blocks(BlockFormat::Q8_0))),
        24 => plain(DType::I8),
        25 => plain(DType::I16),
        26 => plain(DType::I32),
        27 => plain(DType::I64),
        28 => plain(DType::F64),
        30 => plain(DType::BF16),
        _ => None,
    }
}

/// Returns the place of a tensor of blocks that are not read, after a check that it lies in the
/// file. Blocks of an unknown kind may take all bytes up to the next tensor, which begins at
/// `next`, or up to the end of the file.
fn opaque_place(
    file: &Arc<str>,
    info: &Info,
    data: u64,
    next: Option<u64>,
    length: u64,
) -> Result<StorageInfo, FormatError> {
    let numel = numel(info)?;
    let bytes = match blocks_of(info.kind) {
        Some((_, elements, _))
            if !info
                .shape
                .last()
                .is_some_and(|size| (*size as u64).is_multiple_of(elements)) =>
        {
            return Err(malformed(info, "is not made of whole blocks"));
        }
        Some((_, elements, bytes)) => (numel / elements).checked_mul(bytes),
        None => {
            let end = next.map_or(Some(length), |next| data.checked_add(next));
            end.and_then(|end| end.checked_sub(data.checked_add(info.offset)?))
        }
    };
    let start = start_in(info, data, bytes, length)?;
    let length = bytes.unwrap_or_default();
    Ok(StorageInfo {
        relative_path: file.to_string(),
        offset: start,
        length,
        transforms: Vec::new(),
    })
}

fn malformed(info: &Info, reason: &str) -> FormatError {
    FormatError::Malformed {
        what: "GGUF file",
        reason: format!("the tensor `{}` {reason}", info.name),
    }
}

/// Returns the number of a tensor's elements.
fn numel(info: &Info) -> Result<u64, FormatError> {
    let numel = checked_numel(&info.shape).filter(|_| is_sane_shape(&info.shape));
    Ok(numel.ok_or_else(|| malformed(info, "has too many elements"))? as u64)
}

/// Returns where a tensor of so many bytes begins in its file; an error if it does not lie in the
/// file.
fn start_in(info: &Info, data: u64, bytes: Option<u64>, length: u64) -> Result<u64, FormatError> {
    let start = data.checked_add(info.offset);
    let end = start.and_then(|start| start.checked_add(bytes?));
    let start = start.filter(|_| end.is_some_and(|end| end <= length));
    start.ok_or_else(|| malformed(info, "reaches beyond the end of the file"))
}

/// Returns the name of a kind of blocks that is not read, the elements of a block, and its bytes;
/// `None` if it is not known.
fn blocks_of(kind: u32) -> Option<(&'static str, u64, u64)> {
    const KINDS: [(u32, &str, u64, u64); 24] = [
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
    let found = KINDS.iter().find(|(number, ..)| *number == kind);
    found.map(|(_, name, elements, bytes)| (*name, *elements, *bytes))
}
