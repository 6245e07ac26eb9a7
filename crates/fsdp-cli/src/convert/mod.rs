//! `fsdp convert` and `fsdp reshard`: from any format to any, in bounded memory.

mod arguments;
mod merge;
mod write;

use anyhow::Result;
use fsdp_dcp::Location;
use fsdp_dcp::convert::{OutputFormat, View};
use fsdp_dcp::map::Mapped;

use self::write::{Destination, open, write};
use super::keys::Keys;
use super::output;
use super::text::count;

pub(crate) use self::arguments::{ConvertArguments, MergeArguments, ReshardArguments};
pub(crate) use self::merge::merge;

/// Converts a checkpoint: `fsdp convert`.
///
/// # Errors
/// The source cannot be read, or the destination not be written: then there is none.
pub(crate) fn run(arguments: &ConvertArguments) -> Result<()> {
    let destination = Destination::of(&arguments.destination, &arguments.target, &arguments.writing)?;
    let keys = Keys::new(&arguments.include, &arguments.exclude, &arguments.rename, arguments.prefix.as_deref())?;
    let source = open(&arguments.source, &destination)?;
    keys.check(source.metadata())?;
    let view = View::new(&*source, |key| keys.rename(key), arguments.cast())?;
    let places: Vec<&Location> = arguments.target.with()?.into_iter().chain([&arguments.source]).collect();
    let Some(map) = arguments.map.read(&places)? else { return write(&view, &destination) };
    let mapped = Mapped::new(&view, &map)?;
    let unmatched = mapped.unmatched();
    if !unmatched.is_empty() {
        let keys = count(unmatched.len(), "key matches", "keys match");
        output::talk(&format!("{keys} no rule of the map, and stay as they are:"));
        output::talk_keys(unmatched);
    }
    write(&mapped, &destination)
}

/// Writes a checkpoint for another number of ranks: `fsdp reshard`.
///
/// # Errors
/// The same as [`run`].
pub(crate) fn reshard(arguments: &ReshardArguments) -> Result<()> {
    let target = OutputFormat::Dcp { ranks: arguments.world_size };
    let destination = Destination::new(&arguments.destination, target, "dcp", &arguments.writing);
    let source = open(&arguments.source, &destination)?;
    write(&*source, &destination)
}
