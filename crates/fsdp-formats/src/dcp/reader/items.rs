//! Opens the items of a DCP checkpoint: torch archives, streams with a transform, tensors in a
//! safetensors blob.

use std::sync::Arc;

use fsdp_layout::DType;
use fsdp_layout::boxes::checked_bytes;

use super::chunk_item::{ChunkItem, max_item_bytes};
use super::item_bytes::{read_item, read_item_bytes};
use super::{CheckpointReader, PayloadRecord};
use crate::budget::Budget;
use crate::dcp::item::{KnownItem, StoredTensor, lay_out_tensor};
use crate::error::{FileError, FormatError};
use crate::formats::lookup::item_error;
use crate::limits::PICKLE_FACTOR;
use crate::metadata::{StorageInfo, TensorEntry};
use crate::safetensors::header::Header;
use crate::storage::checked_file::CheckedFile;
use crate::storage::read_at::{ReadAt, Window};
use crate::threads::lock;
use crate::torch::tensor_ref::TensorRef;
use crate::zip::{Record, Stored, check_records_in_memory};

/// The length up to which items are read whole, in one go.
const SMALL_ITEM_BYTES: u64 = 64 << 10;
/// The most items that are kept to recognize others by. Each takes about 2 KiB.
const MAX_KNOWN_ITEMS: usize = 1024;

/// A chunk's tensor, and the source of bytes in which it was found.
pub(super) struct LocatedTensor {
    pub(super) source: ItemSource,
    /// The start of the item in the source.
    pub(super) item_start: u64,
    pub(super) tensor: StoredTensor,
    /// The record of its storage, if its checksum is to be compared and the item lies in the file.
    pub(super) record: Option<Record>,
}

/// The source of the bytes of an item.
pub(super) enum ItemSource {
    /// The item itself.
    Memory(Vec<u8>),
    /// The file that it lies in.
    File(Arc<CheckedFile>),
}

impl CheckpointReader {
    /// Opens the file in which the item of a key is stored, and returns what `read` makes of it. An
    /// error of `read` is told with the key and the place of the item.
    pub(super) fn read_from_file<T>(
        &self,
        fqn: &str,
        stored: &StorageInfo,
        read: impl FnOnce(&Arc<CheckedFile>) -> Result<T, FormatError>,
    ) -> Result<T, FileError> {
        let file = self.directory.file(&stored.relative_path)?;
        read(&file).map_err(|source| item_error(&self.directory, fqn, stored, source))
    }

    /// Finds the tensor of a chunk in its file. Small items are read whole; of large ones only the
    /// ends are read. A tensor of another dtype or shape than the chunk's is an error.
    pub(super) fn locate_tensor(
        &self,
        file: &Arc<CheckedFile>,
        item: ChunkItem<'_>,
    ) -> Result<LocatedTensor, FormatError> {
        let located = match self.locate_in_archive(file, item) {
            // Not a zip: torch's SAFETENSORS format has all tensors of a file in one blob, at the
            // offset given for each.
            Err(error @ FormatError::Archive { .. }) if item.stored.transforms.is_empty() => self
                .locate_in_blob(file, item.fqn, item.stored)
                .ok_or(error)?,
            located => located?,
        };
        // The dtype and shape in the item must be those of the chunk in the metadata.
        let found_tensor = &located.tensor.tensor;
        let sizes = &item.bounds.sizes;
        if found_tensor.dtype != item.dtype || found_tensor.shape != *sizes {
            return Err(FormatError::unexpected(
                format!("a `{}` tensor of shape {sizes:?}", item.dtype),
                format!(
                    "a `{}` tensor of shape {:?}",
                    found_tensor.dtype, found_tensor.shape
                ),
            ));
        }
        Ok(located)
    }

    /// Finds the tensor of a chunk in an item that is an archive of torch.
    fn locate_in_archive(
        &self,
        file: &Arc<CheckedFile>,
        item: ChunkItem<'_>,
    ) -> Result<LocatedTensor, FormatError> {
        let ChunkItem {
            dtype,
            bounds,
            stored,
            ..
        } = item;
        // One read for a small item; two, of its ends, for a large one. A transform must be undone
        // from the start.
        if stored.length <= SMALL_ITEM_BYTES || !stored.transforms.is_empty() {
            let bytes = read_item_bytes(&**file, stored, max_item_bytes(bounds, dtype))?;
            let known_item = self.known_item(dtype, &bounds.sizes, bytes.len() as u64);
            let tensor = StoredTensor::locate_known(&bytes, known_item.as_deref())?;
            if self.checks_records {
                check_records_in_memory(&bytes)?;
            }
            return Ok(LocatedTensor {
                tensor,
                source: ItemSource::Memory(bytes),
                item_start: 0,
                record: None,
            });
        }
        let known_item = self.known_item(dtype, &bounds.sizes, stored.length);
        let window = Window::new(&**file, stored.offset, stored.length)?;
        let (tensor, record) = if self.checks_records {
            StoredTensor::locate_with_record(&window, known_item.as_deref())?
        } else {
            let tensor = StoredTensor::locate_known(&window, known_item.as_deref())?;
            (tensor, None)
        };
        Ok(LocatedTensor {
            tensor,
            source: ItemSource::File(file.clone()),
            item_start: stored.offset,
            record,
        })
    }

