//! Writing a DCP checkpoint: each rank writes its own file directly from the tensors' memory, and
//! one rank commits.
//!
//! The steps of a save by N ranks, each with the ranks that take it:
//!
//! 1. all: make a [`LocalPlan`](crate::plan::LocalPlan) of what the rank holds; gather them on
//!    rank 0
//! 2. rank 0: [`plan_save`](crate::plan::plan_save), [`Durable::prepare`]; scatter the
//!    [`Selection`]s, broadcast the staging directory's name
//! 3. all: [`Durable::join`] (rank 0 has it already), [`write_rank`]; gather the [`RankWritten`]s
//!    on rank 0
//! 4. rank 0: [`finish`], which writes `.metadata` and `.integrity` and commits
//!
//! If any rank fails before step 4, rank 0 drops its [`Staging`], which removes everything.
//!
//! ```
//! use std::borrow::Cow;
//! use std::ops::Range;
//! use fsdp_formats::FileError;
//! use fsdp_formats::checkpoint::Checkpoint as _;
//! use fsdp_formats::storage::Durable;
//! use fsdp_formats::plan::{plan_save, LocalPlan, Deduplicate};
//! use fsdp_formats::reader::CheckpointReader;
//! use fsdp_formats::writer::{finish, write_rank, PayloadSource, RankItems, WriteOptions};
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
//! let global = plan_save(&plans, Deduplicate::default())?;
//! let staging = Durable::new().prepare(&target, false)?;
//! let items = RankItems {
//!     rank: 0,
//!     plan: &plans[0],
//!     selection: &global.selections[0],
//!     source: &state,
//! };
//! let written = write_rank(&staging, &items, &WriteOptions::default(), None)?;
//! finish(staging, global.metadata, &[written], None)?;
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

mod layout;
mod payload;
mod predict;
mod selected;
mod unchanged;
mod written;

pub use crate::payload::source::PayloadSource;
pub use crate::torch::value::{decode_value, describe_item, encode_value, value_item_length};
pub use predict::predict_file_lengths;
pub use selected::RankItems;
pub use unchanged::{Before, BoxSum, box_sums, unchanged_entries};
pub use written::{RankWritten, WrittenFile, WrittenItem};

use std::collections::{HashMap, HashSet};

use fsdp_digest::{StateDigest, Sum};
use fsdp_layout::DType;

use crate::digest::check_copy;
use crate::error::{FileError, FormatError};
use crate::metadata::{Entry, METADATA_FILE, Metadata, StorageInfo, decode, encode};
use crate::plan::Selection;
use crate::storage::Staging;
use crate::storage::integrity::{FileIntegrity, Integrity};
use crate::storage::lineage::Lineage;
use crate::threads::default_threads;

/// The options of a rank that writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteOptions {
    /// Threads that hash and write. Each needs about 1 MiB, and 8 MiB more for state on a GPU.
    /// `None` (the default) takes one for each core, up to four; a save of a process group takes
    /// each rank's share of its host's cores, up to sixteen, and four for an object store.
    pub threads: Option<usize>,
    /// `true` (the default) if the digests of what is written are recorded.
    pub digests: bool,
}

impl Default for WriteOptions {
    fn default() -> Self {
        WriteOptions {
            threads: None,
            digests: true,
        }
    }
}

