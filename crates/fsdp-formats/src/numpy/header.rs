//! The header of an array: a magic word, a version, a length, and a dict as Python writes it.

use fsdp_layout::boxes::{checked_bytes, row_major_strides};
use fsdp_layout::{DType, TensorBox};

use crate::error::FormatError;
use crate::formats::assembled::Elements;
use crate::limits::{check_limit, is_sane_shape};
use crate::storage::read_at::{ReadAt, read_whole};
use crate::strided::StridedLayout;

/// The bytes with which an array begins.
pub(crate) const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// The most bytes of a header: NumPy itself refuses longer ones.
const MAX_HEADER_BYTES: u64 = 64 << 10;

/// The content of a header.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ArrayHeader {
    /// Element type.
    pub(super) dtype: DType,
    /// The order of the elements' bytes.
    pub(super) elements: Elements,
    /// Shape.
    pub(super) shape: Vec<usize>,
    /// `true` if the first dimension is innermost.
    is_fortran: bool,
    /// The bytes of the header; the elements follow.
    pub(super) length: u64,
}

/// Makes the error of an array that is not what it should be.
fn malformed(reason: impl ToString) -> FormatError {
    FormatError::malformed("array", reason)
}

impl ArrayHeader {
    /// Reads the header of the array that is all of `source`, and checks that its elements are
    /// there.
    pub(super) fn read(source: &dyn ReadAt) -> Result<Self, FormatError> {
        let fixed = read_whole(source, 0, source.len().min(12))?;
        // After the magic word come the two numbers of the version, and the length of the dict.
        let (dict_offset, length) = match fixed.strip_prefix(MAGIC) {
            Some([1, _, a, b, ..]) => (10, u64::from(u16::from_le_bytes([*a, *b]))),
            Some([2 | 3, _, a, b, c, d]) => (12, u64::from(u32::from_le_bytes([*a, *b, *c, *d]))),
            Some([1..=3, ..]) => return Err(malformed("it is cut short")),
            Some([version, _, ..]) => {
                let what = format!("version {version} of NumPy's format");
                return Err(FormatError::unsupported(what));
            }
            _ => return Err(malformed("it does not begin as one")),
        };
        check_limit("array header length", length, MAX_HEADER_BYTES)?;
        let bytes = read_whole(source, dict_offset, length)?;
        let dict = std::str::from_utf8(&bytes).map_err(|_| malformed("its header is no text"))?;
        let header = Self::parse(dict, dict_offset + length)?;
        let end = checked_bytes(&header.shape, header.dtype)
            .filter(|_| is_sane_shape(&header.shape))
            .and_then(|bytes| (bytes as u64).checked_add(header.length));
        if end != Some(source.len()) {
            return Err(malformed("its length is not that of its elements"));
        }
        Ok(header)
    }

    /// Parses the dict of a header of `length` bytes, such as `{'descr': '<f4', 'fortran_order':
    /// False, 'shape': (3, 4), }`. An array of structures is an error.
    fn parse(dict: &str, length: u64) -> Result<Self, FormatError> {
        let dtype_name = text_after_key(dict, "descr")?
            .strip_prefix('\'')
            .and_then(|rest| rest.split_once('\''));
        let Some((dtype_name, _)) = dtype_name else {
            return Err(FormatError::unsupported("an array of structures"));
        };
        let order_text = text_after_key(dict, "fortran_order")?;
        let is_fortran = order_text.starts_with("True");
        if !is_fortran && !order_text.starts_with("False") {
            return Err(malformed(
                "its order is neither that of C nor that of Fortran",
            ));
        }
        let (sizes, _) = text_after_key(dict, "shape")?
            .strip_prefix('(')
            .and_then(|rest| rest.split_once(')'))
            .ok_or_else(|| malformed("its shape is no tuple"))?;
        let mut shape = Vec::new();
        // A tuple may end with a comma.
        for size in sizes.split(',').map(str::trim) {
            if !size.is_empty() {
                let size = size
                    .parse()
                    .map_err(|_| malformed("its shape is no tuple of numbers"))?;
                shape.push(size);
            }
        }
        let (dtype, elements) = dtype_from_name(dtype_name)?;
        Ok(ArrayHeader {
            dtype,
            elements,
            shape,
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

/// Returns the text that follows a key of the dict and its colon. A key that is missing is an
/// error.
fn text_after_key<'t>(dict: &'t str, key: &str) -> Result<&'t str, FormatError> {
    let (_, rest) = dict
        .split_once(&format!("'{key}'"))
        .ok_or_else(|| malformed(format!("its header has no `{key}`")))?;
    rest.trim_start()
        .strip_prefix(':')
        .map(str::trim_start)
        .ok_or_else(|| malformed("its header is no dict"))
}

/// NumPy's codes of the dtypes that are read, without the order of their bytes.
const CODES: [(&str, DType); 14] = [
    ("f2", DType::F16),
    ("f4", DType::F32),
    ("f8", DType::F64),
    ("i1", DType::I8),
    ("i2", DType::I16),
    ("i4", DType::I32),
    ("i8", DType::I64),
    ("u1", DType::U8),
    ("u2", DType::U16),
    ("u4", DType::U32),
    ("u8", DType::U64),
    ("b1", DType::Bool),
    ("c8", DType::Complex64),
    ("c16", DType::Complex128),
];

/// Returns the dtype that has this code in NumPy; `None` if none of numbers has it.
pub(crate) fn dtype_from_code(code: &str) -> Option<DType> {
    let entry = CODES.iter().find(|(known_code, _)| *known_code == code);
    entry.map(|(_, dtype)| *dtype)
}

/// Returns NumPy's code of a dtype; `None` if NumPy has no such dtype.
pub(crate) fn dtype_to_code(dtype: DType) -> Option<&'static str> {
    let entry = CODES.iter().find(|(_, known_dtype)| *known_dtype == dtype);
    entry.map(|(code, _)| *code)
}

/// Returns the dtype that has this name in NumPy, which is the order of its bytes and its code, and
/// how elements are stored. Any other name is an error.
fn dtype_from_name(name: &str) -> Result<(DType, Elements), FormatError> {
    let dtype = name
        .split_at_checked(1)
        .and_then(|(order, code)| Some((order, dtype_from_code(code)?)));
    match dtype {
        Some(("|", dtype)) if dtype.size_in_bytes() == 1 => Ok((dtype, Elements::Plain)),
        Some(("<", dtype)) if dtype.size_in_bytes() > 1 => Ok((dtype, Elements::Plain)),
        Some((">", dtype)) if dtype.size_in_bytes() > 1 => Ok((dtype, Elements::BigEndian)),
        _ => {
            let what = format!("an array of NumPy's type `{name}`");
            Err(FormatError::unsupported(what))
        }
    }
}
