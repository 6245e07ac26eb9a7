//! Writes a checkpoint to the destination on the command line, and reports what was written.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use fsdp_formats::checkpoint::{self, Checkpoint};
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::storage::{self, Durable};
use fsdp_formats::{FileError, Location};
use fsdp_layout::{ErrorKind, Failure as _};
use fsdp_tools::convert::{ConvertOptions, Converted, OutputFormat, convert};
use fsdp_tools::tensor_parallel::TensorParallelPlan;
use serde::Serialize;

use super::arguments::{TargetArguments, WriteArguments};
use super::slices::{CutTensor, cut_tensors, most_bytes};
use crate::failure::{ConversionStopped, UsageError};
use crate::inspect;
use crate::natural;
use crate::output;
use crate::progress::Progress;
use crate::stop::StopRequest;
use crate::text::{count, escaped, iec};

const SCHEMA: u32 = 1;

/// The largest piece of a tensor that a thread reads at a time. A thread holds two pieces: one as
/// it was read, and one as it will be written.
const PIECE: u64 = 16 << 20;
/// The memory that reading and writing take besides the pieces.
const AROUND: u64 = 2 << 20;

/// The place to write to, and the options of writing.
pub(super) struct Destination<'a> {
    path: &'a Location,
    target: OutputFormat,
    /// The name of the format on the command line.
    name: &'static str,
    overwrite: bool,
    dry_run: bool,
    drop_opaque: bool,
    /// The directory whose configuration and tokenizer are copied.
    with: Option<&'a Location>,
    /// The parts that tensor-parallel ranks get.
    plan: Option<TensorParallelPlan>,
    threads: usize,
    json: bool,
    progress: bool,
}

/// The report of what was, or would be, written.
#[derive(Debug, Serialize)]
struct Written {
    schema: u32,
    source: String,
    destination: String,
    to: &'static str,
    dry_run: bool,
    tensors: usize,
    values: usize,
    /// The bytes of all tensors' elements.
    bytes: u64,
    /// The approximate upper limit of the memory used.
    memory: u64,
    /// The keys of values that the format cannot hold, and the file that holds them.
    aside: Vec<String>,
    aside_file: Option<String>,
    /// The keys of quantized tensors, which are written as integers. `KEY.quantizer` describes
    /// their meaning.
    quantized: Vec<String>,
    /// The containers that the format cannot express: keys that are not text, tuples, empty dicts.
    containers: Vec<String>,
    /// The files beside the source's own that are copied.
    copied: Vec<String>,
    /// The files and directories beside the source's own that are not copied.
    left_behind: Vec<String>,
    /// The keys of the notes in the headers of safetensors files that the format cannot hold.
    notes_left_out: Vec<String>,
    /// The keys of opaque values that are left out.
    dropped: Vec<String>,
    /// The number of tensor-parallel ranks, and the most bytes of tensors that one of them gets.
    #[serde(skip_serializing_if = "Option::is_none")]
    tensor_parallel: Option<Ranks>,
}

/// The parts of tensor-parallel ranks.
#[derive(Debug, Serialize)]
struct Ranks {
    ranks: usize,
    most_bytes: u64,
    /// The parts that each gets of each tensor; only for `--dry-run`.
    tensors: Vec<CutTensor>,
}

impl Ranks {
    fn new(plan: &TensorParallelPlan, source: &dyn Checkpoint, is_planned: bool) -> Self {
        let tensors = if is_planned {
            cut_tensors(plan)
        } else {
            Vec::new()
        };
        Ranks {
            ranks: plan.ranks(),
            most_bytes: most_bytes(plan, source.metadata()),
            tensors,
        }
    }

    fn text(&self) -> String {
        format!(
            " in parts for {} ranks of at most {}",
            self.ranks,
            iec(self.most_bytes)
        )
    }
}

