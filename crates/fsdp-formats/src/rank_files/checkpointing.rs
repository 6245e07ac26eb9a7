//! Directories of `torch_checkpointing` 0.1: a file of `torch.save` for each item and rank, and
//! `metadata.pkl`.

use fsdp_layout::PlainValue;

use super::names::RankFile;
use super::{assemble, check_ranks, items};
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Assembled, Assembler};
use crate::formats::checkpoint::Format;
use crate::formats::read::OpenOptions;
use crate::limits::MAX_PICKLE_BYTES;
use crate::pickle::parse;
use crate::storage::backend::Links;
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
    let directory = CheckedDirectory::open(location, options.verify, Links::Follow)?;
    directory.check_covered()?;
    let bytes = directory.read_small(METADATA, MAX_PICKLE_BYTES)?;
    let error = |source| directory.file_error(METADATA, source);
    let pickle = parse(&bytes).map_err(|source| error(source.into()))?;
    let metadata = value_of(&pickle, pickle.root()).map_err(error)?;
    let malformed = |reason: &str| {
        error(FormatError::Malformed {
            what: "metadata of torch_checkpointing",
            reason: reason.to_owned(),
        })
    };
    let world_size = entry(&metadata, "world_size").and_then(PlainValue::as_int);
    let world_size = world_size
        .and_then(|count| usize::try_from(count).ok())
        .filter(|count| (1..1 << 20).contains(count));
    let world_size = world_size.ok_or_else(|| malformed("it tells no number of ranks"))?;
    let items = items(&directory, &RankFile::parse_bare)?;
    let Some(PlainValue::Dict(listed)) = entry(&metadata, "metadata") else {
        return Err(malformed("it tells no items"));
    };
    for (item, notes) in listed {
        let item = item
            .as_str()
            .ok_or_else(|| malformed("the name of an item is no text"))?;
        if let Some(PlainValue::Dict(layouts)) = entry(notes, "rank_to_layout_info") {
            for (rank, layout) in layouts {
                check_layout(item, rank, layout).map_err(error)?;
            }
        }
        if !items.contains_key(item) {
            return Err(FileError::MissingFiles {
                path: location.name().to_owned(),
                files: vec![format!("{item}_0.pt")],
            });
        }
    }
    for files in items.values() {
        check_ranks(&directory, files, Some(world_size))?;
    }
    assemble(
        Assembler::new(Format::TorchCheckpointing, location.name(), directory),
        &items,
        false,
    )
}

/// Refuses an item whose layout names another file than `ITEM_RANK.pt`. A layout that names no file
/// means that one.
fn check_layout(item: &str, rank: &PlainValue, layout: &PlainValue) -> Result<(), FormatError> {
    let (Some(rank), Some(path)) = (
        rank.as_int(),
        entry(layout, "file_path").and_then(PlainValue::as_str),
    ) else {
        return Ok(());
    };
    if path != format!("{item}_{rank}.pt") {
        return Err(FormatError::Unsupported {
            what: format!("the item `{item}` in the file `{path}`"),
        });
    }
    Ok(())
}

/// Returns the value of a key of a dict.
fn entry<'v>(value: &'v PlainValue, key: &str) -> Option<&'v PlainValue> {
    let PlainValue::Dict(entries) = value else {
        return None;
    };
    entries
        .iter()
        .find(|(name, _)| name.as_str() == Some(key))
        .map(|(_, value)| value)
}
