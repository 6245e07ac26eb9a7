//! Recognizes the directories of `torch_checkpointing`, and the files of one rank in them.

use std::collections::HashSet;

use super::contents;
use super::listing::{count_complete, list_files, may_hold_tensors, ranks_by_item, world_size_of};
use super::metadata::{Described, METADATA};
use super::names::{FileKind, RankFile};
use crate::error::FileError;
use crate::formats::extra::is_beside_items;
use crate::limits::MAX_PICKLE_BYTES;
use crate::safetensors::header::Header;
use crate::storage::backend::Links;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::torch::flat::Leaf;

/// Returns `true` if a directory with entries of these names is one of `torch_checkpointing` that
/// has a `metadata.pkl`. Other programs have a file of this name too, so its content decides.
pub(crate) fn is_described(location: &Location, names: &[String]) -> Result<bool, FileError> {
    if !names.iter().any(|name| name == METADATA) {
        return Ok(false);
    }
    if names.iter().any(|name| is_usual_name(name)) {
        // A damaged `metadata.pkl` beside such files is an error, and not another format.
        return Ok(true);
    }
    let directory = CheckedDirectory::open(location, false, Links::Follow)?;
    let bytes = directory.read_checked(METADATA, MAX_PICKLE_BYTES)?;
    Ok(Described::is_one(&bytes))
}

/// Returns `true` for `ITEM_RANK.pt`.
fn is_usual_name(name: &str) -> bool {
    RankFile::parse_path(name).is_some_and(|file| file.kind == FileKind::Torch)
}

/// Returns `true` if a directory with entries of these names is one of `torch_checkpointing` whose
/// items have no resharder, so that no `metadata.pkl` is there: every rank has a file of each of
/// two items at least, and one of them is a model or an optimizer.
///
/// Files of several epochs may have such names too. So where it is one item only, its files must
/// hold DTensors or, in several files of safetensors, the same keys.
pub(crate) fn is_bare(location: &Location, names: &[String]) -> Result<bool, FileError> {
    // The names of folders tell no format, and what lies in them is listed only where they look
    // like those of ranks or of a state.
    let has_folders = names
        .iter()
        .any(|name| FileKind::of_name(name) == FileKind::Raw && is_folder_of_items(name));
    let paths = if has_folders {
        list_files(location, 2)?
    } else {
        names.to_vec()
    };
    let items = ranks_by_item(&paths);
    let Some(world_size) = world_size_of(&items) else {
        return Ok(false);
    };
    let has_others = items.values().flatten().any(|rank| *rank >= world_size);
    let has_torch = items.keys().any(|(_, kind)| *kind == FileKind::Torch);
    let complete_count = count_complete(&items, world_size);
    if has_torch && complete_count > 1 && !has_others {
        return Ok(paths.iter().any(|path| is_of_state(path)));
    }
    // One rank may have given some items names without a number.
    if has_torch && world_size == 1 && complete_count == items.len() && has_whole_state(&paths) {
        return Ok(true);
    }
    let directory = CheckedDirectory::open(location, false, Links::Follow)?;
    let mut files = paths.iter().filter_map(|path| RankFile::parse_path(path));
    match files.find(|file| may_hold_tensors(file.kind)) {
        Some(file) if file.kind == FileKind::Torch => holds_shards(&directory, &file),
        Some(file) => {
            Ok(complete_count > 1 && world_size == 1
                || have_same_keys(&directory, &file, world_size)?)
        }
        None => Ok(false),
    }
}

/// Returns `true` if a model or an optimizer is among files without numbers, and no configuration,
/// which Hugging Face's libraries have beside a model.
fn has_whole_state(paths: &[String]) -> bool {
    let mut paths_without_rank = paths
        .iter()
        .filter(|path| RankFile::parse_path(path).is_none());
    paths_without_rank.any(|path| {
        is_of_state(path) && may_hold_tensors(FileKind::of_name(path)) && !is_beside_items(path)
    }) && !paths.iter().any(|path| path == "config.json")
}

