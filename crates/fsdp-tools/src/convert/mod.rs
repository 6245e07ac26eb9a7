//! Converts any checkpoint to any format that can be written. Tensors are streamed, so memory does
//! not grow with their size.
//!
//! [`convert`] writes the contents of a [`Checkpoint`] in another format, or as a DCP directory for
//! another number of ranks ([`OutputFormat::Dcp`]), which is resharding. Wrap the source in a
//! [`View`] to select, rename and cast. The source is only read. The destination is committed as a
//! whole, or not at all. Hashes of the source are checked as it is read, and new hashes are
//! computed for what is written.
//!
//! Each thread holds one piece of a tensor, of at most 16 MiB. Only values that are not tensors,
//! and items with a stream transform, are held whole.

mod account;
mod cast;
mod compared;
mod config;
mod copied;
mod dequantize;
mod integer_keys;
mod integers;
mod names;
mod numpy;
mod old_values;
mod opaque;
mod output;
mod sidecars;
mod to_dcp;
mod to_rank_files;
mod to_safetensors;
mod to_torch;
mod to_torch_checkpointing;
mod view;

use std::collections::{BTreeMap, HashSet};

use fsdp_formats::checkpoint::{Checkpoint, ExtraFiles, Format, Structure};
use fsdp_formats::internals::{
    check_expansion, check_key_length, check_writable, is_stored_as_bytes, opaque_entries, shown,
};
use fsdp_formats::storage::{CheckedDirectory, Links, Staging};
use fsdp_formats::{FileError, Location};
use fsdp_layout::boxes::{checked_bytes, saturating_bytes};

use self::account::{find_lost_containers, list_changes};
use self::copied::CopiedFiles;
use self::integers::IntegerView;
use self::output::{Conversion, encode_error};
use self::sidecars::{CopiedSidecars, keys_in_sidecars};

pub use self::cast::Cast;
pub(crate) use self::cast::{
    CASTABLE, Losses, LostElements, Optimizers, is_scale_of_integers, parent_of,
};
pub use self::compared::Compared;
pub(crate) use self::compared::digest_tensor;
pub use self::config::ConfigEdits;
pub(crate) use self::config::{CONFIG_FILE, read_config};
pub use self::dequantize::Dequantized;
pub(crate) use self::names::{NamesInValues, NewKeysOf};
pub(crate) use self::output::unsupported;
pub use self::output::{ConvertOptions, Converted, OutputFormat};
pub use self::view::{Rename, View};

/// Writes all of a checkpoint to `destination` in another format or layout.
///
/// ```no_run
/// use fsdp_formats::checkpoint::open;
/// use fsdp_tools::convert::{convert, ConvertOptions, OutputFormat};
/// let source = open("checkpoints/step-20", Default::default())?;
/// convert(&*source, "model.safetensors", OutputFormat::SafetensorsFile, ConvertOptions::default())?;
/// # Ok::<(), fsdp_formats::FileError>(())
/// ```
pub fn convert(
    source: &dyn Checkpoint,
    destination: impl Into<Location>,
    target: OutputFormat,
    options: ConvertOptions<'_>,
) -> Result<Converted, FileError> {
    with_content(source, target, options, |content| {
        let destination = destination.into();
        write_content(content, &destination, target, options)
    })
}

/// Checks all that [`convert`] finds wrong with a source before it writes, except copies of
/// replicated tensors that differ: no elements are read.
///
/// # Errors
/// The errors of [`convert`] that do not depend on the destination: opaque items, and tensors or
/// keys that the format does not have.
pub fn check_conversion(
    source: &dyn Checkpoint,
    target: OutputFormat,
    options: ConvertOptions<'_>,
) -> Result<(), FileError> {
    with_content(source, target, options, |_| Ok(()))
}