impl<'a> Destination<'a> {
    /// Makes the destination of a command that writes any format.
    pub(super) fn of(
        path: &'a Location,
        target: &'a TargetArguments,
        writing: &WriteArguments,
    ) -> Result<Self> {
        let destination = Destination::new(path, target.format()?, target.to.name(), writing);
        Ok(Destination {
            drop_opaque: target.drop_opaque,
            with: target.with()?,
            ..destination
        })
    }

    /// Adds the parts that tensor-parallel ranks get.
    pub(super) fn with_plan(self, plan: Option<TensorParallelPlan>) -> Self {
        Destination { plan, ..self }
    }

    /// Creates a destination from the options that all writing commands have.
    pub(super) fn new(
        path: &'a Location,
        target: OutputFormat,
        name: &'static str,
        writing: &WriteArguments,
    ) -> Self {
        Destination {
            path,
            target,
            name,
            overwrite: writing.overwrite,
            dry_run: writing.dry_run,
            drop_opaque: false,
            with: None,
            plan: None,
            threads: writing.work.threads.count(),
            json: writing.work.json,
            progress: writing.work.shows_progress(),
        }
    }
}

/// Opens the source, and checks that the destination does not overlap it, and is free or may be
/// replaced.
pub(super) fn open(
    source: &Location,
    destination: &Destination<'_>,
) -> Result<Box<dyn Checkpoint>> {
    let opened = checkpoint::open(source, OpenOptions { verify: true })?;
    let to = destination.path;
    let taken = to.exists()?;
    if overlap(source, to) {
        let (source, destination) = (source.to_string(), to.to_string());
        return Err(UsageError::Overlap {
            source_path: source,
            destination,
        }
        .into());
    }
    if writes_file(&destination.target) && to.to_string().ends_with('/') {
        return Err(UsageError::NotAFile {
            path: to.to_string(),
            to: destination.name,
        }
        .into());
    }
    if taken && !destination.overwrite {
        return Err(UsageError::Exists {
            path: to.to_string(),
        }
        .into());
    }
    if taken {
        check_replaceable(destination)?;
    }
    Ok(opened)
}

/// Checks that `--overwrite` may replace what is there, so that a mistake does not delete other
/// files. A file may be replaced if it is empty or of a known format, a directory if it is empty or
/// holds nothing but a checkpoint.
fn check_replaceable(destination: &Destination<'_>) -> Result<()> {
    let to = destination.path;
    let is_file = match to.local() {
        Some(to) => to.is_file(),
        None => to.is_file()?,
    };
    if is_file != writes_file(&destination.target) {
        return Err(UsageError::NotReplaceable {
            path: to.to_string(),
        }
        .into());
    }
    if is_file {
        return match checkpoint::open(to, OpenOptions { verify: false })
            .map_err(|error| error.kind())
        {
            // The file is not empty and of no known format, so it may be something else than a
            // checkpoint.
            Err(ErrorKind::UnsupportedVersion) if to.read_file(0).is_err() => {
                Err(UsageError::NotReplaceable {
                    path: to.to_string(),
                }
                .into())
            }
            _ => Ok(()),
        };
    }
    // In an object store only single objects can be replaced. For all else the conversion returns
    // an error.
    if to.local().is_none() {
        return Ok(());
    }
    match checkpoint::check_replaceable(to) {
        Err(FileError::NotReplaceable { .. }) => Err(UsageError::NotReplaceable {
            path: to.to_string(),
        }
        .into()),
        checked => Ok(checked?),
    }
}

/// Returns `true` for a format that is one file.
const fn writes_file(target: &OutputFormat) -> bool {
    matches!(target, OutputFormat::SafetensorsFile | OutputFormat::Torch)
}

/// Returns `true` if one place is the other, or is in it.
fn overlap(source: &Location, destination: &Location) -> bool {
    is_within(source, destination) || is_within(destination, source)
}