/// Returns those of the names in a directory that are files of ranks: all items of a model or an
/// optimizer, if every rank has a file of each of them. Returns none for any other directory.
pub(crate) fn find_files_of_ranks(names: &[String]) -> HashSet<&str> {
    let items = ranks_by_item(names);
    let mut items_of_torch = items.keys().filter(|(_, kind)| *kind == FileKind::Torch);
    let are_complete = world_size_of(&items)
        .is_some_and(|world_size| count_complete(&items, world_size) == items.len());
    if items.len() < 2 || !are_complete || !items_of_torch.any(|(item, _)| is_of_state(item)) {
        return HashSet::new();
    }
    let files = names
        .iter()
        .filter_map(|name| RankFile::parse_path(name).map(|file| (name, file)));
    files
        .filter(|(_, file)| items.contains_key(&(file.item.clone(), file.kind)))
        .map(|(name, _)| name.as_str())
        .collect()
}

/// Returns `true` if the file of this name in a directory is that of one rank, whose plain tensors
/// are parts of larger ones by a `metadata.pkl` beside it, or beside its folder.
pub(crate) fn is_part(parent: &Location, name: &str) -> Result<bool, FileError> {
    let mut directory_location = parent.clone();
    let mut path = name.to_owned();
    for _ in 0..2 {
        // A folder further out may be closed to this user.
        let Ok(directory) = CheckedDirectory::open(&directory_location, false, Links::Follow)
        else {
            return Ok(false);
        };
        if directory.has(METADATA).unwrap_or(false) {
            let bytes = directory.read_checked(METADATA, MAX_PICKLE_BYTES)?;
            // What is no metadata of this kind, or damaged, says nothing of the file.
            let Ok(described) = Described::read(&bytes) else {
                return Ok(false);
            };
            return holds_placed_tensors(&directory, &path, &described);
        }
        let Ok((outer, folder)) = directory_location.split() else {
            return Ok(false);
        };
        path = format!("{folder}/{path}");
        directory_location = outer;
    }
    Ok(false)
}

/// Returns `true` if a file is listed, and has plain tensors that are parts of larger ones.
fn holds_placed_tensors(
    directory: &CheckedDirectory,
    path: &str,
    described: &Described,
) -> Result<bool, FileError> {
    let Some((file, placements)) = described.find_file(path) else {
        return Ok(false);
    };
    let is_sharded = |leaf: &Leaf| matches!(leaf, Leaf::Sharded(_));
    let plain = contents::read(directory, &file, None)?;
    let placed = contents::read(directory, &file, Some(placements))?;
    let mut leaves = placed.found.iter();
    Ok(leaves.any(|(key, (_, leaf))| {
        is_sharded(leaf)
            && !plain
                .found
                .get(key)
                .is_some_and(|(_, leaf)| is_sharded(leaf))
    }))
}

/// Returns `true` for the name of a folder of a rank, `rank_0`, or of a state, `weights`.
fn is_folder_of_items(name: &str) -> bool {
    RankFile::parse_path(&format!("{name}/item")).is_some() || is_of_state(name)
}

/// Returns `true` for the path of an item with weights, or with the state of an optimizer.
fn is_of_state(path: &str) -> bool {
    const WORDS: [&str; 4] = ["model", "optim", "weight", "state"];
    path.split('/')
        .any(|part| WORDS.iter().any(|word| part.starts_with(word)))
}

/// Returns `true` if a file of torch holds parts of tensors.
fn holds_shards(directory: &CheckedDirectory, file: &RankFile) -> Result<bool, FileError> {
    match contents::read(directory, file, None) {
        Ok(flat) => {
            let mut leaves = flat.found.values();
            Ok(leaves.any(|(_, leaf)| matches!(leaf, Leaf::Sharded(_))))
        }
        // The format that it is read in will tell what is wrong with it.
        Err(FileError::File { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns `true` if the files of the first two ranks have a key in common, as no two shards of a
/// model have.
fn have_same_keys(
    directory: &CheckedDirectory,
    file: &RankFile,
    world_size: usize,
) -> Result<bool, FileError> {
    if world_size < 2 {
        return Ok(false);
    }
    let mut keys = Vec::new();
    for rank in [0, 1] {
        let name = file.name_of_rank(rank);
        if !directory.has(&name)? {
            return Ok(false);
        }
        match Header::read(&*directory.file(&name)?) {
            Ok(header) => keys.push(header.tensors.into_keys().collect::<HashSet<_>>()),
            Err(_) => return Ok(false),
        }
    }
    Ok(!keys[0].is_disjoint(&keys[1]))
}