/// The content of a conversion.
struct Content<'s> {
    /// The source, without what is left out.
    source: &'s dyn Checkpoint,
    /// The files of a trainer's state that are copied as they are.
    sidecars: &'s CopiedSidecars,
    /// The keys of opaque items that are copied as bytes, with their types.
    copied: Vec<(String, String)>,
    /// The keys of opaque items that are left out, with their types.
    dropped: Vec<(String, String)>,
    /// The keys of quantized tensors, which are written as integers.
    quantized: Vec<String>,
}

/// Finds the content of a conversion, checks that the format can hold it, and calls `then` with it.
fn with_content<T>(
    source: &dyn Checkpoint,
    target: OutputFormat,
    options: ConvertOptions<'_>,
    then: impl FnOnce(Content<'_>) -> Result<T, FileError>,
) -> Result<T, FileError> {
    // Up to three views change the source: each leaves out or replaces a part of it. No format
    // writes quantized tensors as such, so the first view shows them as integers.
    let mut source = source;
    let mut quantized = Vec::new();
    let integers = IntegerView::new(source)?;
    if let Some(integers) = &integers {
        quantized.clone_from(&integers.quantized);
        source = integers;
    }
    // Files of a trainer's state beside a DCP directory's own go along as they are, so their keys
    // stay out of the directory.
    let sidecars = match target {
        OutputFormat::Dcp { .. } => CopiedSidecars::find(source),
        _ => CopiedSidecars::default(),
    };
    let without_sidecars = leave_out(source, &sidecars.keys)?;
    if let Some(view) = &without_sidecars {
        source = view;
    }
    // From DCP to DCP, items in the directory's own files are copied as bytes, so they may be
    // opaque.
    let is_dcp_copy = source.format() == Format::Dcp && matches!(target, OutputFormat::Dcp { .. });
    let in_sidecars = keys_in_sidecars(source);
    let (copied, dropped): (Vec<_>, Vec<_>) = opaque_entries(source, options.thread_count())?
        .into_iter()
        .partition(|(fqn, _)| is_dcp_copy && !in_sidecars.contains(fqn.as_str()));
    if !dropped.is_empty() && !options.drop_opaque {
        return Err(FileError::Opaque { values: dropped });
    }
    let dropped_keys = dropped.iter().map(|(fqn, _)| fqn.clone()).collect();
    let without_opaque = leave_out(source, &dropped_keys)?;
    if let Some(view) = &without_opaque {
        source = view;
    }
    check_source(source, target, &copied, options)?;
    then(Content {
        source,
        sidecars: &sidecars,
        copied,
        dropped,
        quantized,
    })
}

/// Writes the content of a conversion to its destination, and returns the report of it.
fn write_content(
    content: Content<'_>,
    destination: &Location,
    target: OutputFormat,
    options: ConvertOptions<'_>,
) -> Result<Converted, FileError> {
    let Content {
        source,
        sidecars,
        copied,
        dropped,
        quantized,
    } = content;
    // All that can be found wrong with the source is found before anything is written, because a
    // conversion may take hours.
    source.check_copies(&|_| true)?;
    // It is written to a staging area, which replaces the destination when all of it is there.
    let staging = prepare(destination, target, options)?;
    let added_files = options
        .with
        .map(|with| CheckedDirectory::open(with, false, Links::Follow))
        .transpose()?;
    let (mut directories, mut left_behind) =
        choose_extra_files(source, target, sidecars, added_files.as_ref())?;
    if options.config.is_dequantized {
        // They describe quantized weights, and nothing else.
        for name in ["hf_quant_config.json", "quantize_config.json"] {
            left_behind.extend(directories.remove(name).map(|_| name.to_owned()));
        }
    }
    let mut changes = Vec::new();
    let copied_files = CopiedFiles {
        edited: options
            .config
            .apply(&directories, source.metadata(), &mut changes)?,
        directories,
    };
    let conversion = Conversion {
        source,
        staging,
        copied_files: &copied_files,
        options,
    };
    let aside_file = match target {
        OutputFormat::Dcp { ranks } => to_dcp::write(conversion, ranks.max(1), &copied),
        OutputFormat::SafetensorsFile => to_safetensors::write_file(conversion, destination),
        OutputFormat::SafetensorsDirectory { max_file_bytes } => match options.tensor_parallel {
            Some(plan) => to_rank_files::write_ranks(conversion, plan, max_file_bytes),
            None => to_safetensors::write_directory(conversion, max_file_bytes),
        },
        OutputFormat::SafetensorsShards { ranks } => {
            to_safetensors::write_shards(conversion, ranks.max(1))
        }
        OutputFormat::Torch => to_torch::write(conversion, &mut changes),
        OutputFormat::TorchCheckpointing { ranks } => {
            to_torch_checkpointing::write(conversion, ranks.max(1), &mut changes)
        }
    }?;
    let mut converted = Converted {
        quantized,
        dropped,
        containers: find_lost_containers(source, target, sidecars)?,
        copied: copied_files.directories.into_keys().collect(),
        left_behind,
        ..Converted::default()
    };
    for (fqn, tensor) in source.metadata().tensors() {
        converted.tensors += 1;
        let dtype = tensor.properties.dtype;
        if !target.is_of_torch() && is_stored_as_bytes(dtype, tensor.shape.len()) {
            converted.stored_as_bytes.push(format!("{fqn} ({dtype})"));
        }
        let bytes = saturating_bytes(&tensor.shape, dtype);
        converted.bytes = converted.bytes.saturating_add(bytes);
    }
    if aside_file.is_some() {
        let values = source.metadata().values();
        converted.aside = values.map(|(fqn, _)| fqn.to_owned()).collect();
    }
    converted.aside_file = aside_file;
    converted.changes = list_changes(source, changes);
    if target.is_of_torch() {
        let notes = source.notes().into_iter();
        converted.notes_left_out = notes.map(|(key, _)| key.to_owned()).collect();
    }
    Ok(converted)
}

/// Returns a view without these keys; `None` if there are none.
fn leave_out<'s>(
    source: &'s dyn Checkpoint,
    keys: &HashSet<String>,
) -> Result<Option<View<'s>>, FileError> {
    if keys.is_empty() {
        return Ok(None);
    }
    let view = View::new(
        source,
        |fqn| {
            if keys.contains(fqn) {
                Rename::Drop
            } else {
                Rename::Keep
            }
        },
        None,
    )?;
    Ok(Some(view))
}

