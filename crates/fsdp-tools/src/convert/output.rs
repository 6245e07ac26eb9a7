//! The parts of a conversion that several output formats share: the formats, options, the report,
//! the source of payloads, a rank's rows, and the commit of a single file.

use std::borrow::Cow;
use std::ops::Range;

use fsdp_formats::checkpoint::{Change, Checkpoint, Format, stream};
use fsdp_formats::internals::{Sidecar, default_threads, integrity_beside};
use fsdp_formats::metadata::{BytesEntry, Entry};
use fsdp_formats::storage::{Durable, Staging};
use fsdp_formats::writer::PayloadSource;
use fsdp_formats::{FileError, FormatError, Location};
use fsdp_layout::shard::chunk_range;
use fsdp_layout::{PlainTensor, PlainValue, TensorBox};
use indexmap::IndexMap;

use super::config::ConfigEdits;
use super::copied::CopiedFiles;
use crate::tensor_parallel::TensorParallelPlan;

/// The format to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutputFormat {
    /// A DCP directory for this many ranks: tensors cut along dim 0 as torch cuts them.
    Dcp {
        /// The number of ranks: as many data files, at most.
        ranks: usize,
    },
    /// One safetensors file, and `NAME.values.json` beside it if there are values.
    SafetensorsFile,
    /// Hugging Face's layout: files of at most this many bytes of tensors, and their index.
    SafetensorsDirectory {
        /// Bytes of tensors in one file; a larger tensor gets a file of its own.
        max_file_bytes: u64,
    },
    /// The layout of torch's `HuggingFaceStorageWriter`: for each rank a file with its shards.
    SafetensorsShards {
        /// The number of ranks.
        ranks: usize,
    },
    /// One file that `torch.load(weights_only=True)` opens: nested dicts and lists, as the keys'
    /// paths say.
    Torch,
    /// A directory of `torch_checkpointing`: a file of `torch.save` for each item and rank, with
    /// the rank's rows of all tensors, and `metadata.pkl`.
    TorchCheckpointing {
        /// The number of ranks.
        ranks: usize,
    },
}

impl OutputFormat {
    /// Returns `true` for files of `torch.save`, which hold what flat keys cannot express.
    pub(super) fn keeps_containers(self) -> bool {
        matches!(
            self,
            OutputFormat::Torch | OutputFormat::TorchCheckpointing { .. }
        )
    }

    /// Returns `true` for formats whose tensors torch itself rebuilds, so that they have only
    /// dtypes of torch's.
    pub(super) fn is_of_torch(self) -> bool {
        matches!(self, OutputFormat::Dcp { .. }) || self.keeps_containers()
    }
}

/// The options of a conversion.
#[derive(Clone, Copy, Default)]
pub struct ConvertOptions<'o> {
    /// `true` to replace a checkpoint at the destination.
    pub overwrite: bool,
    /// The number of threads that read, hash and write. `None` takes one for each core, up to four.
    pub threads: Option<usize>,
    /// A function that is called with the number of bytes of every piece that was read.
    pub progress: Option<&'o (dyn Fn(u64) + Sync)>,
    /// The [`Durable`] to write with; [`Durable::new`] if `None`. Tests use it to watch the steps
    /// of a commit.
    pub durable: Option<&'o Durable>,
    /// `true` to leave out values that hold objects of unknown types, where the format cannot hold
    /// them.
    pub drop_opaque: bool,
    /// A directory whose configuration and tokenizer are copied beside weights in Hugging Face's
    /// layout.
    pub with: Option<&'o Location>,
    /// The plan for tensor-parallel ranks, for [`OutputFormat::SafetensorsDirectory`]. Each rank
    /// then gets files of its own with its parts of the tensors, and there is no index.
    pub tensor_parallel: Option<&'o TensorParallelPlan>,
    /// The settings that a copied `config.json` gets.
    pub config: ConfigEdits,
}

impl ConvertOptions<'_> {
    /// Returns the number of threads to use.
    pub(super) fn thread_count(&self) -> usize {
        self.threads.unwrap_or_else(default_threads)
    }
}

/// The report of a conversion.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Converted {
    /// The number of tensors that were written.
    pub tensors: usize,
    /// The bytes of their elements.
    pub bytes: u64,
    /// The keys of values that the format itself cannot hold, and that a file beside it holds.
    pub aside: Vec<String>,
    /// The name of that file in the destination's directory.
    pub aside_file: Option<String>,
    /// The keys of quantized tensors, written as the integers that they are made of. Their scales
    /// and zero points are values `KEY.quantizer`.
    pub quantized: Vec<String>,
    /// The keys of tensors whose dtypes safetensors has no name for, with the dtype of each. Other
    /// programs read their bytes.
    pub stored_as_bytes: Vec<String>,
    /// The containers that the format cannot express, each with its place: dict keys that are not
    /// text have become text, tuples have become lists, and empty dicts are left out.
    pub containers: Vec<String>,
    /// The files beside the source's own, such as a configuration, that were copied.
    pub copied: Vec<String>,
    /// The files and directories beside the source's own that were not.
    pub left_behind: Vec<String>,
    /// The keys of the notes in the source's headers that the format cannot hold.
    pub notes_left_out: Vec<String>,
    /// The opaque values that were left out, and the type of each.
    pub dropped: Vec<(String, String)>,
    /// All else that differs from the source, as the views of it and the writer tell.
    pub changes: Vec<Change>,
}

