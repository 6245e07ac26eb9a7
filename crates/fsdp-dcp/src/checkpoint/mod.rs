//! A checkpoint of any format: what it holds, and any part of it by range.
//!
//! [`open`] looks at the content, not at names: a DCP directory, a directory of safetensors files (Hugging Face's layout,
//! or torch's `HuggingFaceStorageWriter`), one safetensors file, or one torch archive (`.pt`, `.pth`, `.bin`).
//! All of them speak [`Metadata`]; whatever handles one handles all.

mod safetensors;
mod torch;

use std::fmt;
use std::ops::Range;
use std::path::Path;

use fsdp_layout::boxes::boxes_of_flat_range;
use fsdp_layout::{DType, PlainValue, TensorBox};
use serde::{Deserialize, Serialize};

use crate::directory::CheckedDirectory;
use crate::error::{CheckpointError, FormatError};
use crate::metadata::{METADATA_FILE, Metadata, TensorEntry};
use crate::plan::LoadPlanError;
use crate::reader::{CheckpointReader, OpenOptions, metadata_files};

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

    /// Where it is: the directory or the file.
    fn path(&self) -> &Path;

    /// What it holds. `planner_data` is there where keys came from a nested state dict.
    fn metadata(&self) -> &Metadata;

    /// Its files.
    fn directory(&self) -> &CheckedDirectory;

    /// Reads one box of a tensor into its row-major bytes, in the dtype that [`Checkpoint::metadata`] says.
    fn read_box(&self, fqn: &str, bounds: &TensorBox, dst: &mut [u8]) -> Result<(), CheckpointError>;

    /// Reads a non-tensor value.
    fn read_value(&self, fqn: &str) -> Result<PlainValue, CheckpointError>;

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

    fn read_box(&self, fqn: &str, bounds: &TensorBox, dst: &mut [u8]) -> Result<(), CheckpointError> {
        CheckpointReader::read_box(self, fqn, bounds, dst)
    }

    fn read_value(&self, fqn: &str) -> Result<PlainValue, CheckpointError> {
        CheckpointReader::read_value(self, fqn)
    }
}

/// Opens whatever checkpoint is at this path.
pub fn open(path: impl AsRef<Path>, options: OpenOptions) -> Result<Box<dyn Checkpoint>, CheckpointError> {
    let path = path.as_ref();
    let kind = path.metadata().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            CheckpointError::NotCommitted { path: path.to_owned(), reason: "there is nothing" }
        }
        _ => CheckpointError::io("inspect", path)(error),
    })?;
    if kind.is_dir() {
        let directory = CheckedDirectory::open(path, false, false)?;
        let is_dcp = directory.has(METADATA_FILE)? || !metadata_files(&directory)?.is_empty();
        let has_safetensors = directory.names()?.iter().any(|name| name.ends_with(".safetensors"));
        return match (is_dcp, has_safetensors) {
            (false, true) => Ok(Box::new(SafetensorsCheckpoint::open_directory(path, options)?)),
            _ => Ok(Box::new(CheckpointReader::open_with(path, options)?)),
        };
    }
    let (parent, name) = file_parts(path)?;
    let file = CheckedDirectory::open(parent, false, true)?.file(name)?;
    let mut magic = vec![0; crate::source::ReadAt::len(&*file).min(16) as usize];
    let read = crate::source::ReadAt::read_exact_at(&*file, 0, &mut magic);
    let unsupported = |what: &str| {
        let source = FormatError::Unsupported { what: what.to_owned() };
        Err(CheckpointError::File { path: path.to_owned(), source })
    };
    read.map_err(|source| CheckpointError::File { path: path.to_owned(), source })?;
    match magic.as_slice() {
        [b'P', b'K', 3 | 5, ..] => Ok(Box::new(TorchCheckpoint::open(path)?)),
        // The pickles of torch before 1.6 begin with a magic number as their first value.
        [0x80, 2, 0x8a, 10, ..] => {
            unsupported("torch's file format from before 1.6; load it and save it again with a newer torch")
        }
        [_, _, _, _, _, _, _, _, b'{', ..] => Ok(Box::new(SafetensorsCheckpoint::open_file(path)?)),
        _ => unsupported("this file: it is neither a torch archive nor a safetensors file; it"),
    }
}

/// The directory and the name of a file.
fn file_parts(path: &Path) -> Result<(&Path, &str), CheckpointError> {
    let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(|| {
        let error = std::io::Error::new(std::io::ErrorKind::InvalidInput, "it has no name in UTF-8");
        CheckpointError::io("open", path)(error)
    })?;
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => Ok((parent, name)),
        _ => Ok((Path::new("."), name)),
    }
}

/// The entry of a tensor, or the error that it is none.
pub(crate) fn tensor_of<'m>(metadata: &'m Metadata, fqn: &str) -> Result<&'m TensorEntry, CheckpointError> {
    metadata.tensor(fqn).ok_or_else(|| {
        let fqn = fqn.to_owned();
        match metadata.entries.contains_key(&fqn) {
            true => LoadPlanError::Kind { fqn, saved: "value", wanted: "tensor" }.into(),
            false => LoadPlanError::Missing { fqn }.into(),
        }
    })
}

/// The error that a key is no value.
pub(crate) fn no_value(metadata: &Metadata, fqn: &str) -> CheckpointError {
    let fqn = fqn.to_owned();
    match metadata.tensor(&fqn) {
        Some(_) => LoadPlanError::Kind { fqn, saved: "tensor", wanted: "value" }.into(),
        None => LoadPlanError::Missing { fqn }.into(),
    }
}

/// How much of a tensor [`stream`] reads at once.
const PIECE: usize = 16 << 20;

/// Reads bytes `range` of the row-major box `bounds` of a tensor, in order, in pieces of bounded size.
///
/// `range` must begin and end between elements.
pub fn stream<E: From<CheckpointError>>(
    checkpoint: &dyn Checkpoint,
    fqn: &str,
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
            checkpoint.read_box(fqn, &TensorBox::new(offsets, part.sizes), &mut buffer[filled..filled + length])?;
            filled += length;
        }
        sink(&buffer[..filled])?;
        at = next;
    }
    Ok(())
}
