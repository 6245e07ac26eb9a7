//! The items of a rank that have not changed since the last checkpoint, and need not be written
//! again.

use std::collections::{BTreeSet, HashMap};

use fsdp_digest::{BoxPlace, Part, StateDigest, Sum};
use fsdp_layout::TensorBox;
use serde::{Deserialize, Serialize};

use super::written::{RankWritten, WrittenFile, WrittenItem};
use crate::error::FileError;
use crate::formats::checkpoint::Checkpoint;
use crate::metadata::{Entry, Metadata, StorageInfo};
use crate::payload::source::PayloadSource;
use crate::plan::{LocalPlan, SelectedItem, Selection, WriteContent};
use crate::storage::Staging;
use crate::storage::backend::Links;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::threads::on_each;

/// The part of the last checkpoint that this rank wrote, under the same plan.
#[derive(Debug, Clone, Copy)]
pub struct Before<'b> {
    /// Its place.
    pub path: &'b Location,
    /// The files and items of this rank.
    pub written: &'b RankWritten,
}

/// The items that were linked, and the files that they are in.
#[derive(Debug, Default)]
pub(super) struct Linked {
    pub(super) files: Vec<WrittenFile>,
    pub(super) items: Vec<WrittenItem>,
    pub(super) payload_bytes: u64,
}

/// An item that has not changed.
struct Candidate {
    before: WrittenItem,
    payload_bytes: u64,
}

/// Links the files of the last checkpoint of which at least half is unchanged items. The caller
/// writes the other items.
///
/// An item counts as unchanged if the sum over its elements is the same. The documentation of
/// `fsdp_digest` says which changes a sum can miss.
pub(super) fn link(
    staging: &Staging,
    rank: usize,
    plan: &LocalPlan,
    selection: &Selection,
    source: &dyn PayloadSource,
    before: Before<'_>,
    threads: usize,
) -> Result<Linked, FileError> {
    // A file is linked only if its recorded hashes show that it is still the one that this rank has
    // written.
    let Ok(directory) = CheckedDirectory::open(before.path, true, Links::Refuse) else {
        return Ok(Linked::default());
    };
    let known: HashMap<(u32, u32), WrittenItem> = before
        .written
        .items
        .iter()
        .map(|item| ((item.entry, item.chunk), *item))
        .collect();
    let compared = on_each(&selection.kept, threads, |selected| {
        let Some(before) = known.get(&(selected.entry, selected.chunk)) else {
            return Ok(None);
        };
        unchanged(plan, *selected, *before, source)
    });
    let mut candidates = Vec::new();
    for compared in compared {
        candidates.extend(compared?);
    }
    let mut linked = Linked::default();
    for (index, file) in before.written.files.iter().enumerate() {
        let of_file: Vec<&Candidate> = candidates
            .iter()
            .filter(|found| found.before.file as usize == index)
            .collect();
        let bytes: u64 = of_file.iter().map(|found| found.payload_bytes).sum();
        // A link keeps the whole file on the disk, also the items in it that are no longer needed.
        let is_worth_it = bytes > 0 && bytes.saturating_mul(2) >= file.integrity.length();
        if !is_worth_it || directory.hashes(&file.name) != Some(&file.integrity) {
            continue;
        }
        let name = staging.linked_name(&file.name, rank, linked.files.len());
        if !staging.link(before.path, &file.name, &name)? {
            continue;
        }
        let number = linked.files.len() as u32;
        linked.files.push(WrittenFile {
            name,
            integrity: file.integrity.clone(),
        });
        linked.payload_bytes += bytes;
        linked
            .items
            .extend(of_file.into_iter().map(|found| WrittenItem {
                file: number,
                ..found.before
            }));
    }
    Ok(linked)
}

/// Compares a tensor's box with the last checkpoint. Returns `None` for a value, and for a box that
/// has changed.
fn unchanged(
    plan: &LocalPlan,
    selected: SelectedItem,
    before: WrittenItem,
    source: &dyn PayloadSource,
) -> Result<Option<Candidate>, FileError> {
    let Some((sum, payload_bytes)) = sum_of(plan, selected, source)? else {
        return Ok(None);
    };
    let is_same = before.part == Some(Part::Elements(sum));
    Ok(is_same.then_some(Candidate {
        before,
        payload_bytes,
    }))
}

/// Returns the sum over a tensor's box, and its bytes; `None` for a value.
fn sum_of(
    plan: &LocalPlan,
    selected: SelectedItem,
    source: &dyn PayloadSource,
) -> Result<Option<(Sum, u64)>, FileError> {
    let Some((fqn, bounds, place)) = box_of(plan, selected) else {
        return Ok(None);
    };
    let (mut sum, mut at) = (Sum::default(), 0);
    source.look(fqn, bounds, 0..place.length(), &mut |bytes| {
        sum.add_piece(&place, at, bytes);
        at += bytes.len() as u64;
        Ok(())
    })?;
    Ok((at == place.length()).then_some((sum, at)))
}