/// Refuses a source that cannot be written in this format.
fn check_source(
    source: &dyn Checkpoint,
    target: OutputFormat,
    opaque: &[(String, String)],
    options: ConvertOptions<'_>,
) -> Result<(), FileError> {
    if !target.keeps_containers() {
        check_same_texts(source)?;
    }
    if let Some(plan) = options.tensor_parallel {
        if !matches!(target, OutputFormat::SafetensorsDirectory { .. }) {
            return Err(unsupported(
                "",
                "a format that has no files of tensor-parallel ranks",
            ));
        }
        to_rank_files::check_plan(source, plan)?;
    }
    if matches!(target, OutputFormat::Dcp { .. }) {
        source
            .metadata()
            .entries
            .keys()
            .try_for_each(|fqn| check_key_length(fqn))?;
    }
    source.check_stored(&|_| true)?;
    check_sizes(source, target, opaque)
}

/// Refuses dicts whose keys would become the same text.
fn check_same_texts(source: &dyn Checkpoint) -> Result<(), FileError> {
    let Some((path, [other_key, text])) = source.structure().and_then(Structure::find_same_texts)
    else {
        return Ok(());
    };
    let what = format!(
        "a dict with both keys {} and {} in a format other than torch's",
        shown(other_key),
        shown(text)
    );
    let fqn = if path.is_empty() {
        shown(text)
    } else {
        format!("{path}.{}", shown(text))
    };
    Err(unsupported(&fqn, what))
}

