//! safetensors files as checkpoints.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

use fsdp_digest::StateDigest;
use fsdp_layout::boxes::{checked_numel, row_major_strides};
use fsdp_layout::{KeyPath, PlainTensor, PlainValue, TensorBox};
use indexmap::IndexMap;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tracing::warn;

use super::header::{Header, TensorInfo, charge_text, malformed};
use super::paths::{self, PATHS};
use super::shards::ShardFiles;
use super::sidecar::{
    DIGESTS, DIGESTS_LAYOUT, SHARDING, SHARDS, VALUES_FILE, VALUES_HASH, digests_of_text,
    is_about_file, layout_text, shard_name, values_beside, values_hash, values_names,
};
use super::slices::{RANK_NOTE, RankNote, SliceBox, rank_in_name};
use super::values;
use super::values_read::ValuesFile;
use crate::budget::Budget;
use crate::error::{FileError, FormatError};
use crate::formats::checkpoint::{Checkpoint, Format, KeyFilter};
use crate::formats::index::Index;
use crate::formats::lookup::{
    check_replica, fill_from_chunks, find_value, item_error, request_of, tensor_of,
};
use crate::formats::read::{OpenOptions, check_buffers};
use crate::formats::replicas::check_replicas;
use crate::formats::weights::{SHARD_PREFIX, Weights, key_in_two_files};
use crate::limits::{MAX_INDEX_BYTES, MAX_TENSOR_RANK, is_sane_shape};
use crate::metadata::{
    BytesEntry, Chunk, Entry, Metadata, Replica, StorageInfo, TensorEntry, TensorProperties,
};
use crate::payload::slot::Slot;
use crate::plan::plan_load;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::storage::read_at::BlockReader;
use crate::strided::{StoredElements, StridedLayout};

/// One safetensors file, or a directory of them.
#[derive(Debug)]
pub(crate) struct SafetensorsCheckpoint {
    path: PathBuf,
    format: Format,
    directory: CheckedDirectory,
    metadata: Metadata,
    /// The values, which are read when they are wanted.
    values: Option<ValuesFile>,
    /// The tensors inside values, which are not among the others.
    inner_tensors: Metadata,
    /// The bytes of all tensors, which those inside one value may not exceed by much.
    stored_bytes: u64,
    /// The strides of chunks that lie among others of their tensor, by file and the position of the
    /// first element.
    strides: HashMap<(String, u64), Vec<usize>>,
    /// The boxes of each tensor that are there already.
    boxes: HashMap<String, HashSet<TensorBox>>,
    /// The file in which each tensor was found first, and `true` if a note in it says which part of
    /// the tensor the file holds.
    first_files: HashMap<String, (String, bool)>,
    /// The places of all keys, where a header or a values file has them.
    paths: Option<IndexMap<String, KeyPath>>,
    /// The notes in the headers, by key. If several files have the same key, the first one counts.
    notes: IndexMap<String, String>,
    /// The digests in the header of a single file.
    digests: Option<StateDigest>,
    /// `true` if the header has digests of what the file held before.
    has_stale_digests: bool,
}

/// The ending of the names of safetensors files.
const ENDING: &str = ".safetensors";

/// The bytes of memory that a part of a tensor takes, besides the first.
const PART_COST_BYTES: u64 = 512;

/// The texts in the header of a file that was added.
struct HeaderTexts {
    texts: IndexMap<String, String>,
    /// The text of [`DIGESTS_LAYOUT`] that the file would have if its digests were written with it.
    layout: String,
    /// The note of the tensor-parallel rank that the file is of.
    rank_note: Option<RankNote>,
}

/// torch's note of where in its tensor a shard lies.
#[derive(Deserialize)]
struct ShardNote {
    saved_offsets: Vec<usize>,
}

/// The notes in a file's header of which parts of tensors it holds.
struct PartNotes {
    /// torch's notes of shards, by key.
    sharding: HashMap<String, ShardNote>,
    /// The note of a tensor-parallel rank.
    rank_note: Option<RankNote>,
}

/// The parts of a tensor that a file holds.
struct TensorParts<'h> {
    fqn: &'h str,
    info: &'h TensorInfo,
    /// The shape of the tensor, as far as this file tells it.
    shape: Vec<usize>,
    /// `true` if the file tells the shape of the whole tensor.
    is_whole_shape: bool,
    boxes: Vec<SliceBox>,
}

