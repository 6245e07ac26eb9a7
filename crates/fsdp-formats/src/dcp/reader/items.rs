//! Opens the items of a DCP checkpoint: torch archives, streams with a transform, tensors in a
//! safetensors blob.

use std::io::Read as _;
use std::sync::{Arc, PoisonError};

use fsdp_layout::{DType, PlainValue, TensorBox};

use super::CheckpointReader;
use super::error::ReadError;
use crate::budget::Budget;
use crate::dcp::item::{KnownItem, StoredTensor, TensorItem};
use crate::error::{FileError, FormatError};
use crate::formats::checkpoint::KeyFilter;
use crate::formats::read::byte_length;
use crate::limits::{MAX_OBJECT_BYTES, PICKLE_FACTOR};
use crate::metadata::{Chunk, StorageInfo, TensorEntry};
use crate::safetensors::header::Header;
use crate::storage::checked_file::CheckedFile;
use crate::storage::read_at::{ReadAt, Window, read_whole};
use crate::torch::tensor_ref::TensorRef;
use crate::torch::value::{describe_object, is_same_quantizer, opaque_type_of, quantizer_of};
use crate::torch::zip::Directory;

/// The most bytes that an item may have around its payload.
const ITEM_OVERHEAD: u64 = 64 << 10;
/// The length up to which items are read whole, in one go.
const SMALL_ITEM: u64 = 64 << 10;
/// The most items that are kept to recognize others by. Each takes about 2 KiB.
const MAX_KNOWN_ITEMS: usize = 1024;

/// A chunk's tensor, and the bytes in which it was found.
pub(super) struct Located {
    pub(super) bytes: Bytes,
    /// The start of the item in them.
    pub(super) start: u64,
    pub(super) tensor: StoredTensor,
}

/// The bytes in which an item was found.
pub(super) enum Bytes {
    /// The item itself.
    Memory(Vec<u8>),
    /// The file that it lies in.
    File(Arc<CheckedFile>),
}

impl Bytes {
    pub(super) fn source(&self) -> &dyn ReadAt {
        match self {
            Bytes::Memory(bytes) => bytes,
            Bytes::File(file) => &**file,
        }
    }
}

impl CheckpointReader {
    /// Finds the tensor of a chunk whose box is `bounds`. Small items are read whole; of large ones
    /// only the ends are read.
    pub(super) fn locate(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        stored: &StorageInfo,
        dtype: DType,
    ) -> Result<Located, ReadError> {
        // One read for a small item; two, of its ends, for a large one. A transform must be undone
        // from the start.
        let located = if stored.length <= SMALL_ITEM || !stored.transforms.is_empty() {
            let expected =
                (byte_length(bounds, dtype).unwrap_or(0) as u64).saturating_add(ITEM_OVERHEAD);
            let bytes = self.item_bytes(stored, expected)?;
            let known = self.known_item(dtype, &bounds.sizes, bytes.len() as u64);
            let found = StoredTensor::locate_known(&bytes, known.as_deref());
            found.map(|tensor| Located {
                bytes: Bytes::Memory(bytes),
                start: 0,
                tensor,
            })
        } else {
            let file = self.directory.file(&stored.relative_path)?;
            let known = self.known_item(dtype, &bounds.sizes, stored.length);
            let item = Window::new(&*file, stored.offset, stored.length)?;
            let found = StoredTensor::locate_known(&item, known.as_deref());
            found.map(|tensor| Located {
                bytes: Bytes::File(file),
                start: stored.offset,
                tensor,
            })
        };
        let located = match located {
            // Not a zip: torch's SAFETENSORS format has all tensors of a file in one blob, at the
            // offset given for each.
            Err(error @ FormatError::Archive { .. }) if stored.transforms.is_empty() => {
                self.locate_in_blob(fqn, stored).ok_or(error)?
            }
            located => located?,
        };
        // The dtype and shape in the item must be those of the chunk in the metadata.
        let found = &located.tensor.tensor;
        if found.dtype != dtype || found.shape != bounds.sizes {
            let expected = format!("a `{dtype}` tensor of shape {:?}", bounds.sizes);
            let found = format!("a `{}` tensor of shape {:?}", found.dtype, found.shape);
            return Err(FormatError::unexpected(expected, found).into());
        }
        Ok(located)
    }

    /// Returns the item that this library writes for a tensor, if it has so many bytes. An item is
    /// made once for all tensors of the same dtype and shape.
    fn known_item(&self, dtype: DType, shape: &[usize], length: u64) -> Option<Arc<KnownItem>> {
        let key = (dtype, shape.to_vec());
        let mut items = self
            .known_items
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !items.contains_key(&key) && items.len() == MAX_KNOWN_ITEMS {
            return None;
        }
        // An item is made in about a microsecond, so other threads may wait for it.
        let item = items
            .entry(key)
            .or_insert_with(|| KnownItem::new(dtype, shape).ok().map(Arc::new));
        item.clone().filter(|item| item.length() == length)
    }

