//! A view of several checkpoints as one. The keys of each are at the top level, or below a prefix.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use fsdp_layout::{KeyPath, PathPart};
use indexmap::IndexMap;

use super::checkpoint::{Checkpoint, Format, PartOf};
use super::layer::{Layer, LayerSource, Origin, Seen};
use super::structure::Structure;
use crate::error::{FileError, FormatError};
use crate::metadata::{Entry, Metadata, Replica, StorageInfo};
use crate::payload::slot::Slot;
use crate::storage::checked_directory::CheckedDirectory;

/// The place of a part, and how its keys are renamed.
#[derive(Debug, Clone, Default)]
pub(crate) struct Part {
    /// The file or directory; empty for the checkpoint's own directory.
    pub(crate) place: String,
    /// `true` if `place` is a directory, to which the names of the part's files are relative.
    pub(crate) is_directory: bool,
    /// The keys that are put before each path of the part.
    pub(crate) prefix: Vec<PathPart>,
    /// The number of leading parts of its paths that the prefix replaces.
    pub(crate) skip: usize,
}

/// The place of one of the checkpoints.
struct Place {
    place: String,
    is_directory: bool,
    /// The keys in the joined checkpoint, by the keys in this one.
    keys: HashMap<String, String>,
}

/// Checkpoints that are seen as one.
pub(crate) struct Joined {
    format: Format,
    path: PathBuf,
    directory: CheckedDirectory,
    seen: Seen<'static>,
    /// The containers of each part, until the last part has been added.
    structures: Vec<Structure>,
    /// The places of the sources.
    places: Vec<Place>,
    /// For each key, the source, and the key in that source.
    origins: HashMap<String, (usize, String)>,
}

impl Joined {
    /// Begins a checkpoint without any parts.
    pub(crate) fn new(format: Format, path: &Path, directory: CheckedDirectory) -> Self {
        let metadata = Metadata {
            planner_data: Some(IndexMap::new()),
            ..Metadata::default()
        };
        let seen = Seen {
            sources: Vec::new(),
            metadata,
            structure: None,
        };
        let (structures, places, origins) = Default::default();
        Joined {
            format,
            path: path.to_owned(),
            directory,
            seen,
            structures,
            places,
            origins,
        }
    }

    /// Adds a part. A key that another part has already is an error.
    pub(crate) fn add(
        &mut self,
        part: Part,
        checkpoint: Box<dyn Checkpoint>,
    ) -> Result<(), FileError> {
        let Part {
            place,
            is_directory,
            prefix,
            skip,
        } = part;
        let index = self.places.len();
        let of = checkpoint.metadata();
        let is_moved = !prefix.is_empty() || skip > 0;
        let placed = |stored: &StorageInfo| {
            let relative = &stored.relative_path;
            let relative_path = if is_directory {
                format!("{place}/{relative}")
            } else {
                relative.clone()
            };
            StorageInfo {
                relative_path,
                ..stored.clone()
            }
        };
        let mut keys = HashMap::new();
        let mut added = Metadata {
            planner_data: Some(IndexMap::new()),
            ..Metadata::default()
        };
        for (fqn, entry) in &of.entries {
            let own = of
                .planner_data
                .as_ref()
                .and_then(|paths| paths.get(fqn))
                .cloned();
            let path = if is_moved {
                let own = own.unwrap_or_else(|| KeyPath(vec![PathPart::Key(fqn.clone())]));
                Some(KeyPath(
                    prefix
                        .iter()
                        .cloned()
                        .chain(own.0.into_iter().skip(skip))
                        .collect(),
                ))
            } else {
                own
            };
            let key = path
                .as_ref()
                .filter(|_| is_moved)
                .map_or_else(|| fqn.clone(), KeyPath::flat_key);
            let mut entry = entry.clone();
            match &mut entry {
                Entry::Tensor(tensor) => {
                    let stored = tensor
                        .chunks
                        .iter_mut()
                        .filter_map(|chunk| chunk.stored.as_mut());
                    stored.for_each(|stored| *stored = placed(stored));
                }
                Entry::Bytes(bytes) => bytes.stored = bytes.stored.as_ref().map(placed),
            }
            if self.seen.metadata.entries.contains_key(&key) || added.entries.contains_key(&key) {
                let what = format!(
                    "`{key}` in both `{}` and `{place}` of one folder",
                    self.place_of(&key)
                );
                return Err(FileError::File {
                    path: checkpoint.path().to_owned(),
                    source: FormatError::Unsupported { what },
                });
            }
            added.entries.insert(key.clone(), entry);
            if let (Some(paths), Some(path)) = (&mut added.planner_data, path) {
                paths.insert(key.clone(), path);
            }
            self.origins.insert(key.clone(), (index, fqn.clone()));
            keys.insert(fqn.clone(), key);
        }
        let replicas = of.replicas.iter().filter_map(|replica| {
            let fqn = keys.get(&replica.fqn)?.clone();
            Some(Replica {
                fqn,
                bounds: replica.bounds.clone(),
                stored: placed(&replica.stored),
            })
        });
        self.seen.metadata.replicas.extend(replicas);
        let structure = match checkpoint.structure() {
            Some(own) if skip == 0 => below(&prefix, own.clone().below(&prefix)),
            _ => Structure::of_paths(&added)?,
        };
        self.seen.metadata.entries.extend(added.entries);
        self.seen
            .metadata
            .planner_data
            .get_or_insert_default()
            .extend(added.planner_data.unwrap_or_default());
        self.structures.push(structure);
        self.seen.sources.push(LayerSource::Own(checkpoint));
        self.places.push(Place {
            place,
            is_directory,
            keys,
        });
        Ok(())
    }

