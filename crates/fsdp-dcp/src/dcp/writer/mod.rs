//! Writing a DCP checkpoint: each rank its own file, straight from the tensors' memory, then one commit.
//!
//! The steps of a save by N ranks, each with the ranks that take it:
//!
//! 1. all: make a [`LocalPlan`] of what the rank holds; gather them on rank 0
//! 2. rank 0: [`plan_save`](crate::plan::plan_save), [`Durable::prepare`]; scatter the [`Selection`]s, broadcast the
//!    staging directory's name
//! 3. all: [`Durable::join`] (rank 0 has it already), [`write_rank`]; gather the [`RankWritten`]s on rank 0
//! 4. rank 0: [`finish`], which writes `.metadata` and `.integrity` and commits
//!
//! An error on any rank before step 4: rank 0 drops its [`Staging`], and nothing is left.
//!
//! ```
//! use std::borrow::Cow;
//! use std::ops::Range;
//! use fsdp_dcp::FileError;
//! use fsdp_dcp::storage::Durable;
//! use fsdp_dcp::plan::{LocalPlan, PlanOptions, plan_save};
//! use fsdp_dcp::reader::CheckpointReader;
//! use fsdp_dcp::writer::{PayloadSource, WriteOptions, finish, write_rank};
//! use fsdp_layout::{DType, PlainValue, TensorBox};
//!
//! /// What this rank holds: one tensor, and the step.
//! struct State(Vec<u8>);
//!
//! impl PayloadSource for State {
//!     fn payload(
//!         &self,
//!         _fqn: &str,
//!         _bounds: &TensorBox,
//!         range: Range<u64>,
//!         sink: &mut dyn FnMut(&[u8]) -> Result<(), FileError>,
//!     ) -> Result<(), FileError> {
//!         sink(&self.0[range.start as usize..range.end as usize])
//!     }
//!
//!     fn value(&self, _fqn: &str) -> Result<Cow<'_, PlainValue>, FileError> {
//!         Ok(Cow::Owned(PlainValue::Int(20)))
//!     }
//! }
//!
//! let parent = tempfile::tempdir()?;
//! let target = parent.path().join("step-20");
//! let state = State(vec![1, 2, 3, 4, 5, 6]);
//! let mut plan = LocalPlan::default();
//! plan.add_value("step", None, 1000);
//! plan.add_tensor("w", None, DType::U8, vec![2, 3], vec![TensorBox::whole(&[2, 3])]);
//!
//! let plans = [plan];
//! let global = plan_save(&plans, PlanOptions::default())?;
//! let staging = Durable::new().prepare(&target, false)?;
//! let written = write_rank(&staging, 0, &plans[0], &global.selections[0], &state, &WriteOptions::default())?;
//! finish(staging, global.metadata, &[written])?;
//!
//! let checkpoint = CheckpointReader::open(&target)?;
//! assert_eq!(checkpoint.read_tensor("w")?, state.0);
//! assert_eq!(checkpoint.read_value("step")?, PlainValue::Int(20));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Selection`]: crate::plan::Selection
//! [`Durable::prepare`]: crate::storage::Durable::prepare
//! [`Durable::join`]: crate::storage::Durable::join

mod foresee;
mod layout;
mod payload;

pub use crate::payload::source::PayloadSource;
pub use crate::torch::value::value_item_length;
pub use foresee::foresee;

use serde::{Deserialize, Serialize};

use crate::error::FileError;
use crate::metadata::{Entry, METADATA_FILE, Metadata, StorageInfo, encode};
use crate::plan::{LocalPlan, Selection};
use crate::storage::Staging;
use crate::storage::integrity::{FileIntegrity, Integrity};
use crate::threads::default_threads;

/// The options of a rank that writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteOptions {
    /// Threads that hash and write. Each needs about 1 MiB.
    pub threads: usize,
}

impl Default for WriteOptions {
    fn default() -> Self {
        WriteOptions { threads: default_threads() }
    }
}

