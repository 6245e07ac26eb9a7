//! A view of several checkpoints as one. The keys of each are at the top level, or below a prefix.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use fsdp_layout::{KeyPath, PathPart};
use indexmap::IndexMap;

use super::checkpoint::{Checkpoint, Format, PartOf};
use super::layer::{Layer, LayerSource, LayerView, Origin};
use super::structure::Structure;
use crate::error::{FileError, FormatError};
use crate::metadata::{Entry, Metadata, Replica, StorageInfo};
use crate::storage::checked_directory::CheckedDirectory;

/// One of the checkpoints, and how its keys are renamed.
#[derive(Default)]
pub(crate) struct Part {
    /// The file or directory; empty for the whole checkpoint's own directory.
    pub(crate) path: String,
    /// `true` if `path` is a directory, to which the names of the part's files are relative.
    pub(crate) is_directory: bool,
    /// The keys that are put before each path of the part.
    pub(crate) prefix: Vec<PathPart>,
    /// The number of leading parts of its paths that the prefix replaces.
    pub(crate) replaced_parts: usize,
    /// The keys in the joined checkpoint, by the keys in this one. They are known once the part was
    /// added.
    pub(crate) keys: HashMap<String, String>,
}

impl Part {
    /// Returns a place in the files of the part as a place in those of the joined checkpoint.
    fn stored_in_whole(&self, stored: &StorageInfo) -> StorageInfo {
        let mut stored = stored.clone();
        if self.is_directory {
            stored.relative_path = format!("{}/{}", self.path, stored.relative_path);
        }
        stored
    }

    /// Returns the path in the joined checkpoint for a key of the part; `None` if the key stays
    /// and has no path.
    fn path_in_whole(&self, metadata: &Metadata, fqn: &str) -> Option<KeyPath> {
        let part_path = metadata
            .planner_data
            .as_ref()
            .and_then(|paths| paths.get(fqn))
            .cloned();
        if !self.has_other_keys() {
            return part_path;
        }
        let KeyPath(parts) = part_path.unwrap_or_else(|| KeyPath::from_key(fqn));
        let mut path = self.prefix.clone();
        path.extend(parts.into_iter().skip(self.replaced_parts));
        Some(KeyPath(path))
    }

    /// Returns `true` if the keys of the part are others in the joined checkpoint.
    fn has_other_keys(&self) -> bool {
        !self.prefix.is_empty() || self.replaced_parts > 0
    }
}

/// Several checkpoints as one.
pub(crate) struct Joined {
    format: Format,
    path: PathBuf,
    directory: CheckedDirectory,
    view: LayerView<'static>,
    /// The containers of each part, until the last part has been added.
    structures: Vec<Structure>,
    /// The parts, in the order of the sources.
    parts: Vec<Part>,
    /// For each key, the source, and the key in that source.
    origins: HashMap<String, (usize, String)>,
}

impl Joined {
    /// Begins a checkpoint without any parts.
    pub(crate) fn new(format: Format, path: &Path, directory: CheckedDirectory) -> Self {
        Joined {
            format,
            path: path.to_owned(),
            directory,
            view: LayerView {
                // The keys that are added have paths, unless no part has some.
                metadata: Metadata {
                    planner_data: Some(IndexMap::new()),
                    ..Metadata::default()
                },
                ..LayerView::default()
            },
            structures: Vec::new(),
            parts: Vec::new(),
            origins: HashMap::new(),
        }
    }

