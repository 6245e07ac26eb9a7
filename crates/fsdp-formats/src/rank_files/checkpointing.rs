//! Directories of `torch_checkpointing`: a file for each item and rank, and `metadata.pkl`, which
//! describes the items that may be cut anew.
//!
//! ```text
//! model_0.pt  model_1.pt  metadata.pkl       the usual names; the items with a resharder
//! weights/part-0.safetensors                 names of the user's own, which `metadata.pkl` tells
//! rank_0/trainer.json  blob_0.bin  config.json       items without tensors are in no list
//! ```
//!
//! Without any resharder, which is the default, there is no `metadata.pkl`. Then the names alone
//! tell what the files are, and DTensors in them where they belong. Plain tensors of safetensors
//! files say nothing: each rank's are kept.

use std::collections::{BTreeMap, HashSet};

use super::listing::{
    MAX_FOLDERS, is_of_first_rank, list_files, may_hold_tensors, ranks_by_item, world_size_of,
};
use super::metadata::{Described, METADATA};
use super::names::{FileKind, RankFile};
use super::{Item, Items, assemble, check_complete, two_saves};
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Assembled, Assembler};
use crate::formats::checkpoint::Format;
use crate::formats::extra::is_beside_items;
use crate::formats::read::OpenOptions;
use crate::limits::{MAX_LISTED_FILES, MAX_PICKLE_BYTES};
use crate::safetensors::header::Header;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::storage::read_at::ReadAt as _;
use crate::zip::Directory;

/// Opens such a directory.
pub(crate) fn open(location: &Location, options: OpenOptions) -> Result<Assembled, FileError> {
    let directory = CheckedDirectory::open_covered(location, options.verify)?;
    let described = if directory.has(METADATA)? {
        let bytes = directory.read_checked(METADATA, MAX_PICKLE_BYTES)?;
        Some(Described::read(&bytes).map_err(|source| directory.file_error(METADATA, source))?)
    } else {
        None
    };
    let items = find_items(&directory, &list_files(location, MAX_FOLDERS)?, described)?;
    let assembler = Assembler::new(Format::TorchCheckpointing, location.name(), directory);
    assemble(assembler, &items, false)
}

/// Returns all items with their files: those that `described` has, and those of the other files.
fn find_items(
    directory: &CheckedDirectory,
    paths: &[String],
    described: Option<Described>,
) -> Result<Items, FileError> {
    let world_size = match &described {
        Some(described) => described.world_size,
        None => world_size_of(&ranks_by_item(paths)).unwrap_or(1),
    };
    let mut items = Items::new();
    let mut missing = Vec::new();
    for (name, item) in described
        .map(|described| described.items)
        .unwrap_or_default()
    {
        let mut files = BTreeMap::new();
        for rank in 0..world_size {
            let (path, kind) = item.file_of(&name, rank);
            if !directory.has(&path)? {
                missing.push(path);
                if missing.len() >= MAX_LISTED_FILES {
                    break;
                }
                continue;
            }
            files.insert(rank, RankFile::listed(&path, &name, rank, kind));
        }
        directory.check_missing(std::mem::take(&mut missing))?;
        let placements = Some(item.placements);
        items.insert(name, Item { files, placements });
    }
    let listed_paths: HashSet<String> = items
        .values()
        .flat_map(|item| item.files.values())
        .map(|file| file.name.clone())
        .collect();
    let other_paths = paths.iter().filter(|path| !listed_paths.contains(*path));
    add_other_items(directory, other_paths, world_size, &mut items)?;
    Ok(items)
}