    /// Finds the tensor of this key in a safetensors blob that starts at the item's offset and ends
    /// with the file.
    fn locate_in_blob(&self, fqn: &str, stored: &StorageInfo) -> Option<Located> {
        let file = self.directory.file(&stored.relative_path).ok()?;
        let header = self.blob_header(&file, stored)?;
        let info = header.tensors.get(fqn)?;
        let tensor = TensorRef::row_major(
            fqn.to_owned(),
            info.end - info.start,
            info.dtype,
            &info.shape,
        );
        let tensor = StoredTensor {
            tensor,
            storage_offset: header.data + info.start,
        };
        Some(Located {
            bytes: Bytes::File(file),
            start: stored.offset,
            tensor,
        })
    }

    /// Returns the header of the safetensors blob that starts at the item's offset; `None` if there
    /// is none. It is read once for all tensors in it.
    fn blob_header(&self, file: &CheckedFile, stored: &StorageInfo) -> Option<Arc<Header>> {
        let place = (stored.relative_path.clone(), stored.offset);
        // Other threads that want it wait.
        let mut blobs = self.blobs.lock().unwrap_or_else(PoisonError::into_inner);
        let read = || {
            let length = file.len().checked_sub(stored.offset)?;
            Header::read(&Window::new(file, stored.offset, length).ok()?)
                .ok()
                .map(Arc::new)
        };
        blobs.entry(place).or_insert_with(read).clone()
    }

    /// Reads all bytes of an item, and undoes its stream transforms. The result may have at most
    /// `expected` bytes.
    pub(super) fn item_bytes(
        &self,
        stored: &StorageInfo,
        expected: u64,
    ) -> Result<Vec<u8>, ReadError> {
        let file = self.directory.file(&stored.relative_path)?;
        let item = Window::new(&*file, stored.offset, stored.length)?;
        if stored.length > MAX_OBJECT_BYTES {
            let (value, limit) = (stored.length, MAX_OBJECT_BYTES);
            return Err(FormatError::Limit {
                what: "item length",
                value,
                limit,
            }
            .into());
        }
        let mut bytes = read_whole(&item, 0, stored.length)?;
        // The transforms were applied one after the other, so the last one is undone first.
        for transform in stored.transforms.iter().rev() {
            bytes = match transform.split('/').next() {
                Some("stream.zstd") => unzstd(&bytes, expected.min(MAX_OBJECT_BYTES))?,
                _ => {
                    return Err(FormatError::Unsupported {
                        what: format!("the stream transform `{transform}`"),
                    }
                    .into());
                }
            };
        }
        Ok(bytes)
    }

    /// Checks that each item of these keys lies in its file, and is long enough for its chunk (a
    /// transform may have made it shorter), unless it is opaque.
    pub(super) fn check_items(&self, keys: KeyFilter<'_>) -> Result<(), FileError> {
        for (fqn, tensor) in self.metadata.tensors().filter(|(fqn, _)| keys(fqn)) {
            for chunk in tensor
                .chunks
                .iter()
                .filter(|chunk| !chunk.bounds.is_empty())
            {
                match self.check_item(fqn, chunk, tensor.properties.dtype) {
                    Err(error) if error.opaque_type().is_some() => {}
                    checked => checked?,
                }
            }
        }
        Ok(())
    }

    /// Returns the type of a tensor's first item, if it is not that of a plain tensor.
    pub(super) fn opaque_tensor(&self, fqn: &str, tensor: &TensorEntry) -> Option<String> {
        let chunks = tensor
            .chunks
            .iter()
            .filter(|chunk| !chunk.bounds.is_empty());
        let (bounds, stored) = chunks
            .filter_map(|chunk| Some((&chunk.bounds, chunk.stored.as_ref()?)))
            .next()?;
        let dtype = tensor.properties.dtype;
        // An item with the length of one of ours is a plain tensor. Any other one is examined.
        if TensorItem::new(dtype, &bounds.sizes).is_ok_and(|plain| plain.length() == stored.length)
        {
            return None;
        }
        // A damaged item is not opaque. The error is reported by whatever reads it.
        let located = self.locate(fqn, bounds, stored, dtype);
        located
            .err()
            .and_then(|error| self.item_error(fqn, stored, error).opaque_type())
    }

    /// Returns the type of the object that makes a value opaque, without reading the tensors in it.
    pub(super) fn opaque_value(&self, stored: &StorageInfo) -> Result<Option<String>, ReadError> {
        let budget = Budget::new(stored.length, PICKLE_FACTOR);
        self.with_item(stored, budget.left() / 2, |item| {
            opaque_type_of(item, budget)
        })
    }

    /// Describes an opaque tensor by its first item.
    pub(super) fn describe_tensor(&self, stored: &StorageInfo) -> Result<PlainValue, ReadError> {
        let budget = Budget::new(stored.length, PICKLE_FACTOR);
        self.with_item(stored, budget.left() / 2, |item| {
            describe_object(item, budget)
        })
    }

