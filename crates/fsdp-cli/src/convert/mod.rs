//! `fsdp convert`, `fsdp reshard` and `fsdp merge`: from any format to any, in bounded memory.

mod arguments;
mod destination;
mod report;

use anyhow::{Context as _, Result, bail};
use fsdp_formats::Location;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_layout::{DType, count_text};
use fsdp_tools::convert::{
    Compared, ConfigEdits, ConvertOptions, Dequantized, OutputFormat, Rename, View,
    check_conversion, convert,
};
use fsdp_tools::map::Mapped;
use fsdp_tools::merge::{Average, Lora, LoraConfig};

use self::destination::Destination;
use self::report::WriteReport;
use crate::failure::usage_error;
use crate::map::StoredWeights;
use crate::progress::Progress;
use crate::{output, stop};

pub(crate) use self::arguments::{ConvertArguments, MergeArguments, ReshardArguments};

/// Converts a checkpoint: `fsdp convert`.
///
/// # Errors
/// The source cannot be read, or the destination not be written: then there is none.
pub(crate) fn run(arguments: &ConvertArguments) -> Result<()> {
    arguments.check()?;
    let mut destination = Destination::new(
        &arguments.destination,
        &arguments.target,
        &arguments.writing,
    )?;
    let prefix = arguments.prefix.as_deref();
    let keys = arguments.filter.keys(&arguments.rename, prefix)?;
    let opened = destination.open_selected(&arguments.source, &|key| keys.includes(key))?;
    // The digests of what has other elements cannot be compared with those of the source, so what
    // is read is.
    let compared = arguments
        .changes_elements()
        .then(|| Compared::new(&*opened));
    let opened: &dyn Checkpoint = compared.as_ref().map_or(&*opened, |compared| compared);
    // The sizes in rules come from the configuration of `--with`, or else of the source.
    let mut places: Vec<&Location> = destination.model_directory.into_iter().collect();
    places.push(&arguments.source);
    let cast = arguments.cast();
    let mut config = ConfigEdits {
        dtype: cast.map(|cast| cast.dtype),
        is_dequantized: arguments.dequantize,
    };
    // Weights meet their scales under the names of the source.
    let dequantized = if arguments.dequantize {
        let stored = StoredWeights::of_places(&places);
        let dtype = config.dtype.or(stored.dtype).unwrap_or(DType::BF16);
        config.dtype = Some(dtype);
        let is_wanted = |key: &str| keys.rename(key) != Rename::Drop;
        let dequantized = Dequantized::new(opened, dtype, stored.block, &is_wanted)?;
        if dequantized.is_empty() {
            bail!(usage_error(
                "`--dequantize` finds no weights of 8 bits with scales beside them",
                "leave it out; `fsdp inspect --tensors` lists the types",
            ));
        }
        Some(dequantized)
    } else {
        None
    };
    let source: &dyn Checkpoint = match &dequantized {
        Some(dequantized) => dequantized,
        None => opened,
    };
    keys.check(source.metadata())?;
    let view = View::new(source, |key| keys.rename(key), None)?;
    let map = arguments.map.read_map(&places)?;
    let mapped = map.map(|map| Mapped::new(&view, &map)).transpose()?;
    let converted: &dyn Checkpoint = match &mapped {
        Some(mapped) => mapped,
        None => &view,
    };
    // The cast comes last, so that each element is cast once, wherever a map puts it.
    let cast_view = match cast {
        Some(_) => Some(View::new(converted, |_| Rename::Keep, cast)?),
        None => None,
    };
    let converted = cast_view.as_ref().map_or(converted, |view| view);
    destination.config = config;
    destination.tensor_parallel_plan =
        arguments.plan_tensor_parallel(converted.metadata(), &places)?;
    write_checkpoint(converted, &destination)
}

/// Writes a checkpoint for another number of ranks: `fsdp reshard`.
///
/// # Errors
/// The same as [`run`].
pub(crate) fn reshard(arguments: &ReshardArguments) -> Result<()> {
    let destination = Destination {
        path: &arguments.destination,
        target: OutputFormat::Dcp {
            ranks: arguments.world_size,
        },
        format_name: "dcp".to_owned(),
        drop_opaque: arguments.drop_opaque,
        model_directory: None,
        tensor_parallel_plan: None,
        config: ConfigEdits::default(),
        writing: &arguments.writing,
    };
    let source = destination.open_source(&arguments.source)?;
    write_checkpoint(&*source, &destination)
}