impl PartNotes {
    /// Returns the parts of a tensor that the file of these notes holds. Their memory is charged to
    /// the budget. Notes that do not fit the tensor are an error.
    fn parts_of<'h>(
        &self,
        fqn: &'h str,
        info: &'h TensorInfo,
        budget: &mut Budget,
    ) -> Result<TensorParts<'h>, FormatError> {
        let slice = self
            .rank_note
            .as_ref()
            .and_then(|note| note.tensors.get(fqn));
        let (shape, boxes) = if let Some(slice) = slice {
            // A small note may have many ranges.
            let more_ranges = slice.ranges.len().saturating_sub(1) as u64;
            budget.charge(
                "memory for parts of tensors",
                more_ranges.saturating_mul(PART_COST_BYTES),
            )?;
            (slice.shape.clone(), slice.boxes(&info.shape))
        } else {
            let bounds =
                saved_box(self.sharding.get(fqn), info).ok_or_else(|| offsets_error(fqn))?;
            // The global shape is noted nowhere: it is what the shards reach.
            let ends = bounds.offsets.iter().zip(&bounds.sizes);
            let shape = ends.map(|(offset, size)| offset + size).collect();
            let part = SliceBox {
                bounds,
                first_element: 0,
                strides: None,
            };
            (shape, Some(vec![part]))
        };
        Ok(TensorParts {
            fqn,
            info,
            shape,
            is_whole_shape: self.rank_note.is_some(),
            boxes: boxes.ok_or_else(|| offsets_error(fqn))?,
        })
    }
}

/// Returns the error of notes that do not fit a tensor.
fn offsets_error(fqn: &str) -> FormatError {
    malformed(format!("the saved offsets of `{fqn}` make no sense"))
}

/// Returns the number in the name of a shard of torch's `HuggingFaceStorageWriter`; `None` for the
/// names of other files.
fn shard_number(name: &str) -> Option<&str> {
    let rest = name.strip_prefix(SHARD_PREFIX)?.strip_suffix(ENDING)?;
    rest.split('-').next()
}

impl SafetensorsCheckpoint {
    /// Creates a checkpoint without files; [`Self::add_file`] adds them.
    fn without_files(location: &Location, format: Format, directory: CheckedDirectory) -> Self {
        SafetensorsCheckpoint {
            path: location.name().to_owned(),
            format,
            directory,
            metadata: Metadata::default(),
            values: None,
            inner_tensors: Metadata::default(),
            stored_bytes: 0,
            strides: HashMap::new(),
            boxes: HashMap::new(),
            first_files: HashMap::new(),
            paths: None,
            notes: IndexMap::new(),
            digests: None,
            has_stale_digests: false,
        }
    }

    /// Opens one file in its directory. Values are taken from `NAME.values.json` beside it, if the
    /// header has the hash of that file.
    ///
    /// # Errors
    /// The file of one of several ranks; a values file that is missing, or is of another
    /// checkpoint.
    pub(crate) fn open_file(
        location: &Location,
        directory: CheckedDirectory,
        options: OpenOptions,
    ) -> Result<Self, FileError> {
        let (_, name) = location.split()?;
        let mut opened = Self::without_files(location, Format::SafetensorsFile, directory);
        // The header has the hash of the values file, if there is one: a file of that name alone
        // proves nothing.
        let HeaderTexts {
            texts,
            layout,
            rank_note,
        } = opened.add_file(name, None)?;
        if rank_note.is_none() && opened.has_other_ranks(name)? {
            return Err(opened.unnoted_rank_error(name));
        }
        opened.check_not_a_shard(name, &texts)?;
        if let Some(text) = texts.get(DIGESTS).filter(|_| options.verify) {
            if texts.get(DIGESTS_LAYOUT) == Some(&layout) {
                opened.digests = Some(
                    digests_of_text(text)
                        .map_err(|error| opened.directory.file_error(name, error))?,
                );
            } else {
                opened.has_stale_digests = true;
                let path = opened.path.display();
                warn!(%path, "another program has written the file again: the digests in it are stale, and not compared");
            }
        }
        let Some(hash) = texts.get(VALUES_HASH) else {
            return Ok(opened.with_paths());
        };
        let values_name = values_beside(name);
        // A process that was killed between two renames may have left it under its first name.
        let mut has_values_file = false;
        for candidate in &values_names(&values_name, hash) {
            if opened.directory.has(candidate)? {
                has_values_file = true;
                let bytes = opened.directory.read_checked(candidate, MAX_INDEX_BYTES)?;
                if values_hash(&bytes) == *hash {
                    opened.add_values(candidate, bytes)?;
                    return Ok(opened.with_paths());
                }
            }
        }
        if !has_values_file {
            return Err(FileError::MissingFiles {
                path: opened.path,
                files: vec![values_name],
            });
        }
        let reason =
            format!("its values are not in `{values_name}`, which is of another checkpoint");
        Err(opened
            .directory
            .file_error(name, FormatError::malformed("checkpoint", reason)))
    }