    /// Adds a part, and fills in its `keys`. A key that another part has already is an error.
    pub(crate) fn add(
        &mut self,
        mut part: Part,
        checkpoint: Box<dyn Checkpoint>,
    ) -> Result<(), FileError> {
        let part_metadata = checkpoint.metadata();
        let mut added = Metadata::default();
        for (fqn, entry) in &part_metadata.entries {
            let path = part.path_in_whole(part_metadata, fqn);
            let key = match &path {
                Some(path) if part.has_other_keys() => path.flat_key(),
                _ => fqn.clone(),
            };
            // The prefixes of parts come from what lies in a folder, so two may give one key.
            if self.view.metadata.entries.contains_key(&key) || added.entries.contains_key(&key) {
                // A key that is twice in this part has no other place yet.
                let first_part = self.origins.get(&key);
                let first_part = first_part.and_then(|(index, _)| self.parts.get(*index));
                let what = format!(
                    "`{key}` in both `{}` and `{}` of one folder",
                    first_part.map_or("", |first_part| &first_part.path),
                    part.path
                );
                return Err(FormatError::unsupported(what).in_file(checkpoint.path()));
            }
            let mut entry = entry.clone();
            match &mut entry {
                Entry::Tensor(tensor) => {
                    for stored in tensor.chunks.iter_mut().flat_map(|chunk| &mut chunk.stored) {
                        *stored = part.stored_in_whole(stored);
                    }
                }
                Entry::Bytes(bytes) => {
                    if let Some(stored) = &mut bytes.stored {
                        *stored = part.stored_in_whole(stored);
                    }
                }
            }
            added.entries.insert(key.clone(), entry);
            if let Some(path) = path {
                added
                    .planner_data
                    .get_or_insert_default()
                    .insert(key.clone(), path);
            }
            self.origins
                .insert(key.clone(), (self.parts.len(), fqn.clone()));
            part.keys.insert(fqn.clone(), key);
        }
        for replica in &part_metadata.replicas {
            // A replica of a tensor that the metadata does not have is a copy of nothing.
            if let Some(fqn) = part.keys.get(&replica.fqn) {
                self.view.metadata.replicas.push(Replica {
                    fqn: fqn.clone(),
                    bounds: replica.bounds.clone(),
                    stored: part.stored_in_whole(&replica.stored),
                });
            }
        }
        self.structures.push(match checkpoint.structure() {
            Some(structure) if part.replaced_parts == 0 => structure
                .clone()
                .with_prefix(&part.prefix)
                .nested_in(part.prefix.iter().map(|key| key.to_string().into())),
            _ => Structure::from_paths(&added)?,
        });
        self.view.metadata.entries.extend(added.entries);
        self.view
            .metadata
            .planner_data
            .get_or_insert_default()
            .extend(added.planner_data.into_iter().flatten());
        self.view.sources.push(LayerSource::Own(checkpoint));
        self.parts.push(part);
        Ok(())
    }

    /// Completes the checkpoint. If the containers of the parts do not fit together, the whole has
    /// no structure.
    pub(crate) fn finish(mut self) -> Self {
        let structure = Structure::merged(std::mem::take(&mut self.structures));
        let is_complete = structure.leaves().len() == self.view.metadata.entries.len();
        self.view.structure = is_complete.then_some(structure);
        self
    }
}

impl Layer for Joined {
    fn view(&self) -> &LayerView<'_> {
        &self.view
    }

    fn origin<'o>(&'o self, fqn: &'o str) -> Origin<'o> {
        let (index, name) = &self.origins[fqn];
        Origin::Source(*index, name)
    }

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
        let parts = self.parts.iter().zip(&self.view.sources);
        parts
            .map(|(part, source)| PartOf {
                path: &part.path,
                is_directory: part.is_directory,
                checkpoint: &**source,
                keys: &part.keys,
            })
            .collect()
    }

    fn key_in_parts<'o>(&'o self, fqn: &'o str) -> Option<&'o str> {
        Some(fqn)
    }

    /// Translates a place in this checkpoint to a place in one of its sources: file names lose the
    /// name of the source's directory.
    fn stored_in<'s>(&self, source: usize, stored: &'s StorageInfo) -> Cow<'s, StorageInfo> {
        let part = &self.parts[source];
        let path_in_part = stored
            .relative_path
            .strip_prefix(part.path.as_str())
            .and_then(|rest| rest.strip_prefix('/'));
        match path_in_part {
            Some(path_in_part) if part.is_directory => Cow::Owned(StorageInfo {
                relative_path: path_in_part.to_owned(),
                ..stored.clone()
            }),
            _ => Cow::Borrowed(stored),
        }
    }
}
