//! `fsdp diff`: the differences of two checkpoints of any formats.

use anyhow::{Result, ensure};
use clap::Args;
use fsdp_formats::Location;
use fsdp_formats::checkpoint::{self, Checkpoint};
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::count_text;
use fsdp_tools::convert::View;
use fsdp_tools::diff::{self, DiffOptions, Difference, Tolerance};
use fsdp_tools::map::Mapped;
use serde::Serialize;
use serde_json::json;

use crate::failure::{difference_error, nothing_selected_error};
use crate::keys::KeyFilter;
use crate::map::MapArguments;
use crate::natural;
use crate::parsers::parse_not_negative;
use crate::text::{escaped, or_word};
use crate::work::Threads;
use crate::{heatmap, output};

/// Options of `fsdp diff`.
#[derive(Debug, Args)]
pub(crate) struct DiffArguments {
    /// A checkpoint of any format
    #[arg(value_name = "A")]
    first: Location,
    /// Another one, of any format
    #[arg(value_name = "B")]
    second: Location,
    /// Largest absolute difference of two numbers that counts as equal [default: 0, bit for bit]
    #[arg(long, value_name = "X", default_value_t = 0.0, hide_default_value = true,
          value_parser = parse_not_negative, allow_negative_numbers = true)]
    tolerance: f64,
    /// Read all data, also where both checkpoints have recorded digests; a tolerance does that too
    #[arg(long)]
    full: bool,
    /// The keys that are compared, after `--map`.
    #[command(flatten)]
    filter: KeyFilter,
    #[command(flatten)]
    map: MapArguments,
    #[command(flatten)]
    threads: Threads,
    /// Show where in each tensor the elements differ, and by how much; reads all data
    #[arg(long, conflicts_with = "json")]
    heatmap: bool,
    /// One JSON object on stdout
    #[arg(long)]
    json: bool,
}

const SCHEMA: u32 = 1;

#[derive(Debug, Serialize)]
struct DifferenceRow {
    name: String,
    kind: &'static str,
    /// A description for people.
    #[serde(rename = "what")]
    description: String,
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
    let first_checkpoint = checkpoint::open(&arguments.first, OpenOptions { verify: true })?;
    let second_checkpoint = checkpoint::open(&arguments.second, OpenOptions { verify: true })?;
    // The map is for the first: its keys become those of the second.
    let map = arguments.map.read_map(&[&arguments.first])?;
    let mapped;
    let mut first: &dyn Checkpoint = &*first_checkpoint;
    if let Some(map) = map {
        mapped = Mapped::new(first, &map)?;
        first = &mapped;
    }
    let mut second: &dyn Checkpoint = &*second_checkpoint;
    let keys = arguments.filter.keys(&[], None)?;
    // Without globs all keys are compared, and there is no need for views that leave none out.
    let views;
    if keys.has_globs() {
        let first_keys = first.metadata().entries.keys();
        let all_keys = first_keys.chain(second.metadata().entries.keys());
        views = [
            View::new(first, |key| keys.rename(key), None)?,
            View::new(second, |key| keys.rename(key), None)?,
        ];
        ensure!(
            views.iter().any(|view| !view.metadata().entries.is_empty()),
            nothing_selected_error()
        );
        keys.check_globs(all_keys.map(String::as_str))?;
        [first, second] = views.each_ref().map(|view| view as &dyn Checkpoint);
    }
    let mut differences = Vec::new();
    // Digests tell only whether bits are equal: not by how much they differ, nor where.
    let reads_data = arguments.full || arguments.heatmap || arguments.tolerance > 0.0;
    let is_by_digests =
        !reads_data && diff::diff_digests(first, second, &mut make_collector(&mut differences))?;
    if !is_by_digests {
        let options = DiffOptions {
            tolerance: Tolerance {
                absolute: arguments.tolerance,
                relative: 0.0,
            },
            threads: Some(arguments.threads.count()),
        };
        diff::diff(
            first,
            second,
            options,
            &mut make_collector(&mut differences),
        )?;
    }
    differences.sort_by(|a, b| natural::compare(&a.name, &b.name));
    // Keys of both count once.
    let first_keys = &first.metadata().entries;
    let second_keys = second.metadata().entries.keys();
    let only_in_second = second_keys.filter(|key| !first_keys.contains_key(*key));
    let compared = first_keys.len() + only_in_second.count();
    let printed = if arguments.json {
        output::print_json(&json!({
            "schema": SCHEMA,
            "first": arguments.first.to_string(),
            "second": arguments.second.to_string(),
            "tolerance": arguments.tolerance,
            // The digests, if they told all and no data was read.
            "by": if is_by_digests { "digests" } else { "elements" },
            "equal": differences.is_empty(),
            "compared": compared,
            "differences": differences,
        }))
    } else {
        print_differences(&differences, arguments.heatmap, first, second)
    };
    if is_by_digests {
        output::print_message(
            "compared by the digests that both have recorded, no data was read; `--full` reads it",
        );
    }
    // The verdict is for people; scripts look at the exit code.
    if differences.is_empty() {
        let compared = count_text(compared, "tensor or value", "tensors and values");
        output::print_message(&format!("equal: {compared}"));
        return output::outcome_after_report(printed, Ok(()));
    }
    let is_compared = |row: &&DifferenceRow| {
        [first, second].map(|side| side.metadata().entries.contains_key(&row.name)) != [false; 2]
    };
    let differing = differences.iter().filter(is_compared).count();
    let mut message = format!(
        "`{}` and `{}` differ in {differing} of {compared} tensors and values",
        arguments.first, arguments.second,
    );
    let others = differences.len() - differing;
    if others > 0 {
        let others = count_text(others, "container or part", "containers and parts");
        message.push_str(&format!(", and in {others} of values"));
    }
    output::outcome_after_report(printed, Err(difference_error(message).into()))
}

