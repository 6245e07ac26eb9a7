//! The formats that a conversion can write.

use fsdp_formats::checkpoint::Format;

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
}

impl OutputFormat {
    /// Returns `true` if what is written is for the framework that wrote the source: files beside
    /// the source's own, such as a trainer's loop state or a model's configuration, go with it.
    #[must_use]
    pub const fn keeps_framework(&self, source: Format) -> bool {
        matches!(
            (source, self),
            (Format::Dcp, OutputFormat::Dcp { .. })
                | (
                    Format::SafetensorsDirectory,
                    OutputFormat::SafetensorsDirectory { .. }
                        | OutputFormat::SafetensorsShards { .. }
                )
        )
    }
}