    /// Completes the checkpoint. If the containers of the parts do not fit together, the whole has
    /// no structure.
    pub(crate) fn finish(mut self) -> Self {
        let structure = Structure::merged(std::mem::take(&mut self.structures));
        let does_fit = structure.leaves().len() == self.seen.metadata.entries.len();
        self.seen.structure = does_fit.then_some(structure);
        self
    }

    /// Returns the place of the part that has a key, for errors; an empty text if the part is still
    /// being added.
    fn place_of(&self, key: &str) -> String {
        let place = self
            .origins
            .get(key)
            .and_then(|(index, _)| self.places.get(*index));
        place.map_or_else(String::new, |place| place.place.clone())
    }
}

/// Wraps a structure in nested dicts with these keys, the first of them outermost.
fn below(prefix: &[PathPart], structure: Structure) -> Structure {
    prefix.iter().rev().fold(structure, |structure, part| {
        Structure::Dict(vec![(part.to_string().into(), structure)])
    })
}

impl Layer for Joined {
    fn seen(&self) -> &Seen<'_> {
        &self.seen
    }

    fn origin<'o>(&'o self, fqn: &'o str) -> Origin<'o> {
        let (index, name) = &self.origins[fqn];
        Origin::Source(*index, name)
    }

    fn read_made(&self, fqn: &str, _: &mut [Slot<'_>]) -> Result<(), FileError> {
        Err(FileError::NotStored {
            fqn: fqn.to_owned(),
        })
    }

    fn inputs_of_made(&self, _: &str, _: &mut Vec<(usize, String)>) {}

    fn format(&self) -> Format {
        self.format
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn directory(&self) -> &CheckedDirectory {
        &self.directory
    }

    fn parts(&self) -> Vec<PartOf<'_>> {
        let parts = self.places.iter().zip(&self.seen.sources);
        let parts = parts.map(
            |(
                Place {
                    place,
                    is_directory,
                    keys,
                },
                source,
            )| PartOf {
                place,
                is_directory: *is_directory,
                checkpoint: &**source,
                keys,
            },
        );
        parts.collect()
    }

    fn key_in_parts<'o>(&'o self, fqn: &'o str) -> Option<&'o str> {
        Some(fqn)
    }

    /// Translates a place in this checkpoint to a place in one of its sources: file names lose the
    /// name of the source's directory.
    fn stored_in<'s>(&self, source: usize, stored: &'s StorageInfo) -> Cow<'s, StorageInfo> {
        let Place {
            place,
            is_directory,
            ..
        } = &self.places[source];
        let below = stored
            .relative_path
            .strip_prefix(place.as_str())
            .and_then(|rest| rest.strip_prefix('/'));
        match below {
            Some(below) if *is_directory => Cow::Owned(StorageInfo {
                relative_path: below.to_owned(),
                ..stored.clone()
            }),
            _ => Cow::Borrowed(stored),
        }
    }
}