/// Adds the items of files that `metadata.pkl` does not list. Their names tell the item and the
/// rank; a file without a rank is an item by itself, of all ranks.
///
/// # Errors
/// Files of another save than the others; an item that lacks a rank's file, unless rank 0 alone has
/// saved it.
fn add_other_items<'p>(
    directory: &CheckedDirectory,
    paths: impl Iterator<Item = &'p String>,
    world_size: usize,
    items: &mut Items,
) -> Result<(), FileError> {
    let mut others: BTreeMap<String, BTreeMap<usize, RankFile>> = BTreeMap::new();
    let mut whole_files = Vec::new();
    for path in paths.filter(|path| *path != METADATA && !is_beside_items(path)) {
        let Some(mut file) = RankFile::parse_path(path) else {
            whole_files.push(path);
            continue;
        };
        if file.rank >= world_size {
            // Perhaps the number is no rank. But a file of a rank that was not there is of another
            // save.
            let saved = items.get(&file.item);
            if let Some(first_file) = saved.and_then(|item| item.files.values().next())
                && may_hold_tensors(file.kind)
            {
                return Err(two_saves(directory, first_file, path));
            }
            whole_files.push(path);
            continue;
        }
        file.kind = kind_of(directory, &file)?;
        // Two items may have one name in different folders, or with different extensions.
        let is_taken = items.contains_key(&file.item)
            || others
                .get(&file.item)
                .is_some_and(|files| files.contains_key(&file.rank) || !is_like(files, &file));
        if is_taken {
            file.item = file.long_item();
        }
        let files = others.entry(file.item.clone()).or_default();
        if let Some(first_file) = files.insert(file.rank, file) {
            return Err(two_saves(directory, &first_file, path));
        }
    }
    for (name, files) in others {
        // An item that rank 0 alone has saved is complete.
        let ranks = files.keys().copied();
        if !is_of_first_rank(ranks, world_size) {
            check_complete(directory, &files, world_size)?;
        }
        let placements = None;
        items.insert(name, Item { files, placements });
    }
    for path in whole_files {
        add_whole_file(directory, path, world_size, items)?;
    }
    Ok(())
}

/// Returns `true` if a file has the same names before and behind the rank as the others of an item,
/// which are all alike.
fn is_like(files: &BTreeMap<usize, RankFile>, file: &RankFile) -> bool {
    let mut others = files.values();
    others
        .next()
        .is_none_or(|other| other.name_of_rank(file.rank) == file.name)
}

/// Adds a file without a rank as an item. Where there are several ranks, raw bytes are taken for
/// somebody else's file, and left out; so is any file that came after the hashes.
fn add_whole_file(
    directory: &CheckedDirectory,
    path: &str,
    world_size: usize,
    items: &mut Items,
) -> Result<(), FileError> {
    let file_name = path.rsplit('/').next().unwrap_or(path);
    let stem = file_name
        .rsplit_once('.')
        .map_or(file_name, |(stem, _)| stem);
    let mut file = RankFile::at(path, stem, 0, FileKind::of_name(file_name));
    file.kind = kind_of(directory, &file)?;
    let is_uncovered = directory.has_integrity() && directory.hashes(path).is_none();
    if is_uncovered || file.kind == FileKind::Raw && world_size > 1 {
        return Ok(());
    }
    let mut name = stem.to_owned();
    if items.contains_key(&name) {
        name = path.replace('/', ".");
    }
    let item = Item {
        files: BTreeMap::from([(0, file)]),
        placements: None,
    };
    if items.insert(name, item).is_some() {
        let reason = "two files would be one item";
        return Err(directory.file_error(path, FormatError::malformed("checkpoint", reason)));
    }
    Ok(())
}

/// Returns the format of a file: that of its extension or, if that tells none, of its first bytes.
fn kind_of(directory: &CheckedDirectory, file: &RankFile) -> Result<FileKind, FileError> {
    if file.kind != FileKind::Raw {
        return Ok(file.kind);
    }
    // What is no item is in no list of hashes.
    let opened = directory.extra_file(&file.name)?;
    let mut start = [0; 9];
    let read_bytes = start.len().min(opened.len() as usize);
    opened
        .unchecked()
        .read_exact_at(0, &mut start[..read_bytes])
        .map_err(|source| directory.file_error(&file.name, source))?;
    let is_torch = start.starts_with(b"PK")
        && Directory::read(&opened).is_ok_and(|archive| archive.records.contains_key("data.pkl"));
    Ok(if is_torch {
        FileKind::Torch
    } else if start[8] == b'{' && Header::read(&opened).is_ok() {
        FileKind::Safetensors
    } else {
        FileKind::Raw
    })
}
