//! Reading a DCP checkpoint: by ranges, in parallel, directly into the destination.

mod chunk_item;
mod item_bytes;
mod items;
mod read;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex};

use fsdp_digest::StateDigest;
use fsdp_layout::{DType, PlainValue, TensorBox};

use crate::budget::Budget;
use crate::dcp::item::KnownItem;
use crate::error::{FileError, FormatError};
use crate::limits::{MAX_PICKLE_BYTES, PICKLE_FACTOR};
use crate::metadata::{METADATA_FILE, Metadata, StorageInfo, decode};
use crate::safetensors::header::Header;
use crate::storage::backend::Links;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::lineage::Lineage;
use crate::storage::location::Location;
use crate::torch::value::{
    decode_value_within, describe_object, is_same_quantizer, opaque_type_of,
};

use self::chunk_item::{ChunkItem, max_item_bytes};
pub use self::item_bytes::check_transformed;
use self::item_bytes::{read_item_bytes, read_quantizer};
use crate::formats::checkpoint::{Checkpoint, Format, KeyFilter};
use crate::formats::lookup::{check_replica, find_value, tensor_of};
use crate::formats::read::OpenOptions;
use crate::formats::replicas::check_replicas;
use crate::metadata::Replica;
use crate::payload::slot::Slot;
use crate::plan::{LoadRequest, plan_load};
use crate::threads::lock;
use crate::zip::Stored;

/// The headers of safetensors blobs that were looked for, by file and offset; `None` where there is
/// none.
type Blobs = HashMap<(String, u64), Option<Arc<Header>>>;
/// The items that this library writes for tensors, by their dtype and shape; `None` where it writes
/// none.
type KnownItems = HashMap<(DType, Vec<usize>), Option<Arc<KnownItem>>>;

/// The records with the payloads of items, by file and offset of the item.
type Records = BTreeMap<(String, u64), PayloadRecord>;

/// The record with the payload of an item, and the item, for messages.
#[derive(Debug, Clone)]
struct PayloadRecord {
    fqn: String,
    item: StorageInfo,
    record: Arc<Stored>,
}

/// An open DCP checkpoint. Threads can share it, and nothing is ever written to it.
///
/// Data files are opened when they are first needed. If the checkpoint has an integrity file, every
/// byte that is read is checked against it. Otherwise each item has a checksum, which is compared
/// once all of its payload was read. [`Checkpoint`] has the methods that all formats share:
///
/// ```no_run
/// use fsdp_formats::checkpoint::Checkpoint as _;
/// use fsdp_formats::reader::CheckpointReader;
/// use fsdp_layout::TensorBox;
/// let checkpoint = CheckpointReader::open("checkpoints/step-20")?;
/// // Rows 2 and 3 of a [1024, 768] tensor of f32.
/// let mut rows = vec![0; 2 * 768 * 4];
/// checkpoint.read_box("model.wte.weight", &TensorBox::new(vec![2, 0], vec![2, 768]), &mut rows)?;
/// # Ok::<(), fsdp_formats::FileError>(())
/// ```
#[derive(Debug)]
pub struct CheckpointReader {
    directory: CheckedDirectory,
    metadata: Metadata,
    blobs: Mutex<Blobs>,
    known_items: Mutex<KnownItems>,
    /// `true` if the checksums of items are compared, because nothing else tells whether their
    /// bytes are those that were written.
    checks_records: bool,
    records: Mutex<Records>,
}

impl CheckpointReader {
    /// Opens the checkpoint in this directory.
    ///
    /// Without `.metadata`, the rank-local files `__{rank}.metadata` are merged (torch's
    /// `use_collectives=False`). Without those either, the error is [`FileError::NotCommitted`].
    pub fn open(location: impl Into<Location>) -> Result<Self, FileError> {
        Self::open_with(location, OpenOptions::default())
    }

