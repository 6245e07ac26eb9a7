//! Checkpoint files: DCP directories, safetensors and torch archives; plans, storage, durable
//! commit.
//!
//! This crate uses no tensor library: it moves boxes of bytes between files and the caller's
//! memory.
//!
//! | module | what it holds |
//! |---|---|
//! | [`checkpoint`] | a checkpoint of any format: what it holds, and any part of it |
//! | [`reader`] | reading a DCP directory: any part, by ranges, checked, in parallel |
//! | [`writer`] | how N ranks save one checkpoint together, straight from their memory |
//! | [`plan`] | which rank writes and reads what: pure functions that find all errors before any byte moves |
//! | [`storage`] | directories and object stores behind one trait; staging, fsync, one rename; the guarantees after a crash |
//! | [`convert`] | conversion of any format, with keys filtered, renamed, cast and resharded, in bounded memory |
//! | [`map`] | from the keys and shapes of one framework to those of another |
//! | [`tensor_parallel`] | the parts of a model that tensor-parallel ranks hold |
//! | [`merge`] | the average of checkpoints, and a base with a LoRA adapter |
//! | [`verify`](mod@verify), [`diff`](mod@diff), [`elements`] | checks of a checkpoint, the differences of two, statistics of tensors |
//! | [`digest`](mod@digest) | one number for the same state in any format and layout |
//! | `sign` (with the feature of this name) | signatures, in the format of OpenSSF Model Signing |
//! | [`metadata`] | the content of `.metadata`, and torch's pickle of it |
//! | [`limits`] | the limits on what a hostile file can make this crate allocate or do |
//!
//! Inside, each format has a folder (`dcp`, `safetensors`, `torch`, `rank_files`, `deepspeed`,
//! `numpy`, `gguf`, and `folder` for those of trainers, which hold several). They share `formats`
//! (reading) and `payload` (writing). `open` knows all formats, and `convert` writes each of them.
//!
//! A checkpoint on disk:
//!
//! ```text
//! step-20/
//!   .metadata       torch's pickle: tensors, their chunks, where each chunk lies
//!   .integrity      hashes of all files; torch ignores it
//!   __0_0.distcp    rank 0: items one after the other, each a torch archive
//!   __1_0.distcp    rank 1
//! .step-21.tmp-53f1a09be6c02d77/    a save in progress
//! ```

mod budget;
pub mod convert;
mod dcp;
mod deepspeed;
pub mod diff;
pub mod digest;
pub mod elements;
mod error;
mod folder;
mod formats;
mod gguf;
mod kind;
pub mod limits;
pub mod lineage;
mod links;
pub mod map;
pub mod merge;
pub mod metadata;
mod nested;
mod numpy;
mod open;
mod output;
mod payload;
mod pickle;
pub mod plan;
mod rank_files;
mod safetensors;
mod shown;
#[cfg(feature = "sign")]
pub mod sign;
mod steps;
pub mod storage;
mod strided;
pub mod tensor_parallel;
mod threads;
mod torch;
pub mod verify;

pub use dcp::{parts, writer};
pub use error::{FileError, FormatError, LocationError};
pub use pickle::{PickleError, PickleErrorKind};
pub use storage::location::Location;
#[cfg(feature = "object-store")]
pub use storage::object::{Store, object_store};

/// An open checkpoint of any format: its contents, and reads of any part of them.
///
/// All formats are described by [`Metadata`](metadata::Metadata), so code that handles one of them
/// handles all.
pub mod checkpoint {
    pub use crate::formats::checkpoint::{Checkpoint, Format, KeyFilter, PartOf};
    pub use crate::formats::extra::ExtraFiles;
    pub use crate::formats::stream::stream;
    pub use crate::formats::structure::Structure;
    pub use crate::links::LinksInFolder;
    pub use crate::open::{check_replaceable, open};
    pub use crate::safetensors::sidecar::{VALUES_FILE, values_beside};
    pub use crate::steps::{StepOfRun, steps_of_run};
}

/// Reading a DCP directory, and the options of reading in any format.
pub mod reader {
    pub use crate::dcp::reader::CheckpointReader;
    pub use crate::formats::read::{Destination, OpenOptions, ReadDone, ReadOptions};
    pub use crate::payload::slot::Slot;
}

/// Internal parts that only this project's tests and fuzz targets use.
#[doc(hidden)]
pub mod internals {
    pub use crate::dcp::item::{StoredTensor, TensorItem};
    pub use crate::pickle::parse;
    pub use crate::safetensors::header::Header;
    pub use crate::storage::cleanup::recover;
    pub use crate::storage::integrity::{INTEGRITY_FILE, Integrity};
    pub use crate::torch::value::{decode_value, encode_value, value_of};
    pub use crate::torch::zip::{ArchiveLayout, Directory};
}
