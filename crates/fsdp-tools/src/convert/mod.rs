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

mod cast;
mod copied;
mod integers;
mod old_values;
mod opaque;
mod options;
mod sidecars;
mod to_dcp;
mod to_rank_files;
mod to_safetensors;
mod to_torch;
mod view;

use std::collections::HashSet;

use fsdp_formats::checkpoint::{Checkpoint, ExtraFiles, Format, Structure};
use fsdp_formats::internals::{
    byte_length, check_expansion, check_key_length, opaque_entries, shown,
};
use fsdp_formats::storage::{CheckedDirectory, Links};
use fsdp_formats::{FileError, FormatError, Location};
use fsdp_layout::TensorBox;

use self::copied::CopiedFiles;
use self::integers::Integers;
use self::sidecars::{Kept, keys_beside};

pub use self::cast::Cast;
pub(crate) use self::cast::Optimizers;
pub use self::options::OutputFormat;
pub use self::view::{Rename, View};
pub use crate::output::{ConvertOptions, Converted};

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
    if let Some(integers) = Integers::of(source)? {
        let quantized = integers.keys().map(str::to_owned).collect();
        return Ok(Converted {
            quantized,
            ..convert(&integers, destination, target, options)?
        });
    }
    // Files of a trainer's state beside a DCP directory's own go along as they are, so their keys
    // stay out of the directory.
    let kept = if matches!(target, OutputFormat::Dcp { .. }) {
        Kept::of(source)
    } else {
        Kept::default()
    };
    if kept.keys.is_empty() {
        return write(source, destination.into(), target, &kept, options);
    }
    let keep = |fqn: &str| {
        if kept.keys.contains(fqn) {
            Rename::Drop
        } else {
            Rename::Keep
        }
    };
    write(
        &View::new(source, keep, None)?,
        destination.into(),
        target,
        &kept,
        options,
    )
}

/// Refuses tensors with vastly more elements than are stored, before any plan or file becomes as
/// large as they are.
fn check_sizes(
    source: &dyn Checkpoint,
    target: OutputFormat,
    opaque: &[(String, String)],
) -> Result<(), FileError> {
    let opaque: HashSet<&str> = opaque.iter().map(|(fqn, _)| fqn.as_str()).collect();
    // Ranks share the elements.
    let ranks = match target {
        OutputFormat::Dcp { ranks } | OutputFormat::SafetensorsShards { ranks } => {
            ranks.max(1) as u64
        }
        _ => 1,
    };
    for (fqn, tensor) in source
        .metadata()
        .tensors()
        .filter(|(fqn, _)| !opaque.contains(fqn))
    {
        let bytes = byte_length(&TensorBox::whole(&tensor.shape), tensor.properties.dtype)
            .unwrap_or(usize::MAX);
        check_expansion(source, fqn, bytes as u64 / ranks)?;
    }
    Ok(())
}

