//! The folders of trainers: a model, and beside it the state of its training, in files and directories of their own.
//!
//! ```text
//! checkpoint_0/                       accelerate's `save_state`
//!   pytorch_model_fsdp_0/             a DCP directory; or pytorch_model_fsdp.bin, pytorch_model_fsdp_0_rank0.bin
//!   optimizer_0/                      a DCP directory; or optimizer.bin, optimizer_0_rank0.bin
//!   scheduler.bin  sampler.bin  random_states_0.pkl  custom_checkpoint_0.pkl
//! checkpoint-10/                      HF Trainer
//!   model.safetensors                 or in shards, or pytorch_model.bin, or accelerate's directories
//!   optimizer.pt  scheduler.pt  rng_state_0.pth  trainer_state.json
//! ```
//!
//! All of them are one tree: `model.…`, `optimizer.…`, `scheduler.…`, `rng_state.rank_0.…`. A configuration and a tokenizer
//! are files beside it, as they are beside a model alone.

mod json;
mod names;
mod python_json;

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use fsdp_layout::{KeyPath, PathPart};
use indexmap::IndexMap;

use self::names::{Kind, Part};
use crate::error::FileError;
use crate::formats::checkpoint::{Checkpoint, Format, PartOf};
use crate::formats::layer::{Layer, Origin};
use crate::formats::read::OpenOptions;
use crate::formats::structure::Structure;
use crate::metadata::{Entry, Metadata, Replica, StorageInfo};
use crate::payload::slot::Slot;
use crate::rank_files;
use crate::safetensors::read::SafetensorsCheckpoint;
use crate::storage::backend::Links;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::torch::index;

/// Returns `true` if a directory with entries of these names is a trainer's folder.
pub(crate) fn is_there(names: &[String]) -> bool {
    !names::parts(names, rank_files::is_there(names)).is_empty()
}

/// A function that opens a checkpoint of any format.
type Open<'o> = &'o dyn Fn(&Location, OpenOptions) -> Result<Box<dyn Checkpoint>, FileError>;

/// Opens a trainer's folder; `open` opens the checkpoints in it.
pub(crate) fn open(
    location: &Location,
    names: &[String],
    options: OpenOptions,
    open: Open<'_>,
) -> Result<Box<dyn Checkpoint>, FileError> {
    let directory = CheckedDirectory::open(location, false, Links::Follow)?;
    let mut folder = Folder {
        path: location.name().to_owned(),
        directory,
        sources: Vec::new(),
        metadata: Metadata { planner_data: Some(IndexMap::new()), ..Metadata::default() },
        origins: HashMap::new(),
        structure: Structure::Dict(Vec::new()),
    };
    for part in names::parts(names, rank_files::is_there(names)) {
        let checkpoint: Box<dyn Checkpoint> = match part.kind {
            Kind::Own => open(&location.join(&part.place), options)?,
            Kind::Json => Box::new(json::open(&location.join(&part.place), options)?),
            Kind::Safetensors => Box::new(SafetensorsCheckpoint::open_directory(location, options)?),
            Kind::TorchIndex => Box::new(index::open(location, "pytorch_model.bin.index.json", options)?),
            Kind::RankFiles => Box::new(rank_files::open(location, options)?),
        };
        folder.add(part, checkpoint)?;
    }
    Ok(Box::new(folder))
}

/// One checkpoint of a folder.
struct Source {
    place: String,
    checkpoint: Box<dyn Checkpoint>,
    /// The keys in the folder, by those in the checkpoint.
    keys: HashMap<String, String>,
}

impl Source {
    fn part(&self) -> PartOf<'_> {
        PartOf { place: &self.place, checkpoint: &*self.checkpoint, keys: &self.keys }
    }
}

/// A trainer's folder.
struct Folder {
    path: PathBuf,
    directory: CheckedDirectory,
    sources: Vec<Source>,
    metadata: Metadata,
    /// For each key, its source and the key that it has there.
    origins: HashMap<String, (usize, String)>,
    structure: Structure,
}

