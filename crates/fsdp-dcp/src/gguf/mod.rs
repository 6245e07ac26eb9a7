//! llama.cpp's files: a header of keys and values, the list of tensors, and their elements.
//!
//! Tensors of `F32`, `F16`, `BF16`, `F64` and of integers are read as they are, those of `Q8_0` and `Q4_0` as `f32`. Tensors
//! of other blocks are opaque values that name their kind. The header's keys (`general.name`, the tokenizer's tokens) are
//! values. GGUF counts dimensions from the innermost; shapes here begin with the outermost.

mod header;

use std::sync::Arc;

use fsdp_layout::boxes::{checked_numel, row_major_strides};
use fsdp_layout::{DType, KeyPath, PathPart, PlainValue, TensorBox};

pub(crate) use self::header::START;
use self::header::{Header, Info};
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Assembled, Assembler, Elements, Held, Piece, Start};
use crate::formats::blocks::{BLOCK, BlockFormat};
use crate::formats::checkpoint::Format;
use crate::formats::read::OpenOptions;
use crate::limits::is_sane_shape;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::storage::read_at::ReadAt as _;
use crate::strided::StridedLayout;

/// Opens a file.
pub(crate) fn open(location: &Location, options: OpenOptions) -> Result<Assembled, FileError> {
    let (parent, name) = location.split()?;
    let directory = CheckedDirectory::open_beside(&parent, name, options.verify)?;
    let mut assembler = Assembler::new(Format::Gguf, location.name(), directory);
    let file = assembler.directory().file(name)?;
    let error = |source| FileError::File { path: location.name().to_owned(), source };
    let header = Header::read(&*file).map_err(error)?;
    let name: Arc<str> = Arc::from(name);
    for info in header.tensors {
        let path = KeyPath(vec![PathPart::Key(info.name.clone())]);
        match kind(info.kind) {
            Some((dtype, elements)) => {
                let piece = piece(&name, &info, dtype, elements, header.data, file.len()).map_err(error)?;
                assembler.add_tensor(&path, &name, dtype, &info.shape, vec![piece])?;
            }
            None => {
                let of = format!("GGUF tensor of {} {:?}", kind_name(info.kind), info.shape);
                let description = PlainValue::Str(of.clone());
                assembler.add_value(&path, &name, Held::Opaque(of, description))?;
            }
        }
    }
    for (key, value) in header.values {
        assembler.add_value(&KeyPath(vec![PathPart::Key(key)]), &name, Held::Plain(value))?;
    }
    Ok(assembler.finish(None))
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
    let malformed = |reason: &str| {
        let reason = format!("the tensor `{}` {reason}", info.name);
        FormatError::Malformed { what: "GGUF file", reason }
    };
    let numel = checked_numel(&info.shape).filter(|_| is_sane_shape(&info.shape));
    let numel = numel.ok_or_else(|| malformed("has too many elements"))? as u64;
    let bytes = match elements {
        Elements::Plain => numel.checked_mul(dtype.size_in_bytes()),
        Elements::Blocks(_) if !info.shape.last().is_some_and(|size| size.is_multiple_of(BLOCK)) => {
            return Err(malformed("is not made of whole blocks"));
        }
        Elements::Blocks(format) => Some(format.bytes(numel)),
    };
    let start = data.checked_add(info.offset);
    let end = start.and_then(|start| start.checked_add(bytes?));
    let start = start.filter(|_| end.is_some_and(|end| end <= length));
    let start = start.ok_or_else(|| malformed("reaches beyond the end of the file"))?;
    let layout =
        StridedLayout { bounds: TensorBox::whole(&info.shape), offset: 0, strides: row_major_strides(&info.shape) };
    Ok(Piece { file: file.clone(), start: Start::At(start), layout, elements })
}

/// Returns the type as which a kind of tensors is read; `None` for one that is not.
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

/// Returns the name of a kind of tensors that is not read.
fn kind_name(kind: u32) -> String {
    const NAMES: [(u32, &str); 15] = [
        (3, "Q4_1"),
        (6, "Q5_0"),
        (7, "Q5_1"),
        (9, "Q8_1"),
        (10, "Q2_K"),
        (11, "Q3_K"),
        (12, "Q4_K"),
        (13, "Q5_K"),
        (14, "Q6_K"),
        (15, "Q8_K"),
        (16, "IQ2_XXS"),
        (17, "IQ2_XS"),
        (20, "IQ4_NL"),
        (23, "IQ4_XS"),
        (39, "MXFP4"),
    ];
    let name = NAMES.iter().find(|(number, _)| *number == kind);
    name.map_or_else(|| format!("kind {kind}"), |(_, name)| (*name).to_owned())
}