    /// Opens the checkpoint in this directory, with options.
    pub fn open_with(
        location: impl Into<Location>,
        options: OpenOptions,
    ) -> Result<Self, FileError> {
        let location = location.into();
        let path = location.name();
        let directory = match CheckedDirectory::open(&location, options.verify, Links::Refuse) {
            Err(FileError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return Err(not_committed_error(path, "there is nothing"));
            }
            directory => directory?,
        };
        // There are several metadata files if each rank has written its own.
        let mut metadata_parts = Vec::new();
        for name in metadata_files(&directory)? {
            let bytes = directory.read_checked(&name, MAX_PICKLE_BYTES)?;
            metadata_parts
                .push(decode(&bytes).map_err(|error| directory.file_error(&name, error.into()))?);
        }
        let metadata = match metadata_parts.len() {
            0 => return Err(not_committed_error(path, missing_metadata_reason(path))),
            1 => metadata_parts.swap_remove(0),
            _ => Metadata::merge(metadata_parts)
                .map_err(|reason| FormatError::malformed("checkpoint", reason).in_file(path))?,
        };
        Ok(CheckpointReader {
            checks_records: options.verify && !directory.has_integrity(),
            directory,
            metadata,
            blobs: Mutex::default(),
            known_items: Mutex::default(),
            records: Mutex::default(),
        })
    }

    /// Reads and decodes the value that is stored at a place, which may be that of a copy. With
    /// `describes`, objects that cannot be built become descriptions of themselves instead of
    /// errors.
    fn read_value_at(
        &self,
        fqn: &str,
        stored: &StorageInfo,
        describes: bool,
    ) -> Result<PlainValue, FileError> {
        self.read_from_file(fqn, stored, |file| {
            // The budget is computed from the stored length and not from the decompressed one, so
            // that a small compressed file cannot take much memory.
            let mut budget = Budget::new(stored.length, PICKLE_FACTOR);
            // A buffer that grows takes up to three times what is in it.
            let bytes = read_item_bytes(&**file, stored, budget.left() / 2)?;
            let growth = (bytes.len() as u64).saturating_sub(stored.length);
            budget.charge("decompressed length", growth)?;
            decode_value_within(&bytes, budget, describes)
        })
    }
}