impl Folder {
    /// Adds a part. All keys of its checkpoint go below the key of the part.
    fn add(&mut self, part: Part, checkpoint: Box<dyn Checkpoint>) -> Result<(), FileError> {
        let Part { place, item, kind } = part;
        let index = self.sources.len();
        let mut item: Vec<PathPart> = item.into_iter().map(PathPart::Key).collect();
        let of = checkpoint.metadata();
        let is_directory = !checkpoint.format().is_file() && !place.is_empty() && kind == Kind::Own;
        // The keys in accelerate's directories begin with `model.` or `optimizer.` already, which is not to stand twice.
        let stripped = is_directory && have_item(of);
        if kind == Kind::RankFiles && are_items(of) {
            item.clear();
        }
        let path_of = |fqn: &str| {
            let own = of.planner_data.as_ref().and_then(|paths| paths.get(fqn)).cloned();
            let own = own.unwrap_or_else(|| KeyPath(vec![PathPart::Key(fqn.to_owned())]));
            KeyPath(item.iter().cloned().chain(own.0.into_iter().skip(usize::from(stripped))).collect())
        };
        let placed = |stored: &StorageInfo| {
            let relative = &stored.relative_path;
            let relative_path = if is_directory { format!("{place}/{relative}") } else { relative.clone() };
            StorageInfo { relative_path, ..stored.clone() }
        };
        let mut keys = HashMap::new();
        let mut added = Metadata { planner_data: Some(IndexMap::new()), ..Metadata::default() };
        for (fqn, entry) in &of.entries {
            let path = path_of(fqn);
            let key = path.flat_key();
            let mut entry = entry.clone();
            match &mut entry {
                Entry::Tensor(tensor) => {
                    let stored = tensor.chunks.iter_mut().filter_map(|chunk| chunk.stored.as_mut());
                    stored.for_each(|stored| *stored = placed(stored));
                }
                Entry::Bytes(bytes) => bytes.stored = bytes.stored.as_ref().map(placed),
            }
            if self.metadata.entries.contains_key(&key) || added.entries.contains_key(&key) {
                let (first, second) = (self.file_of(&key), place.clone());
                return Err(FileError::Differing { fqn: key, what: "stands in both".to_owned(), first, second });
            }
            added.entries.insert(key.clone(), entry);
            added.planner_data.get_or_insert_default().insert(key.clone(), path);
            self.origins.insert(key.clone(), (index, fqn.clone()));
            keys.insert(fqn.clone(), key);
        }
        let replicas = of.replicas.iter().filter_map(|replica| {
            let fqn = keys.get(&replica.fqn)?.clone();
            Some(Replica { fqn, bounds: replica.bounds.clone(), stored: placed(&replica.stored) })
        });
        self.metadata.replicas.extend(replicas);
        let structure = match checkpoint.structure() {
            Some(own) if !stripped => below(&item, own.clone().below(&item)),
            _ => Structure::of_paths(&added)?,
        };
        self.structure.merge(structure);
        self.metadata.entries.extend(added.entries);
        self.metadata.planner_data.get_or_insert_default().extend(added.planner_data.unwrap_or_default());
        self.sources.push(Source { place, checkpoint, keys });
        Ok(())
    }

    /// Returns the place of the part that has a key.
    fn file_of(&self, key: &str) -> String {
        let source = self.origins.get(key).and_then(|(index, _)| self.sources.get(*index));
        source.map_or_else(String::new, |source| source.place.clone())
    }
}

/// Returns `true` if the paths of all keys begin with the same part, `model` or `optimizer`, and have something below it: so it
/// is where a state dict was saved as `{"model": …}`.
fn have_item(metadata: &Metadata) -> bool {
    let Some(paths) = &metadata.planner_data else { return false };
    let mut first = None;
    let mut begins = |fqn: &String| match paths.get(fqn).map(|path| path.0.as_slice()) {
        Some([PathPart::Key(key), _, ..]) => {
            matches!(key.as_str(), "model" | "optimizer") && first.get_or_insert(key) == &key
        }
        _ => false,
    };
    !metadata.entries.is_empty() && metadata.entries.keys().all(&mut begins)
}

/// Returns `true` if the keys of files of ranks begin with the names of their items.
fn are_items(metadata: &Metadata) -> bool {
    let is_item = |fqn: &String| ["model.", "optim"].iter().any(|item| fqn.starts_with(item));
    metadata.entries.keys().any(|fqn| fqn.starts_with("optim")) && metadata.entries.keys().all(is_item)
}

/// Returns containers below dicts with these keys.
fn below(item: &[PathPart], structure: Structure) -> Structure {
    item.iter().rev().fold(structure, |structure, part| Structure::Dict(vec![(part.to_string().into(), structure)]))
}

impl Layer for Folder {
    fn source_count(&self) -> usize {
        self.sources.len()
    }

    fn source(&self, index: usize) -> &dyn Checkpoint {
        &*self.sources[index].checkpoint
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn structure(&self) -> Option<&Structure> {
        Some(&self.structure)
    }

    fn origin<'o>(&'o self, fqn: &'o str) -> Origin<'o> {
        let (index, name) = &self.origins[fqn];
        Origin::Source(*index, name)
    }

    fn read_made(&self, fqn: &str, _: &mut [Slot<'_>]) -> Result<(), FileError> {
        Err(FileError::NotStored { fqn: fqn.to_owned() })
    }

    fn inputs_of_made(&self, _: &str, _: &mut Vec<(usize, String)>) {}

    fn format(&self) -> Format {
        Format::Folder
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn directory(&self) -> &CheckedDirectory {
        &self.directory
    }

    fn parts(&self) -> Vec<PartOf<'_>> {
        self.sources.iter().map(Source::part).collect()
    }

    fn stored_in<'s>(&self, source: usize, stored: &'s StorageInfo) -> Cow<'s, StorageInfo> {
        let place = &self.sources[source].place;
        let below = stored.relative_path.strip_prefix(place.as_str()).and_then(|rest| rest.strip_prefix('/'));
        match below {
            Some(below) if !place.is_empty() => {
                Cow::Owned(StorageInfo { relative_path: below.to_owned(), ..stored.clone() })
            }
            _ => Cow::Borrowed(stored),
        }
    }
}
