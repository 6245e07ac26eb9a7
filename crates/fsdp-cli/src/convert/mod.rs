//! `fsdp convert` and `fsdp reshard`: from any format to any, in bounded memory.

mod arguments;
mod merge;
mod slices;
mod write;

use anyhow::Result;
use fsdp_formats::Location;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_tools::convert::{OutputFormat, View};
use fsdp_tools::map::Mapped;

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
    arguments.check()?;
    let destination = Destination::of(
        &arguments.destination,
        &arguments.target,
        &arguments.writing,
    )?;
    let keys = Keys::new(
        &arguments.include,
        &arguments.exclude,
        &arguments.rename,
        arguments.prefix.as_deref(),
    )?;
    let source = open(&arguments.source, &destination)?;
    keys.check(source.metadata())?;
    let view = View::new(&*source, |key| keys.rename(key), arguments.cast())?;
    let places: Vec<&Location> = arguments
        .target
        .with()?
        .into_iter()
        .chain([&arguments.source])
        .collect();
    let map = arguments.map.read(&places)?;
    let mapped = map.map(|map| Mapped::new(&view, &map)).transpose()?;
    if let Some(unmatched) = mapped
        .as_ref()
        .map(Mapped::unmatched)
        .filter(|unmatched| !unmatched.is_empty())
    {
        let keys = count(unmatched.len(), "key matches", "keys match");
        output::talk(&format!("{keys} no rule of the map, and stay as they are:"));
        output::talk_keys(unmatched);
    }
    let converted: &dyn Checkpoint = mapped.as_ref().map_or(&view, |mapped| mapped);
    let plan = arguments.plan(converted.metadata(), &places)?;
    write(converted, &destination.with_plan(plan))
}

/// Writes a checkpoint for another number of ranks: `fsdp reshard`.
///
/// # Errors
/// The same as [`run`].
pub(crate) fn reshard(arguments: &ReshardArguments) -> Result<()> {
    let target = OutputFormat::Dcp {
        ranks: arguments.world_size,
    };
    let destination = Destination::new(&arguments.destination, target, "dcp", &arguments.writing);
    let source = open(&arguments.source, &destination)?;
    write(&*source, &destination)
}
