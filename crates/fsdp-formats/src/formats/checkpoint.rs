//! The trait [`Checkpoint`]: an open checkpoint of any format.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;

use fsdp_digest::StateDigest;
use fsdp_layout::{PlainValue, TensorBox};
use serde::{Deserialize, Serialize};

use super::change::{Change, find_shared};
use super::lookup::{item_error, request_of};
use super::read::{
    Destination, LARGE_BOX_BYTES, ReadDone, ReadOptions, ReadSource, check_buffers,
    read_in_parallel,
};
use super::structure::Structure;
use crate::error::FileError;
use crate::metadata::{Metadata, Replica, StorageInfo};
use crate::payload::slot::Slot;
use crate::plan::{LoadRequest, plan_load};
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::lineage::Lineage;
use crate::storage::read_at::{ReadAt as _, Window};

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
    /// A directory of files of `torch.save` with a JSON index, as Hugging Face's sharded
    /// `pytorch_model.bin`.
    TorchDirectory,
    /// A directory with one file of `torch.save` for each rank, which holds the rank's parts of the
    /// tensors.
    RankFiles,
    /// A directory of DeepSpeed with the shards of ZeRO stage 1, 2 or 3.
    DeepSpeed,
    /// A directory of DeepSpeed's Universal Checkpoint.
    DeepSpeedUniversal,
    /// A directory of `torch_checkpointing`: a file for each item and rank, and `metadata.pkl`.
    TorchCheckpointing,
    /// A NumPy file: one array (`.npy`) or several (`.npz`).
    Numpy,
    /// A GGUF file of llama.cpp.
    Gguf,
    /// A trainer's folder, which holds a model and the state of its training in separate files and
    /// directories.
    Folder,
}

impl Format {
    /// Returns the name of the format in the output of the command.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.names().0
    }

    /// Returns the name in the output of the command, and the words for messages.
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Format::Dcp => ("dcp", "DCP directory"),
            Format::SafetensorsFile => ("safetensors", "safetensors file"),
            Format::SafetensorsDirectory => ("safetensors-directory", "safetensors directory"),
            Format::Torch => ("torch", "torch archive"),
            Format::TorchDirectory => ("torch-directory", "directory of torch archives"),
            Format::RankFiles => ("rank-files", "directory of rank files"),
            Format::DeepSpeed => ("deepspeed", "DeepSpeed directory"),
            Format::DeepSpeedUniversal => ("deepspeed-universal", "DeepSpeed universal checkpoint"),
            Format::TorchCheckpointing => ("torch-checkpointing", "torch_checkpointing directory"),
            Format::Numpy => ("numpy", "NumPy file"),
            Format::Gguf => ("gguf", "GGUF file"),
            Format::Folder => ("folder", "folder of checkpoints"),
        }
    }

    /// Returns `true` if a checkpoint of this format is one file.
    #[must_use]
    pub const fn is_file(self) -> bool {
        matches!(
            self,
            Format::SafetensorsFile | Format::Torch | Format::Numpy | Format::Gguf
        )
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.names().1)
    }
}

/// A part of a checkpoint that consists of several, such as a trainer's folder.
#[derive(Clone, Copy)]
pub struct PartOf<'c> {
    /// Its file or directory in the whole checkpoint; empty for files directly in the directory of
    /// the whole.
    pub path: &'c str,
    /// `true` if it is a directory, so that the names of its files are relative to `path`.
    pub is_directory: bool,
    /// The checkpoint.
    pub checkpoint: &'c dyn Checkpoint,
    /// The keys in the whole, by those in the checkpoint.
    pub keys: &'c HashMap<String, String>,
}

impl fmt::Debug for PartOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PartOf")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// A choice of keys.
pub type KeyFilter<'f> = &'f dyn Fn(&str) -> bool;

/// An open checkpoint of any format.
pub trait Checkpoint: Send + Sync {
    /// Returns its format.
    fn format(&self) -> Format;

    /// Returns the path of its directory or file, or its URL.
    fn path(&self) -> &Path;

    /// Returns its metadata. `planner_data` is set if the keys came from a nested state dict.
    fn metadata(&self) -> &Metadata;

    /// Returns the nested containers that its keys came from, if the format stores more about them
    /// than the paths in [`Checkpoint::metadata`].
    fn structure(&self) -> Option<&Structure> {
        None
    }