/// Writes the average of checkpoints, or a base with a LoRA adapter: `fsdp merge`.
///
/// # Errors
/// The sources cannot be read, or do not belong together, or the destination cannot be written:
/// then there is none.
pub(crate) fn merge(arguments: &MergeArguments) -> Result<()> {
    let destination = Destination::new(
        &arguments.destination,
        &arguments.target,
        &arguments.writing,
    )?;
    let keys = arguments.filter.keys(&arguments.rename, None)?;
    let mut checkpoints = Vec::with_capacity(arguments.from.len());
    for location in &arguments.from {
        checkpoints.push(destination.open_selected(location, &|key| keys.includes(key))?);
    }
    let compared: Vec<Compared<'_>> = checkpoints
        .iter()
        .map(|checkpoint| Compared::new(&**checkpoint))
        .collect();
    let mut views = Vec::with_capacity(compared.len());
    for source in &compared {
        keys.check(source.metadata())?;
        views.push(View::new(source, |key| keys.rename(key), None)?);
    }
    let mut sources: Vec<&dyn Checkpoint> = Vec::with_capacity(views.len());
    for view in &views {
        sources.push(view);
    }
    let Some(adapter_location) = &arguments.lora else {
        if sources.len() == 1 {
            // Whoever has forgotten the adapter would take the base for the result.
            output::print_message(
                "there is one checkpoint and no `--lora`, so the result is a copy of it",
            );
        }
        let average = Average::new(sources, &arguments.weight)?;
        if let Some(model_directory) = destination.model_directory {
            average.check_configuration(model_directory)?;
        }
        return write_checkpoint(&average, &destination);
    };
    let [base] = sources.as_slice() else {
        bail!(usage_error(
            "with `--lora`, give exactly one `--from`: the base",
            "average the checkpoints first, or give one",
        ));
    };
    let config = LoraConfig::read(adapter_location)?;
    // Open the file rather than the directory: a trainer's directory holds more than the adapter.
    let mut adapter_file = adapter_location.clone();
    for name in ["adapter_model.safetensors", "adapter_model.bin"] {
        let file = adapter_location.join(name);
        // If it cannot be told, opening the directory returns the error.
        if matches!(file.is_file(), Ok(true)) {
            adapter_file = file;
            break;
        }
    }
    let adapter = destination.open_source(&adapter_file)?;
    let adapter = Compared::new(&*adapter);
    let merged = Lora::new(*base, &adapter, &config)?;
    if let Some(model_directory) = destination.model_directory {
        merged.check_configuration(model_directory)?;
    }
    let changed_tensors = count_text(merged.changed().count(), "tensor", "tensors");
    output::print_message(&format!("the adapter changes {changed_tensors}"));
    write_checkpoint(&merged, &destination)
}

/// Writes a checkpoint, unless it is a dry run, and prints a report.
///
/// # Errors
/// The destination cannot be written, or a signal has stopped the write: then there is none.
fn write_checkpoint(source: &dyn Checkpoint, destination: &Destination<'_>) -> Result<()> {
    let mut report = WriteReport::before_write(source, destination);
    let work = &destination.writing.work;
    let options = ConvertOptions {
        overwrite: destination.writing.overwrite,
        drop_opaque: destination.drop_opaque,
        with: destination.model_directory,
        tensor_parallel: destination.tensor_parallel_plan.as_ref(),
        config: destination.config,
        threads: Some(work.threads.count()),
        progress: None,
        durable: None,
    };
    if destination.writing.dry_run {
        check_conversion(source, destination.target, options)
            .with_context(|| format!("`{}` could not be written", destination.path))?;
    } else {
        let converted = stop::write_unless_stopped(destination.path, |durable| {
            let bar = Progress::new(report.conversion.bytes, !work.no_progress && !work.json);
            let options = ConvertOptions {
                progress: Some(&|bytes| bar.add(bytes)),
                durable: Some(durable),
                ..options
            };
            let outcome = convert(source, destination.path, destination.target, options);
            outcome.with_context(|| format!("failed to write `{}`", destination.path))
        })?;
        report.set_conversion(converted);
    }
    report.print(work.json)
}
