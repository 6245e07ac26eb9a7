//! Writing one file of `torch.save`.

use std::collections::HashMap;
use std::path::Path;

use fsdp_digest::{BoxPlace, StateDigest};
use fsdp_formats::checkpoint::{Change, Checkpoint, Structure};
use fsdp_formats::internals::{
    ArchiveLayout, FileIntegrity, PlannedPayload, ROOT, check_copy, check_depth, check_writable,
    pickle_write as write, write_payloads, write_tensor, write_value, wrong_box,
};
use fsdp_formats::metadata::Metadata;
use fsdp_formats::storage::StagedFile;
use fsdp_formats::{FileError, FormatError};
use fsdp_layout::boxes::saturating_bytes;
use fsdp_layout::{PlainTensor, PlainValue, TensorBox};
use indexmap::IndexMap;

use super::integer_keys::restore_optimizers;
use super::numpy::{holds_numpy, without_numpy};
use super::output::{
    CheckpointPayloads, Conversion, commit_file, encode_error, rows_of_rank, unsupported,
};
use super::to_safetensors::{Sums, digests_of};

/// A storage of the file to be written, which holds one tensor.
struct PlannedStorage<'a> {
    /// The key of the tensor. A tensor inside a value has the number of its storage, in a form that
    /// is no key of a checkpoint.
    name: String,
    bounds: TensorBox,
    length_bytes: u64,
    /// The tensor itself, if it was inside a value.
    inner_tensor: Option<&'a PlainTensor>,
}

/// A writer of the pickle of a state dict, which plans the storages that it refers to.
struct PickleWriter<'a> {
    bytes: Vec<u8>,
    storages: Vec<PlannedStorage<'a>>,
    metadata: &'a Metadata,
    /// The values, by flat key.
    values: &'a HashMap<String, PlainValue>,
    /// The rank whose rows of each tensor the file holds, and the number of ranks. A tensor that
    /// has no rows is whole.
    rank: usize,
    ranks: usize,
}

impl<'a> PickleWriter<'a> {
    /// Writes the opcodes of a structure and of all that it holds.
    fn write_structure(
        &mut self,
        structure: &'a Structure,
        depth: usize,
    ) -> Result<(), FormatError> {
        check_depth(depth)?;
        match structure {
            Structure::Module(_, items) | Structure::Dict(items) => {
                self.bytes.push(write::EMPTY_DICT);
                self.bytes.push(write::MARK);
                if let Structure::Module(..) = structure {
                    // The state dict of a module is flat, whatever modules it consists of.
                    self.write_module("", items, depth)?;
                } else {
                    for (key, item) in items {
                        self.write_item(key, item, depth + 1)?;
                    }
                }
                self.bytes.push(write::SETITEMS);
            }
            Structure::List(items) => {
                self.bytes.push(write::EMPTY_LIST);
                self.bytes.push(write::MARK);
                self.write_sequence(items, depth)?;
                self.bytes.push(write::APPENDS);
            }
            Structure::Tuple(items) => {
                write::open_tuple(&mut self.bytes, items.len());
                self.write_sequence(items, depth)?;
                write::close_tuple(&mut self.bytes, items.len());
            }
            Structure::Leaf(fqn) => match (self.metadata.tensor(fqn), self.values.get(fqn)) {
                (Some(tensor), _) => {
                    let dtype = tensor.properties.dtype;
                    check_writable(dtype)?;
                    let bounds = rows_of_rank(&tensor.shape, self.rank, self.ranks);
                    write_tensor(&mut self.bytes, self.storages.len(), dtype, &bounds.sizes);
                    self.storages.push(PlannedStorage {
                        name: fqn.clone(),
                        length_bytes: saturating_bytes(&bounds.sizes, dtype),
                        bounds,
                        inner_tensor: None,
                    });
                }
                (None, Some(value)) => {
                    let mut inner_tensors: Vec<&PlainTensor> = Vec::new();
                    let first_storage = self.storages.len();
                    write_value(
                        &mut self.bytes,
                        value,
                        &mut inner_tensors,
                        first_storage,
                        depth,
                    )?;
                    for tensor in inner_tensors {
                        self.storages.push(PlannedStorage {
                            name: format!("\0storage {}", self.storages.len()),
                            bounds: TensorBox::whole(&tensor.shape),
                            length_bytes: tensor.data.len() as u64,
                            inner_tensor: Some(tensor),
                        });
                    }
                }
                (None, None) => {
                    return Err(FormatError::unexpected(format!("a key `{fqn}`"), "none"));
                }
            },
        }
        Ok(())
    }

    /// Writes the items of a module as those of its state dict: each key is the path of an item
    /// below the module.
    fn write_module(
        &mut self,
        prefix: &str,
        items: &'a [(PlainValue, Structure)],
        depth: usize,
    ) -> Result<(), FormatError> {
        check_depth(depth)?;
        for (key, item) in items {
            let text = key.key_text().expect("the keys of a module are texts");
            let name = format!("{prefix}{text}");
            if let Structure::Module(_, module_items) = item {
                self.write_module(&format!("{name}."), module_items, depth + 1)?;
                continue;
            }
            self.write_item(&PlainValue::Str(name), item, depth + 1)?;
        }
        Ok(())
    }