/// A report of what a rank has written, to be gathered for [`finish`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RankWritten {
    /// Its file, relative to the checkpoint; none if it had nothing to write.
    pub file: Option<String>,
    /// The places of its items.
    pub items: Vec<WrittenItem>,
    /// The hashes of its file.
    pub integrity: FileIntegrity,
    /// Payload bytes.
    pub payload_bytes: u64,
}

impl RankWritten {
    /// Returns about how many bytes it takes to send this.
    #[must_use]
    pub fn wire_bytes(&self) -> u64 {
        64 + self.items.len() as u64 * 24 + self.integrity.wire_bytes()
    }
}

/// One item of a [`RankWritten`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenItem {
    /// Position of its entry in the metadata of the global plan.
    pub entry: u32,
    /// Position of the chunk in the entry; 0 for a value.
    pub chunk: u32,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Writes the selected items of one rank to its file, hashes them on the way, and fsyncs it. No communication.
pub fn write_rank(
    staging: &Staging,
    rank: usize,
    plan: &LocalPlan,
    selection: &Selection,
    source: &dyn PayloadSource,
    options: &WriteOptions,
) -> Result<RankWritten, FileError> {
    if selection.kept.is_empty() {
        return Ok(RankWritten::default());
    }
    let name = staging.data_file(rank);
    let layout = layout::FileLayout::new(plan, selection, source)?;
    let file = staging.create(&name, layout.length)?;
    let integrity = payload::write(&file, &layout, source, options.threads)?;
    file.finish()?;
    let items = layout.items.iter().map(|placed| WrittenItem {
        entry: placed.selected.entry,
        chunk: placed.selected.chunk,
        offset: placed.offset,
        length: placed.length,
    });
    Ok(RankWritten {
        file: Some(name),
        items: items.collect(),
        integrity,
        payload_bytes: layout.items.iter().map(|placed| placed.payload_length()).sum(),
    })
}

/// Notes in the metadata where all ranks' items are.
fn place_items(metadata: &mut Metadata, written: &[RankWritten]) -> Result<(), FileError> {
    for rank in written {
        let Some(file) = &rank.file else { continue };
        for item in &rank.items {
            let stored = StorageInfo {
                relative_path: file.clone(),
                offset: item.offset,
                length: item.length,
                transforms: Vec::new(),
            };
            match metadata.entries.get_index_mut(item.entry as usize) {
                Some((_, Entry::Bytes(bytes))) => bytes.stored = Some(stored),
                Some((_, Entry::Tensor(tensor))) => {
                    if let Some(chunk) = tensor.chunks.get_mut(item.chunk as usize) {
                        chunk.stored = Some(stored);
                    }
                }
                None => {}
            }
        }
    }
    // A chunk that no rank wrote would be missing from the checkpoint without a word.
    let unplaced = metadata.entries.iter().find(|(_, entry)| match entry {
        Entry::Bytes(bytes) => bytes.stored.is_none(),
        Entry::Tensor(tensor) => tensor.chunks.iter().any(|chunk| chunk.stored.is_none()),
    });
    match unplaced {
        Some((fqn, _)) => Err(FileError::NotStored { fqn: fqn.clone() }),
        None => Ok(()),
    }
}

/// Ends a save, on the rank that prepared it: writes `.integrity` and `.metadata`, and commits.
///
/// `metadata` is that of the global plan; `written` is by rank. If any item was written by no rank, nothing is committed.
pub fn finish(staging: Staging, mut metadata: Metadata, written: &[RankWritten]) -> Result<(), FileError> {
    place_items(&mut metadata, written)?;
    let metadata = encode(&metadata);
    let files = written.iter().filter_map(|rank| Some((rank.file.clone()?, rank.integrity.clone())));
    let mut integrity = Integrity { files: files.collect() };
    staging.check_files(integrity.files.keys())?;
    let mut own = FileIntegrity::default();
    own.push_bytes(&metadata);
    integrity.files.insert(METADATA_FILE.to_owned(), own);
    let name = staging.integrity_file();
    let integrity =
        integrity.encode().map_err(|source| FileError::File { path: staging.directory().join(&name), source })?;
    // The hashes come first: once the `.metadata` is there, the checkpoint is, and must be whole.
    staging.write(&name, &integrity)?;
    staging.commit(METADATA_FILE, &metadata)
}