    /// Opens a directory: the files that its `*.safetensors.index.json` lists, or else all
    /// `*.safetensors` except further variants of the same model ([`Weights`]).
    ///
    /// Shards that torch's `HuggingFaceStorageWriter` wrote become chunks of whole tensors. Values
    /// are taken from [`VALUES_FILE`].
    pub(crate) fn open_directory(
        location: impl Into<Location>,
        options: OpenOptions,
    ) -> Result<Self, FileError> {
        let location = location.into();
        let directory = CheckedDirectory::open_covered(&location, options.verify)?;
        let names = directory.names()?;
        let mut opened = Self::without_files(&location, Format::SafetensorsDirectory, directory);
        match Weights::choose(&opened.directory, &names, ENDING)? {
            Weights::Indexed(index) => opened.add_indexed(index)?,
            Weights::Files(files) => {
                let mut shard_count = 0;
                let mut first_note: Option<RankNote> = None;
                for name in &files {
                    let HeaderTexts {
                        texts, rank_note, ..
                    } = opened.add_file(name, None)?;
                    if let Some(rank_note) = rank_note {
                        opened.check_rank(
                            name,
                            &rank_note,
                            first_note.as_ref().unwrap_or(&rank_note),
                        )?;
                        first_note.get_or_insert(rank_note);
                    }
                    shard_count = shard_count.max(opened.parse_shard_count(name, &texts)?);
                }
                opened.check_expected(&names, (0..shard_count).map(shard_name))?;
                opened.check_shards(&ShardFiles::among(&files), shard_count > 0)?;
                if let Some(rank_note) = &first_note {
                    opened.check_expected(&names, rank_note.file_names())?;
                }
            }
        }
        if opened.directory.has(VALUES_FILE)? {
            let bytes = opened
                .directory
                .read_checked(VALUES_FILE, MAX_INDEX_BYTES)?;
            opened.add_values(VALUES_FILE, bytes)?;
        }
        Ok(opened.with_paths())
    }

    /// Takes over the paths, if the checkpoint that this came from was a nested state dict: then
    /// all keys have one.
    fn with_paths(mut self) -> Self {
        let entries = &self.metadata.entries;
        self.metadata.planner_data = self
            .paths
            .take()
            .filter(|paths| entries.keys().all(|key| paths.contains_key(key)));
        self
    }

    /// Refuses the shard of one of several ranks. Nothing in it tells how large the whole tensors
    /// are, so that those of the first shard would look whole.
    fn check_not_a_shard(
        &self,
        name: &str,
        texts: &IndexMap<String, String>,
    ) -> Result<(), FileError> {
        let Some(own_number) = shard_number(name).filter(|_| texts.contains_key(SHARDING)) else {
            return Ok(());
        };
        let mut is_one_of_several = self.parse_shard_count(name, texts)? > 1;
        for other_name in self.directory.names()? {
            // A rank may have written several files, which have its number in common.
            is_one_of_several |=
                shard_number(&other_name).is_some_and(|other_number| other_number != own_number);
        }
        if is_one_of_several {
            let what =
                "the shard of one of several ranks (name the directory, which has the others),";
            return Err(self
                .directory
                .file_error(name, FormatError::unsupported(what)));
        }
        Ok(())
    }