/// Returns `true` if a place is another one, or is in it.
fn is_within(inner: &Location, outer: &Location) -> bool {
    match (inner.local(), outer.local()) {
        (Some(inner), Some(outer)) => resolved(inner)
            .zip(resolved(outer))
            .is_some_and(|(inner, outer)| inner.starts_with(outer)),
        (None, None) => inner.name().starts_with(outer.name()),
        _ => false,
    }
}

/// Returns the absolute path of a place. If the place does not exist yet, the closest directory
/// above it that exists is resolved.
fn resolved(path: &Path) -> Option<PathBuf> {
    path.ancestors().find_map(|ancestor| {
        let place = if ancestor.as_os_str().is_empty() {
            Path::new(".")
        } else {
            ancestor
        };
        Some(
            place
                .canonicalize()
                .ok()?
                .join(path.strip_prefix(ancestor).ok()?),
        )
    })
}

/// Writes a checkpoint, and prints a report.
pub(super) fn write(source: &dyn Checkpoint, destination: &Destination<'_>) -> Result<()> {
    let mut written = Written::planned(source, destination);
    if !destination.dry_run {
        let stop = StopRequest::new();
        // Uploads cannot be stopped between two steps, so signals end the process as they always
        // do.
        if destination.path.local().is_some() {
            stop.watch()?;
        }
        let durable = Durable::with_hook(Arc::new(stop.clone()));
        // Remove what a killed command has left of this destination.
        storage::clean_stale(destination.path)?;
        let bar = Progress::new(written.bytes, destination.progress && !destination.json);
        let progress = |bytes| bar.add(bytes);
        let options = ConvertOptions {
            overwrite: destination.overwrite,
            drop_opaque: destination.drop_opaque,
            with: destination.with,
            tensor_parallel: destination.plan.as_ref(),
            threads: destination.threads,
            progress: Some(&progress),
            durable: Some(&durable),
        };
        let done = convert(source, destination.path, destination.target, options);
        drop(bar);
        if let (Err(_), Some(signal)) = (&done, stop.signal()) {
            return Err(ConversionStopped {
                signal,
                destination: destination.path.to_string(),
            }
            .into());
        }
        let Converted {
            tensors,
            bytes,
            mut aside,
            aside_file,
            mut quantized,
            containers,
            copied,
            left_behind,
            notes_left_out,
            dropped,
            ..
        } = done.with_context(|| format!("failed to write `{}`", destination.path))?;
        aside.sort_by(|a, b| natural::compare(a, b));
        quantized.sort_by(|a, b| natural::compare(a, b));
        let is_value = |key: &str| source.metadata().tensor(key).is_none();
        written = Written {
            tensors,
            values: written.values - dropped.iter().filter(|(key, _)| is_value(key)).count(),
            bytes,
            aside,
            aside_file,
            quantized,
            containers,
            copied,
            left_behind,
            notes_left_out,
            dropped: dropped
                .into_iter()
                .map(|(key, of)| format!("{key} ({of})"))
                .collect(),
            ..written
        };
    }
    if let Some(file) = &written.aside_file {
        let (count, name) = (written.aside.len(), destination.name);
        let are = if written.dry_run { "would be" } else { "are" };
        output::talk(&format!(
            "{count} values that `{name}` cannot hold {are} in `{file}`:"
        ));
        written
            .aside
            .iter()
            .for_each(|key| output::talk(&format!("  {}", escaped(key))));
    }
    if !written.quantized.is_empty() {
        let count = written.quantized.len();
        output::talk(&format!(
            "{count} quantized tensors were written as integers, with a value `KEY.quantizer` for each:"
        ));
        written
            .quantized
            .iter()
            .for_each(|key| output::talk(&format!("  {}", escaped(key))));
    }
    if !written.containers.is_empty() {
        let (count, name) = (written.containers.len(), destination.name);
        output::talk(&format!(
            "{count} places of the state dict that `{name}` cannot tell (keys become text, tuples lists, empty dicts go):"
        ));
        written
            .containers
            .iter()
            .for_each(|place| output::talk(&format!("  {}", escaped(place))));
    }
    if !written.dropped.is_empty() {
        let count = written.dropped.len();
        let were = if count == 1 { "item was" } else { "items were" };
        output::talk(&format!("{count} opaque {were} left out:"));
        written
            .dropped
            .iter()
            .for_each(|key| output::talk(&format!("  {}", escaped(key))));
    }
    let names = |files: &[String]| {
        files
            .iter()
            .map(|file| format!("`{}`", escaped(file)))
            .collect::<Vec<_>>()
            .join(", ")
    };
    if !written.copied.is_empty() {
        output::talk(&format!("copied {}", names(&written.copied)));
    }
    if !written.left_behind.is_empty() {
        output::talk(&format!("left behind: {}", names(&written.left_behind)));
    }
    if !written.notes_left_out.is_empty() {
        let name = destination.name;
        output::talk(&format!(
            "notes in the header that `{name}` cannot hold: {}",
            names(&written.notes_left_out)
        ));
    }
    if destination.json {
        return output::json(&written);
    }
    let Written {
        tensors,
        values,
        bytes,
        memory,
        destination: path,
        ..
    } = &written;
    let (bytes, memory) = (iec(*bytes), iec(*memory));
    let ranks = written
        .tensor_parallel
        .as_ref()
        .map(Ranks::text)
        .unwrap_or_default();
    let (tensors, values) = (
        count(*tensors, "tensor", "tensors"),
        count(*values, "value", "values"),
    );
    if written.dry_run {
        let cut = written
            .tensor_parallel
            .iter()
            .flat_map(|ranks| &ranks.tensors);
        cut.map(CutTensor::line)
            .try_for_each(|line| output::data(&line))?;
        return output::data(&format!(
            "would write {tensors} and {values}, {bytes}{ranks}, to `{}` with at most about {memory} of memory",
            escaped(path)
        ));
    }
    output::talk(&format!(
        "wrote {tensors} and {values}, {bytes}{ranks}, to `{}`",
        escaped(path)
    ));
    Ok(())
}

