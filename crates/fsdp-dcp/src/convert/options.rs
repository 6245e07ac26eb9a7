//! The target and the options of a conversion, and its report.

use crate::storage::Durable;
use crate::threads::default_threads;

/// The format to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Target {
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
    /// One file that `torch.load(weights_only=True)` opens: nested dicts and lists, as the keys' paths say.
    Torch,
}

/// How to convert.
#[derive(Clone, Copy)]
pub struct ConvertOptions<'o> {
    /// `true` to replace what is at the destination.
    pub overwrite: bool,
    /// Threads that read, hash and write.
    pub threads: usize,
    /// A function that is told of every piece that was read, in bytes.
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

/// A report of what was written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Converted {
    /// The number of tensors.
    pub tensors: usize,
    /// The bytes of their elements.
    pub bytes: u64,
    /// The keys of values that the format itself cannot hold, and that a file beside it holds.
    pub aside: Vec<String>,
    /// The name of that file in the destination's directory.
    pub aside_file: Option<String>,
    /// The keys of quantized tensors, written as the integers that they are made of. Their scales and zero points are
    /// values `KEY.quantizer`.
    pub quantized: Vec<String>,
}
