//! Directories with a file of `torch.save` for each rank, which holds the rank's parts of the
//! tensors (DTensors, or FSDP1's ShardedTensors) and copies of what every rank has.
//!
//! ```text
//! model_world_size_4_rank_0.pt        verl, SkyRL; with optim_… and extra_state_…
//! pytorch_model_fsdp_0_rank0.bin      accelerate without DCP; optimizer_0_rank0.bin
//! pytorch_model_fsdp_rank0.bin        FSDP1's local and sharded state dicts
//! model_0.pt                          torch_checkpointing, with optimizer_0.pt and others: see `checkpointing`
//! ```
//!
//! The boxes of all ranks are chunks of one tensor. What several ranks hold must be the same:
//! values are compared when the checkpoint is opened, tensors before they are converted, and by
//! `verify` at its deepest level.
//!
//! Where there are several items, their keys begin with the item's name (`model.`, `optim.`). An
//! item other than a model or an optimizer (random numbers, a data loader's place) may be another
//! one on each rank: then each rank's is kept, below `ITEM.rank_R`. That of verl's `extra_state`
//! always is.

mod checkpointing;
mod contents;
mod listing;
mod metadata;
mod names;
mod placements;
mod recognize;

use std::collections::BTreeMap;

use fsdp_layout::{PathPart, PlainTensor, TensorBox};
use tracing::warn;

use self::names::{FileKind, RankFile};
use self::placements::Placements;
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Assembled, Assembler};
use crate::formats::checkpoint::Format;
use crate::formats::read::OpenOptions;
use crate::formats::structure::Structure;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::torch::flat::{FlatFile, Leaf};
use crate::torch::read::add;
use crate::torch::tensor_ref::TensorRef;
use crate::torch::value::is_same_quantizer;

pub(crate) use self::checkpointing::open as open_checkpointing;
pub(crate) use self::recognize::{find_files_of_ranks, is_bare, is_described, is_part};

/// The items, by name.
type Items = BTreeMap<String, Item>;

/// A state, such as a model, of which each rank has a part.
#[derive(Debug, Default)]
struct Item {
    /// The files, by rank. What is the same for all ranks may be with the first one alone.
    files: BTreeMap<usize, RankFile>,
    /// Where the tensors of the files belong, if they do not say it themselves.
    placements: Option<Placements>,
}

/// Returns `true` if a directory with entries of these names holds files of ranks.
pub(crate) fn is_there(names: &[String]) -> bool {
    names.iter().any(|name| RankFile::parse(name).is_some())
}

/// Opens a directory of such files.
pub(crate) fn open(location: &Location, options: OpenOptions) -> Result<Assembled, FileError> {
    let directory = CheckedDirectory::open_covered(location, options.verify)?;
    let items = find_items(&directory)?;
    for item in items.values() {
        check_ranks(&directory, &item.files)?;
    }
    let has_one_item = items.len() == 1;
    let assembler = Assembler::new(Format::RankFiles, location.name(), directory);
    assemble(assembler, &items, has_one_item)
}

/// Returns the files of all items. Two files of one item and rank are an error.
fn find_items(directory: &CheckedDirectory) -> Result<Items, FileError> {
    let mut items = Items::new();
    for name in directory.names()? {
        let Some(file) = RankFile::parse(&name) else {
            continue;
        };
        let item = items.entry(file.item.clone()).or_default();
        if let Some(earlier) = item.files.insert(file.rank, file) {
            return Err(two_saves(directory, &earlier, &name));
        }
    }
    Ok(items)
}

/// Assembles the items. Each is at the top under its name; if `has_one_item`, the keys of the only
/// item are at the top themselves.
fn assemble(
    mut assembler: Assembler,
    items: &Items,
    has_one_item: bool,
) -> Result<Assembled, FileError> {
    let mut root = Vec::new();
    for (name, item) in items {
        let structure = add_item(&mut assembler, (!has_one_item).then_some(name), item)?;
        if has_one_item {
            return Ok(assembler.finish(Some(structure)));
        }
        root.push((name.as_str().into(), structure));
    }
    Ok(assembler.finish(Some(Structure::Dict(root))))
}

