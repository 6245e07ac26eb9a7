//! `fsdp diff`: the differences of two checkpoints of any formats.

use anyhow::Result;
use clap::Args;
use fsdp_formats::Location;
use fsdp_formats::checkpoint::{self, Checkpoint};
use fsdp_formats::reader::OpenOptions;
use fsdp_tools::convert::View;
use fsdp_tools::diff::{self, Difference, Tolerance};
use fsdp_tools::map::Mapped;
use serde::Serialize;

use super::failure::{Different, UsageError};
use super::heatmap;
use super::keys::Keys;
use super::map::MapArguments;
use super::output;
use super::text::escaped;
use super::work::Threads;

use crate::natural;

/// Options of `fsdp diff`.
#[derive(Debug, Args)]
pub(crate) struct DiffArguments {
    /// A checkpoint of any format
    #[arg(value_name = "A")]
    first: Location,
    /// Another one, of any format
    #[arg(value_name = "B")]
    second: Location,
    /// Largest absolute difference of two numbers that counts as equal [default: bit for bit]
    #[arg(long, value_name = "X", default_value_t = 0.0, hide_default_value = true,
          value_parser = tolerance)]
    tolerance: f64,
    /// Read all data, also where both checkpoints have recorded digests; a tolerance does that too
    #[arg(long)]
    full: bool,
    /// Only keys that this glob matches, after --map; may be given more than once
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
    /// No keys that this glob matches, after --map; may be given more than once
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
    #[command(flatten)]
    map: MapArguments,
    #[command(flatten)]
    threads: Threads,
    /// Show where in each tensor the elements differ, and by how much; reads all data
    #[arg(long, conflicts_with = "json")]
    heatmap: bool,
    /// One JSON object on stdout
    #[arg(long, env = "FSDP_JSON")]
    json: bool,
}

/// Parses the option `--tolerance`.
fn tolerance(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "it is not a number".to_owned())?;
    if value.is_finite() && value >= 0.0 {
        Ok(value)
    } else {
        Err("a tolerance is finite and not negative".to_owned())
    }
}

const SCHEMA: u32 = 1;

#[derive(Debug, Serialize)]
struct Comparison {
    schema: u32,
    first: String,
    second: String,
    tolerance: f64,
    /// `digests`, if they told all and no data was read; `elements` otherwise.
    by: &'static str,
    equal: bool,
    /// The number of keys of either checkpoint.
    compared: usize,
    differences: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    name: String,
    kind: &'static str,
    /// A description for people.
    what: String,
    /// The number of elements that differ.
    elements: Option<u64>,
    /// Their largest absolute difference; `null` if it is not a number.
    max_abs: Option<f64>,
}

