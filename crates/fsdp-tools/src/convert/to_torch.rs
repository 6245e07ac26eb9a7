//! Writing one file of `torch.save`.

use std::collections::HashMap;

use fsdp_formats::checkpoint::{Checkpoint, Structure};
use fsdp_formats::internals::{
    ArchiveLayout, PlannedPayload, ROOT, check_depth, check_writable, pickle_write as write,
    write_payloads, write_tensor, write_value,
};
use fsdp_formats::metadata::Metadata;
use fsdp_formats::storage::StagedFile;
use fsdp_formats::{FileError, FormatError};
use fsdp_layout::boxes::checked_numel;
use fsdp_layout::{DType, PlainTensor, PlainValue, TensorBox};
use indexmap::IndexMap;

use super::output::{Conversion, Converted, Streamed, commit_file, summary, unsupported};

/// A storage of the file to be written, which holds one tensor.
struct PlannedStorage<'a> {
    /// The key of the tensor. A tensor inside a value has the number of its storage, in a form that
    /// is no key of a checkpoint.
    name: String,
    dtype: DType,
    shape: &'a [usize],
    /// The tensor itself, if it was inside a value.
    inside: Option<&'a PlainTensor>,
}

/// The pickle of a state dict, and the storages that it refers to.
struct Pickled<'a> {
    bytes: Vec<u8>,
    storages: Vec<PlannedStorage<'a>>,
    metadata: &'a Metadata,
    /// The values, by flat key.
    values: &'a HashMap<String, PlainValue>,
}

impl<'a> Pickled<'a> {
    /// Writes the opcodes of a structure and of all that it holds.
    fn write(&mut self, structure: &'a Structure, depth: usize) -> Result<(), FormatError> {
        check_depth(depth)?;
        match structure {
            // The state dict of a module is flat, whatever modules it consists of.
            Structure::Module(_, items) => {
                self.bytes.push(write::EMPTY_DICT);
                self.bytes.push(write::MARK);
                self.write_module("", items, depth)?;
                self.bytes.push(write::SETITEMS);
            }
            Structure::Dict(items) => {
                self.bytes.push(write::EMPTY_DICT);
                self.bytes.push(write::MARK);
                for (key, item) in items {
                    // Keys hold no tensors.
                    write_value(&mut self.bytes, key, &mut Vec::new(), 0, depth + 1)?;
                    self.write(item, depth + 1)?;
                }
                self.bytes.push(write::SETITEMS);
            }
            Structure::List(items) => {
                self.bytes.push(write::EMPTY_LIST);
                self.bytes.push(write::MARK);
                self.write_all(items, depth)?;
                self.bytes.push(write::APPENDS);
            }
            Structure::Tuple(items) => {
                write::open_tuple(&mut self.bytes, items.len());
                self.write_all(items, depth)?;
                write::close_tuple(&mut self.bytes, items.len());
            }
            Structure::Leaf(fqn) => match (self.metadata.tensor(fqn), self.values.get(fqn)) {
                (Some(tensor), _) => {
                    let dtype = tensor.properties.dtype;
                    check_writable(dtype)?;
                    write_tensor(&mut self.bytes, self.storages.len(), dtype, &tensor.shape);
                    self.storages.push(PlannedStorage {
                        name: fqn.clone(),
                        dtype,
                        shape: &tensor.shape,
                        inside: None,
                    });
                }
                (None, Some(value)) => {
                    let mut inside: Vec<&PlainTensor> = Vec::new();
                    let first = self.storages.len();
                    write_value(&mut self.bytes, value, &mut inside, first, depth)?;
                    for tensor in inside {
                        self.storages.push(PlannedStorage {
                            name: format!("\0storage {}", self.storages.len()),
                            dtype: tensor.dtype,
                            shape: &tensor.shape,
                            inside: Some(tensor),
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
            if let Structure::Module(_, below) = item {
                self.write_module(&format!("{name}."), below, depth + 1)?;
                continue;
            }
            // Keys hold no tensors.
            let key = PlainValue::Str(name);
            write_value(&mut self.bytes, &key, &mut Vec::new(), 0, depth + 1)?;
            self.write(item, depth + 1)?;
        }
        Ok(())
    }

    fn write_all(&mut self, items: &'a [Structure], depth: usize) -> Result<(), FormatError> {
        items
            .iter()
            .try_for_each(|item| self.write(item, depth + 1))
    }
}

/// Returns the structure to write: the source's own, or else that of its keys' paths. All keys have
/// a place in it.
fn structure_of(source: &dyn Checkpoint) -> Result<Structure, FileError> {
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

/// Writes all of a checkpoint as one file of `torch.save`.
pub(super) fn write(conversion: Conversion<'_>) -> Result<Converted, FileError> {
    let Conversion {
        source,
        staging,
        options,
        ..
    } = conversion;
    let structure = structure_of(source)?;
    // Values are small, so all of them are held.
    let mut values = HashMap::new();
    for (fqn, _) in source.metadata().values() {
        values.insert(fqn.to_owned(), source.read_value(fqn)?);
    }
    // Make the pickle first: it numbers the storages, which determines their places.
    let mut pickled = Pickled {
        bytes: Vec::new(),
        storages: Vec::new(),
        metadata: source.metadata(),
        values: &values,
    };
    write::proto(&mut pickled.bytes, 2);
    pickled
        .write(&structure, 0)
        .map_err(|source| FileError::Encode {
            fqn: "data.pkl".to_owned(),
            source,
        })?;
    pickled.bytes.push(write::STOP);
    let mut lengths = Vec::with_capacity(pickled.storages.len());
    let mut boxes = Vec::with_capacity(pickled.storages.len());
    let mut extra = IndexMap::new();
    for storage in &pickled.storages {
        let length = checked_numel(storage.shape)
            .and_then(|numel| (numel as u64).checked_mul(storage.dtype.size_in_bytes()))
            .ok_or_else(|| unsupported(&storage.name, "a tensor of absurd size"))?;
        lengths.push(length);
        boxes.push(TensorBox::whole(storage.shape));
        if let Some(tensor) = storage.inside {
            extra.insert(storage.name.clone(), tensor);
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
    let layout = ArchiveLayout::new(&root, pickled.bytes, &lengths);

    let streamed = Streamed {
        source,
        options,
        extra,
    };
    let payloads: Vec<PlannedPayload<'_>> = (0..boxes.len())
        .map(|index| PlannedPayload {
            fqn: &pickled.storages[index].name,
            bounds: &boxes[index],
            offset: layout.storage_offset(index),
            length: lengths[index],
            // The format has no place for digests.
            place: None,
        })
        .collect();
    let file = staging.create_single(layout.length())?;
    // The header before a storage contains its checksum, so it is written after the storage.
    let written = write_payloads(
        &*file,
        &payloads,
        &streamed,
        options.threads,
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
    Ok(summary(source))
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