/// Adds the files of one item, and returns its containers.
fn add_item(
    assembler: &mut Assembler,
    name: Option<&str>,
    item: &Item,
) -> Result<Structure, FileError> {
    let is_kept_by_rank = is_kept_by_rank(assembler.directory(), name, item)?;
    // Each file is read for itself. Parts of tensors become chunks, and copies are compared.
    let mut structures = Vec::new();
    let mut world_size = 0;
    for (rank, file) in &item.files {
        let flat = contents::read(assembler.directory(), file, item.placements.as_ref())?;
        let rank_key = is_kept_by_rank.then(|| format!("rank_{rank}"));
        let prefix_keys = name.map(str::to_owned).into_iter().chain(rank_key);
        let prefix: Vec<PathPart> = prefix_keys.map(PathPart::Key).collect();
        add(assembler, &flat, &prefix)?;
        for (_, leaf) in flat.found.values() {
            if let Leaf::Sharded(sharded) = leaf {
                world_size = sharded.ranks.max(world_size);
            }
        }
        // The containers of what all ranks have are those of the first one.
        if is_kept_by_rank || structures.is_empty() {
            structures.push((
                format!("rank_{rank}").into(),
                flat.structure.with_prefix(&prefix),
            ));
        }
    }
    // A mesh tells how many ranks there were, where the names do not.
    check_complete(assembler.directory(), &item.files, world_size)?;
    if is_kept_by_rank {
        return Ok(Structure::Dict(structures));
    }
    let (_, structure) = structures.pop().expect("an item has a file");
    Ok(structure)
}

/// Returns `true` if each rank's state of an item is kept by itself. That is so if it differs from
/// the first one's, unless it is a model or an optimizer that tells where its tensors belong: these
/// must be the same.
///
/// Logs a warning where the ranks may have parts of the same tensors, and nothing tells which.
fn is_kept_by_rank(
    directory: &CheckedDirectory,
    name: Option<&str>,
    item: &Item,
) -> Result<bool, FileError> {
    let Some(name) = name else {
        return Ok(false);
    };
    if name == names::EXTRA_STATE {
        return Ok(true);
    }
    let is_state = name.starts_with("model") || name.starts_with("optim");
    if is_state && !is_without_places(item) {
        return Ok(false);
    }
    let differs = differs_by_rank(directory, item)?;
    if differs && is_without_places(item) {
        let path = directory.path().display().to_string();
        warn!(%path, item = name, ranks = item.files.len(), "nothing tells how the tensors of the ranks' safetensors files were cut (the item was saved without a resharder): each rank's are kept by themselves");
    }
    Ok(differs)
}

/// Returns `true` if the tensors of an item are plain ones, and nothing tells where they belong.
fn is_without_places(item: &Item) -> bool {
    let mut files = item.files.values();
    let placements = item.placements.as_ref();
    files.any(|file| file.kind == FileKind::Safetensors)
        && placements.is_none_or(|placements| !placements.are_known())
}

/// Returns `true` if an item without parts of tensors holds other keys, values or tensors on some
/// rank.
fn differs_by_rank(directory: &CheckedDirectory, item: &Item) -> Result<bool, FileError> {
    // There is nothing to compare it with, so it is not read here.
    if item.files.len() < 2 {
        return Ok(false);
    }
    let mut first_flat: Option<FlatFile> = None;
    let mut differs = false;
    for file in item.files.values() {
        let flat = contents::read(directory, file, item.placements.as_ref())?;
        let mut leaves = flat.found.values();
        if leaves.any(|(_, leaf)| matches!(leaf, Leaf::Sharded(_))) {
            return Ok(false);
        }
        match &first_flat {
            None => first_flat = Some(flat),
            Some(first_flat) => differs = differs || do_differ(directory, first_flat, &flat)?,
        }
    }
    Ok(differs)
}

