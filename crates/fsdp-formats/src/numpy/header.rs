//! The header of an array: a magic word, a version, a length, and a dict as Python writes it.

use fsdp_layout::boxes::{checked_numel, row_major_strides};
use fsdp_layout::{DType, TensorBox};

use crate::error::FormatError;
use crate::limits::is_sane_shape;
use crate::storage::read_at::{ReadAt, read_whole};
use crate::strided::StridedLayout;

/// The bytes with which an array begins.
pub(crate) const START: &[u8; 6] = b"\x93NUMPY";

/// The most bytes of a header: NumPy itself refuses longer ones.
const MAX_HEADER: u64 = 64 << 10;

/// The content of a header.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Header {
    /// Element type.
    pub(super) dtype: DType,
    /// Shape.
    pub(super) shape: Vec<usize>,
    /// `true` if the first dimension is innermost.
    is_fortran: bool,
    /// The bytes of the header; the elements follow.
    pub(super) length: u64,
}

fn malformed(reason: impl Into<String>) -> FormatError {
    FormatError::Malformed {
        what: "array",
        reason: reason.into(),
    }
}

impl Header {
    /// Reads the header of the array that is all of `source`, and checks that its elements are
    /// there.
    pub(super) fn read(source: &dyn ReadAt) -> Result<Self, FormatError> {
        let fixed = read_whole(source, 0, source.len().min(12))?;
        let (text, length) = match fixed
            .get(..8)
            .filter(|start| start.starts_with(START))
            .map(|start| start[6])
        {
            Some(1) => (
                10,
                fixed.get(8..10).map_or(0, |bytes| {
                    u64::from(u16::from_le_bytes([bytes[0], bytes[1]]))
                }),
            ),
            Some(2 | 3) => {
                let bytes = fixed.get(8..12).and_then(|bytes| bytes.try_into().ok());
                (
                    12,
                    bytes.map_or(0, |bytes| u64::from(u32::from_le_bytes(bytes))),
                )
            }
            Some(version) => {
                return Err(FormatError::Unsupported {
                    what: format!("version {version} of NumPy's format"),
                });
            }
            None => return Err(malformed("it does not begin as one")),
        };
        if length > MAX_HEADER {
            return Err(FormatError::Limit {
                what: "array header length",
                value: length,
                limit: MAX_HEADER,
            });
        }
        let bytes = read_whole(source, text, length)?;
        let bytes = std::str::from_utf8(&bytes).map_err(|_| malformed("its header is no text"))?;
        let header = Self::parse(bytes, text + length)?;
        let elements = checked_numel(&header.shape).filter(|_| is_sane_shape(&header.shape));
        let bytes =
            elements.and_then(|count| (count as u64).checked_mul(header.dtype.size_in_bytes()));
        if bytes.and_then(|bytes| bytes.checked_add(header.length)) != Some(source.len()) {
            return Err(malformed("its length is not that of its elements"));
        }
        Ok(header)
    }

    /// Reads `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }`.
    fn parse(text: &str, length: u64) -> Result<Self, FormatError> {
        let after = |key: &str| {
            let at = text
                .find(&format!("'{key}'"))
                .ok_or_else(|| malformed(format!("its header has no `{key}`")))?;
            let rest = text[at + key.len() + 2..].trim_start();
            rest.strip_prefix(':')
                .map(str::trim_start)
                .ok_or_else(|| malformed("its header is no dict"))
        };
        let descr = after("descr")?;
        let name = descr
            .strip_prefix('\'')
            .and_then(|rest| rest.split_once('\''));
        let Some((name, _)) = name else {
            return Err(FormatError::Unsupported {
                what: "an array of structures".to_owned(),
            });
        };
        let is_fortran = match after("fortran_order")? {
            rest if rest.starts_with("True") => true,
            rest if rest.starts_with("False") => false,
            _ => {
                return Err(malformed(
                    "its order is neither that of C nor that of Fortran",
                ));
            }
        };
        let shape = after("shape")?
            .strip_prefix('(')
            .and_then(|rest| rest.split_once(')'));
        let (shape, _) = shape.ok_or_else(|| malformed("its shape is no tuple"))?;
        let sizes = shape
            .split(',')
            .map(str::trim)
            .filter(|size| !size.is_empty());
        let sizes = sizes.map(|size| {
            size.parse()
                .map_err(|_| malformed("its shape is no tuple of numbers"))
        });
        Ok(Header {
            dtype: dtype(name)?,
            shape: sizes.collect::<Result<_, _>>()?,
            is_fortran,
            length,
        })
    }

    /// Returns where the elements lie.
    pub(super) fn layout(&self) -> StridedLayout {
        let strides = if self.is_fortran {
            let reversed: Vec<usize> = self.shape.iter().rev().copied().collect();
            row_major_strides(&reversed).into_iter().rev().collect()
        } else {
            row_major_strides(&self.shape)
        };
        StridedLayout {
            bounds: TensorBox::whole(&self.shape),
            offset: 0,
            strides,
        }
    }
}

/// Returns the type of NumPy's name for it.
fn dtype(name: &str) -> Result<DType, FormatError> {
    Ok(match name {
        "<f2" => DType::F16,
        "<f4" => DType::F32,
        "<f8" => DType::F64,
        "|i1" => DType::I8,
        "<i2" => DType::I16,
        "<i4" => DType::I32,
        "<i8" => DType::I64,
        "|u1" => DType::U8,
        "<u2" => DType::U16,
        "<u4" => DType::U32,
        "<u8" => DType::U64,
        "|b1" => DType::Bool,
        "<c8" => DType::Complex64,
        "<c16" => DType::Complex128,
        name => {
            return Err(FormatError::Unsupported {
                what: format!("an array of NumPy's type `{name}`"),
            });
        }
    })
}
