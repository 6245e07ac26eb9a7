//! The items of a rank that are what they were in the checkpoint before, and need not be written again.

use std::collections::HashMap;

use fsdp_digest::{BoxPlace, Part, Sum};

use super::written::{RankWritten, WrittenFile, WrittenItem};
use crate::error::FileError;
use crate::payload::source::PayloadSource;
use crate::plan::{LocalPlan, SelectedItem, Selection, WriteContent};
use crate::storage::Staging;
use crate::storage::backend::Links;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::threads::on_each;

/// The checkpoint before, as this rank has written it for the same plan.
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

/// Links the files of the checkpoint before that hold mostly items which have not changed. The rest is to be written.
///
/// An item has not changed if the sum over its elements is what it was: see `fsdp_digest` for what that finds.
pub(super) fn link(
    staging: &Staging,
    plan: &LocalPlan,
    selection: &Selection,
    source: &dyn PayloadSource,
    before: Before<'_>,
    threads: usize,
) -> Result<Linked, FileError> {
    // The file there must still be the one that this rank has written.
    let Ok(directory) = CheckedDirectory::open(before.path, true, Links::Refuse) else { return Ok(Linked::default()) };
    let known: HashMap<(u32, u32), WrittenItem> =
        before.written.items.iter().map(|item| ((item.entry, item.chunk), *item)).collect();
    let compared = on_each(&selection.kept, threads, |selected| {
        let Some(before) = known.get(&(selected.entry, selected.chunk)) else { return Ok(None) };
        unchanged(plan, *selected, *before, source)
    });
    let mut candidates = Vec::new();
    for compared in compared {
        candidates.extend(compared?);
    }
    let mut linked = Linked::default();
    for (index, file) in before.written.files.iter().enumerate() {
        let of_file: Vec<&Candidate> = candidates.iter().filter(|found| found.before.file as usize == index).collect();
        let bytes: u64 = of_file.iter().map(|found| found.payload_bytes).sum();
        // A file of which little is needed would keep the rest of its bytes alive.
        let is_worth_it = bytes > 0 && bytes.saturating_mul(2) >= file.integrity.length();
        if !is_worth_it || directory.hashes(&file.name) != Some(&file.integrity) {
            continue;
        }
        if !staging.link(before.path, &file.name)? {
            continue;
        }
        let number = linked.files.len() as u32;
        linked.files.push(file.clone());
        linked.payload_bytes += bytes;
        linked.items.extend(of_file.into_iter().map(|found| WrittenItem { file: number, ..found.before }));
    }
    Ok(linked)
}

/// Compares a tensor's box with what it was; `None` for a value, and for a box that has changed.
fn unchanged(
    plan: &LocalPlan,
    selected: SelectedItem,
    before: WrittenItem,
    source: &dyn PayloadSource,
) -> Result<Option<Candidate>, FileError> {
    let Some(item) = plan.items.get(selected.item as usize) else { return Ok(None) };
    let WriteContent::Tensor { properties, shape, boxes, .. } = &item.content else { return Ok(None) };
    let Some(bounds) = boxes.get(selected.index as usize) else { return Ok(None) };
    let Ok(place) = BoxPlace::new(shape, bounds, properties.dtype.size_in_bytes() as usize) else { return Ok(None) };
    let (mut sum, mut at) = (Sum::default(), 0);
    source.look(&item.fqn, bounds, 0..place.length(), &mut |bytes| {
        sum.add_piece(&place, at, bytes);
        at += bytes.len() as u64;
        Ok(())
    })?;
    let is_same = before.part == Some(Part::Elements(sum)) && at == place.length();
    Ok(is_same.then(|| Candidate { before, payload_bytes: place.length() }))
}