    /// Returns the number of shards that the texts of a shard tell; 0 for a file that tells none,
    /// because another program has written it. A text that is no number is an error.
    fn parse_shard_count(
        &self,
        name: &str,
        texts: &IndexMap<String, String>,
    ) -> Result<usize, FileError> {
        let Some(count) = texts.get(SHARDS) else {
            return Ok(0);
        };
        count.parse().map_err(|_| {
            let reason = format!("`{count}` is no number of shards");
            self.directory.file_error(name, malformed(reason))
        })
    }

    /// Returns `true` if a file is named as that of a tensor-parallel rank, and files of other
    /// ranks are beside it.
    fn has_other_ranks(&self, name: &str) -> Result<bool, FileError> {
        let Some(own_rank) = rank_in_name(name) else {
            return Ok(false);
        };
        let file_names = self.directory.names()?;
        Ok(file_names
            .iter()
            .filter_map(|other_name| rank_in_name(other_name))
            .any(|rank| rank != own_rank))
    }

    /// Returns the error of a tensor-parallel rank's file without a note of its parts. All ranks'
    /// files have the same keys, and nothing else tells parts from copies.
    fn unnoted_rank_error(&self, name: &str) -> FileError {
        let what = "a file of a tensor-parallel rank without a note of the parts that it holds, as vLLM and SGLang \
                    write it,";
        self.directory
            .file_error(name, FormatError::unsupported(what))
    }

    /// Checks that all files exist that the checkpoint was written in. Another file does not stand
    /// in for one.
    fn check_expected(
        &self,
        names: &[String],
        expected: impl Iterator<Item = String>,
    ) -> Result<(), FileError> {
        // The number of files comes from one of them and may be absurdly large, so only the first
        // few missing names are made.
        let missing = expected.filter(|name| names.binary_search(name).is_err());
        self.directory.check_missing(missing)
    }

    /// Checks that no file is missing among those of the ranks.
    ///
    /// torch notes nowhere how many there are (`has_count` is `false`): only their numbers, and
    /// tensors that are not whole, tell. A rank that had nothing to write has no file, so the
    /// files after the last one are not missed, which is logged.
    fn check_shards(&self, files: &ShardFiles, has_count: bool) -> Result<(), FileError> {
        if files.is_empty() || has_count {
            return Ok(());
        }
        self.directory.check_missing(files.missing())?;
        // Tensors with holes, by one of the files that have parts of them.
        let mut with_holes = BTreeSet::new();
        for (_, tensor) in self.metadata.tensors() {
            let numels = tensor.chunks.iter().map(|chunk| chunk.bounds.numel());
            let covered = numels.fold(0, usize::saturating_add);
            let mut stored = tensor
                .chunks
                .iter()
                .filter_map(|chunk| chunk.stored.as_ref());
            if checked_numel(&tensor.shape).is_some_and(|numel| covered < numel) {
                with_holes.extend(stored.next().map(|stored| &stored.relative_path));
            }
        }
        for file in with_holes {
            self.directory.check_missing(files.missing_beside(file))?;
        }
        let path = self.path.display();
        warn!(%path, "torch does not note how many ranks have written: if the file of a last rank is missing, that is not noticed");
        Ok(())
    }

    /// Checks that a file is of the same ranks as the first one.
    fn check_rank(
        &self,
        name: &str,
        note: &RankNote,
        first_note: &RankNote,
    ) -> Result<(), FileError> {
        if note.files == first_note.files && note.rank < note.files.len() {
            return Ok(());
        }
        let reason = "it is not of the same tensor-parallel ranks as the files before";
        Err(self
            .directory
            .file_error(name, FormatError::malformed("note of a rank", reason)))
    }

    /// Adds the tensors that an index names, each from the file that it gives.
    fn add_indexed(&mut self, index: Index) -> Result<(), FileError> {
        for (file, keys) in index.keys_by_file(&self.directory)? {
            self.add_file(file, Some((&index, &keys)))?;
        }
        index.sort(&mut self.metadata);
        Ok(())
    }