/// A conversion that is about to be written.
pub(super) struct Conversion<'c> {
    /// The checkpoint, in the form in which it is written.
    pub(super) source: &'c dyn Checkpoint,
    /// The prepared destination.
    pub(super) staging: Staging,
    /// The files of other programs that are copied beside it.
    pub(super) copied_files: &'c CopiedFiles<'c>,
    pub(super) options: ConvertOptions<'c>,
}

/// Returns the error that the tensor or value of a key cannot be written.
pub(super) fn encode_error(fqn: &str, source: FormatError) -> FileError {
    FileError::Encode {
        fqn: fqn.to_owned(),
        source,
    }
}

/// Returns the error that the tensor or value of a key is of a kind that cannot be written. `what`
/// names the kind.
pub(crate) fn unsupported(fqn: &str, what: impl Into<String>) -> FileError {
    encode_error(fqn, FormatError::unsupported(what))
}

/// The tensors that were inside values, by the keys that they get.
pub(super) type InnerTensors<'a> = IndexMap<String, &'a PlainTensor>;

/// A checkpoint as the source of payloads for a writer.
pub(super) struct CheckpointPayloads<'a> {
    pub(super) source: &'a dyn Checkpoint,
    pub(super) options: ConvertOptions<'a>,
    pub(super) inner_tensors: &'a InnerTensors<'a>,
}

impl PayloadSource for CheckpointPayloads<'_> {
    fn payload(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        // A tensor that was inside a value is in memory already.
        if let Some(tensor) = self.inner_tensors.get(fqn) {
            return sink(&tensor.data[range.start as usize..range.end as usize]);
        }
        stream(self.source, fqn, bounds, range, &mut |bytes| {
            if let Some(progress) = self.options.progress {
                progress(bytes.len() as u64);
            }
            sink(bytes)
        })
    }

    fn stored_item(&self, fqn: &str) -> Result<Option<Cow<'_, [u8]>>, FileError> {
        Ok(read_stored_item(self.source, fqn)?.map(Cow::Owned))
    }

    fn value(&self, fqn: &str) -> Result<Cow<'_, PlainValue>, FileError> {
        // The stored bytes of an opaque value are copied, so a description of it is enough here.
        self.source.describe_value(fqn).map(Cow::Owned)
    }
}

/// Reads the stored bytes of a value that is an item of a DCP checkpoint; returns `None` for
/// others. Copying them keeps what [`PlainValue`] cannot express: classes such as `torch.Size`, and
/// opaque objects.
pub(super) fn read_stored_item(
    source: &dyn Checkpoint,
    fqn: &str,
) -> Result<Option<Vec<u8>>, FileError> {
    // Values of other formats are no items, and are written anew.
    let is_opaque = match source.read_value(fqn) {
        Ok(_) if source.format() != Format::Dcp => return Ok(None),
        Ok(_) => false,
        Err(error) if error.opaque_type().is_some() => true,
        Err(error) => return Err(error),
    };
    let Some(Entry::Bytes(BytesEntry {
        stored: Some(stored),
    })) = source.metadata().entries.get(fqn)
    else {
        return Ok(None);
    };
    match source.read_item(fqn, stored) {
        // The value is made by a layer, or comes from a sidecar file.
        Err(FileError::NotStored { .. }) if !is_opaque => Ok(None),
        item => item.map(Some),
    }
}

/// Returns a rank's rows of a tensor, by torch's chunk rule; all of a scalar.
pub(super) fn rows_of_rank(shape: &[usize], rank: usize, rank_count: usize) -> TensorBox {
    let mut bounds = TensorBox::whole(shape);
    if let Some(&row_count) = shape.first() {
        let own_rows = chunk_range(row_count, rank_count, rank);
        bounds.offsets[0] = own_rows.start;
        bounds.sizes[0] = own_rows.len();
    }
    bounds
}

/// Commits a checkpoint that is a single file. Removes the old file's hashes first, so that they
/// never describe the new file.
pub(super) fn commit_file(staging: Staging, sidecar: Option<Sidecar<'_>>) -> Result<(), FileError> {
    // A file of that name may belong to somebody else: then nothing is committed.
    let integrity = integrity_beside(staging.target_name());
    staging.check_sidecar(&integrity)?;
    staging.remove_sidecar(&integrity)?;
    match sidecar {
        Some(sidecar) => staging.commit_single_with(sidecar),
        None => staging.commit_single(),
    }
}
