//! The sum over the elements of a tensor, and the digest that it becomes.

use std::fmt;
use std::str::FromStr;

use fsdp_layout::{DType, PlainValue, TensorBox};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use crate::blocks;
use crate::error::DigestError;
use crate::place::BoxPlace;

/// The part of a rank, a file or a box in the digest of a tensor or a value: the sum over some
/// elements of a tensor, or the digest of a whole value. Sums of boxes that do not overlap add up,
/// in any order.
///
/// ```
/// use fsdp_digest::Sum;
/// use fsdp_layout::{DType, PlainValue, TensorBox};
/// // A tensor of u8 [2, 2], by rows and by columns.
/// let (mut rows, mut columns) = (Sum::default(), Sum::default());
/// rows.add_box(&[2, 2], &TensorBox::new(vec![1, 0], vec![1, 2]), 1, &[3, 4])?;
/// rows.add_box(&[2, 2], &TensorBox::new(vec![0, 0], vec![1, 2]), 1, &[1, 2])?;
/// columns.add_box(&[2, 2], &TensorBox::new(vec![0, 0], vec![2, 1]), 1, &[1, 3])?;
/// columns.add_box(&[2, 2], &TensorBox::new(vec![0, 1], vec![2, 1]), 1, &[2, 4])?;
/// assert_eq!(rows.finish(DType::U8, &[2, 2]), columns.finish(DType::U8, &[2, 2]));
/// assert_ne!(rows.finish(DType::U8, &[2, 2]), rows.finish(DType::U8, &[4]));
/// # Ok::<(), fsdp_digest::DigestError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Sum {
    lanes: [u64; 2],
    /// The digest of a value, which has no elements.
    value: Option<Digest>,
}

impl Sum {
    /// Adds the elements of a box, row-major, little-endian, of `element_size` bytes each.
    ///
    /// # Errors
    /// A box that is not inside of a tensor of `shape`; another number of bytes than the box
    /// has.
    pub fn add_box(
        &mut self,
        shape: &[usize],
        bounds: &TensorBox,
        element_size: usize,
        bytes: &[u8],
    ) -> Result<(), DigestError> {
        let place = BoxPlace::new(shape, bounds, element_size)?;
        if bytes.len() as u64 != place.length() {
            return Err(DigestError::WrongLength {
                bounds: bounds.clone(),
                element_size,
                expected: place.length() as usize,
                found: bytes.len(),
            });
        }
        self.add_piece(&place, 0, bytes);
        Ok(())
    }

    /// Adds a piece of a box. `place` is the position of the box in its tensor, and `offset` is
    /// that of the piece in the row-major bytes of the box. Bytes beyond the end of the box are
    /// ignored.
    pub fn add_piece(&mut self, place: &BoxPlace, offset: u64, bytes: &[u8]) {
        let bytes_until_box_end = place.length().saturating_sub(offset) as usize;
        let mut remaining = &bytes[..bytes.len().min(bytes_until_box_end)];
        for (start, length) in place.pieces(offset, remaining.len() as u64) {
            let (piece, tail) = remaining.split_at(length as usize);
            self.add_bytes(start, piece);
            remaining = tail;
        }
    }

    /// Adds bytes that begin at an offset in the string of the whole tensor's bytes.
    pub fn add_bytes(&mut self, offset: u64, bytes: &[u8]) {
        blocks::add(&mut self.lanes, blocks::compute_sums(offset, bytes));
    }

    /// Adds the sum of other elements of the same tensor, or that of the same value.
    pub fn add(&mut self, other: Sum) {
        blocks::add(&mut self.lanes, other.lanes);
        // A rank that does not have a value contributes the empty sum, which changes nothing.
        self.value = other.value.or(self.value);
    }

    /// Returns the sum that stands for a whole value, which has this digest.
    #[must_use]
    pub fn of_value(digest: Digest) -> Self {
        Sum {
            value: Some(digest),
            ..Sum::default()
        }
    }

    /// Returns the digest of a value; `None` for elements of a tensor.
    #[must_use]
    pub const fn value(&self) -> Option<Digest> {
        self.value
    }

    /// Returns the digest of a tensor of `dtype` and `shape` from the sum over all its elements; of
    /// a value the digest that it has.
    #[must_use]
    pub fn finish(&self, dtype: DType, shape: &[usize]) -> Digest {
        if let Some(digest) = self.value {
            return digest;
        }
        let mut hashed = hash_prefix(&dtype.to_string());
        hashed.extend((shape.len() as u64).to_le_bytes());
        let sizes = shape.iter().map(|&size| size as u64);
        hashed.extend(sizes.chain(self.lanes).flat_map(u64::to_le_bytes));
        Digest(XxHash3_128::oneshot(&hashed))
    }
}

