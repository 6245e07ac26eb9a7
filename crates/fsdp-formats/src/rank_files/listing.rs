//! The files in a directory of `torch_checkpointing`, and what their names tell of items and ranks.

use std::collections::{BTreeMap, BTreeSet};

use super::names::{FileKind, RankFile};
use crate::error::{FileError, FormatError};
use crate::formats::extra::is_beside_items;
use crate::limits::{MAX_RANKS, check_limit};
use crate::storage::backend::EntryKind;
use crate::storage::location::Location;

/// The ranks of items, by the names and formats of these.
pub(super) type RanksByItem = BTreeMap<(String, FileKind), BTreeSet<usize>>;

/// Returns the ranks of each item that these paths tell. A number in the name of an item itself is
/// one that other formats put there.
pub(super) fn ranks_by_item(paths: &[String]) -> RanksByItem {
    let mut items = RanksByItem::new();
    for file in paths.iter().filter_map(|path| RankFile::parse_path(path)) {
        if !is_beside_items(&file.name) && !file.item.contains(|c: char| c.is_ascii_digit()) {
            let ranks = items.entry((file.item, file.kind)).or_default();
            ranks.insert(file.rank);
        }
    }
    items
}

/// Returns the number of ranks: of the items that may hold tensors and have a file of each, the
/// largest one. Returns `None` if there is no such item.
pub(super) fn world_size_of(items: &RanksByItem) -> Option<usize> {
    items
        .iter()
        .filter(|((_, kind), ranks)| may_hold_tensors(*kind) && is_every_rank(ranks, ranks.len()))
        .map(|(_, ranks)| ranks.len())
        .max()
}

/// Returns `true` if `ranks` has every rank from 0 to `world_size - 1`.
fn is_every_rank(ranks: &BTreeSet<usize>, world_size: usize) -> bool {
    ranks.len() == world_size && ranks.last() == Some(&(world_size - 1))
}

/// Returns the number of items that have a file of each rank. What is the same for all ranks may be
/// with the first one alone.
pub(super) fn count_complete(items: &RanksByItem, world_size: usize) -> usize {
    items
        .values()
        .filter(|ranks| {
            is_every_rank(ranks, world_size) || is_of_first_rank(ranks.iter().copied(), world_size)
        })
        .count()
}

/// Returns `true` if files of this format may hold tensors.
pub(super) fn may_hold_tensors(kind: FileKind) -> bool {
    matches!(kind, FileKind::Torch | FileKind::Safetensors)
}

/// Returns `true` if these ranks are the first one alone, of so many that the others are hardly
/// lost: then only that rank has saved the item.
pub(super) fn is_of_first_rank(mut ranks: impl Iterator<Item = usize>, world_size: usize) -> bool {
    world_size > 2 && ranks.next() == Some(0) && ranks.next().is_none()
}

/// The levels of folders in which items are found, the directory itself included.
pub(super) const MAX_FOLDERS: usize = 4;

/// The most entries that are looked through.
const MAX_ENTRIES: u64 = 2 * MAX_RANKS as u64;

/// Returns the paths of the regular files in a directory and in its folders, down to so many
/// levels, without hidden ones. Too many are an error.
pub(super) fn list_files(location: &Location, levels: usize) -> Result<Vec<String>, FileError> {
    let mut paths = Vec::new();
    let mut entry_count = 0u64;
    // The folders of each level, as paths with a slash behind them.
    let mut folders = vec![String::new()];
    for _ in 0..levels {
        for folder in std::mem::take(&mut folders) {
            let below = folder.trim_end_matches('/');
            let here = if below.is_empty() {
                location.clone()
            } else {
                location.join(below)
            };
            for name in here.names()? {
                entry_count += 1;
                check_limit("number of files", entry_count, MAX_ENTRIES)
                    .map_err(|over| FormatError::Limit(over).in_file(location.name()))?;
                let path = format!("{folder}{name}");
                if name.starts_with('.') {
                    continue;
                }
                match kind_of_entry(location, &path)? {
                    Some(EntryKind::File) => paths.push(path),
                    Some(EntryKind::Directory) => folders.push(format!("{path}/")),
                    _ => {}
                }
            }
        }
    }
    paths.sort();
    Ok(paths)
}

/// Returns what an entry is. One whose name has an extension that items have is taken for a file,
/// because a look at each takes time where files are far away.
fn kind_of_entry(location: &Location, path: &str) -> Result<Option<EntryKind>, FileError> {
    if FileKind::of_name(path) != FileKind::Raw {
        return Ok(Some(EntryKind::File));
    }
    location.join(path).storage()?.kind()
}
