//! The sum over the elements of a tensor, and the digest that it becomes.

use std::fmt;
use std::str::FromStr;

use fsdp_layout::boxes::{checked_numel, copy_runs};
use fsdp_layout::{DType, PlainValue, TensorBox};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use crate::coefficients::{BLOCK_BYTES, TABLES, block_factor};

/// The low half of a pair of words.
const LOW: u64 = 0xffff_ffff;

/// The sum over some elements of a tensor. Sums of boxes that do not overlap add up, in any order.
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
}

/// An error of [`Sum::add_box`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DigestError {
    /// A box that is not inside of the tensor.
    #[error("box {bounds} is not inside of a tensor of shape {shape:?}")]
    OutsideOfTensor {
        /// The box.
        bounds: TensorBox,
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// Another number of bytes than the box has.
    #[error("box {bounds} of elements of {element} bytes has {expected} bytes, not {found}")]
    WrongLength {
        /// The box.
        bounds: TensorBox,
        /// Bytes of an element.
        element: usize,
        /// The bytes that it has.
        expected: usize,
        /// The bytes that were given.
        found: usize,
    },
}

impl Sum {
    /// Adds the elements of a box, row-major, little-endian, of `element` bytes each.
    ///
    /// # Errors
    /// A box that is not inside of a tensor of this shape; another number of bytes than the box has.
    pub fn add_box(
        &mut self,
        shape: &[usize],
        bounds: &TensorBox,
        element: usize,
        bytes: &[u8],
    ) -> Result<(), DigestError> {
        if !bounds.fits(shape) || checked_numel(shape).and_then(|numel| numel.checked_mul(element)).is_none() {
            return Err(DigestError::OutsideOfTensor { bounds: bounds.clone(), shape: shape.to_vec() });
        }
        let expected = bounds.numel() * element;
        if bytes.len() != expected {
            return Err(DigestError::WrongLength { bounds: bounds.clone(), element, expected, found: bytes.len() });
        }
        // The box's elements in runs that are contiguous in the whole tensor.
        for run in copy_runs(bounds, &TensorBox::whole(shape), bounds) {
            let (start, end) = (run.dst * element, (run.dst + run.len) * element);
            self.add_bytes((run.src * element) as u64, &bytes[start..end]);
        }
        Ok(())
    }

    /// Adds bytes that begin at an offset in the string of the whole tensor's bytes.
    pub fn add_bytes(&mut self, offset: u64, bytes: &[u8]) {
        let (mut offset, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let start = (offset % BLOCK_BYTES as u64) as usize;
            let (part, after) = rest.split_at(rest.len().min(BLOCK_BYTES - start));
            let sums = block_sums(start, part);
            for (lane, sum) in sums.into_iter().enumerate() {
                let weighted = block_factor(lane, offset / BLOCK_BYTES as u64).wrapping_mul(sum);
                self.lanes[lane] = self.lanes[lane].wrapping_add(weighted);
            }
            offset += part.len() as u64;
            rest = after;
        }
    }

    /// Adds the sum of other elements of the same tensor.
    pub fn add(&mut self, other: Sum) {
        for (lane, other) in self.lanes.iter_mut().zip(other.lanes) {
            *lane = lane.wrapping_add(other);
        }
    }

    /// Returns the digest of a tensor from the sum over all its elements.
    #[must_use]
    pub fn finish(&self, dtype: DType, shape: &[usize]) -> Digest {
        let mut hashed = beginning(&dtype.to_string());
        hashed.extend((shape.len() as u64).to_le_bytes());
        let sizes = shape.iter().flat_map(|&size| (size as u64).to_le_bytes());
        hashed.extend(sizes.chain(self.lanes.into_iter().flat_map(u64::to_le_bytes)));
        Digest(XxHash3_128::oneshot(&hashed))
    }
}

/// Returns the first bytes of what a digest is a hash of.
fn beginning(kind: &str) -> Vec<u8> {
    [b"fsdp-digest-1\0", kind.as_bytes(), b"\0"].concat()
}