    /// Calls a function with an item. Stream transforms are undone in memory, where they may make
    /// `expected` bytes at most; without any, nothing is read before the function reads it.
    fn with_item<T>(
        &self,
        stored: &StorageInfo,
        expected: u64,
        read: impl FnOnce(&dyn ReadAt) -> Result<T, FormatError>,
    ) -> Result<T, ReadError> {
        if !stored.transforms.is_empty() {
            return Ok(read(&self.item_bytes(stored, expected)?)?);
        }
        let file = self.directory.file(&stored.relative_path)?;
        Ok(read(&Window::new(&*file, stored.offset, stored.length)?)?)
    }

    /// Checks one item as [`CheckpointReader::check_items`] does.
    pub(super) fn check_item(
        &self,
        fqn: &str,
        chunk: &Chunk,
        dtype: DType,
    ) -> Result<(), FileError> {
        let stored = chunk.stored.as_ref();
        let stored = stored.ok_or_else(|| FileError::NotStored {
            fqn: fqn.to_owned(),
        })?;
        let file = self.directory.file(&stored.relative_path)?;
        let payload = byte_length(&chunk.bounds, dtype).unwrap_or(usize::MAX);
        let error = |source| self.item_error(fqn, stored, ReadError::Format(source));
        Window::new(&*file, stored.offset, stored.length).map_err(error)?;
        if stored.transforms.is_empty() && payload as u64 > stored.length {
            // If the item is opaque, report that: it is more helpful than a wrong length.
            let located = self.locate(fqn, &chunk.bounds, stored, dtype);
            let found = located.map_err(|error| self.item_error(fqn, stored, error));
            if let Some(opaque) = found.err().filter(|error| error.opaque_type().is_some()) {
                return Err(opaque);
            }
            let expected = format!("an item of at least {payload} bytes");
            return Err(error(FormatError::unexpected(
                expected,
                format!("one of {}", stored.length),
            )));
        }
        Ok(())
    }

    /// Reads how a tensor is quantized, which all of its items must say alike; `None` if it is not.
    pub(crate) fn read_quantizer(&self, fqn: &str) -> Result<Option<PlainValue>, FileError> {
        let Some(tensor) = self.metadata.tensor(fqn) else {
            return Ok(None);
        };
        let mut first: Option<(&StorageInfo, Option<PlainValue>)> = None;
        for chunk in &tensor.chunks {
            let Some(stored) = &chunk.stored else {
                continue;
            };
            let length = byte_length(&chunk.bounds, tensor.properties.dtype).unwrap_or(0) as u64;
            let found = self
                .quantizer_in(stored, length)
                .map_err(|error| self.item_error(fqn, stored, error))?;
            let (place, quantizer) = first.get_or_insert_with(|| (stored, found.clone()));
            if !is_same_quantizer(quantizer.as_ref(), found.as_ref()) {
                return Err(FileError::Differing {
                    fqn: fqn.to_owned(),
                    what: "has another scale or zero point".to_owned(),
                    first: place.relative_path.clone(),
                    second: stored.relative_path.clone(),
                });
            }
        }
        Ok(first.and_then(|(_, quantizer)| quantizer))
    }

    /// Reads how the tensor of `length` bytes in one item is quantized; `None` if it is not.
    fn quantizer_in(
        &self,
        stored: &StorageInfo,
        length: u64,
    ) -> Result<Option<PlainValue>, ReadError> {
        self.with_item(
            stored,
            length.saturating_add(ITEM_OVERHEAD),
            |item| match Directory::read(item) {
                Ok(archive) => quantizer_of(&archive, item),
                // torch's SAFETENSORS format has no archives, nor quantized tensors, nor
                // transforms.
                Err(FormatError::Archive { .. }) if stored.transforms.is_empty() => Ok(None),
                Err(error) => Err(error),
            },
        )
    }

    /// Adds the key and the place of an item to an error of its contents.
    pub(super) fn item_error(
        &self,
        fqn: &str,
        stored: &StorageInfo,
        error: ReadError,
    ) -> FileError {
        match error {
            ReadError::File(error) => error,
            ReadError::Format(source) => FileError::Item {
                fqn: fqn.to_owned(),
                path: self.path().join(&stored.relative_path),
                offset: stored.offset,
                source,
            },
        }
    }
}

fn bad_stream(error: impl ToString) -> FormatError {
    FormatError::Malformed {
        what: "zstd stream",
        reason: error.to_string(),
    }
}

/// Decompresses one zstd stream, to at most `limit` bytes.
fn unzstd(compressed: &[u8], limit: u64) -> Result<Vec<u8>, FormatError> {
    let decoder = ruzstd::decoding::StreamingDecoder::new(compressed).map_err(bad_stream)?;
    let mut bytes = Vec::new();
    decoder
        .take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(bad_stream)?;
    if bytes.len() as u64 > limit {
        return Err(FormatError::Limit {
            what: "decompressed length",
            value: bytes.len() as u64,
            limit,
        });
    }
    Ok(bytes)
}