/// Returns `true` if two files hold other keys, values or tensors.
fn do_differ(
    directory: &CheckedDirectory,
    first: &FlatFile,
    second: &FlatFile,
) -> Result<bool, FileError> {
    if first.found.len() != second.found.len() {
        return Ok(true);
    }
    for (key, (_, leaf)) in &second.found {
        let is_same = match (first.found.get(key), leaf) {
            (Some((_, Leaf::Value(first))), Leaf::Value(second)) => first.is_same(second),
            (
                Some((_, Leaf::Tensor(first_tensor, quantizer))),
                Leaf::Tensor(second_tensor, second_quantizer),
            ) => {
                (first_tensor.dtype, &first_tensor.shape)
                    == (second_tensor.dtype, &second_tensor.shape)
                    && is_same_quantizer(quantizer.as_ref(), second_quantizer.as_ref())
                    && read_elements(directory, first, key, first_tensor)?
                        == read_elements(directory, second, key, second_tensor)?
            }
            _ => false,
        };
        if !is_same {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Reads the elements of a tensor with this key: of a large one the first, of each dimension some.
fn read_elements(
    directory: &CheckedDirectory,
    flat: &FlatFile,
    key: &str,
    tensor: &TensorRef,
) -> Result<PlainTensor, FileError> {
    let mut part = tensor.clone();
    for dim in 0..part.shape.len() {
        let bytes =
            |shape: &[usize]| TensorBox::whole(shape).numel() as u64 * tensor.dtype.size_in_bytes();
        while part.shape[dim] > 1 && bytes(&part.shape) > SMALL_TENSOR_BYTES {
            part.shape[dim] /= 2;
        }
    }
    part.layout.bounds = TensorBox::whole(&part.shape);
    let file = directory.file(&flat.name)?;
    flat.load(&*file, &part)
        .map_err(|source| flat.error(source.of_key(key)))
}

/// The most bytes of a tensor that are compared when a checkpoint is opened. The rest of a larger
/// one is compared before a conversion. The state of a generator of random numbers takes a few KiB.
const SMALL_TENSOR_BYTES: u64 = 1 << 20;

/// Checks that all ranks of an item are there, and that no file is of another number of ranks.
fn check_ranks(
    directory: &CheckedDirectory,
    files: &BTreeMap<usize, RankFile>,
) -> Result<(), FileError> {
    let (_, first_file) = files.first_key_value().expect("an item has a file");
    let (last_rank, last_file) = files.last_key_value().expect("an item has a file");
    if let Some(other_file) = files
        .values()
        .find(|file| file.world_size != first_file.world_size)
    {
        return Err(two_saves(directory, first_file, &other_file.name));
    }
    let world_size = first_file.world_size.unwrap_or(last_rank + 1);
    if *last_rank >= world_size {
        return Err(two_saves(directory, first_file, &last_file.name));
    }
    check_complete(directory, files, world_size)
}

/// Checks that there is a file of each of `world_size` ranks; the error names those that are
/// missing.
fn check_complete(
    directory: &CheckedDirectory,
    files: &BTreeMap<usize, RankFile>,
    world_size: usize,
) -> Result<(), FileError> {
    let (_, first_file) = files.first_key_value().expect("an item has a file");
    let missing = (0..world_size)
        .filter(|rank| !files.contains_key(rank))
        .map(|rank| first_file.name_of_rank(rank));
    directory.check_missing(missing)
}

/// Returns the error of two files that are not of one save.
fn two_saves(directory: &CheckedDirectory, first: &RankFile, second: &str) -> FileError {
    let reason = format!("it is of another save than `{}`", first.name);
    directory.file_error(second, FormatError::malformed("checkpoint", reason))
}