/// Compares two checkpoints: `fsdp diff`.
///
/// # Errors
/// They differ, or one cannot be read.
pub(crate) fn run(arguments: &DiffArguments) -> Result<()> {
    arguments.map.check_set(None)?;
    let first = checkpoint::open(&arguments.first, OpenOptions { verify: true })?;
    let second = checkpoint::open(&arguments.second, OpenOptions { verify: true })?;
    // The map is for the first: its keys become those of the second.
    let map = arguments.map.read(&[&arguments.first])?;
    let mapped = map.map(|map| Mapped::new(&*first, &map)).transpose()?;
    let first: &dyn Checkpoint = mapped.as_ref().map_or(&*first, |mapped| mapped);
    let keys = Keys::new(&arguments.include, &arguments.exclude, &[], None)?;
    let names = [first, &*second].map(|of| of.metadata().entries.keys().map(String::as_str));
    let is_whole = arguments.include.is_empty() && arguments.exclude.is_empty();
    let select = |of| {
        if is_whole {
            Ok(None)
        } else {
            View::new(of, |key| keys.rename(key), None).map(Some)
        }
    };
    let (first_view, second_view) = (select(first)?, select(&*second)?);
    let first: &dyn Checkpoint = first_view.as_ref().map_or(first, |view| view);
    let second: &dyn Checkpoint = second_view.as_ref().map_or(&*second, |view| view);
    if first.metadata().entries.is_empty() && second.metadata().entries.is_empty() && !is_whole {
        return Err(UsageError::NothingSelected.into());
    }
    keys.check_include(names.into_iter().flatten())?;
    let mut differences = Vec::new();
    let tolerance = Tolerance {
        absolute: arguments.tolerance,
        relative: 0.0,
    };
    let threads = arguments.threads.count();
    let mut add = |name: &str, difference| differences.push(Row::new(name, &difference));
    let reads = arguments.full || arguments.heatmap || tolerance != Tolerance::default();
    let by_digests = !reads && diff::diff_digests(first, second, &mut add)?;
    if !by_digests {
        diff::diff_on_threads(first, second, tolerance, threads, &mut add)?;
    }
    differences.sort_by(|a, b| natural::compare(&a.name, &b.name));
    let (keys, others) = (&first.metadata().entries, &second.metadata().entries);
    let compared = keys.len() + others.keys().filter(|key| !keys.contains_key(*key)).count();
    let comparison = Comparison {
        schema: SCHEMA,
        first: arguments.first.to_string(),
        second: arguments.second.to_string(),
        tolerance: arguments.tolerance,
        by: if by_digests { "digests" } else { "elements" },
        equal: differences.is_empty(),
        compared,
        differences,
    };
    output::read_or_not(if arguments.json {
        output::json(&comparison)
    } else {
        list(&comparison.differences, arguments.heatmap, first, second)
    })?;
    if by_digests {
        output::talk(
            "compared by the digests that both have recorded, no data was read; `--full` reads it",
        );
    }
    if comparison.equal {
        output::talk(&format!("equal: {compared} tensors and values"));
        return Ok(());
    }
    let Comparison { first, second, .. } = &comparison;
    let count = comparison.differences.len();
    Err(Different {
        first: first.clone(),
        second: second.clone(),
        count,
        of: compared,
    }
    .into())
}

/// Prints the differences, and with `pictures` where in the tensors they are.
fn list(
    differences: &[Row],
    pictures: bool,
    first: &dyn Checkpoint,
    second: &dyn Checkpoint,
) -> Result<()> {
    for row in differences {
        output::data(&format!("{}: {}", escaped(&row.name), escaped(&row.what)))?;
        if pictures && row.elements.is_some() {
            let picture = heatmap::lines(first, second, &row.name)?;
            picture
                .iter()
                .try_for_each(|line| output::data(&format!("  {line}")))?;
        }
    }
    if pictures && !differences.is_empty() {
        output::talk(heatmap::LEGEND);
    }
    Ok(())
}

impl Row {
    /// Describes a difference, for the text and for `--json`.
    fn new(name: &str, difference: &Difference) -> Self {
        let (mut elements, mut max_abs) = (None, None);
        let (kind, what) = match difference {
            Difference::OnlyInFirst => ("only_in_first", "only in the first".to_owned()),
            Difference::OnlyInSecond => ("only_in_second", "only in the second".to_owned()),
            Difference::Kind => ("kind", "a tensor in one, a value in the other".to_owned()),
            Difference::DType { first, second } => ("dtype", format!("dtype {first} and {second}")),
            Difference::Shape { first, second } => {
                ("shape", format!("shape {first:?} and {second:?}"))
            }
            Difference::Digest => ("digest", "other digests".to_owned()),
            Difference::Elements {
                count,
                first,
                max_abs: max,
            } => {
                (elements, max_abs) = (Some(*count), *max);
                let by = max.map_or_else(String::new, |max| format!(", by at most {max:e}"));
                (
                    "elements",
                    format!("{count} elements differ{by}, the first at position {first}"),
                )
            }
            Difference::Container { first, second } => {
                ("container", format!("{first} and {second}"))
            }
            Difference::Value { first, second } => ("value", format!("{first} and {second}")),
            _ => ("other", format!("{difference:?}")),
        };
        Row {
            name: name.to_owned(),
            kind,
            what,
            elements,
            max_abs,
        }
    }
}
