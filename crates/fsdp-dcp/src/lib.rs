//! Checkpoint files: metadata, plans, the DCP and safetensors codecs, storage, durable commit.
//!
//! This crate knows no tensor library: it moves boxes of bytes between files and whoever holds them.
//!
//! | module | what it answers |
//! |---|---|
//! | [`writer`] | how N ranks save one checkpoint together, straight from their memory |
//! | [`reader`] | how any part of a checkpoint is read, by ranges, checked, in parallel |
//! | [`plan`] | who writes what, who reads what: pure functions, all errors before any byte moves |
//! | [`storage`] | directories and object stores behind one trait; staging, fsync, one rename; the crash contract |
//! | [`checkpoint`] | a checkpoint of any format: what it holds, and any part of it |
//! | [`convert`] | from any format to any, filtered, renamed, cast, resharded, in bounded memory |
//! | [`verify`](mod@verify), [`diff`](mod@diff), [`elements`] | whether it is whole, how two differ, what the numbers are |
//! | [`metadata`] | what `.metadata` says, and torch's pickle of it |
//! | [`item`] | one tensor or value inside a `.distcp` file |
//! | [`torch_zip`], [`pickle`], [`safetensors`] | the containers: torch's zip, a pickle that cannot run, safetensors |
//! | [`strided`] | bytes in any memory order |
//! | [`limits`] | how much a hostile file can make us do |
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

pub mod checkpoint;
pub mod convert;
pub mod diff;
pub mod elements;
pub mod error;
pub mod item;
mod kind;
pub mod limits;
pub mod metadata;
pub mod pickle;
pub mod plan;
pub mod reader;
pub mod safetensors;
pub mod storage;
pub mod strided;
mod threads;
pub mod torch_zip;
mod values;
pub mod verify;
pub mod writer;

pub use error::{FileError, FormatError};
pub use metadata::Metadata;
pub use storage::integrity;
pub use storage::location::Location;
#[cfg(feature = "object-store")]
pub use storage::object::{Store, object_store};