/// Returns a function that describes a difference and adds it to `rows`.
fn make_collector(rows: &mut Vec<DifferenceRow>) -> impl FnMut(&str, Difference) {
    |name, difference| rows.push(DifferenceRow::new(name, &difference))
}

/// Prints the differences, and if `with_heatmaps`, where in the tensors they are.
fn print_differences(
    differences: &[DifferenceRow],
    with_heatmaps: bool,
    first: &dyn Checkpoint,
    second: &dyn Checkpoint,
) -> Result<()> {
    for row in differences {
        output::print_line(&format!(
            "{}: {}",
            escaped(&row.name),
            escaped(&row.description)
        ))?;
        // Only where elements differ is there something to draw: other shapes have no common grid.
        if with_heatmaps && row.elements.is_some() {
            for line in heatmap::heatmap_lines(first, second, &row.name)? {
                output::print_line(&format!("  {line}"))?;
            }
        }
    }
    if with_heatmaps && !differences.is_empty() {
        output::print_message(heatmap::LEGEND);
    }
    Ok(())
}

impl DifferenceRow {
    /// Describes a difference, for the text and for `--json`.
    fn new(name: &str, difference: &Difference) -> Self {
        let mut elements = None;
        let mut max_abs = None;
        let (kind, description) = match difference {
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
                elements = Some(*count);
                max_abs = *max;
                let extent = or_word(max.map(|max| format!(", by at most {max:e}")), "");
                let elements = count_text(*count, "element differs", "elements differ");
                let description = format!("{elements}{extent}, the first at position {first}");
                ("elements", description)
            }
            Difference::Container { first, second } => {
                ("container", format!("{first} and {second}"))
            }
            Difference::Value { first, second } => ("value", format!("{first} and {second}")),
            _ => ("other", format!("{difference:?}")),
        };
        DifferenceRow {
            name: name.to_owned(),
            kind,
            description,
            elements,
            max_abs,
        }
    }
}
