//! The folders of trainers: a model, and beside it the state of its training, in files and
//! directories of their own.
//!
//! ```text
//! checkpoint_0/                       accelerate's `save_state`
//!   pytorch_model_fsdp_0/             a DCP directory; or pytorch_model_fsdp.bin, pytorch_model_fsdp_0_rank0.bin
//!   optimizer_0/                      a DCP directory; or optimizer.bin, optimizer_0_rank0.bin
//!   scheduler.bin  sampler.bin  random_states_0.pkl  custom_checkpoint_0.pkl
//! checkpoint-10/                      HF Trainer
//!   model.safetensors                 or in shards, or pytorch_model.bin, or accelerate's directories
//!   optimizer.pt  scheduler.pt  rng_state_0.pth  trainer_state.json
//!   global_step10/  latest            DeepSpeed's shards, and the name of their directory
//! ```
//!
//! All of them are one tree: `model.…`, `optimizer.…`, `scheduler.…`, `rng_state.rank_0.…`. A
//! configuration and a tokenizer are files beside it, as they are beside a model alone. DeepSpeed's
//! shards hold a model and its optimizer themselves: they are at the top, or below `deepspeed`
//! where the folder has the model, or an optimizer, in files of its own.

mod json;
mod names;
mod shards;

use fsdp_layout::PathPart;

use self::names::{FolderPart, PartKind};
use crate::error::FileError;
use crate::formats::checkpoint::{Checkpoint, Format};
use crate::formats::joined::{Joined, Part};
use crate::formats::read::OpenOptions;
use crate::metadata::Metadata;
use crate::rank_files;
use crate::safetensors::read::SafetensorsCheckpoint;
use crate::storage::backend::Links;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::torch::index;

/// Returns `true` if a directory with entries of these names is a trainer's folder.
pub(crate) fn is_there(names: &[String]) -> bool {
    !names::find_parts(names, rank_files::is_there(names)).is_empty()
}

/// A function that opens a checkpoint of any format.
type OpenPart<'o> = &'o dyn Fn(&Location, OpenOptions) -> Result<Box<dyn Checkpoint>, FileError>;

/// Opens a trainer's folder; `open_part` opens the checkpoints in it.
///
/// # Errors
/// A part that is missing between others of its series; those of the parts.
pub(crate) fn open(
    location: &Location,
    names: &[String],
    options: OpenOptions,
    open_part: OpenPart<'_>,
) -> Result<Box<dyn Checkpoint>, FileError> {
    let directory = CheckedDirectory::open(location, false, Links::Follow)?;
    directory.check_missing(names::missing_parts(names))?;
    let mut folder = Joined::new(Format::Folder, location.name(), directory);
    let mut parts = names::find_parts(names, rank_files::is_there(names));
    if let Some(path) = shards::find_directory(location, names)? {
        let mut prefix = Vec::new();
        if parts
            .iter()
            .any(|part| matches!(part.prefix[0].as_str(), "model" | "optimizer"))
        {
            prefix.push("deepspeed".to_owned());
        }
        parts.push(FolderPart {
            path,
            prefix,
            kind: PartKind::Own,
        });
    }
    for part in parts {
        let checkpoint: Box<dyn Checkpoint> = match part.kind {
            PartKind::Own => open_part(&location.join(&part.path), options)?,
            PartKind::Json => Box::new(json::open(&location.join(&part.path), options)?),
            PartKind::Safetensors => {
                Box::new(SafetensorsCheckpoint::open_directory(location, options)?)
            }
            PartKind::TorchIndex => Box::new(index::open(
                location,
                &["pytorch_model.bin.index.json".to_owned()],
                options,
            )?),
            PartKind::RankFiles => Box::new(rank_files::open(location, options)?),
        };
        folder.add(place_in_folder(part, &*checkpoint), checkpoint)?;
    }
    Ok(Box::new(folder.finish()))
}

/// Returns how the keys of a part go into the folder: all below those of the part.
fn place_in_folder(part: FolderPart, checkpoint: &dyn Checkpoint) -> Part {
    let FolderPart { path, prefix, kind } = part;
    let metadata = checkpoint.metadata();
    let is_directory = kind == PartKind::Own && !checkpoint.format().is_file() && !path.is_empty();
    let mut prefix: Vec<PathPart> = prefix.into_iter().map(PathPart::Key).collect();
    if kind == PartKind::RankFiles && have_item_names(metadata) {
        prefix.clear();
    }
    // The keys in accelerate's directories begin with `model.` or `optimizer.` already, which the
    // prefix replaces.
    let replaced_parts =
        usize::from(is_directory && !prefix.is_empty() && have_item_prefix(metadata));
    Part {
        path,
        is_directory,
        prefix,
        replaced_parts,
        ..Part::default()
    }
}

/// Returns `true` if the paths of all keys begin with the same part, `model` or `optimizer`, and
/// have something below it: so it is where a state dict was saved as `{"model": …}`.
fn have_item_prefix(metadata: &Metadata) -> bool {
    let Some(paths) = &metadata.planner_data else {
        return false;
    };
    let mut first_key = None;
    for fqn in metadata.entries.keys() {
        match paths.get(fqn).map(|path| path.0.as_slice()) {
            Some([PathPart::Key(key), _, ..])
                if matches!(key.as_str(), "model" | "optimizer")
                    && *first_key.get_or_insert(key) == key => {}
            _ => return false,
        }
    }
    first_key.is_some()
}

/// Returns `true` if the keys of files of ranks begin with the names of their items: all with
/// `model.` or `optim`, and one at least with the latter.
fn have_item_names(metadata: &Metadata) -> bool {
    let mut has_optimizer = false;
    for fqn in metadata.entries.keys() {
        if fqn.starts_with("optim") {
            has_optimizer = true;
        } else if !fqn.starts_with("model.") {
            return false;
        }
    }
    has_optimizer
}