    /// Adds the tensors of a file, except those that the index lists for another file. The index
    /// comes with the keys that it lists for this file. Returns the metadata strings in the file's
    /// header.
    fn add_file(
        &mut self,
        name: &str,
        index: Option<(&Index, &[&str])>,
    ) -> Result<HeaderTexts, FileError> {
        let header = Header::read(&*self.directory.file(name)?)
            .map_err(|source| self.directory.file_error(name, source))?;
        if let Some((_, keys)) = index
            && let Some(missing) = keys.iter().find(|key| !header.tensors.contains_key(**key))
        {
            let reason = format!("it does not hold `{missing}`, which the index looks for here");
            return Err(self.directory.file_error(name, malformed(reason)));
        }
        let notes = self
            .read_notes(&header)
            .map_err(|source| self.directory.file_error(name, source))?;
        // Without an index, all files of a directory count, and a later rank's file without a note
        // would add parts that nothing tells from copies.
        let is_of_later_rank = rank_in_name(name).is_some_and(|rank| rank > 0);
        if notes.rank_note.is_none() && index.is_none() && is_of_later_rank {
            return Err(self.unnoted_rank_error(name));
        }
        let tensors = header
            .tensors
            .iter()
            .map(|(fqn, info)| (fqn.as_str(), info.dtype, &info.shape[..], info.start));
        let layout = layout_text(header.data_offset, tensors);
        let mut budget = Budget::new(header.data_offset, 1);
        for (fqn, info) in &header.tensors {
            if index.is_some_and(|(index, _)| index.is_elsewhere(fqn, name)) {
                continue;
            }
            // Parts that several ranks have written, and their copies of whole tensors, are noted
            // as such.
            let is_noted = notes.rank_note.is_some() || notes.sharding.contains_key(fqn);
            let (first_file, is_noted_there) = self
                .first_files
                .entry(fqn.clone())
                .or_insert_with(|| (name.to_owned(), is_noted));
            if first_file != name && !(is_noted && *is_noted_there) {
                return Err(key_in_two_files(&self.directory, fqn, first_file, name));
            }
            notes
                .parts_of(fqn, info, &mut budget)
                .and_then(|parts| self.add_parts(name, header.data_offset, parts))
                .map_err(|source| self.directory.file_error(name, source))?;
        }
        Ok(HeaderTexts {
            texts: header.metadata,
            layout,
            rank_note: notes.rank_note,
        })
    }

    /// Reads the notes in a header, and keeps those that are about the whole checkpoint.
    fn read_notes(&mut self, header: &Header) -> Result<PartNotes, FormatError> {
        for (key, text) in &header.metadata {
            if !is_about_file(key) {
                self.notes
                    .entry(key.clone())
                    .or_insert_with(|| text.clone());
            }
        }
        if let Some(text) = header.metadata.get(PATHS) {
            self.paths = Some(paths::decode(text)?);
        }
        Ok(PartNotes {
            // A file that no rank has written alone has no notes of shards.
            sharding: read_note(header, SHARDING)?.unwrap_or_default(),
            rank_note: read_note(header, RANK_NOTE)?,
        })
    }

    /// Adds the parts of a tensor that a file holds, whose data begins at `data_offset`.
    fn add_parts(
        &mut self,
        file: &str,
        data_offset: u64,
        parts: TensorParts<'_>,
    ) -> Result<(), FormatError> {
        let TensorParts {
            fqn,
            info,
            shape,
            is_whole_shape,
            boxes,
        } = parts;
        let entry = self
            .metadata
            .entries
            .entry(fqn.to_owned())
            .or_insert_with(|| {
                Entry::Tensor(TensorEntry {
                    properties: TensorProperties::new(info.dtype),
                    shape: shape.clone(),
                    chunks: Vec::new(),
                })
            });
        let Entry::Tensor(tensor) = entry else {
            unreachable!("values are added after all files");
        };
        let is_same = tensor.properties.dtype == info.dtype && tensor.shape.len() == shape.len();
        if !is_same || (is_whole_shape && tensor.shape != shape) {
            let reason = format!("`{fqn}` is another tensor than in the files before");
            return Err(malformed(reason));
        }
        // The shape of a tensor in torch's shards is what they reach.
        for (size, end) in tensor.shape.iter_mut().zip(shape) {
            *size = (*size).max(end);
        }
        if !is_sane_shape(&tensor.shape) {
            return Err(offsets_error(fqn));
        }
        let element_bytes = info.dtype.size_in_bytes();
        let known_boxes = self.boxes.entry(fqn.to_owned()).or_default();
        for part in boxes {
            let bounds = part.bounds;
            let offset = data_offset + info.start + part.first_element * element_bytes;
            let stored = StorageInfo::new(file, offset, bounds.numel() as u64 * element_bytes);
            if let Some(strides) = part.strides {
                self.strides
                    .insert((file.to_owned(), stored.offset), strides);
            }
            if known_boxes.insert(bounds.clone()) {
                tensor.chunks.push(Chunk {
                    bounds,
                    stored: Some(stored),
                });
            } else {
                // Replicated tensors are in the file of every rank.
                self.metadata.replicas.push(Replica {
                    fqn: fqn.to_owned(),
                    bounds: Some(bounds),
                    stored,
                });
            }
        }
        Ok(())
    }