impl Written {
    /// Returns the report of what will be written, in which the rest is filled in later.
    fn planned(source: &dyn Checkpoint, destination: &Destination<'_>) -> Self {
        let sizes = || {
            source
                .metadata()
                .tensors()
                .map(|(_, tensor)| inspect::bytes(tensor))
        };
        let largest = sizes().max().unwrap_or(0);
        let threads = destination.threads as u64;
        let mut aside: Vec<String> = source
            .metadata()
            .values()
            .map(|(key, _)| key.to_owned())
            .collect();
        let aside_file = match destination.target {
            OutputFormat::SafetensorsFile => destination
                .path
                .name()
                .file_name()
                .map(|name| checkpoint::values_beside(&name.to_string_lossy())),
            OutputFormat::SafetensorsDirectory { .. } | OutputFormat::SafetensorsShards { .. } => {
                Some(checkpoint::VALUES_FILE.to_owned())
            }
            _ => None,
        };
        let aside_file = aside_file.filter(|_| !aside.is_empty());
        if aside_file.is_none() {
            aside.clear();
        }
        aside.sort_by(|a, b| natural::compare(a, b));
        Written {
            schema: SCHEMA,
            source: source.path().display().to_string(),
            destination: destination.path.to_string(),
            to: destination.name,
            dry_run: destination.dry_run,
            tensors: sizes().count(),
            values: source.metadata().values().count(),
            bytes: sizes().fold(0, u64::saturating_add),
            memory: threads.saturating_mul(2 * largest.min(PIECE) + AROUND),
            aside,
            aside_file,
            quantized: Vec::new(),
            containers: Vec::new(),
            copied: Vec::new(),
            left_behind: Vec::new(),
            notes_left_out: Vec::new(),
            dropped: Vec::new(),
            tensor_parallel: destination
                .plan
                .as_ref()
                .map(|plan| Ranks::new(plan, source, destination.dry_run)),
        }
    }
}