/// Returns the key of a tensor, the box of it that is selected, and the place of the box in it;
/// `None` for a value.
fn box_of(plan: &LocalPlan, selected: SelectedItem) -> Option<(&str, &TensorBox, BoxPlace)> {
    let item = plan.items.get(selected.item as usize)?;
    let WriteContent::Tensor {
        properties,
        shape,
        boxes,
        ..
    } = &item.content
    else {
        return None;
    };
    let bounds = boxes.get(selected.index as usize)?;
    let place = BoxPlace::new(shape, bounds, properties.dtype.size_in_bytes() as usize).ok()?;
    Some((&item.fqn, bounds, place))
}

/// The sum over a box that a rank will write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoxSum {
    /// Position of the tensor's entry in the metadata of the global plan.
    pub entry: u32,
    /// Position of the box among the entry's chunks.
    pub chunk: u32,
    /// The sum over its elements.
    pub sum: Sum,
}

/// Returns the sums over all boxes that a rank will write. No communication.
///
/// # Errors
/// The source's.
pub fn box_sums(
    plan: &LocalPlan,
    selection: &Selection,
    source: &dyn PayloadSource,
    threads: usize,
) -> Result<Vec<BoxSum>, FileError> {
    let sums = on_each(&selection.kept, threads, |selected| {
        let sum = sum_of(plan, *selected, source)?;
        Ok(sum.map(|(sum, _)| BoxSum {
            entry: selected.entry,
            chunk: selected.chunk,
            sum,
        }))
    });
    sums.into_iter().filter_map(Result::transpose).collect()
}

/// Returns the positions of the tensors in `metadata` that are unchanged since a checkpoint with
/// these digests, computed from the sums over all their boxes.
#[must_use]
pub fn unchanged_entries(
    metadata: &Metadata,
    recorded: &StateDigest,
    sums: impl IntoIterator<Item = BoxSum>,
) -> BTreeSet<u32> {
    let mut whole: HashMap<u32, Sum> = HashMap::new();
    for BoxSum { entry, sum, .. } in sums {
        whole.entry(entry).or_default().add(sum);
    }
    let is_unchanged = |(entry, sum): (u32, Sum)| {
        let (fqn, Entry::Tensor(tensor)) = metadata.entries.get_index(entry as usize)? else {
            return None;
        };
        let digest = sum.finish(tensor.properties.dtype, &tensor.shape);
        (recorded.get(fqn) == Some(digest)).then_some(entry)
    };
    whole.into_iter().filter_map(is_unchanged).collect()
}

impl RankWritten {
    /// Returns the report that this rank would have made if it had written `checkpoint`, limited to
    /// its boxes of unchanged tensors. It is used for [`Before`] when another process wrote the
    /// checkpoint.
    ///
    /// `unchanged` are positions in the metadata of the global plan, as [`unchanged_entries`]
    /// returns them.
    #[must_use]
    pub fn of_checkpoint(
        checkpoint: &dyn Checkpoint,
        rank: usize,
        plan: &LocalPlan,
        selection: &Selection,
        sums: &[BoxSum],
        unchanged: &BTreeSet<u32>,
    ) -> Self {
        let sums: HashMap<(u32, u32), Sum> = sums
            .iter()
            .map(|of| ((of.entry, of.chunk), of.sum))
            .collect();
        let own_files = format!("__{rank}_");
        let mut written = RankWritten::default();
        for &selected in selection
            .kept
            .iter()
            .filter(|selected| unchanged.contains(&selected.entry))
        {
            let Some((fqn, bounds, place)) = box_of(plan, selected) else {
                continue;
            };
            let chunks = checkpoint
                .metadata()
                .tensor(fqn)
                .into_iter()
                .flat_map(|tensor| &tensor.chunks);
            let stored = chunks
                .filter(|chunk| chunk.bounds == *bounds)
                .find_map(|chunk| chunk.stored.as_ref());
            // The names of other ranks' files may be taken by these ranks.
            let stored = stored
                .filter(|at| at.transforms.is_empty() && at.relative_path.starts_with(&own_files));
            let Some(StorageInfo {
                relative_path: name,
                offset,
                length,
                ..
            }) = stored
            else {
                continue;
            };
            let Some(hashes) = checkpoint.directory().hashes(name) else {
                continue;
            };
            let file = written
                .files
                .iter()
                .position(|file| file.name == *name)
                .unwrap_or_else(|| {
                    written.files.push(WrittenFile {
                        name: name.clone(),
                        integrity: hashes.clone(),
                    });
                    written.files.len() - 1
                });
            written.payload_bytes += place.length();
            written.items.push(WrittenItem {
                file: file as u32,
                entry: selected.entry,
                chunk: selected.chunk,
                offset: *offset,
                length: *length,
                part: sums
                    .get(&(selected.entry, selected.chunk))
                    .copied()
                    .map(Part::Elements),
            });
        }
        written
    }
}