    /// Writes an item of a dict, and its key.
    fn write_item(
        &mut self,
        key: &PlainValue,
        item: &'a Structure,
        depth: usize,
    ) -> Result<(), FormatError> {
        // Keys hold no tensors.
        write_value(&mut self.bytes, key, &mut Vec::new(), 0, depth)?;
        self.write_structure(item, depth)
    }

    /// Writes the items of a list or tuple.
    fn write_sequence(&mut self, items: &'a [Structure], depth: usize) -> Result<(), FormatError> {
        items
            .iter()
            .try_for_each(|item| self.write_structure(item, depth + 1))
    }
}

/// Returns the structure to write: the source's own, or else that of its keys' paths. A key that
/// has no place in it is an error.
pub(super) fn choose_structure(source: &dyn Checkpoint) -> Result<Structure, FileError> {
    let metadata = source.metadata();
    let structure = match source.structure() {
        Some(structure) => structure.clone(),
        None => Structure::from_paths(metadata)?,
    };
    let leaves = structure.leaves();
    for fqn in metadata.entries.keys() {
        if !leaves.contains(fqn.as_str()) {
            return Err(unsupported(
                fqn,
                "a key that has no place in the state dict",
            ));
        }
    }
    Ok(structure)
}

/// Returns the containers and the values of a checkpoint as files of torch hold them, and adds to
/// `changes` what becomes another type. Values are small, so all of them are held.
pub(super) fn read_content(
    source: &dyn Checkpoint,
    changes: &mut Vec<Change>,
) -> Result<(Structure, HashMap<String, PlainValue>), FileError> {
    let mut structure = choose_structure(source)?;
    let mut with_numpy = Vec::new();
    let mut values = HashMap::new();
    for (fqn, _) in source.metadata().values() {
        let mut value = source.read_value(fqn)?;
        if holds_numpy(&value) {
            value = without_numpy(value);
            with_numpy.push(fqn.to_owned());
        }
        values.insert(fqn.to_owned(), value);
    }
    changes.extend(Change::new(
        "value",
        "of NumPy became a tensor, or a number of Python's",
        with_numpy,
    ));
    // Where the types of keys are known, they stay as they are.
    if source.structure().is_none() {
        let restored = restore_optimizers(&mut structure, &values);
        let what = "of optimizer state became the integer that `param_groups` has";
        changes.extend(Change::new("key", what, restored.keys));
        let what = "of an optimizer was added, empty, as torch has it";
        changes.extend(Change::new("state", what, restored.states));
    }
    Ok((structure, values))
}

/// Writes all of a checkpoint as one file of `torch.save`, and adds to `changes` what differs from
/// the source. The file holds any value, so no file has to hold values beside it, and `None` is
/// returned.
pub(super) fn write(
    conversion: Conversion<'_>,
    changes: &mut Vec<Change>,
) -> Result<Option<String>, FileError> {
    let (structure, values) = read_content(conversion.source, changes)?;
    // torch calls the root of an archive like the file. No part of a record's path is `.` or `..`,
    // so such a file has the usual root.
    let stem = conversion
        .staging
        .target()
        .file_stem()
        .and_then(|stem| stem.to_str())
        .filter(|stem| ![".", ".."].contains(stem));
    let archive = Archive {
        root: &stem.unwrap_or(ROOT).replace(['/', '\\'], "_"),
        structure: &structure,
        values: &values,
        rank: 0,
        ranks: 1,
    };
    // The format has no place for digests, so they are only compared.
    let source = conversion.source;
    let mut sums = Sums::new();
    let is_checked = source.digests().is_some();
    archive.write(&conversion, None, is_checked.then_some(&mut sums))?;
    source.check_elements_read()?;
    if is_checked {
        let written = digests_of(source, &values, &sums);
        check_unchanged(source, conversion.staging.target(), &written)?;
    }
    commit_file(conversion.staging, None)?;
    Ok(None)
}

/// Checks that what was written to `path` has the digests that the source has recorded, if it has
/// any. Values of NumPy became other types, so these differ.
pub(super) fn check_unchanged(
    source: &dyn Checkpoint,
    path: &Path,
    written: &StateDigest,
) -> Result<(), FileError> {
    let (path, names) = match check_copy(path, source.digests(), written) {
        Err(FileError::Digests { path, names }) => (path, names),
        outcome => return outcome,
    };
    let mut differing = Vec::new();
    for fqn in names {
        let is_value = source.metadata().tensor(&fqn).is_none();
        if !(is_value && holds_numpy(&source.read_value(&fqn)?)) {
            differing.push(fqn);
        }
    }
    if differing.is_empty() {
        return Ok(());
    }
    Err(FileError::Digests {
        path,
        names: differing,
    })
}