    /// Fills the part of a slot's box that lies in `part_bounds`, a box of a tensor that is stored
    /// at a place.
    fn read_part(
        &self,
        fqn: &str,
        part_bounds: &TensorBox,
        stored: &StorageInfo,
        slot: &mut Slot<'_>,
    ) -> Result<(), FileError> {
        let Some(overlap) = part_bounds.intersect(&slot.bounds) else {
            return Ok(());
        };
        let tensor = match self.inner_tensors.tensor(fqn) {
            Some(tensor) => tensor,
            None => tensor_of(&self.metadata, fqn)?,
        };
        let dtype = tensor.properties.dtype;
        let file = self.directory.file(&stored.relative_path)?;
        let layout = StridedLayout {
            bounds: part_bounds.clone(),
            offset: 0,
            strides: self
                .strides
                .get(&(stored.relative_path.clone(), stored.offset))
                .cloned()
                .unwrap_or_else(|| row_major_strides(&part_bounds.sizes)),
        };
        let elements = StoredElements {
            storage: stored.offset,
            element: dtype.size_in_bytes() as usize,
            layout: &layout,
        };
        elements
            .read(&mut BlockReader::new(&*file), &overlap, slot)
            .map_err(|source| item_error(&self.directory, fqn, stored, source))
    }

    /// Adds the values of a values file, and takes the tensors inside of them away from the other
    /// tensors. A value with the key of a tensor is an error.
    fn add_values(&mut self, name: &str, text: Vec<u8>) -> Result<(), FileError> {
        let values_file =
            ValuesFile::new(text).map_err(|error| self.directory.file_error(name, error))?;
        let stored = self.metadata.stored();
        self.stored_bytes = stored.map(|(_, _, stored)| stored.length).sum();
        // Tensors inside values lie among the others, under keys of their own; here they belong to
        // their value again.
        let inner_keys = values_file
            .find_inner_tensors(&|key| self.metadata.tensor(key).is_some())
            .map_err(|error| self.directory.file_error(name, error))?;
        let entries = std::mem::take(&mut self.metadata.entries);
        (self.inner_tensors.entries, self.metadata.entries) = entries
            .into_iter()
            .partition(|(key, _)| inner_keys.contains(key));
        self.metadata
            .replicas
            .retain(|replica| !inner_keys.contains(&replica.fqn));
        for fqn in values_file.keys() {
            if self.metadata.entries.contains_key(fqn) {
                // Another program has added a tensor of that name. Neither may hide the other.
                let reason = format!("`{fqn}` is a value in it, and a tensor beside it");
                return Err(self.directory.file_error(name, values::malformed(reason)));
            }
            let entry = Entry::Bytes(BytesEntry {
                stored: Some(StorageInfo::new(name, 0, values_file.length())),
            });
            self.metadata.entries.insert(fqn.to_owned(), entry);
        }
        self.values = Some(values_file);
        Ok(())
    }

    /// Reads a tensor that is inside of a value. Its bytes are charged to the budget.
    fn read_inner_tensor(
        &self,
        key: &str,
        budget: &mut Budget,
    ) -> Result<PlainTensor, FormatError> {
        let no_tensor = || values::malformed(format!("no tensor `{key}`"));
        let tensor = self.inner_tensors.tensor(key).ok_or_else(no_tensor)?;
        let chunks = tensor.chunks.iter().flat_map(|chunk| &chunk.stored);
        let length: u64 = chunks.map(|stored| stored.length).sum();
        budget.charge("bytes of tensors in values", length)?;
        let bounds = TensorBox::whole(&tensor.shape);
        let mut data = vec![0; length as usize];
        self.read_inner_box(key, tensor, &bounds, &mut data)
            .map_err(|error| match error {
                FileError::Item { source, .. } | FileError::File { source, .. } => source,
                _ => no_tensor(),
            })?;
        Ok(PlainTensor {
            dtype: tensor.properties.dtype,
            shape: bounds.sizes,
            data,
        })
    }

