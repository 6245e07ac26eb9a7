//! Directories of `torch_checkpointing` 0.1: a file of `torch.save` for each item and rank, and
//! `metadata.pkl`.

use fsdp_layout::PlainValue;

use super::names::RankFile;
use super::{assemble, check_ranks, find_items};
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Assembled, Assembler};
use crate::formats::checkpoint::Format;
use crate::formats::read::OpenOptions;
use crate::limits::{MAX_PICKLE_BYTES, MAX_RANKS};
use crate::pickle::parse;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::torch::value::value_of;

/// The file that tells the items and the number of ranks.
const METADATA: &str = "metadata.pkl";

/// Returns `true` if a directory with entries of these names is one of `torch_checkpointing`.
pub(crate) fn is_there(names: &[String]) -> bool {
    names.iter().any(|name| name == METADATA)
        && names
            .iter()
            .any(|name| RankFile::parse_bare(name).is_some())
}

/// Opens such a directory.
pub(crate) fn open(location: &Location, options: OpenOptions) -> Result<Assembled, FileError> {
    let directory = CheckedDirectory::open_covered(location, options.verify)?;
    let bytes = directory.read_checked(METADATA, MAX_PICKLE_BYTES)?;
    let (world_size, listed_items) =
        read_metadata(&bytes).map_err(|source| directory.file_error(METADATA, source))?;
    let items = find_items(&directory, &RankFile::parse_bare)?;
    let missing_items = listed_items
        .iter()
        .filter(|item| !items.contains_key(*item));
    directory.check_missing(missing_items.map(|item| format!("{item}_0.pt")))?;
    for files in items.values() {
        check_ranks(&directory, files, Some(world_size))?;
    }
    let assembler = Assembler::new(Format::TorchCheckpointing, location.name(), directory);
    assemble(assembler, &items, false)
}

/// Reads the number of ranks and the names of the items.
fn read_metadata(bytes: &[u8]) -> Result<(usize, Vec<String>), FormatError> {
    let pickle = parse(bytes)?;
    let metadata = value_of(&pickle, pickle.root())?;
    let world_size = find_entry(&metadata, "world_size")
        .and_then(PlainValue::as_int)
        .and_then(|count| usize::try_from(count).ok())
        .filter(|count| (1..MAX_RANKS).contains(count))
        .ok_or_else(|| malformed("it tells no number of ranks"))?;
    let Some(PlainValue::Dict(items)) = find_entry(&metadata, "metadata") else {
        return Err(malformed("it tells no items"));
    };
    let mut names = Vec::with_capacity(items.len());
    for (item, notes) in items {
        let name = item
            .as_str()
            .ok_or_else(|| malformed("the name of an item is no text"))?;
        if let Some(PlainValue::Dict(layouts)) = find_entry(notes, "rank_to_layout_info") {
            for (rank, layout) in layouts {
                check_layout(name, rank, layout)?;
            }
        }
        names.push(name.to_owned());
    }
    Ok((world_size, names))
}

fn malformed(reason: &str) -> FormatError {
    FormatError::malformed("metadata of torch_checkpointing", reason)
}

/// Refuses an item whose layout names another file than `ITEM_RANK.pt`. A layout that names no file
/// means that one.
fn check_layout(item: &str, rank: &PlainValue, layout: &PlainValue) -> Result<(), FormatError> {
    let file_name = find_entry(layout, "file_path").and_then(PlainValue::as_str);
    match (rank.as_int(), file_name) {
        (Some(rank), Some(file_name)) if file_name != format!("{item}_{rank}.pt") => {
            let what = format!("the item `{item}` in the file `{file_name}`");
            Err(FormatError::unsupported(what))
        }
        _ => Ok(()),
    }
}

/// Returns the value of a key of a dict; `None` if it has none, or `value` is no dict.
fn find_entry<'v>(value: &'v PlainValue, key: &str) -> Option<&'v PlainValue> {
    let PlainValue::Dict(entries) = value else {
        return None;
    };
    entries
        .iter()
        .find(|(name, _)| name.as_str() == Some(key))
        .map(|(_, value)| value)
}