    /// Returns its files.
    fn directory(&self) -> &CheckedDirectory;

    /// Returns the parts of a trainer's folder, or of a directory with files of a trainer's state
    /// beside its own; empty for any other checkpoint.
    fn parts(&self) -> Vec<PartOf<'_>> {
        Vec::new()
    }

    /// Returns the key that the content at a key has in the whole of which [`Checkpoint::parts`]
    /// are the parts; `None` if a view makes the content, or takes it from elsewhere. The key must
    /// be in the metadata.
    fn key_in_parts<'c>(&'c self, fqn: &'c str) -> Option<&'c str> {
        Some(fqn)
    }

    /// Returns the digests of its tensors and values that were recorded when it was saved, by key;
    /// `None` if there are none, or if it was opened without verification.
    /// [`digest`](crate::digest::digest) computes them.
    fn digests(&self) -> Option<&StateDigest> {
        None
    }

    /// Returns `true` if it has recorded digests, but another program has rewritten the file since.
    /// Such digests are not among [`Checkpoint::digests`].
    fn has_stale_digests(&self) -> bool {
        false
    }

    /// Returns its lineage (its place in its run), if that was recorded.
    fn lineage(&self) -> Option<&Lineage> {
        None
    }

    /// Fills slots with boxes of one tensor, in the dtype that [`Checkpoint::metadata`] says.
    ///
    /// Each format implements this method, and [`Checkpoint::read`] calls it from several threads.
    /// The caller has planned the read: the tensor exists, its chunks are valid and cover the
    /// boxes, and each slot has the length of its box. A format that fills the bytes of a slot
    /// directly, and not through this crate's files, must report them with [`Slot::filled`].
    fn read_boxes(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError>;

    /// Reads one box of a tensor into its row-major bytes, in the dtype that
    /// [`Checkpoint::metadata`] says.
    fn read_box(&self, fqn: &str, bounds: &TensorBox, dst: &mut [u8]) -> Result<(), FileError> {
        let request = request_of(self.metadata(), fqn, bounds)?;
        if dst.len() > LARGE_BOX_BYTES {
            // The threads of a whole read share a large box.
            let destination = Destination::new(request, vec![dst]);
            self.read(vec![destination], ReadOptions::default())?;
            return Ok(());
        }
        plan_load(self.metadata(), [&request])?;
        check_buffers(&request, request.dtype, &[&mut *dst])?;
        if dst.is_empty() {
            return Ok(());
        }
        self.read_boxes(fqn, &mut [Slot::new(bounds.clone(), dst)])
    }

    /// Reads boxes of many tensors into buffers, by several threads.
    ///
    /// Everything that can be checked without reading is checked first; an error then has changed
    /// no buffer. After an error while reading, the contents of the buffers are unspecified.
    fn read(
        &self,
        destinations: Vec<Destination<'_>>,
        options: ReadOptions,
    ) -> Result<ReadDone, FileError> {
        let source = ReadSource {
            metadata: self.metadata(),
            digests: self.digests(),
            directory: self.directory(),
            read_boxes: &|fqn, slots| self.read_boxes(fqn, slots),
        };
        read_in_parallel(&source, destinations, options)
    }

    /// Makes the checks of a [`Checkpoint::read`] that are possible before tensor bytes are read:
    /// of the plan, and that the files are long enough for the places in the metadata.
    fn check_read(&self, requests: &[LoadRequest]) -> Result<(), FileError> {
        let wanted: HashSet<&str> = requests
            .iter()
            .map(|request| request.fqn.as_str())
            .collect();
        self.check_stored(&|fqn| wanted.contains(fqn))?;
        plan_load(self.metadata(), requests)?;
        Ok(())
    }

    /// Reads a non-tensor value. One that holds an object of an unknown type is an error; see
    /// [`FileError::opaque_type`].
    fn read_value(&self, fqn: &str) -> Result<PlainValue, FileError>;

    /// Returns the type of the object that makes a value or tensor opaque, such as a tensor
    /// subclass; `None` if it is not opaque.
    fn opaque_type(&self, fqn: &str) -> Result<Option<String>, FileError> {
        if self.metadata().tensor(fqn).is_some() {
            return Ok(None);
        }
        match self.read_value(fqn) {
            Ok(_) => Ok(None),
            Err(error) => error.opaque_type().map(Some).ok_or(error),
        }
    }

    /// Reads a non-tensor value, or an opaque tensor, in a form that can be shown: objects of
    /// unknown types become dicts with their type (`$type`), arguments and state. Tensors inside an
    /// opaque tensor have no elements.
    fn describe_value(&self, fqn: &str) -> Result<PlainValue, FileError> {
        self.read_value(fqn)
    }

    /// Reads the stored bytes of a value at a place, as `torch.save` wrote them, to copy them.
    fn read_item(&self, fqn: &str, stored: &StorageInfo) -> Result<Vec<u8>, FileError> {
        let _ = stored;
        Err(FileError::not_stored(fqn))
    }

    /// Reads stored bytes of an item into all of `dst`, from the byte `offset` of the item on, to
    /// copy or compare them.
    fn read_stored(
        &self,
        fqn: &str,
        stored: &StorageInfo,
        offset: u64,
        dst: &mut [u8],
    ) -> Result<(), FileError> {
        let file = self.directory().file(&stored.relative_path)?;
        Window::new(&*file, stored.offset, stored.length)
            .and_then(|item| item.read_exact_at(offset, dst))
            .map_err(|source| item_error(self.directory(), fqn, stored, source))
    }

    /// Checks that the files are long enough for the tensors with these keys. A conversion calls
    /// this before it reserves space.
    fn check_stored(&self, keys: KeyFilter<'_>) -> Result<(), FileError> {
        let _ = keys;
        Ok(())
    }

    /// Compares the copies of tensors with these keys, in formats in which several ranks' files
    /// hold the same tensor. A copy that differs is an error that names the tensor: a conversion
    /// could keep only one, and it is not known which is right.
    fn check_copies(&self, keys: KeyFilter<'_>) -> Result<(), FileError> {
        let _ = keys;
        Ok(())
    }

    /// Compares what was read of tensors so far with their recorded digests, where a view under
    /// this one has summed it, and with the checksums of the storages of which at least half was
    /// read. A conversion calls this before it commits: what it writes gets new hashes, and
    /// elements that it changes have other digests.
    fn check_elements_read(&self) -> Result<(), FileError> {
        Ok(())
    }

    /// Returns the notes that programs have left in the headers of safetensors files
    /// (`__metadata__`), by key: a title, or the settings of a training.
    fn notes(&self) -> Vec<(&str, &str)> {
        Vec::new()
    }

    /// Returns the quantizer of a quantized tensor: a tuple of `torch.per_tensor_affine`, scale and
    /// zero point, or of `torch.per_channel_affine`, the tensors of scales and zero points, and the
    /// axis. `None` for other tensors, or if it is not known.
    fn quantizer(&self, fqn: &str) -> Result<Option<PlainValue>, FileError> {
        let _ = fqn;
        Ok(None)
    }

    /// Reads a box of one particular copy of a chunk: a replica (see [`Metadata::replicas`]), or
    /// the chunk itself if it is known to be valid.
    fn read_replica(
        &self,
        replica: &Replica,
        bounds: &TensorBox,
        dst: &mut [u8],
    ) -> Result<(), FileError> {
        self.read_boxes(&replica.fqn, &mut [Slot::new(bounds.clone(), dst)])
    }

    /// Reads another copy of a value; see [`Metadata::replicas`].
    fn read_value_replica(&self, replica: &Replica) -> Result<PlainValue, FileError> {
        Err(FileError::not_stored(&replica.fqn))
    }

    /// Returns what it shows in another way than the files have it, or not at all: nothing for a
    /// checkpoint that was opened, and for a view what the view changes. Changes of elements, such
    /// as casts that make them infinite, are included once the elements have been read.
    fn changes(&self) -> Vec<Change> {
        Vec::new()
    }

    /// Returns the tensors that share elements with another tensor in the files (tied weights,
    /// views), each with one such tensor.
    fn shared_tensors(&self) -> HashMap<String, String> {
        find_shared(self.metadata())
    }

    /// Returns the bytes of data files that were read so far.
    fn bytes_read(&self) -> u64 {
        self.directory().bytes_read()
    }
}
