//! The trait of an open checkpoint of any format.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;

use fsdp_digest::StateDigest;
use fsdp_layout::{PlainValue, TensorBox};
use serde::{Deserialize, Serialize};

use super::lookup::request_of;
use super::read::{Destination, Files, ReadDone, ReadOptions, read_in_parallel};
use super::structure::Structure;
use crate::error::FileError;
use crate::metadata::{Metadata, Replica, StorageInfo};
use crate::payload::slot::Slot;
use crate::plan::{LoadPlan, LoadRequest, ReadPlanOptions, plan_load};
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
    /// A directory of files of `torch.save` with a JSON index, as Hugging Face's sharded `pytorch_model.bin`.
    TorchDirectory,
    /// A directory with a file of `torch.save` for each rank, which hold the ranks' parts of the tensors.
    RankFiles,
    /// A directory of DeepSpeed's ZeRO, of stage 1 to 3.
    DeepSpeed,
    /// A directory of DeepSpeed's Universal Checkpoint.
    DeepSpeedUniversal,
    /// A directory of `torch_checkpointing`: a file for each item and rank, and `metadata.pkl`.
    TorchCheckpointing,
    /// A file of NumPy: one array, or several.
    Numpy,
    /// A file of llama.cpp.
    Gguf,
    /// A directory that holds a model, and beside it the state of its training, in files and directories of their own.
    Folder,
}

impl Format {
    /// Returns the name of the format in the output of the command.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Format::Dcp => "dcp",
            Format::SafetensorsFile => "safetensors",
            Format::SafetensorsDirectory => "safetensors-directory",
            Format::Torch => "torch",
            Format::TorchDirectory => "torch-directory",
            Format::RankFiles => "rank-files",
            Format::DeepSpeed => "deepspeed",
            Format::DeepSpeedUniversal => "deepspeed-universal",
            Format::TorchCheckpointing => "torch-checkpointing",
            Format::Numpy => "numpy",
            Format::Gguf => "gguf",
            Format::Folder => "folder",
        }
    }

    /// Returns `true` if a checkpoint of this format is one file.
    #[must_use]
    pub const fn is_file(self) -> bool {
        matches!(self, Format::SafetensorsFile | Format::Torch | Format::Numpy | Format::Gguf)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Dcp => "DCP directory",
            Format::SafetensorsFile => "safetensors file",
            Format::SafetensorsDirectory => "safetensors directory",
            Format::Torch => "torch archive",
            Format::TorchDirectory => "directory of torch archives",
            Format::RankFiles => "directory of rank files",
            Format::DeepSpeed => "DeepSpeed directory",
            Format::DeepSpeedUniversal => "DeepSpeed universal checkpoint",
            Format::TorchCheckpointing => "torch_checkpointing directory",
            Format::Numpy => "NumPy file",
            Format::Gguf => "GGUF file",
            Format::Folder => "folder of checkpoints",
        })
    }
}

/// One of the checkpoints that another one is made of.
#[derive(Clone, Copy)]
pub struct PartOf<'c> {
    /// Its file or directory; empty for files in the directory of the whole.
    pub place: &'c str,
    /// `true` if the names of its files are those below its place.
    pub is_directory: bool,
    /// The checkpoint.
    pub checkpoint: &'c dyn Checkpoint,
    /// The keys in the whole, by those in the checkpoint.
    pub keys: &'c HashMap<String, String>,
}

impl fmt::Debug for PartOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PartOf").field("place", &self.place).finish_non_exhaustive()
    }
}

/// A choice of keys.
pub type KeyFilter<'f> = &'f dyn Fn(&str) -> bool;

/// An open checkpoint of any format.
pub trait Checkpoint: Send + Sync {
    /// Returns its format.
    fn format(&self) -> Format;

    /// Returns its place: the directory or the file, or the URL.
    fn path(&self) -> &Path;

    /// Returns its metadata. `planner_data` is there where the keys came from a nested state dict.
    fn metadata(&self) -> &Metadata;

    /// Returns the nested containers that its keys came from, where the format tells more of them than the paths in
    /// [`Checkpoint::metadata`].
    fn structure(&self) -> Option<&Structure> {
        None
    }

    /// Returns its files.
    fn directory(&self) -> &CheckedDirectory;

