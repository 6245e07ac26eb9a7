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
//! | [`complete`] | whether all that a checkpoint names is there |
//! | [`digest`](mod@digest) | one number for the same state in any format and layout |
//! | [`metadata`] | the content of `.metadata`, and torch's pickle of it |
//! | [`limits`] | the limits on what a hostile file can make this crate allocate or do |
//!
//! Inside, each format has a folder (`dcp`, `safetensors`, `torch`, `rank_files`, `deepspeed`,
//! `numpy`, `gguf`, and `folder` for those of trainers, which hold several). They share `formats`
//! (reading) and `payload` (writing). `open` knows all formats. The crate `fsdp-tools` converts
//! between them.
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
pub mod complete;
mod dcp;
mod deepspeed;
pub mod digest;
mod error;
mod folder;
mod formats;
mod gguf;
mod kind;
pub mod limits;
pub mod lineage;
mod links;
pub mod metadata;
mod numpy;
mod open;
mod payload;
mod pickle;
pub mod plan;
mod rank_files;
mod safetensors;
mod shown;
mod steps;
pub mod storage;
mod strided;
mod threads;
mod torch;
mod zip;

pub use budget::OverBudget;
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
    pub use crate::formats::change::Change;
    pub use crate::formats::checkpoint::{Checkpoint, Format, KeyFilter, PartOf};
    pub use crate::formats::extra::ExtraFiles;
    pub use crate::formats::stream::stream;
    pub use crate::formats::structure::Structure;
    pub use crate::links::LinksInFolder;
    pub use crate::open::{
        check_has_metadata, check_replaceable, has_lost_metadata, open, open_selected,
    };
    pub use crate::safetensors::sidecar::{VALUES_FILE, values_beside};
    pub use crate::steps::{StepOfRun, list_steps, step_in_name, step_name, steps_with_leftovers};
}

/// Reading a DCP directory, and the options of reading in any format.
pub mod reader {
    pub use crate::dcp::reader::CheckpointReader;
    pub use crate::formats::read::{Destination, OpenOptions, ReadDone, ReadOptions};
    pub use crate::payload::slot::Slot;
}

/// The parts that `fsdp-tools`, the tests and the fuzz targets of this project use. They are no
/// public interface, and change without notice.
#[doc(hidden)]
pub mod internals {
    // Items and archives of torch: the converters write them, and the tests craft damaged ones.
    pub use crate::dcp::item::{StoredTensor, lay_out_tensor};
    pub use crate::pickle::{parse, write as pickle_write};
    pub use crate::torch::tensor_ref::{check_writable, write_tensor};
    pub use crate::torch::value::{decode_value, encode_value, value_of, write_value};
    pub use crate::zip::{ArchiveLayout, Directory, ROOT, check_records, is_archive};

    // The texts in the headers of safetensors files, and the names of the files that belong to
    // them: reading and writing must agree on each.
    pub use crate::safetensors::header::{Header, charge_text, is_stored_as_bytes};
    pub use crate::safetensors::paths::{PATHS, encode_paths};
    pub use crate::safetensors::sidecar::{
        DIGESTS, DIGESTS_LAYOUT, NEW_VALUES, SHARDING, SHARDS, VALUES_HASH, digests_text,
        layout_text, other_with_values_of, shard_name, values_hash, values_names,
    };
    pub use crate::safetensors::slices::{RANK_NOTE, RankNote, SliceNote, rank_file_name};
    pub use crate::safetensors::values::encode_values;
    pub use crate::safetensors::values_read::ValuesFile;

    // Views of checkpoints: a conversion, a map and a merge each show their sources through one.
    pub use crate::formats::build::KeyChange;
    pub use crate::formats::key_move::KeyMove;
    pub use crate::formats::layer::{Layer, LayerSource, LayerView, Origin};
    pub use crate::formats::lookup::{quantizer_key, tensor_of};
    pub use crate::formats::structure::Place;

    // Reading and comparing whole checkpoints, in pieces of bounded size.
    pub use crate::dcp::reader::check_transformed;
    pub use crate::dcp::sidecars::SIDECAR_FILES;
    pub use crate::deepspeed::universal::parameter_files;
    pub use crate::digest::{check_copy, digest_of_quantizer};
    pub use crate::formats::opaque::{digest_of_opaque, opaque_entries, stream_stored};
    pub use crate::formats::replicas::compare;
    pub use crate::formats::stream::{check_expansion, stream_boxes};
    pub use crate::plan::{check_key_length, validate_chunks};
    pub use crate::shown::{decimal_text, shown};
    pub use crate::threads::{default_threads, on_each};

    // Writing the files of other formats, and of hashes, with the same guarantees as those of a
    // DCP directory.
    pub use crate::budget::check_depth;
    pub use crate::dcp::writer::finish_copy;
    pub use crate::error::wrong_box;
    pub use crate::limits::{MAX_INDEX_BYTES, is_sane_shape};
    pub use crate::payload::write::{PlannedPayload, write_payloads};
    pub use crate::storage::integrity::{
        FileIntegrity, INTEGRITY_FILE, Integrity, block_length, integrity_beside,
    };
    pub use crate::storage::read_at::{Window, read_file, read_whole};
    pub use crate::storage::sidecar::Sidecar;
}
