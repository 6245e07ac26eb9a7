//! The items of a `.distcp` file that are tensors: their layout, which is known before the data is,
//! and how to find the payload in one.
//!
//! An item is what `torch.save` makes of one tensor or one value, with [`ROOT`] as its root
//! directory. Items of values are in [`value`](crate::torch::value).

use fsdp_layout::boxes::saturating_bytes;
use fsdp_layout::{DType, TensorBox};

use crate::error::FormatError;
use crate::limits::check_limit;
use crate::payload::slot::Slot;
use crate::pickle::{parse, write};
use crate::storage::read_at::{BlockReader, ReadAt, Window};
use crate::strided::StoredElements;
use crate::torch::storages::check_storage_length;
use crate::torch::tensor_ref::{TensorRef, check_writable, write_tensor};
use crate::zip::{ArchiveLayout, Directory, ROOT, Record};

/// Lays out the item of a row-major tensor of this type and shape, in a form that
/// `torch.load(weights_only=True)` accepts. The only storage of the archive is the payload.
///
/// ```
/// use fsdp_formats::internals::lay_out_tensor;
/// use fsdp_layout::DType;
/// let item = lay_out_tensor(DType::F32, &[2, 3])?;
/// assert_eq!(item.storage_length(0), 24);
/// assert_eq!(item.storage_offset(0) % 64, 0);
///
/// let payload: Vec<u8> = [1f32, 2., 3., 4., 5., 6.].iter().flat_map(|v| v.to_le_bytes()).collect();
/// let crc = crc32fast::hash(&payload);
/// let whole = [item.head(crc), payload, item.tail(&[crc])].concat();
/// assert_eq!(whole.len() as u64, item.length());
/// # Ok::<(), fsdp_formats::FormatError>(())
/// ```
pub fn lay_out_tensor(dtype: DType, shape: &[usize]) -> Result<ArchiveLayout, FormatError> {
    check_writable(dtype)?;
    let payload_length = saturating_bytes(shape, dtype);
    check_limit("tensor length", payload_length, i64::MAX as u64)?;
    let mut pickle = Vec::with_capacity(256);
    write::proto(&mut pickle, 2);
    write_tensor(&mut pickle, 0, dtype, shape);
    pickle.push(write::STOP);
    Ok(ArchiveLayout::new(ROOT, pickle, &[payload_length]))
}

/// The bytes of an item around its payload. An item that this library has written is recognized by
/// them, and then its zip directory and its pickle need no parsing.
#[derive(Debug)]
pub(crate) struct KnownItem {
    /// The bytes of the whole item.
    pub(crate) length: u64,
    head: EndBytes,
    tail: EndBytes,
    tensor: StoredTensor,
}

/// The bytes at one end of an item, and the position in them of the CRC-32 of its payload. The CRC
/// differs from item to item, and all other bytes are the same in each.
#[derive(Debug)]
struct EndBytes {
    bytes: Vec<u8>,
    crc_offset: usize,
}

/// The length of a CRC-32 in bytes.
const CRC_BYTES: usize = 4;

impl EndBytes {
    /// Makes the bytes of an end, which `make_end` returns for a given CRC of the payload. The
    /// offset of the CRC in them is found by comparing the bytes for two CRCs.
    fn new(make_end: impl Fn(u32) -> Vec<u8>) -> Self {
        let bytes = make_end(0);
        let crc_offset = bytes
            .iter()
            .zip(make_end(u32::MAX))
            .position(|(byte, other_byte)| *byte != other_byte)
            .expect("both ends of an item have the CRC of its payload");
        EndBytes { bytes, crc_offset }
    }

    /// Returns `true` if other bytes are the same, except for the CRC.
    fn is_same(&self, other: &[u8]) -> bool {
        let crc_end = self.crc_offset + CRC_BYTES;
        self.bytes.len() == other.len()
            && self.bytes[..self.crc_offset] == other[..self.crc_offset]
            && self.bytes[crc_end..] == other[crc_end..]
    }
}

impl KnownItem {
    /// Makes the item of a row-major tensor of this type and shape.
    pub(crate) fn new(dtype: DType, shape: &[usize]) -> Result<Self, FormatError> {
        let item = lay_out_tensor(dtype, shape)?;
        // An item has a single storage, whose key is 0.
        let tensor = TensorRef::row_major("0".to_owned(), item.storage_length(0), dtype, shape);
        Ok(KnownItem {
            length: item.length(),
            head: EndBytes::new(|crc| item.head(crc)),
            tail: EndBytes::new(|crc| item.tail(&[crc])),
            tensor: StoredTensor {
                tensor,
                storage_offset: item.storage_offset(0),
            },
        })
    }

    /// Returns `true` if the bytes at both ends of an item are those of this one, except for the
    /// CRC of the payload.
    fn is_same(&self, item: &ItemEnds<'_>) -> bool {
        // A short item is all in its head.
        let last_bytes = if item.tail.is_empty() {
            &item.head
        } else {
            &item.tail
        };
        let (Some(head), Some(tail_start)) = (
            item.head.get(..self.head.bytes.len()),
            last_bytes.len().checked_sub(self.tail.bytes.len()),
        ) else {
            return false;
        };
        item.len() == self.length
            && self.head.is_same(head)
            && self.tail.is_same(&last_bytes[tail_start..])
    }
}

/// A tensor found in an item, and where its storage lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    /// The tensor, as the item's pickle has it.
    pub tensor: TensorRef,
    /// The start of its storage, counted from the start of the item.
    pub storage_offset: u64,
}

