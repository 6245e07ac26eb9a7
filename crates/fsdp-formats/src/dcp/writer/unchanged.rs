//! The items of a rank that have not changed since the last checkpoint, and need not be written
//! again.

use std::collections::{BTreeSet, HashMap};

use fsdp_digest::{StateDigest, Sum};
use serde::{Deserialize, Serialize};

use super::selected::{RankItems, SelectedBox, selected_box};
use super::written::{RankWritten, WrittenFile, WrittenItem};
use crate::error::FileError;
use crate::formats::checkpoint::Checkpoint;
use crate::metadata::{Entry, Metadata, StorageInfo};
use crate::payload::source::PayloadSource;
use crate::plan::{LocalPlan, SelectedItem, Selection};
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

/// An item that has not changed.
struct UnchangedItem {
    /// The item as it was written then.
    written: WrittenItem,
    payload_bytes: u64,
}

/// Links the files of the last checkpoint of which at least half is unchanged items, and returns
/// these items. The caller writes the others. If the last checkpoint cannot be opened, nothing is
/// linked.
///
/// An item counts as unchanged if the sum over its elements is the same. The documentation of
/// `fsdp_digest` says which changes a sum can miss.
pub(super) fn link(
    staging: &Staging,
    items: &RankItems<'_>,
    before: Before<'_>,
    threads: usize,
) -> Result<RankWritten, FileError> {
    // A file is linked only if its recorded hashes show that it is still the one that this rank has
    // written.
    let Ok(directory) = CheckedDirectory::open(before.path, true, Links::Refuse) else {
        return Ok(RankWritten::default());
    };
    let written_items: HashMap<(u32, u32), &WrittenItem> = before
        .written
        .items
        .iter()
        .map(|item| ((item.entry, item.chunk), item))
        .collect();
    let outcomes = on_each(&items.selection.kept, threads, |selected| {
        let Some(&written) = written_items.get(&(selected.entry, selected.chunk)) else {
            return Ok(None);
        };
        let Some((sum, payload_bytes)) = compute_sum(items.plan, *selected, items.source)? else {
            return Ok(None);
        };
        let is_unchanged = written.part == Some(sum);
        Ok::<_, FileError>(is_unchanged.then_some(UnchangedItem {
            written: *written,
            payload_bytes,
        }))
    });
    let mut unchanged = Vec::new();
    for outcome in outcomes {
        unchanged.extend(outcome?);
    }
    let mut linked = RankWritten::default();
    for (index, file) in before.written.files.iter().enumerate() {
        let file_items: Vec<&UnchangedItem> = unchanged
            .iter()
            .filter(|item| item.written.file as usize == index)
            .collect();
        let bytes: u64 = file_items.iter().map(|item| item.payload_bytes).sum();
        // A link keeps the whole file on the disk, also the items in it that are no longer needed.
        let is_worth_it = bytes > 0 && bytes.saturating_mul(2) >= file.integrity.length();
        if !is_worth_it || directory.hashes(&file.name) != Some(&file.integrity) {
            continue;
        }
        let name = staging.linked_name(&file.name, items.rank, linked.files.len());
        if !staging.link(before.path, &file.name, &name)? {
            continue;
        }
        let file_index = linked.files.len() as u32;
        linked.files.push(WrittenFile {
            name,
            integrity: file.integrity.clone(),
        });
        linked.payload_bytes += bytes;
        linked.linked_bytes += bytes;
        linked
            .items
            .extend(file_items.into_iter().map(|item| WrittenItem {
                file: file_index,
                ..item.written
            }));
    }
    Ok(linked)
}

/// Returns the sum over a tensor's box, and its bytes; `None` for a value, or if the source does
/// not give as many bytes as the box has.
fn compute_sum(
    plan: &LocalPlan,
    selected: SelectedItem,
    source: &dyn PayloadSource,
) -> Result<Option<(Sum, u64)>, FileError> {
    let Some(tensor) = selected_box(plan, selected)? else {
        return Ok(None);
    };
    let place = tensor.place()?;
    let mut sum = Sum::default();
    let mut position = 0;
    source.peek(tensor.fqn, tensor.bounds, 0..place.length(), &mut |bytes| {
        sum.add_piece(&place, position, bytes);
        position += bytes.len() as u64;
        Ok(())
    })?;
    // A source that gives too few bytes fails once the box is written.
    Ok((position == place.length()).then_some((sum, position)))
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
        let sum = compute_sum(plan, *selected, source)?;
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
    let mut whole_sums: HashMap<u32, Sum> = HashMap::new();
    for BoxSum { entry, sum, .. } in sums {
        whole_sums.entry(entry).or_default().add(sum);
    }
    let mut unchanged = BTreeSet::new();
    for (entry, sum) in whole_sums {
        if let Some((fqn, Entry::Tensor(tensor))) = metadata.entries.get_index(entry as usize)
            && recorded.get(fqn) == Some(sum.finish(tensor.properties.dtype, &tensor.shape))
        {
            unchanged.insert(entry);
        }
    }
    unchanged
}

impl RankWritten {
    /// Returns the report that this rank would have made if it had written `checkpoint`, limited to
    /// the boxes of these sums, which are those of unchanged tensors. It is used for [`Before`]
    /// when another process wrote the checkpoint.
    #[must_use]
    pub fn from_checkpoint(
        checkpoint: &dyn Checkpoint,
        rank: usize,
        plan: &LocalPlan,
        selection: &Selection,
        sums: &[BoxSum],
    ) -> Self {
        let sums_by_item: HashMap<(u32, u32), Sum> = sums
            .iter()
            .map(|box_sum| ((box_sum.entry, box_sum.chunk), box_sum.sum))
            .collect();
        let own_prefix = format!("__{rank}_");
        let mut written = RankWritten::default();
        for &selected in &selection.kept {
            let Some(&sum) = sums_by_item.get(&(selected.entry, selected.chunk)) else {
                continue;
            };
            // Only boxes that can be written have sums.
            let Ok(Some(tensor)) = selected_box(plan, selected) else {
                continue;
            };
            let Some(stored) = find_place_of_box(checkpoint.metadata(), &tensor) else {
                continue;
            };
            // The names of other ranks' files may be taken by these ranks.
            if !stored.transforms.is_empty() || !stored.relative_path.starts_with(&own_prefix) {
                continue;
            }
            let Some(hashes) = checkpoint.directory().hashes(&stored.relative_path) else {
                continue;
            };
            let file = written
                .files
                .iter()
                .position(|file| file.name == stored.relative_path)
                .unwrap_or_else(|| {
                    written.files.push(WrittenFile {
                        name: stored.relative_path.clone(),
                        integrity: hashes.clone(),
                    });
                    written.files.len() - 1
                });
            written.payload_bytes += tensor.bounds.numel() as u64 * tensor.dtype.size_in_bytes();
            written.items.push(WrittenItem {
                file: file as u32,
                entry: selected.entry,
                chunk: selected.chunk,
                offset: stored.offset,
                length: stored.length,
                part: Some(sum),
            });
        }
        written
    }
}

/// Returns where a box of a tensor is stored; `None` if the metadata lacks the tensor, if the
/// tensor was cut in other boxes, or if the box is stored nowhere.
fn find_place_of_box<'m>(
    metadata: &'m Metadata,
    tensor: &SelectedBox<'_>,
) -> Option<&'m StorageInfo> {
    metadata
        .tensor(tensor.fqn)?
        .chunks
        .iter()
        .filter(|chunk| chunk.bounds == *tensor.bounds)
        .find_map(|chunk| chunk.stored.as_ref())
}