/// Writes a checkpoint in another format. The files in `kept` are copied as they are.
fn write(
    source: &dyn Checkpoint,
    destination: Location,
    target: OutputFormat,
    kept: &Kept,
    options: ConvertOptions<'_>,
) -> Result<Converted, FileError> {
    // From DCP to DCP, values in the directory's own files are copied as bytes, so they may be
    // opaque.
    let copied = matches!(
        (source.format(), target),
        (Format::Dcp, OutputFormat::Dcp { .. })
    );
    let beside = keys_beside(source);
    let (opaque, unknown): (Vec<_>, Vec<_>) = opaque_entries(source, options.threads)?
        .into_iter()
        .partition(|(fqn, _)| copied && !beside.contains(fqn.as_str()));
    if !unknown.is_empty() {
        if !options.drop_opaque {
            return Err(FileError::Opaque { values: unknown });
        }
        let dropped: HashSet<&str> = unknown.iter().map(|(fqn, _)| fqn.as_str()).collect();
        let keep = |fqn: &str| {
            if dropped.contains(fqn) {
                Rename::Drop
            } else {
                Rename::Keep
            }
        };
        let view = View::new(source, keep, None)?;
        let converted = write(&view, destination, target, kept, options)?;
        return Ok(Converted {
            dropped: unknown,
            ..converted
        });
    }
    // All that can be found wrong with the source is found before anything is written.
    let same = source
        .structure()
        .filter(|_| target != OutputFormat::Torch)
        .and_then(Structure::same_texts);
    if let Some((path, [other, text])) = same {
        let what = format!(
            "a dict with both keys {} and {} in a format other than torch's",
            shown(other),
            shown(text)
        );
        let fqn = if path.is_empty() {
            shown(text)
        } else {
            format!("{path}.{}", shown(text))
        };
        return Err(FileError::Encode {
            fqn,
            source: FormatError::Unsupported { what },
        });
    }
    if let Some(plan) = options.tensor_parallel {
        if !matches!(target, OutputFormat::SafetensorsDirectory { .. }) {
            let what = "a format that has no files of tensor-parallel ranks".to_owned();
            return Err(FileError::Encode {
                fqn: String::new(),
                source: FormatError::Unsupported { what },
            });
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
    check_sizes(source, target, &opaque)?;
    source.check_copies(&|_| true)?;
    let durable = options.durable.cloned().unwrap_or_default();
    let staging = durable.prepare(&destination, options.overwrite)?;
    match target {
        OutputFormat::SafetensorsFile | OutputFormat::Torch => staging.check_replaces_file()?,
        OutputFormat::Dcp { .. }
        | OutputFormat::SafetensorsDirectory { .. }
        | OutputFormat::SafetensorsShards { .. } => {
            staging.check_replaces_directory()?;
        }
    }
    let mut containers = source
        .structure()
        .map(Structure::modules)
        .unwrap_or_default();
    if target != OutputFormat::Torch {
        containers.extend(
            source
                .structure()
                .map(Structure::untold)
                .unwrap_or_default(),
        );
    }
    let ExtraFiles { files, others, .. } = ExtraFiles::of(source)?;
    let (read, files) = files
        .into_iter()
        .partition(|name| kept.leaves_out(source, name));
    let mut extra = CopiedFiles::default();
    let mut left_behind: Vec<String> = [others, read].concat();
    if target.keeps_framework(source.format()) {
        extra.add(files, source.directory());
    } else if matches!(target, OutputFormat::SafetensorsDirectory { .. })
        && !source.format().is_file()
    {
        // Hugging Face's libraries need the configuration and the tokenizer beside the weights, so
        // these files go with them.
        let needed = ExtraFiles::for_hugging_face(source.directory())?;
        left_behind.extend(files.into_iter().filter(|name| !needed.contains(name)));
        extra.add(needed, source.directory());
    } else {
        left_behind.extend(files);
    }
    left_behind.sort();
    let with = options
        .with
        .map(|with| CheckedDirectory::open(with, false, Links::Follow))
        .transpose()?;
    if let Some(with) = &with {
        extra.add(ExtraFiles::for_hugging_face(with)?, with);
    }
    let converted = match target {
        OutputFormat::Dcp { ranks } => {
            to_dcp::write(source, staging, ranks.max(1), &opaque, &extra, options)
        }
        OutputFormat::SafetensorsFile => {
            to_safetensors::write_file(source, &destination, staging, options)
        }
        OutputFormat::SafetensorsDirectory { max_file_bytes } => match options.tensor_parallel {
            Some(plan) => {
                to_rank_files::write_ranks(source, staging, plan, max_file_bytes, &extra, options)
            }
            None => {
                to_safetensors::write_directory(source, staging, max_file_bytes, &extra, options)
            }
        },
        OutputFormat::SafetensorsShards { ranks } => {
            to_safetensors::write_shards(source, staging, ranks.max(1), &extra, options)
        }
        OutputFormat::Torch => to_torch::write(source, staging, options),
    };
    let notes_left_out = match target {
        OutputFormat::Dcp { .. } | OutputFormat::Torch => source
            .notes()
            .iter()
            .map(|(key, _)| (*key).to_owned())
            .collect(),
        _ => Vec::new(),
    };
    Ok(Converted {
        containers,
        copied: extra.names(),
        left_behind,
        notes_left_out,
        ..converted?
    })
}
