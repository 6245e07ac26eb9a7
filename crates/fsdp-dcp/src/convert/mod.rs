//! From any checkpoint to any format, streaming: memory is bounded whatever the size.
//!
//! [`convert`] writes what a [`Checkpoint`] holds in another format, or in the same one cut for another number of ranks
//! ([`Target::Dcp`]: that is resharding). A [`View`] in front selects, renames and casts. The source is only read; the
//! destination is committed as a whole, or is absent. Hashes of the source are checked as it is read, and new ones are
//! made for what is written.
//!
//! Each thread holds one piece of at most 16 MiB of a tensor; nothing holds a whole one (a value that is no tensor, and
//! an item with a stream transform, excepted).

mod dcp;
mod integers;
mod safetensors;
mod stream;
mod torch;
mod view;

use crate::checkpoint::Checkpoint;
use crate::error::FileError;
use crate::reader::default_threads;
use crate::storage::integrity::integrity_beside;
use crate::storage::location::Location;
use crate::storage::sidecar::Sidecar;
use crate::storage::{Durable, Staging};

pub use view::{Rename, View};

/// What to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Target {
    /// A DCP directory for this many ranks: tensors cut along dim 0 as torch cuts them.
    Dcp {
        /// Ranks: as many data files, at most.
        ranks: usize,
    },
    /// One safetensors file, and `NAME.values.json` beside it if there are values.
    SafetensorsFile,
    /// Hugging Face's layout: files of at most this many bytes of tensors, and their index.
    SafetensorsDirectory {
        /// Bytes of tensors in one file; a larger tensor gets a file of its own.
        max_file_bytes: u64,
    },
    /// What torch's `HuggingFaceStorageWriter` writes: for each rank a file with its shards.
    SafetensorsShards {
        /// Ranks.
        ranks: usize,
    },
    /// One file that `torch.load(weights_only=True)` opens: nested dicts and lists, as the keys' paths say.
    Torch,
}

/// How to convert.
#[derive(Clone, Copy)]
pub struct ConvertOptions<'o> {
    /// Replace what is at the destination.
    pub overwrite: bool,
    /// Threads that read, hash and write.
    pub threads: usize,
    /// Told of every piece that was read, in bytes.
    pub progress: Option<&'o (dyn Fn(u64) + Sync)>,
    /// The way to durable storage, where it is not [`Durable::new`]: a test watches its steps.
    pub durable: Option<&'o Durable>,
}

impl Default for ConvertOptions<'_> {
    fn default() -> Self {
        ConvertOptions { overwrite: false, threads: default_threads(), progress: None, durable: None }
    }
}

impl std::fmt::Debug for ConvertOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConvertOptions")
            .field("overwrite", &self.overwrite)
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

/// What was written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Converted {
    /// Number of tensors.
    pub tensors: usize,
    /// Bytes of tensor payload.
    pub bytes: u64,
    /// Keys of values that the format itself cannot hold, and the file beside it that holds them.
    pub aside: Vec<String>,
    /// That file, relative to the destination's directory.
    pub aside_file: Option<String>,
    /// Keys of quantized tensors, written as the integers that they are made of. Their scales and zero points are values
    /// `KEY.quantizer`.
    pub quantized: Vec<String>,
}

/// Writes all of a checkpoint to `destination` in another format or layout.
///
/// ```no_run
/// use fsdp_dcp::checkpoint::open;
/// use fsdp_dcp::convert::{ConvertOptions, Target, convert};
/// let source = open("checkpoints/step-20", Default::default())?;
/// convert(&*source, "model.safetensors", Target::SafetensorsFile, ConvertOptions::default())?;
/// # Ok::<(), fsdp_dcp::FileError>(())
/// ```
pub fn convert(
    source: &dyn Checkpoint,
    destination: impl Into<Location>,
    target: Target,
    options: ConvertOptions<'_>,
) -> Result<Converted, FileError> {
    if let Some(integers) = integers::Integers::of(source)? {
        let quantized = integers.keys().map(str::to_owned).collect();
        return Ok(Converted { quantized, ..convert(&integers, destination, target, options)? });
    }
    source.check_stored()?;
    let durable = options.durable.cloned().unwrap_or_default();
    let staging = durable.prepare(destination, options.overwrite)?;
    match target {
        Target::SafetensorsFile | Target::Torch => staging.check_replaces_file()?,
        Target::Dcp { .. } | Target::SafetensorsDirectory { .. } | Target::SafetensorsShards { .. } => {
            staging.check_replaces_directory()?;
        }
    }
    match target {
        Target::Dcp { ranks } => dcp::write(source, staging, ranks.max(1), options),
        Target::SafetensorsFile => safetensors::write_file(source, staging, options),
        Target::SafetensorsDirectory { max_file_bytes } => {
            safetensors::write_directory(source, staging, max_file_bytes, options)
        }
        Target::SafetensorsShards { ranks } => safetensors::write_shards(source, staging, ranks.max(1), options),
        Target::Torch => torch::write(source, staging, options),
    }
}

/// Puts a checkpoint of one file in its place. Removes the old file's hashes first, so that they never describe the new
/// one.
fn commit_file(staging: Staging, sidecar: Option<Sidecar<'_>>) -> Result<(), FileError> {
    let integrity = integrity_beside(staging.target_name());
    staging.check_sidecar(&integrity)?;
    staging.remove_sidecar(&integrity)?;
    match sidecar {
        Some(sidecar) => staging.commit_single_with(sidecar),
        None => staging.commit_single(),
    }
}

/// Tensors and their bytes, for [`Converted`].
fn summary(source: &dyn Checkpoint) -> Converted {
    let mut summary = Converted::default();
    for (_, tensor) in source.metadata().tensors() {
        summary.tensors += 1;
        let numel = tensor.shape.iter().fold(1u64, |numel, &size| numel.saturating_mul(size as u64));
        summary.bytes = summary.bytes.saturating_add(numel.saturating_mul(tensor.properties.dtype.size_in_bytes()));
    }
    summary
}