/// Writes the selected items of one rank to its file, hashes and digests them on the way, and
/// fsyncs it. No communication.
///
/// With `before`, the files of that checkpoint that are mostly unchanged are linked. Then only the
/// items that have changed are written, to another file.
pub fn write_rank(
    staging: &Staging,
    items: &RankItems<'_>,
    options: &WriteOptions,
    before: Option<Before<'_>>,
) -> Result<RankWritten, FileError> {
    let threads = options.threads.unwrap_or_else(default_threads);
    let mut written = match before {
        // Without digests it is not known what has changed.
        Some(before) if options.digests => unchanged::link(staging, items, before, threads)?,
        _ => RankWritten::default(),
    };
    let linked: HashSet<(u32, u32)> = written
        .items
        .iter()
        .map(|item| (item.entry, item.chunk))
        .collect();
    let changed = Selection {
        kept: items
            .selection
            .kept
            .iter()
            .filter(|item| !linked.contains(&(item.entry, item.chunk)))
            .copied()
            .collect(),
    };
    if changed.kept.is_empty() {
        return Ok(written);
    }
    // The first name that no linked file has.
    let name = (0..)
        .map(|number| staging.data_file_of(items.rank, number))
        .find(|name| written.files.iter().all(|file| file.name != *name))
        .expect("there are more numbers than linked files");
    let items = RankItems {
        selection: &changed,
        ..*items
    };
    let layout = layout::FileLayout::new(&items, options.digests)?;
    let file = staging.create(&name, layout.length)?;
    let (integrity, parts) = payload::write(&*file, &layout, items.source, threads)?;
    file.finish()?;
    let file_index = written.files.len() as u32;
    written.items.extend(
        layout
            .items
            .iter()
            .zip(parts)
            .map(|(placed, part)| WrittenItem {
                file: file_index,
                entry: placed.selected.entry,
                chunk: placed.selected.chunk,
                offset: placed.offset,
                length: placed.length,
                part: options.digests.then_some(part),
            }),
    );
    written.files.push(WrittenFile { name, integrity });
    written.payload_bytes += layout
        .items
        .iter()
        .map(|placed| placed.payload_length())
        .sum::<u64>();
    Ok(written)
}

/// Records in the metadata where the items of all ranks are stored. An item that the metadata or
/// its rank's files lack, and one that no rank has written are errors.
fn place_items(metadata: &mut Metadata, reports: &[RankWritten]) -> Result<(), FileError> {
    for rank in reports {
        for item in &rank.items {
            let file = rank.files.get(item.file as usize);
            // The report came from another process: it may be of another plan.
            let (Some(file), Some(place)) = (file, find_place(metadata, item)) else {
                return Err(FileError::not_stored(&format!(
                    "entry {}, chunk {}",
                    item.entry, item.chunk
                )));
            };
            *place = Some(StorageInfo {
                relative_path: file.name.clone(),
                offset: item.offset,
                length: item.length,
                // An item that was copied as stored keeps the transforms of its bytes, such as
                // compression.
                transforms: place
                    .take()
                    .map_or_else(Vec::new, |stored| stored.transforms),
            });
        }
    }
    check_placed(metadata)
}

/// Returns where the metadata says that an item is stored; `None` if it has no such item.
fn find_place<'m>(
    metadata: &'m mut Metadata,
    item: &WrittenItem,
) -> Option<&'m mut Option<StorageInfo>> {
    let (_, entry) = metadata.entries.get_index_mut(item.entry as usize)?;
    Some(match entry {
        Entry::Bytes(bytes) => &mut bytes.stored,
        Entry::Tensor(tensor) => &mut tensor.chunks.get_mut(item.chunk as usize)?.stored,
    })
}

/// Checks that everything is stored somewhere. Otherwise a chunk that no rank wrote would be
/// missing silently.
fn check_placed(metadata: &Metadata) -> Result<(), FileError> {
    let unplaced = metadata
        .entries
        .iter()
        .find(|(_, entry)| entry.items().any(|(_, stored)| stored.is_none()));
    match unplaced {
        Some((fqn, _)) => Err(FileError::not_stored(fqn)),
        None => Ok(()),
    }
}

/// Ends a save, on the rank that prepared it: writes `.integrity` and `.metadata`, and commits.
/// Returns the digests of the saved tensors and values, which are in `.integrity` too, unless
/// [`WriteOptions::digests`] was off.
///
/// `metadata` is that of the global plan, `reports` has the report of each rank, and `lineage` is
/// recorded with the checkpoint. If an item was written by no rank, nothing is committed.
pub fn finish(
    staging: Staging,
    metadata: Metadata,
    reports: &[RankWritten],
    lineage: Option<Lineage>,
) -> Result<Option<StateDigest>, FileError> {
    finish_copy(staging, metadata, reports, lineage, None)
}

