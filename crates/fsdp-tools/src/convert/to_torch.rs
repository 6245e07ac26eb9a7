//! Writing one file of `torch.save`.

use std::collections::HashMap;

use fsdp_formats::checkpoint::{Change, Checkpoint, Structure};
use fsdp_formats::internals::{
    ArchiveLayout, PlannedPayload, ROOT, check_depth, check_writable, pickle_write as write,
    write_payloads, write_tensor, write_value,
};
use fsdp_formats::metadata::Metadata;
use fsdp_formats::storage::StagedFile;
use fsdp_formats::{FileError, FormatError};
use fsdp_layout::{PlainTensor, PlainValue, TensorBox};
use indexmap::IndexMap;

use super::integer_keys::restore_integer_keys;
use super::output::{
    CheckpointPayloads, Conversion, commit_file, encode_error, saturating_bytes, unsupported,
};

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
                    write_tensor(&mut self.bytes, self.storages.len(), dtype, &tensor.shape);
                    self.storages.push(PlannedStorage {
                        name: fqn.clone(),
                        bounds: TensorBox::whole(&tensor.shape),
                        length_bytes: saturating_bytes(&tensor.shape, dtype),
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
fn choose_structure(source: &dyn Checkpoint) -> Result<Structure, FileError> {
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

/// Writes all of a checkpoint as one file of `torch.save`, and adds to `changes` what differs from
/// the source. The file holds any value, so no file has to hold values beside it, and `None` is
/// returned.
pub(super) fn write(
    conversion: Conversion<'_>,
    changes: &mut Vec<Change>,
) -> Result<Option<String>, FileError> {
    let Conversion {
        source,
        staging,
        options,
        ..
    } = conversion;
    let mut structure = choose_structure(source)?;
    // Values are small, so all of them are held.
    let mut values = HashMap::new();
    for (fqn, _) in source.metadata().values() {
        values.insert(fqn.to_owned(), source.read_value(fqn)?);
    }
    // Where the types of keys are known, they stay as they are.
    if source.structure().is_none() {
        let restored = restore_integer_keys(&mut structure, &values);
        let what = "of optimizer state became the integer that `param_groups` has";
        changes.extend(Change::new("key", what, restored));
    }
    // Make the pickle first: it numbers the storages, which determines their places.
    let mut pickle = PickleWriter {
        bytes: Vec::new(),
        storages: Vec::new(),
        metadata: source.metadata(),
        values: &values,
    };
    write::proto(&mut pickle.bytes, 2);
    pickle
        .write_structure(&structure, 0)
        .map_err(|source| encode_error("data.pkl", source))?;
    pickle.bytes.push(write::STOP);
    let mut lengths = Vec::with_capacity(pickle.storages.len());
    let mut inner_tensors = IndexMap::new();
    for storage in &pickle.storages {
        lengths.push(storage.length_bytes);
        if let Some(tensor) = storage.inner_tensor {
            inner_tensors.insert(storage.name.clone(), tensor);
        }
    }
    // torch calls the root of an archive like the file. No part of a record's path is `.` or `..`,
    // so such a file has the usual root.
    let stem = staging
        .target()
        .file_stem()
        .and_then(|stem| stem.to_str())
        .filter(|stem| ![".", ".."].contains(stem));
    let root = stem.unwrap_or(ROOT).replace(['/', '\\'], "_");
    let layout = ArchiveLayout::new(&root, pickle.bytes, &lengths);

    let source_payloads = CheckpointPayloads {
        source,
        options,
        inner_tensors: &inner_tensors,
    };
    let payloads: Vec<PlannedPayload<'_>> = pickle
        .storages
        .iter()
        .enumerate()
        .map(|(index, storage)| PlannedPayload {
            fqn: &storage.name,
            bounds: &storage.bounds,
            offset: layout.storage_offset(index),
            length: storage.length_bytes,
            // The format has no place for digests.
            place: None,
        })
        .collect();
    let file = staging.create_single(layout.length())?;
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
    file.write_at(layout.tail_offset(), &layout.tail(&crcs))?;
    file.finish()?;
    commit_file(staging, None)?;
    Ok(None)
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