impl Checkpoint for CheckpointReader {
    fn format(&self) -> Format {
        Format::Dcp
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn directory(&self) -> &CheckedDirectory {
        &self.directory
    }

    fn digests(&self) -> Option<&StateDigest> {
        self.directory.digests()
    }

    fn lineage(&self) -> Option<&Lineage> {
        self.directory.lineage()
    }

    fn read_boxes(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        let tensor = tensor_of(&self.metadata, fqn)?;
        for chunk in &tensor.chunks {
            let is_wanted = slots
                .iter()
                .any(|slot| chunk.bounds.intersect(&slot.bounds).is_some());
            if is_wanted {
                self.fill_from_chunk(ChunkItem::new(fqn, tensor, chunk)?, slots)?;
            }
        }
        Ok(())
    }

    fn check_read(&self, requests: &[LoadRequest]) -> Result<(), FileError> {
        for read in plan_load(&self.metadata, requests)? {
            let fqn = &requests[read.request].fqn;
            let tensor = tensor_of(&self.metadata, fqn)?;
            self.check_item(ChunkItem::new(fqn, tensor, &tensor.chunks[read.chunk])?)?;
        }
        Ok(())
    }

    fn read_value(&self, fqn: &str) -> Result<PlainValue, FileError> {
        self.read_value_at(fqn, find_value(&self.metadata, fqn)?, false)
    }

    fn opaque_type(&self, fqn: &str) -> Result<Option<String>, FileError> {
        if let Some(tensor) = self.metadata.tensor(fqn) {
            return Ok(self.opaque_type_of_tensor(fqn, tensor));
        }
        self.read_object(fqn, find_value(&self.metadata, fqn)?, opaque_type_of)
    }

    fn describe_value(&self, fqn: &str) -> Result<PlainValue, FileError> {
        if let Some(tensor) = self.metadata.tensor(fqn)
            && let Some(stored) = tensor.chunks.iter().find_map(|chunk| chunk.stored.as_ref())
        {
            return self.read_object(fqn, stored, describe_object);
        }
        let stored = find_value(&self.metadata, fqn)?;
        match self.read_value_at(fqn, stored, false) {
            Err(error) if error.opaque_type().is_some() => self.read_value_at(fqn, stored, true),
            value => value,
        }
    }

    fn read_item(&self, fqn: &str, stored: &StorageInfo) -> Result<Vec<u8>, FileError> {
        let max_bytes = Budget::new(stored.length, PICKLE_FACTOR).left() / 2;
        self.read_from_file(fqn, stored, |file| {
            read_item_bytes(&**file, stored, max_bytes)
        })
    }

    /// Checks that the item of each chunk that is not empty lies in its file and is long enough. A
    /// chunk that is stored nowhere is an error. An item with a stream transform may be shorter
    /// than its chunk, and an opaque one has a length of its own, so those may have any length.
    fn check_stored(&self, keys: KeyFilter<'_>) -> Result<(), FileError> {
        for (fqn, tensor) in self.metadata.tensors().filter(|(fqn, _)| keys(fqn)) {
            for chunk in &tensor.chunks {
                if chunk.bounds.is_empty() {
                    continue;
                }
                match self.check_item(ChunkItem::new(fqn, tensor, chunk)?) {
                    Err(error) if error.opaque_type().is_some() => {}
                    checked => checked?,
                }
            }
        }
        Ok(())
    }

    fn check_elements_read(&self) -> Result<(), FileError> {
        let records: Vec<PayloadRecord> = lock(&self.records).values().cloned().collect();
        for PayloadRecord { fqn, item, record } in &records {
            self.read_from_file(fqn, item, |file| record.read_rest(&**file))?;
        }
        Ok(())
    }

    fn check_copies(&self, keys: KeyFilter<'_>) -> Result<(), FileError> {
        check_replicas(self, keys)
    }

    fn quantizer(&self, fqn: &str) -> Result<Option<PlainValue>, FileError> {
        let Some(tensor) = self.metadata.tensor(fqn) else {
            return Ok(None);
        };
        let mut first_found: Option<(&StorageInfo, Option<PlainValue>)> = None;
        for chunk in &tensor.chunks {
            let Some(stored) = &chunk.stored else {
                continue;
            };
            let max_bytes = max_item_bytes(&chunk.bounds, tensor.properties.dtype);
            let quantizer = self.read_from_file(fqn, stored, |file| {
                read_quantizer(&**file, stored, max_bytes)
            })?;
            let (first_stored, first_quantizer) =
                first_found.get_or_insert_with(|| (stored, quantizer.clone()));
            if !is_same_quantizer(first_quantizer.as_ref(), quantizer.as_ref()) {
                return Err(FileError::Differing {
                    fqn: fqn.to_owned(),
                    what: "has another scale or zero point".to_owned(),
                    first: first_stored.relative_path.clone(),
                    second: stored.relative_path.clone(),
                });
            }
        }
        Ok(first_found.and_then(|(_, quantizer)| quantizer))
    }

    fn read_replica(
        &self,
        replica: &Replica,
        bounds: &TensorBox,
        dst: &mut [u8],
    ) -> Result<(), FileError> {
        let (dtype, whole) = check_replica(&self.metadata, replica, bounds, dst)?;
        let item = ChunkItem {
            fqn: &replica.fqn,
            dtype,
            bounds: whole,
            stored: &replica.stored,
        };
        self.fill_from_chunk(item, &mut [Slot::new(bounds.clone(), dst)])
    }

    fn read_value_replica(&self, replica: &Replica) -> Result<PlainValue, FileError> {
        self.read_value_at(&replica.fqn, &replica.stored, false)
    }
}

/// Returns the error of a directory that is no checkpoint.
fn not_committed_error(path: &Path, reason: &'static str) -> FileError {
    FileError::NotCommitted {
        path: path.to_owned(),
        reason,
    }
}

/// Returns the likely reason why a directory has no metadata.
fn missing_metadata_reason(path: &Path) -> &'static str {
    let is_staging = path
        .file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.contains(".tmp-"));
    if is_staging {
        "it is a staging directory of a save that did not finish"
    } else {
        "it has no `.metadata`"
    }
}

/// Returns the names of the metadata files: `.metadata`, or those of the ranks in order.
pub(crate) fn metadata_files(directory: &CheckedDirectory) -> Result<Vec<String>, FileError> {
    if directory.has(METADATA_FILE)? {
        return Ok(vec![METADATA_FILE.to_owned()]);
    }
    let names = directory.names()?;
    let mut ranks: Vec<u32> = names
        .iter()
        .filter_map(|name| rank_of_metadata(name))
        .collect();
    ranks.sort_unstable();
    Ok(ranks
        .into_iter()
        .map(|rank| format!("__{rank}.metadata"))
        .collect())
}

/// Returns the rank in the name of a rank's own metadata file; `None` for other names.
fn rank_of_metadata(name: &str) -> Option<u32> {
    let rank = name
        .strip_prefix("__")?
        .strip_suffix(".metadata")?
        .parse()
        .ok()?;
    // Only torch's spelling counts: `__01.metadata` is some other file.
    (format!("__{rank}.metadata") == name).then_some(rank)
}