impl StoredTensor {
    /// Finds the tensor in the item that is all of `item`, and returns what its pickle says and
    /// where its storage begins. Only the ends of the item are read. An object that is no tensor,
    /// and a storage that is too short are errors.
    pub fn locate(item: &dyn ReadAt) -> Result<Self, FormatError> {
        Self::locate_known(item, None)
    }

    /// Finds the tensor as [`Self::locate`] does. An item that has the same ends as `known_item` is
    /// not parsed.
    pub(crate) fn locate_known(
        item: &dyn ReadAt,
        known_item: Option<&KnownItem>,
    ) -> Result<Self, FormatError> {
        Self::find(&ItemEnds::new(item)?, known_item)
    }

    /// Finds the tensor as [`Self::locate_known`] does, and the record of its storage, with the
    /// same reads. `None` for an item that is no archive.
    pub(crate) fn locate_with_record(
        item: &dyn ReadAt,
        known_item: Option<&KnownItem>,
    ) -> Result<(Self, Option<Record>), FormatError> {
        let ends = ItemEnds::new(item)?;
        let stored = Self::find(&ends, known_item)?;
        let name = format!("data/{}", stored.tensor.storage);
        let archive = Directory::read(&ends).ok();
        let record = archive.and_then(|archive| archive.records.get(&name).copied());
        Ok((stored, record))
    }

    /// Finds the tensor in an item whose ends were read.
    fn find(item: &ItemEnds<'_>, known_item: Option<&KnownItem>) -> Result<Self, FormatError> {
        if let Some(same) = known_item.filter(|known_item| known_item.is_same(item)) {
            return Ok(same.tensor.clone());
        }
        let directory = Directory::read(item)?;
        let pickle = directory.read_pickle(item)?;
        let parsed = parse(&pickle)?;
        let Some(tensor) = TensorRef::from_node(&parsed, parsed.root())? else {
            // A class or object of unknown type is opaque; any other value is not what the metadata
            // says.
            let error = parsed.expected_error(parsed.root(), "a tensor");
            return Err(match error.opaque_type() {
                Some(_) => error.into(),
                None => FormatError::unexpected("a tensor", parsed.node(parsed.root()).kind()),
            });
        };
        let name = format!("data/{}", tensor.storage);
        let record = directory.get(&name)?;
        check_storage_length(tensor.storage_bytes, record.length)?;
        let storage_offset = directory.data_offset(item, &name, record)?;
        Ok(StoredTensor {
            tensor,
            storage_offset,
        })
    }

    /// Fills the part of a slot's box that lies in `bounds`, the box of the whole tensor that the
    /// item holds. The item begins at `item_offset` in what `reader` reads.
    pub(crate) fn read<S: ReadAt + ?Sized>(
        &self,
        reader: &mut BlockReader<'_, S>,
        item_offset: u64,
        bounds: &TensorBox,
        slot: &mut Slot<'_>,
    ) -> Result<(), FormatError> {
        let Some(overlap) = bounds.intersect(&slot.bounds) else {
            return Ok(());
        };
        let mut layout = self.tensor.layout.clone();
        layout.bounds = bounds.clone();
        let stored = StoredElements {
            storage: item_offset + self.storage_offset,
            element: self.tensor.dtype.size_in_bytes() as usize,
            layout: &layout,
        };
        stored.read(reader, &overlap, slot)
    }
}

/// An item whose first and last bytes are in memory, because its zip structure and its pickle are
/// there.
struct ItemEnds<'a> {
    item: Window<'a>,
    head: Vec<u8>,
    tail: Vec<u8>,
}

/// Bytes at the start of an item: enough for the head of any tensor item of ours or torch's.
const HEAD_BYTES: u64 = 1536;
/// Bytes at the end of an item: enough for its directory.
const TAIL_BYTES: u64 = 1024;
/// The length up to which an item is read at once.
const WHOLE_ITEM_BYTES: u64 = 8 << 10;

impl<'a> ItemEnds<'a> {
    /// Reads the beginning and the end of an item, where the small records of its archive are, or
    /// all of a short one.
    fn new(item: &'a dyn ReadAt) -> Result<Self, FormatError> {
        let length = item.len();
        let mut head_length = length;
        let mut tail_length = 0;
        if length > WHOLE_ITEM_BYTES {
            // Read no more than one hash block at each end. The payload between them has large
            // blocks.
            head_length = item
                .block_at(0)
                .map_or(HEAD_BYTES, |block| block.end.min(HEAD_BYTES));
            tail_length = item
                .block_at(length - 1)
                .map_or(TAIL_BYTES, |block| (length - block.start).min(TAIL_BYTES));
        }
        let mut ends = ItemEnds {
            item: Window::new(item, 0, length)?,
            head: vec![0; head_length as usize],
            tail: vec![0; tail_length as usize],
        };
        item.read_exact_at(0, &mut ends.head)?;
        item.read_exact_at(length - tail_length, &mut ends.tail)?;
        Ok(ends)
    }
}

impl ReadAt for ItemEnds<'_> {
    fn len(&self) -> u64 {
        self.item.len()
    }

    fn find_hole(&self, offset: u64) -> Option<u64> {
        self.item.find_hole(offset)
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        let tail_start = self.len() - self.tail.len() as u64;
        match offset.checked_add(dst.len() as u64) {
            Some(end) if end <= self.head.len() as u64 => {
                self.head.as_slice().read_exact_at(offset, dst)
            }
            Some(_) if offset >= tail_start => {
                self.tail.as_slice().read_exact_at(offset - tail_start, dst)
            }
            _ => self.item.read_exact_at(offset, dst),
        }
    }
}

#[cfg(test)]
#[path = "item_tests.rs"]
mod tests;