    /// Returns the item that this library writes for a tensor; `None` if it writes none, if the
    /// item has another length, or if too many are kept already. An item is made once for all
    /// tensors of the same dtype and shape.
    fn known_item(&self, dtype: DType, shape: &[usize], length: u64) -> Option<Arc<KnownItem>> {
        let key = (dtype, shape.to_vec());
        let mut items = lock(&self.known_items);
        if !items.contains_key(&key) && items.len() == MAX_KNOWN_ITEMS {
            return None;
        }
        // An item is made in about a microsecond, so other threads may wait for it.
        let item = items
            .entry(key)
            .or_insert_with(|| KnownItem::new(dtype, shape).ok().map(Arc::new));
        item.clone().filter(|item| item.length == length)
    }

    /// Returns the record with the payload of an item, so that its checksum is compared; `None` if
    /// that need not be, or if the item has none.
    pub(super) fn record_to_check(
        &self,
        item: ChunkItem<'_>,
        located: &LocatedTensor,
    ) -> Option<Arc<Stored>> {
        let record = located.record.as_ref()?;
        let place = (item.stored.relative_path.clone(), item.stored.offset);
        let mut records = lock(&self.records);
        let known = records.entry(place).or_insert_with(|| PayloadRecord {
            fqn: item.fqn.to_owned(),
            item: item.stored.clone(),
            record: Arc::new(Stored::new(
                located.item_start + located.tensor.storage_offset,
                record,
            )),
        });
        Some(Arc::clone(&known.record))
    }

    /// Finds the tensor of this key in a safetensors blob that starts at the item's offset and ends
    /// with the file; `None` if there is no such blob, or no such tensor in it.
    fn locate_in_blob(
        &self,
        file: &Arc<CheckedFile>,
        fqn: &str,
        stored: &StorageInfo,
    ) -> Option<LocatedTensor> {
        let header = self.blob_header(file, stored)?;
        let info = header.tensors.get(fqn)?;
        Some(LocatedTensor {
            source: ItemSource::File(file.clone()),
            item_start: stored.offset,
            record: None,
            tensor: StoredTensor {
                tensor: TensorRef::row_major(
                    fqn.to_owned(),
                    info.end - info.start,
                    info.dtype,
                    &info.shape,
                ),
                storage_offset: header.data_offset + info.start,
            },
        })
    }

    /// Returns the header of the safetensors blob that starts at the item's offset; `None` if there
    /// is none. It is read once for all tensors in it.
    fn blob_header(&self, file: &CheckedFile, stored: &StorageInfo) -> Option<Arc<Header>> {
        let place = (stored.relative_path.clone(), stored.offset);
        // Other threads that want it wait.
        lock(&self.blobs)
            .entry(place)
            .or_insert_with(|| {
                let length = file.len().checked_sub(stored.offset)?;
                let blob = Window::new(file, stored.offset, length).ok()?;
                Header::read(&blob).ok().map(Arc::new)
            })
            .clone()
    }

    /// Returns the type of the object in a tensor's first stored item; `None` if it is a plain
    /// tensor, or cannot be read.
    pub(super) fn opaque_type_of_tensor(&self, fqn: &str, tensor: &TensorEntry) -> Option<String> {
        let item = tensor
            .chunks
            .iter()
            .filter(|chunk| !chunk.bounds.is_empty())
            .find_map(|chunk| ChunkItem::new(fqn, tensor, chunk).ok())?;
        // An item with the length that this crate would give it is a plain tensor. Any other one is
        // examined.
        if lay_out_tensor(item.dtype, &item.bounds.sizes)
            .is_ok_and(|plain| plain.length() == item.stored.length)
        {
            return None;
        }
        // A damaged item is not opaque. The error is reported by whatever reads it.
        let file = self.directory.file(&item.stored.relative_path).ok()?;
        self.locate_tensor(&file, item).err()?.opaque_type()
    }

    /// Calls a function with an item that may be any object, and with the budget for reading it.
    pub(super) fn read_object<T>(
        &self,
        fqn: &str,
        stored: &StorageInfo,
        read: impl FnOnce(&dyn ReadAt, Budget) -> Result<T, FormatError>,
    ) -> Result<T, FileError> {
        let budget = Budget::new(stored.length, PICKLE_FACTOR);
        self.read_from_file(fqn, stored, |file| {
            read_item(&**file, stored, budget.left() / 2, |item| {
                read(item, budget)
            })
        })
    }

    /// Checks one item as [`check_stored`] does.
    ///
    /// [`check_stored`]: crate::formats::checkpoint::Checkpoint::check_stored
    pub(super) fn check_item(&self, item: ChunkItem<'_>) -> Result<(), FileError> {
        let ChunkItem { fqn, stored, .. } = item;
        self.read_from_file(fqn, stored, |file| {
            Window::new(&**file, stored.offset, stored.length)?;
            let payload_bytes = checked_bytes(&item.bounds.sizes, item.dtype).unwrap_or(usize::MAX);
            if !stored.transforms.is_empty() || payload_bytes as u64 <= stored.length {
                return Ok(());
            }
            // If the item is opaque, report that: it is more helpful than a wrong length.
            if let Err(error) = self.locate_tensor(file, item)
                && error.opaque_type().is_some()
            {
                return Err(error);
            }
            Err(FormatError::unexpected(
                format!("an item of at least {payload_bytes} bytes"),
                format!("one of {}", stored.length),
            ))
        })
    }
}