/// Returns both lanes' sums over bytes of one block that begin at `start` in it.
fn block_sums(start: usize, bytes: &[u8]) -> [u64; 2] {
    // Pairs of words are read at once. Bytes before the first whole pair, and after the last, come with zeros around them.
    let head = bytes.len().min((8 - start % 8) % 8);
    let (head, rest) = bytes.split_at(head);
    let pairs = rest.chunks_exact(8);
    let tail = pairs.remainder();
    let first = (start + head.len()) / 8;
    let count = rest.len() / 8;
    let mut sums = pair_sums(&rest[..count * 8], [&TABLES[0][first..first + count], &TABLES[1][first..first + count]]);
    for (edge, at, pair) in [(head, start % 8, start / 8), (tail, 0, first + count)] {
        if !edge.is_empty() {
            let mut bytes = [0; 8];
            bytes[at..at + edge.len()].copy_from_slice(edge);
            let of_edge = pair_sums(&bytes, [&TABLES[0][pair..=pair], &TABLES[1][pair..=pair]]);
            sums = [sums[0].wrapping_add(of_edge[0]), sums[1].wrapping_add(of_edge[1])];
        }
    }
    sums
}

/// Returns both lanes' sums over whole pairs of words. Written so that compilers use vector instructions for it.
fn pair_sums(bytes: &[u8], tables: [&[u64]; 2]) -> [u64; 2] {
    let (mut first, mut second) = ([0u64; 2], [0u64; 2]);
    for ((pair, a), b) in bytes.chunks_exact(8).zip(tables[0]).zip(tables[1]) {
        let pair = pair.try_into().map_or(0, u64::from_le_bytes);
        let (even, odd) = (pair & LOW, pair >> 32);
        first[0] = first[0].wrapping_add(even.wrapping_mul(a & LOW));
        first[1] = first[1].wrapping_add(odd.wrapping_mul(a >> 32));
        second[0] = second[0].wrapping_add(even.wrapping_mul(b & LOW));
        second[1] = second[1].wrapping_add(odd.wrapping_mul(b >> 32));
    }
    [first[0].wrapping_add(first[1]), second[0].wrapping_add(second[1])]
}

/// The digest of a tensor, a plain value or a state dict: 128 bits, written as 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest(pub(crate) u128);

impl Digest {
    /// Returns the digest of a value that has no elements by itself. Floats count by their bits.
    #[must_use]
    pub fn of_value(value: &PlainValue) -> Self {
        let mut hashed = beginning("value");
        encode(value, &mut hashed);
        Digest(XxHash3_128::oneshot(&hashed))
    }
}

/// Appends a value: a letter for its kind, and its content. Texts, bytes and containers begin with their length.
fn encode(value: &PlainValue, to: &mut Vec<u8>) {
    match value {
        PlainValue::None => to.push(b'n'),
        PlainValue::Bool(value) => to.extend([b'b', u8::from(*value)]),
        PlainValue::Int(value) => encode_bytes(b'i', value.to_string().as_bytes(), to),
        PlainValue::BigInt(bytes) => encode_bytes(b'I', bytes, to),
        PlainValue::Float(value) => {
            to.push(b'f');
            to.extend(value.to_bits().to_le_bytes());
        }
        PlainValue::Str(text) => encode_bytes(b's', text.as_bytes(), to),
        PlainValue::Bytes(bytes) => encode_bytes(b'y', bytes, to),
        PlainValue::List(values) => encode_all(b'l', values, to),
        PlainValue::Tuple(values) => encode_all(b't', values, to),
        PlainValue::Set(values) => encode_all(b'S', values, to),
        PlainValue::Dict(entries) => {
            to.push(b'd');
            to.extend((entries.len() as u64).to_le_bytes());
            for (key, value) in entries {
                encode(key, to);
                encode(value, to);
            }
        }
        PlainValue::Tensor(tensor) => {
            let mut sum = Sum::default();
            sum.add_bytes(0, &tensor.data);
            to.push(b'T');
            to.extend(sum.finish(tensor.dtype, &tensor.shape).0.to_le_bytes());
        }
        // Kinds that are newer than this version of the format.
        other => encode_bytes(b'?', format!("{other:?}").as_bytes(), to),
    }
}

/// Appends a letter, a length, and bytes.
fn encode_bytes(kind: u8, bytes: &[u8], to: &mut Vec<u8>) {
    to.push(kind);
    to.extend((bytes.len() as u64).to_le_bytes());
    to.extend(bytes);
}

/// Appends a letter, a number of values, and the values.
fn encode_all(kind: u8, values: &[PlainValue], to: &mut Vec<u8>) {
    to.push(kind);
    to.extend((values.len() as u64).to_le_bytes());
    values.iter().for_each(|value| encode(value, to));
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

    fn from_str(text: &str) -> Result<Self, String> {
        let is_hex = text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let number = u128::from_str_radix(text, 16).ok().filter(|_| is_hex);
        number.map(Digest).ok_or_else(|| format!("`{text}` is not a digest: 32 hexadecimal digits in lower case"))
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}
