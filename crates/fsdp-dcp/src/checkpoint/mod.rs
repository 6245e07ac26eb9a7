//! A checkpoint of any format: what it holds, and any part of it by range.
//!
//! [`open`] looks at the content, not at names: a DCP directory, a directory of safetensors files (Hugging Face's layout,
//! or torch's `HuggingFaceStorageWriter`), one safetensors file, or one torch archive (`.pt`, `.pth`, `.bin`).
//! All of them speak [`Metadata`]; whatever handles one handles all.

pub(crate) mod lookup;
mod safetensors;
mod torch;

use std::fmt;
use std::ops::Range;
use std::path::Path;

use fsdp_layout::boxes::boxes_of_flat_range;
use fsdp_layout::{DType, PlainValue, TensorBox};
use serde::{Deserialize, Serialize};

use crate::error::{FileError, FormatError};
use crate::metadata::{METADATA_FILE, Metadata, Replica};
use crate::plan::{LoadPlan, LoadRequest, ReadPlanOptions, plan_load};
use crate::reader::{CheckpointReader, Destination, OpenOptions, ReadOptions, metadata_files};
use crate::storage::backend::{EntryKind, Links};
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::storage::read_at::ReadAt as _;

pub(crate) use safetensors::{NEW_VALUES, VALUES_HASH, values_hash};
pub use safetensors::{SafetensorsCheckpoint, VALUES_FILE, values_beside};
pub use torch::TorchCheckpoint;

/// The formats that are read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Format {
    /// A directory of `torch.distributed.checkpoint`.
    Dcp,
    /// One safetensors file.
    SafetensorsFile,
    /// A directory of safetensors files.
    SafetensorsDirectory,
    /// A file of `torch.save`.
    Torch,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Dcp => "DCP directory",
            Format::SafetensorsFile => "safetensors file",
            Format::SafetensorsDirectory => "safetensors directory",
            Format::Torch => "torch archive",
        })
    }
}

/// An open checkpoint of any format.
pub trait Checkpoint: Send + Sync {
    /// Which format it has.
    fn format(&self) -> Format;

    /// Where it is: the directory or the file, or its URL.
    fn path(&self) -> &Path;

    /// What it holds. `planner_data` is there where keys came from a nested state dict.
    fn metadata(&self) -> &Metadata;

    /// Its files.
    fn directory(&self) -> &CheckedDirectory;

    /// Reads one box of a tensor into its row-major bytes, in the dtype that [`Checkpoint::metadata`] says.
    fn read_box(&self, fqn: &str, bounds: &TensorBox, dst: &mut [u8]) -> Result<(), FileError>;

    /// Reads boxes of many tensors into buffers. All that can be known beforehand is checked first: on an error of the
    /// plan no buffer was touched. Returns the plan, which lists the requests that were missing, if that was allowed.
    fn read(&self, destinations: Vec<Destination<'_>>, options: ReadOptions) -> Result<LoadPlan, FileError> {
        let (requests, buffers): (Vec<_>, Vec<_>) =
            destinations.into_iter().map(|destination| (destination.request, destination.buffers)).unzip();
        let plan = plan_load(self.metadata(), &requests, options.plan)?;
        for (index, (request, buffers)) in requests.iter().zip(buffers).enumerate() {
            if plan.missing.contains(&index) {
                continue;
            }
            for (bounds, buffer) in request.boxes.iter().zip(buffers) {
                self.read_box(&request.fqn, bounds, buffer)?;
            }
        }
        Ok(plan)
    }

    /// Checks all that can be known of a [`Checkpoint::read`] before the bytes of tensors are read: the plan, and that they
    /// can be where the metadata says.
    fn check_read(&self, requests: &[LoadRequest], options: ReadPlanOptions) -> Result<LoadPlan, FileError> {
        self.check_stored()?;
        Ok(plan_load(self.metadata(), requests, options)?)
    }

    /// Reads a non-tensor value.
    fn read_value(&self, fqn: &str) -> Result<PlainValue, FileError>;

    /// Checks that every tensor's bytes can be where the metadata says: before a conversion reserves space for them.
    fn check_stored(&self) -> Result<(), FileError> {
        Ok(())
    }

    /// How a quantized tensor's integers are meant: a tuple of `torch.per_tensor_affine`, scale and zero point, or of
    /// `torch.per_channel_affine`, their tensors and the axis. `None` for other tensors, or where it is not known.
    fn quantizer(&self, fqn: &str) -> Result<Option<PlainValue>, FileError> {
        let _ = fqn;
        Ok(None)
    }

    /// Reads a box of another copy of a chunk; see [`Metadata::replicas`].
    fn read_replica(&self, replica: &Replica, bounds: &TensorBox, dst: &mut [u8]) -> Result<(), FileError> {
        let _ = (bounds, dst);
        Err(FileError::NotStored { fqn: replica.fqn.clone() })
    }

    /// Reads another copy of a value; see [`Metadata::replicas`].
    fn read_value_replica(&self, replica: &Replica) -> Result<PlainValue, FileError> {
        Err(FileError::NotStored { fqn: replica.fqn.clone() })
    }

    /// Bytes of data files read so far.
    fn bytes_read(&self) -> u64 {
        self.directory().bytes_read()
    }
}

impl Checkpoint for CheckpointReader {
    fn format(&self) -> Format {
        Format::Dcp
    }

    fn path(&self) -> &Path {
        CheckpointReader::path(self)
    }

    fn metadata(&self) -> &Metadata {
        CheckpointReader::metadata(self)
    }

    fn directory(&self) -> &CheckedDirectory {
        CheckpointReader::directory(self)
    }

    fn read_box(&self, fqn: &str, bounds: &TensorBox, dst: &mut [u8]) -> Result<(), FileError> {
        CheckpointReader::read_box(self, fqn, bounds, dst)
    }