/// A file of `torch.save` to be written.
pub(super) struct Archive<'a> {
    /// The name of its root.
    pub(super) root: &'a str,
    pub(super) structure: &'a Structure,
    /// All values, by flat key.
    pub(super) values: &'a HashMap<String, PlainValue>,
    /// The rank whose rows of each tensor it holds, and the number of ranks.
    pub(super) rank: usize,
    pub(super) ranks: usize,
}

impl Archive<'_> {
    /// Writes the file of this name, or the only file of a conversion if `name` is `None`. Adds to
    /// the sums over the tensors, if there are any, and returns the file's hashes.
    pub(super) fn write(
        &self,
        conversion: &Conversion<'_>,
        name: Option<&str>,
        mut sums: Option<&mut Sums>,
    ) -> Result<FileIntegrity, FileError> {
        let Conversion {
            source,
            staging,
            options,
            ..
        } = conversion;
        // Make the pickle first: it numbers the storages, which determines their places.
        let mut pickle = PickleWriter {
            bytes: Vec::new(),
            storages: Vec::new(),
            metadata: source.metadata(),
            values: self.values,
            rank: self.rank,
            ranks: self.ranks,
        };
        write::proto(&mut pickle.bytes, 2);
        pickle
            .write_structure(self.structure, 0)
            .map_err(|source| encode_error("data.pkl", source))?;
        pickle.bytes.push(write::STOP);
        let mut lengths = Vec::with_capacity(pickle.storages.len());
        let mut inner_tensors = IndexMap::new();
        let mut places = Vec::with_capacity(pickle.storages.len());
        for storage in &pickle.storages {
            lengths.push(storage.length_bytes);
            if let Some(tensor) = storage.inner_tensor {
                inner_tensors.insert(storage.name.clone(), tensor);
            }
            places.push(match sums {
                Some(_) => self.find_place(*source, storage)?,
                None => None,
            });
        }
        let layout = ArchiveLayout::new(self.root, pickle.bytes, &lengths);
        let source_payloads = CheckpointPayloads {
            source: *source,
            options: *options,
            inner_tensors: &inner_tensors,
        };
        let payloads: Vec<PlannedPayload<'_>> = pickle
            .storages
            .iter()
            .zip(&places)
            .enumerate()
            .map(|(index, (storage, place))| PlannedPayload {
                fqn: &storage.name,
                bounds: &storage.bounds,
                offset: layout.storage_offset(index),
                length: storage.length_bytes,
                place: place.as_ref(),
            })
            .collect();
        let file = match name {
            Some(name) => staging.create(name, layout.length())?,
            None => staging.create_single(layout.length())?,
        };
        // The header before a storage contains its checksum, so it is written after the storage.
        let written = write_payloads(
            &*file,
            &payloads,
            &source_payloads,
            options.thread_count(),
            Some(&|index, crc| write_header(&*file, &layout, index, crc)),
        )?;
        let crcs: Vec<u32> = written.iter().map(|written| written.crc).collect();
        if crcs.is_empty() {
            // Without storages, nothing has written the head of the archive.
            write_header(&*file, &layout, 0, 0)?;
        }
        let tail = layout.tail(&crcs);
        file.write_at(layout.tail_offset(), &tail)?;
        file.finish()?;
        // Each storage is a segment of its own, so that reading one checks little else.
        let mut integrity = FileIntegrity::default();
        integrity.push_bytes(&layout.head(crcs.first().copied().unwrap_or_default()));
        for (index, (payload, written)) in payloads.iter().zip(written).enumerate() {
            if index > 0 {
                integrity.push_bytes(&layout.storage_header(index, written.crc));
            }
            integrity.push(payload.length, payload.block_length(), written.hashes);
            if let Some(sums) = &mut sums
                && payload.place.is_some()
            {
                sums.entry(payload.fqn.to_owned())
                    .or_default()
                    .add(written.sum);
            }
        }
        integrity.push_bytes(&tail);
        Ok(integrity)
    }

    /// Returns the position of a storage's elements in their tensor; `None` for what is not summed:
    /// a tensor inside a value, and one that the first rank's file has whole.
    fn find_place(
        &self,
        source: &dyn Checkpoint,
        storage: &PlannedStorage<'_>,
    ) -> Result<Option<BoxPlace>, FileError> {
        let tensor = source.metadata().tensor(&storage.name);
        let Some(tensor) = tensor.filter(|tensor| self.rank == 0 || !tensor.shape.is_empty())
        else {
            return Ok(None);
        };
        let element_bytes = tensor.properties.dtype.size_in_bytes() as usize;
        BoxPlace::new(&tensor.shape, &storage.bounds, element_bytes)
            .map(Some)
            .map_err(|error| wrong_box(&storage.name, &error))
    }
}

/// Writes the bytes before a storage, which contain its checksum. Before the first storage, that is
/// all of the archive's head.
fn write_header(
    file: &dyn StagedFile,
    layout: &ArchiveLayout,
    index: usize,
    crc: u32,
) -> Result<(), FileError> {
    if index == 0 {
        return file.write_at(0, &layout.head(crc));
    }
    let header = layout.storage_header(index, crc);
    file.write_at(layout.storage_offset(index) - header.len() as u64, &header)
}