    /// Fills `dst` with a box of a tensor that is inside of a value. Chunks that do not hold all of
    /// it are an error.
    fn read_inner_box(
        &self,
        key: &str,
        tensor: &TensorEntry,
        bounds: &TensorBox,
        dst: &mut [u8],
    ) -> Result<(), FileError> {
        let request = request_of(&self.inner_tensors, key, bounds)?;
        plan_load(&self.inner_tensors, [&request])?;
        check_buffers(&request, request.dtype, &[&mut *dst])?;
        if dst.is_empty() {
            return Ok(());
        }
        let slots = &mut [Slot::new(bounds.clone(), dst)];
        fill_from_chunks(key, tensor, slots, &|whole, stored, slot| {
            self.read_part(key, whole, stored, slot)
        })
    }
}

/// Reads a note: an entry of a header's `__metadata__` whose text is JSON. Returns `None` if it is
/// not there.
fn read_note<T: DeserializeOwned>(header: &Header, key: &str) -> Result<Option<T>, FormatError> {
    let Some(text) = header.metadata.get(key) else {
        return Ok(None);
    };
    charge_text(text, "memory for shards")?;
    serde_json::from_str(text).map(Some).map_err(malformed)
}

/// Returns the box of a tensor that torch's note says a shard is; all of it without a note. `None`
/// if the note makes no sense.
fn saved_box(note: Option<&ShardNote>, info: &TensorInfo) -> Option<TensorBox> {
    let offsets = match note {
        Some(note) if info.dtype.safetensors_name().is_none() || info.dtype.packing().is_some() => {
            // Of a tensor that is stored as its bytes, they are noted, and they have a dimension
            // more.
            let dimensions = note.saved_offsets.len().min(info.shape.len());
            note.saved_offsets[..dimensions].to_vec()
        }
        Some(note) => note.saved_offsets.clone(),
        None => vec![0; info.shape.len()],
    };
    let is_shard = offsets.len() == info.shape.len() && offsets.len() <= MAX_TENSOR_RANK;
    let fits = offsets
        .iter()
        .zip(&info.shape)
        .all(|(offset, size)| offset.checked_add(*size).is_some());
    (is_shard && fits).then(|| TensorBox::new(offsets, info.shape.clone()))
}

impl Checkpoint for SafetensorsCheckpoint {
    fn format(&self) -> Format {
        self.format
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn directory(&self) -> &CheckedDirectory {
        &self.directory
    }

    fn digests(&self) -> Option<&StateDigest> {
        self.directory.digests().or(self.digests.as_ref())
    }

    fn notes(&self) -> Vec<(&str, &str)> {
        self.notes
            .iter()
            .map(|(key, text)| (key.as_str(), text.as_str()))
            .collect()
    }

    fn has_stale_digests(&self) -> bool {
        self.has_stale_digests && self.digests().is_none()
    }

    fn read_boxes(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        let tensor = tensor_of(&self.metadata, fqn)?;
        fill_from_chunks(fqn, tensor, slots, &|whole, stored, slot| {
            self.read_part(fqn, whole, stored, slot)
        })
    }

    fn read_replica(
        &self,
        replica: &Replica,
        bounds: &TensorBox,
        dst: &mut [u8],
    ) -> Result<(), FileError> {
        let (_, whole) = check_replica(&self.metadata, replica, bounds, dst)?;
        let mut slot = Slot::new(bounds.clone(), dst);
        self.read_part(&replica.fqn, whole, &replica.stored, &mut slot)
    }

    fn check_copies(&self, keys: KeyFilter<'_>) -> Result<(), FileError> {
        check_replicas(self, keys)
    }

    fn read_value(&self, fqn: &str) -> Result<PlainValue, FileError> {
        let stored = find_value(&self.metadata, fqn)?;
        let mut budget = Budget::new(self.stored_bytes, 1);
        let read = self.values.as_ref().and_then(|values| {
            values.read(fqn, &mut |key| self.read_inner_tensor(key, &mut budget))
        });
        read.ok_or_else(|| FileError::not_stored(fqn))?
            .map_err(|source| item_error(&self.directory, fqn, stored, source))
    }
}