    fn read(&self, destinations: Vec<Destination<'_>>, options: ReadOptions) -> Result<LoadPlan, FileError> {
        CheckpointReader::read(self, destinations, options)
    }

    fn check_read(&self, requests: &[LoadRequest], options: ReadPlanOptions) -> Result<LoadPlan, FileError> {
        CheckpointReader::check_read(self, requests, options)
    }

    fn read_value(&self, fqn: &str) -> Result<PlainValue, FileError> {
        CheckpointReader::read_value(self, fqn)
    }

    fn check_stored(&self) -> Result<(), FileError> {
        self.check_items()
    }

    fn quantizer(&self, fqn: &str) -> Result<Option<PlainValue>, FileError> {
        self.read_quantizer(fqn)
    }

    fn read_replica(&self, replica: &Replica, bounds: &TensorBox, dst: &mut [u8]) -> Result<(), FileError> {
        CheckpointReader::read_replica(self, replica, bounds, dst)
    }

    fn read_value_replica(&self, replica: &Replica) -> Result<PlainValue, FileError> {
        self.read_stored_value(&replica.fqn, &replica.stored)
    }
}

/// Opens whatever checkpoint is there: a path, or the URL of one in an object store.
pub fn open(location: impl Into<Location>, options: OpenOptions) -> Result<Box<dyn Checkpoint>, FileError> {
    let location = location.into();
    let path = location.name();
    let kind = location
        .storage()
        .kind()?
        .ok_or_else(|| FileError::NotCommitted { path: path.to_owned(), reason: "there is nothing" })?;
    if kind == EntryKind::Directory {
        let directory = CheckedDirectory::open(&location, false, Links::Refuse)?;
        let is_dcp = directory.has(METADATA_FILE)? || !metadata_files(&directory)?.is_empty();
        let has_safetensors = directory.names()?.iter().any(|name| name.ends_with(".safetensors"));
        return match (is_dcp, has_safetensors) {
            (false, true) => Ok(Box::new(SafetensorsCheckpoint::open_directory(&location, options)?)),
            _ => Ok(Box::new(CheckpointReader::open_with(&location, options)?)),
        };
    }
    let (parent, name) = location.split()?;
    let file = CheckedDirectory::open(&parent, false, Links::Follow)?.file(name).map_err(|error| match error {
        // What the user names is no path inside a checkpoint.
        FileError::Path { .. } => {
            let source = FormatError::Unsupported { what: "what is no regular file".to_owned() };
            FileError::File { path: path.to_owned(), source }
        }
        error => error,
    })?;
    let mut magic = vec![0; file.len().min(16) as usize];
    let read = file.read_exact_at(0, &mut magic);
    let unsupported = |what: &str| {
        let source = FormatError::Unsupported { what: what.to_owned() };
        Err(FileError::File { path: path.to_owned(), source })
    };
    read.map_err(|source| FileError::File { path: path.to_owned(), source })?;
    match magic.as_slice() {
        [b'P', b'K', 3 | 5, ..] => Ok(Box::new(TorchCheckpoint::open(&location, options)?)),
        // The pickles of torch before 1.6 begin with a magic number as their first value.
        [0x80, 2, 0x8a, 10, ..] => {
            unsupported("torch's file format from before 1.6 (load it and save it again with a newer torch)")
        }
        [_, _, _, _, _, _, _, _, b'{', ..] => Ok(Box::new(SafetensorsCheckpoint::open_file(&location, options)?)),
        _ => unsupported("a file that is neither a torch archive nor a safetensors file"),
    }
}

/// How much of a tensor [`stream`] reads at once.
const PIECE: usize = 16 << 20;

/// Reads bytes `range` of the row-major box `bounds` of a tensor, in order, in pieces of bounded size.
///
/// `range` must begin and end between elements.
pub fn stream<E: From<FileError>>(
    checkpoint: &dyn Checkpoint,
    fqn: &str,
    dtype: DType,
    bounds: &TensorBox,
    range: Range<u64>,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut read = |part: &TensorBox, dst: &mut [u8]| checkpoint.read_box(fqn, part, dst);
    stream_boxes(&mut read, dtype, bounds, range, sink)
}

/// Fills a buffer with the row-major bytes of a box.
type ReadBox<'r> = dyn FnMut(&TensorBox, &mut [u8]) -> Result<(), FileError> + 'r;

/// As [`stream`], with boxes from wherever `read` takes them.
pub(crate) fn stream_boxes<E: From<FileError>>(
    read: &mut ReadBox<'_>,
    dtype: DType,
    bounds: &TensorBox,
    range: Range<u64>,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    if range.is_empty() {
        return Ok(());
    }
    let element = dtype.size_in_bytes() as usize;
    let (mut at, end) = (range.start as usize / element, range.end as usize / element);
    let row: usize = bounds.sizes.get(1..).unwrap_or_default().iter().product();
    let most = (PIECE / element).max(1);
    let mut buffer = vec![0; (end - at).min(most) * element];
    while at < end {
        let mut next = end.min(at + most);
        // Whole rows where they fit: one box instead of three.
        if next < end && row > 0 && next / row > at.div_ceil(row) {
            next -= next % row;
        }
        let mut filled = 0;
        for part in boxes_of_flat_range(&bounds.sizes, at..next) {
            let offsets = part.offsets.iter().zip(&bounds.offsets).map(|(a, b)| a + b).collect();
            let length = part.numel() * element;
            read(&TensorBox::new(offsets, part.sizes), &mut buffer[filled..filled + length])?;
            filled += length;
        }
        sink(&buffer[..filled])?;
        at = next;
    }
    Ok(())
}