/// Refuses tensors of dtypes that the format has not, and tensors with vastly more elements than
/// are stored, before any plan or file becomes as large as they are.
fn check_sizes(
    source: &dyn Checkpoint,
    target: OutputFormat,
    opaque: &[(String, String)],
) -> Result<(), FileError> {
    let opaque_keys: HashSet<&str> = opaque.iter().map(|(fqn, _)| fqn.as_str()).collect();
    // Ranks share the elements.
    let rank_count = match target {
        OutputFormat::Dcp { ranks }
        | OutputFormat::SafetensorsShards { ranks }
        | OutputFormat::TorchCheckpointing { ranks } => ranks.max(1) as u64,
        _ => 1,
    };
    for (fqn, tensor) in source
        .metadata()
        .tensors()
        .filter(|(fqn, _)| !opaque_keys.contains(fqn))
    {
        if target.is_of_torch() {
            check_writable(tensor.properties.dtype).map_err(|source| encode_error(fqn, source))?;
        }
        // More bytes than this machine can count are refused like the most that it can.
        let bytes = checked_bytes(&tensor.shape, tensor.properties.dtype).unwrap_or(usize::MAX);
        check_expansion(source, fqn, bytes as u64 / rank_count)?;
    }
    Ok(())
}

/// Prepares the destination, and returns the staging area to write to. Something at the destination
/// that a checkpoint of this format may not replace is an error.
fn prepare(
    destination: &Location,
    target: OutputFormat,
    options: ConvertOptions<'_>,
) -> Result<Staging, FileError> {
    destination.check_target()?;
    let durable = options.durable.cloned().unwrap_or_default();
    let staging = durable.prepare(destination, options.overwrite)?;
    match target {
        OutputFormat::SafetensorsFile | OutputFormat::Torch => staging.check_replaces_file()?,
        _ => staging.check_replaces_directory()?,
    }
    Ok(staging)
}

/// Returns the files beside the source's own that are copied, with the directory that each comes
/// from, and the names of those that are not copied.
fn choose_extra_files<'c>(
    source: &'c dyn Checkpoint,
    target: OutputFormat,
    sidecars: &CopiedSidecars,
    added_files: Option<&'c CheckedDirectory>,
) -> Result<(BTreeMap<String, &'c CheckedDirectory>, Vec<String>), FileError> {
    let ExtraFiles {
        files,
        others: other_files,
        ..
    } = ExtraFiles::find(source)?;
    // The keys of a sidecar file that is not copied have been written like all others.
    let (written_files, files): (Vec<_>, Vec<_>) = files
        .into_iter()
        .partition(|name| sidecars.is_taken_apart(source, name));
    let mut copied = Vec::new();
    let mut left_behind = [other_files, written_files].concat();
    // Where the format is that of the framework that wrote the source, files beside the source's
    // own go with it, such as a trainer's loop state or a model's configuration.
    if let (Format::Dcp, OutputFormat::Dcp { .. })
    | (
        Format::SafetensorsDirectory,
        OutputFormat::SafetensorsDirectory { .. } | OutputFormat::SafetensorsShards { .. },
    ) = (source.format(), target)
    {
        copied = files;
    } else if matches!(target, OutputFormat::SafetensorsDirectory { .. })
        && !source.format().is_file()
    {
        // Hugging Face's libraries need the configuration and the tokenizer beside the weights, so
        // these files go with them.
        copied = ExtraFiles::for_hugging_face(source.directory())?;
        left_behind.extend(files.into_iter().filter(|name| !copied.contains(name)));
    } else {
        left_behind.extend(files);
    }
    left_behind.sort();
    let mut copied_files: BTreeMap<String, &CheckedDirectory> = copied
        .into_iter()
        .map(|name| (name, source.directory()))
        .collect();
    // The files that were asked for replace the source's of the same names.
    if let Some(added_files) = added_files {
        let files = ExtraFiles::for_hugging_face(added_files)?;
        copied_files.extend(files.into_iter().map(|name| (name, added_files)));
    }
    Ok((copied_files, left_behind))
}