    /// Returns the checkpoints that a folder, or a directory with files of a trainer's state beside its own, is made of; none
    /// of any other checkpoint.
    fn parts(&self) -> Vec<PartOf<'_>> {
        Vec::new()
    }

    /// Returns the digests of its tensors and values that were recorded when it was saved, by key; `None` if there are none,
    /// or if it was opened without verification. [`digest`](crate::digest::digest) computes them.
    fn digests(&self) -> Option<&StateDigest> {
        None
    }

    /// Returns `true` if digests were recorded in it, but of what it held before another program wrote it again. They are not
    /// among [`Checkpoint::digests`].
    fn has_stale_digests(&self) -> bool {
        false
    }

    /// Returns its place in the run that it is of, where that was recorded.
    fn lineage(&self) -> Option<&Lineage> {
        None
    }

    /// Fills slots with boxes of one tensor, in the dtype that [`Checkpoint::metadata`] says.
    ///
    /// A format implements this method, and [`Checkpoint::read`] calls it from several threads. The caller has planned the
    /// read: the tensor exists, its chunks are sound and cover the boxes, and each slot is as long as its box. A format that
    /// fills the bytes of a slot by itself, rather than through this crate's files, must report them with [`Slot::filled`].
    fn read_boxes(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError>;

    /// Reads one box of a tensor into its row-major bytes, in the dtype that [`Checkpoint::metadata`] says.
    fn read_box(&self, fqn: &str, bounds: &TensorBox, dst: &mut [u8]) -> Result<(), FileError> {
        let request = request_of(self.metadata(), fqn, bounds)?;
        self.read(vec![Destination { request, buffers: vec![dst] }], ReadOptions::default())?;
        Ok(())
    }

    /// Reads boxes of many tensors into buffers, by several threads.
    ///
    /// All that can be known beforehand is checked first: on an error of the plan no buffer was touched. After an error
    /// while reading, the content of the buffers is unspecified.
    fn read(&self, destinations: Vec<Destination<'_>>, options: ReadOptions) -> Result<ReadDone, FileError> {
        let files = Files { metadata: self.metadata(), directory: self.directory(), digests: self.digests() };
        read_in_parallel(files, destinations, options, &|fqn, slots| self.read_boxes(fqn, slots))
    }

    /// Checks all that can be known of a [`Checkpoint::read`] before the bytes of tensors are read: the plan, and that
    /// they can be where the metadata says.
    fn check_read(&self, requests: &[LoadRequest], options: ReadPlanOptions) -> Result<LoadPlan, FileError> {
        let wanted: HashSet<&str> = requests.iter().map(|request| request.fqn.as_str()).collect();
        self.check_stored(&|fqn| wanted.contains(fqn))?;
        Ok(plan_load(self.metadata(), requests, options)?)
    }

    /// Reads a non-tensor value. One that holds an object of an unknown type is an error; see
    /// [`FileError::opaque_type`].
    fn read_value(&self, fqn: &str) -> Result<PlainValue, FileError>;

    /// Returns the type of what makes a value or tensor opaque: an object that is never built, such as a tensor of a
    /// subclass. `None` for a plain one.
    fn opaque_type(&self, fqn: &str) -> Result<Option<String>, FileError> {
        if self.metadata().tensor(fqn).is_some() {
            return Ok(None);
        }
        match self.read_value(fqn) {
            Ok(_) => Ok(None),
            Err(error) => error.opaque_type().map(Some).ok_or(error),
        }
    }

    /// Reads a non-tensor value, or an opaque tensor, to be shown: objects of unknown types in it become dicts of their
    /// type (`$type`), arguments and state. The tensors inside an opaque tensor come without their elements.
    fn describe_value(&self, fqn: &str) -> Result<PlainValue, FileError> {
        self.read_value(fqn)
    }

    /// Reads the bytes of a value as they are stored at a place, to be copied: what `torch.save` made of it.
    fn read_item(&self, fqn: &str, stored: &StorageInfo) -> Result<Vec<u8>, FileError> {
        let _ = stored;
        Err(FileError::NotStored { fqn: fqn.to_owned() })
    }

    /// Reads bytes of an item as they are stored, from `at` on, to be copied or compared.
    fn read_stored(&self, fqn: &str, stored: &StorageInfo, at: u64, dst: &mut [u8]) -> Result<(), FileError> {
        let file = self.directory().file(&stored.relative_path)?;
        let read = Window::new(&*file, stored.offset, stored.length).and_then(|item| item.read_exact_at(at, dst));
        read.map_err(|source| FileError::Item {
            fqn: fqn.to_owned(),
            path: self.directory().path().join(&stored.relative_path),
            offset: stored.offset,
            source,
        })
    }

    /// Checks that the bytes of the tensors with these keys can be where the metadata says: before a conversion reserves
    /// space for them.
    fn check_stored(&self, keys: KeyFilter<'_>) -> Result<(), FileError> {
        let _ = keys;
        Ok(())
    }

    /// Compares what several files hold of one tensor of these keys, in formats where nothing else keeps the copies equal.
    /// A copy that differs is an error that names the tensor: a conversion would keep one of them, and nobody knows which
    /// is right.
    fn check_copies(&self, keys: KeyFilter<'_>) -> Result<(), FileError> {
        let _ = keys;
        Ok(())
    }

    /// Returns how a quantized tensor's integers are meant: a tuple of `torch.per_tensor_affine`, scale and zero point,
    /// or of `torch.per_channel_affine`, their tensors and the axis. `None` for other tensors, or where it is not known.
    fn quantizer(&self, fqn: &str) -> Result<Option<PlainValue>, FileError> {
        let _ = fqn;
        Ok(None)
    }

    /// Reads a box of one copy of a chunk, from where that is stored: another copy than the first, see
    /// [`Metadata::replicas`], or a chunk that is known to be sound.
    fn read_replica(&self, replica: &Replica, bounds: &TensorBox, dst: &mut [u8]) -> Result<(), FileError> {
        self.read_boxes(&replica.fqn, &mut [Slot::new(bounds.clone(), dst)])
    }

    /// Reads another copy of a value; see [`Metadata::replicas`].
    fn read_value_replica(&self, replica: &Replica) -> Result<PlainValue, FileError> {
        Err(FileError::NotStored { fqn: replica.fqn.clone() })
    }

    /// Returns the bytes of data files that were read so far.
    fn bytes_read(&self) -> u64 {
        self.directory().bytes_read()
    }
}