/// Ends a save like [`finish`]. If it is the copy of a checkpoint with the digests `original`, and
/// those of the copy differ, nothing is committed.
pub fn finish_copy(
    staging: Staging,
    mut metadata: Metadata,
    reports: &[RankWritten],
    lineage: Option<Lineage>,
    original: Option<&StateDigest>,
) -> Result<Option<StateDigest>, FileError> {
    place_items(&mut metadata, reports)?;
    let digests = compute_digests(&metadata, reports);
    if let Some(digests) = &digests {
        check_copy(staging.target(), original, digests)?;
    }
    commit(staging, &encode(&metadata), reports, digests, lineage)
}

/// Returns the digests of all tensors and values, from the parts that the ranks report. An item of
/// the metadata has the part that was written at its place. Returns `None` if some item has none.
fn compute_digests(metadata: &Metadata, reports: &[RankWritten]) -> Option<StateDigest> {
    let mut sums_by_place: HashMap<(&str, u64), Sum> = HashMap::new();
    for rank in reports {
        for item in &rank.items {
            let file = rank.files.get(item.file as usize)?;
            sums_by_place.insert((&file.name, item.offset), item.part?);
        }
    }
    let mut digests = StateDigest::default();
    for (fqn, entry) in &metadata.entries {
        let mut tensor_sum = Sum::default();
        for (_, stored) in entry.items() {
            let stored = stored?;
            tensor_sum.add(*sums_by_place.get(&(stored.relative_path.as_str(), stored.offset))?);
        }
        let (dtype, shape) = match entry {
            Entry::Tensor(tensor) => (tensor.properties.dtype, tensor.shape.as_slice()),
            // The digest of a value is finished: no dtype counts.
            Entry::Bytes(_) => (DType::U8, &[][..]),
        };
        digests.insert(fqn.clone(), tensor_sum.finish(dtype, shape));
    }
    Some(digests)
}

/// Ends a save like [`finish`], with a `.metadata` that the caller has encoded, as torch does. The
/// ranks' items are matched with that metadata by their places in the files.
///
/// # Errors
/// Besides those of [`finish`]: metadata that this crate cannot decode, or that names files which
/// no rank has written. Then nothing is committed.
pub fn finish_encoded(
    staging: Staging,
    metadata: &[u8],
    reports: &[RankWritten],
) -> Result<(), FileError> {
    let path = staging.directory().join(METADATA_FILE);
    let decoded = decode(metadata).map_err(|error| FormatError::from(error).in_file(path))?;
    check_placed(&decoded)?;
    let files: HashSet<&str> = reports
        .iter()
        .flat_map(|rank| &rank.files)
        .map(|file| file.name.as_str())
        .collect();
    // The caller's metadata must not name files that are not in this checkpoint.
    for (fqn, _, stored) in decoded.stored() {
        if !files.contains(stored.relative_path.as_str()) {
            return Err(FileError::not_stored(fqn));
        }
    }
    let digests = compute_digests(&decoded, reports);
    commit(staging, metadata, reports, digests, None).map(drop)
}

/// Writes the hashes, the digests and the lineage, and commits with this `.metadata`. Returns the
/// digests.
pub(super) fn commit(
    staging: Staging,
    metadata: &[u8],
    reports: &[RankWritten],
    digests: Option<StateDigest>,
    lineage: Option<Lineage>,
) -> Result<Option<StateDigest>, FileError> {
    let mut integrity = Integrity {
        files: reports
            .iter()
            .flat_map(|rank| &rank.files)
            .map(|file| (file.name.clone(), file.integrity.clone()))
            .collect(),
        digests: digests.clone(),
        lineage,
    };
    // A rank that wrote elsewhere is found before anything is committed.
    staging.check_files(integrity.files.keys())?;
    let mut metadata_integrity = FileIntegrity::default();
    metadata_integrity.push_bytes(metadata);
    integrity
        .files
        .insert(METADATA_FILE.to_owned(), metadata_integrity);
    let name = staging.integrity_file();
    let encoded = integrity
        .encode()
        .map_err(|source| source.in_file(staging.directory().join(&name)))?;
    // The hashes come first: once the `.metadata` is there, the checkpoint is, and must be whole.
    staging.write(&name, &encoded)?;
    staging.commit(METADATA_FILE, metadata)?;
    Ok(digests)
}