/// Returns the prefix of the bytes that a digest hashes: the version of the digest, and the kind of
/// what follows.
fn hash_prefix(kind: &str) -> Vec<u8> {
    [b"fsdp-digest-1\0", kind.as_bytes(), b"\0"].concat()
}

/// The digest of a tensor, a plain value or a state dict: 128 bits, written as 32 hexadecimal
/// digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest(pub(crate) u128);

impl Digest {
    /// Returns the digest of a plain value. Floats are compared by their bits.
    #[must_use]
    pub fn of_value(value: &PlainValue) -> Self {
        let mut hashed = hash_prefix("value");
        encode(value, &mut hashed);
        Digest(XxHash3_128::oneshot(&hashed))
    }
}

/// Appends a value: a letter for its kind, and its content. Texts, bytes and containers begin with
/// their length.
fn encode(value: &PlainValue, output: &mut Vec<u8>) {
    match value {
        PlainValue::None => output.push(b'n'),
        PlainValue::Bool(value) => output.extend([b'b', u8::from(*value)]),
        PlainValue::Int(value) => encode_bytes(b'i', value.to_string().as_bytes(), output),
        PlainValue::BigInt(bytes) => encode_bytes(b'I', bytes, output),
        PlainValue::Float(value) => {
            output.push(b'f');
            output.extend(value.to_bits().to_le_bytes());
        }
        PlainValue::Str(text) => encode_bytes(b's', text.as_bytes(), output),
        PlainValue::Bytes(bytes) => encode_bytes(b'y', bytes, output),
        PlainValue::List(values) => encode_all(b'l', values, output),
        PlainValue::Tuple(values) => encode_all(b't', values, output),
        PlainValue::Set(values) => {
            let mut encoded_values: Vec<Vec<u8>> = Vec::with_capacity(values.len());
            for value in values {
                let mut item = Vec::new();
                encode(value, &mut item);
                encoded_values.push(item);
            }
            // Python's order of a set differs from process to process.
            encoded_values.sort_unstable();
            encode_header(b'S', encoded_values.len(), output);
            output.extend(encoded_values.concat());
        }
        PlainValue::Dict(entries) => {
            encode_header(b'd', entries.len(), output);
            for (key, value) in entries {
                encode(key, output);
                encode(value, output);
            }
        }
        PlainValue::Tensor(tensor) => {
            let mut sum = Sum::default();
            sum.add_bytes(0, &tensor.data);
            output.push(b'T');
            output.extend(sum.finish(tensor.dtype, &tensor.shape).0.to_le_bytes());
        }
        PlainValue::Typed(python_type, description) => {
            encode_bytes(b'o', python_type.name().as_bytes(), output);
            encode(description, output);
        }
        // Kinds that are newer than this version of the format.
        other => encode_bytes(b'?', format!("{other:?}").as_bytes(), output),
    }
}

/// Appends the letter of a kind of value, and the number of bytes or values that follow.
fn encode_header(kind: u8, len: usize, output: &mut Vec<u8>) {
    output.push(kind);
    output.extend((len as u64).to_le_bytes());
}

/// Appends the letter of a kind of value, the length of its bytes, and the bytes.
fn encode_bytes(kind: u8, bytes: &[u8], output: &mut Vec<u8>) {
    encode_header(kind, bytes.len(), output);
    output.extend(bytes);
}

/// Appends the letter of a kind of container, the number of its values, and the values.
fn encode_all(kind: u8, values: &[PlainValue], output: &mut Vec<u8>) {
    encode_header(kind, values.len(), output);
    values.iter().for_each(|value| encode(value, output));
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl FromStr for Digest {
    type Err = String;

    /// Parses 32 hexadecimal digits in lower case, as [`Display`](fmt::Display) writes them; fails
    /// for any other text.
    fn from_str(text: &str) -> Result<Self, String> {
        // The parser of numbers would also take a sign, and digits in upper case.
        let is_digest = text.len() == 32
            && text
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        match u128::from_str_radix(text, 16) {
            Ok(bits) if is_digest => Ok(Digest(bits)),
            _ => Err(format!(
                "`{text}` is not a digest: 32 hexadecimal digits in lower case"
            )),
        }
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    /// Parses a digest, as [`FromStr`] does; `serde` uses this.
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}
