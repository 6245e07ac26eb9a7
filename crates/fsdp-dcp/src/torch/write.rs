//! Writing one file of `torch.save`.

use std::collections::BTreeMap;

use fsdp_layout::{KeyPath, PathPart, PlainTensor, PlainValue, TensorBox};
use indexmap::IndexMap;

use super::tensor_ref::{check_writable, write_tensor};
use super::value::put;
use super::zip::ArchiveLayout;
use crate::error::{FileError, FormatError};
use crate::formats::checkpoint::Checkpoint;
use crate::limits::MAX_DEPTH;
use crate::metadata::{Entry, TensorEntry};
use crate::output::{ConvertOptions, Converted};
use crate::output::{Streamed, commit_file, summary};
use crate::payload::write::{PlannedPayload, write_payloads};
use crate::pickle::write;
use crate::storage::{StagedFile, Staging};

/// The nested state dict that the flat keys came from.
enum Tree<'a> {
    Dict(IndexMap<String, Tree<'a>>),
    /// By position; positions without a value are empty dicts, which vanished when the list was flattened.
    List(BTreeMap<usize, Tree<'a>>),
    Tensor(&'a str, &'a TensorEntry),
    Value(PlainValue),
}

/// The number of positions without a value that the lists of a checkpoint may have: positions come from files.
const MAX_GAPS: usize = 1 << 16;

fn unsupported(fqn: &str, what: &str) -> FileError {
    FileError::Encode { fqn: fqn.to_owned(), source: FormatError::Unsupported { what: what.to_owned() } }
}

impl<'a> Tree<'a> {
    /// Makes the empty container that the first part of a path leads into.
    fn container_for(path: &[PathPart]) -> Self {
        match path.first() {
            Some(PathPart::Index(_)) => Tree::List(BTreeMap::new()),
            _ => Tree::Dict(IndexMap::new()),
        }
    }

    /// Puts a leaf at its place, and makes the dicts and lists on the way.
    fn insert(&mut self, fqn: &str, path: &[PathPart], leaf: Tree<'a>) -> Result<(), FileError> {
        let Some((part, rest)) = path.split_first() else {
            return Err(unsupported(fqn, "a value where others lie below"));
        };
        let slot = match (self, part) {
            (Tree::Dict(dict), PathPart::Key(key)) => {
                if rest.is_empty() {
                    return match dict.insert(key.clone(), leaf) {
                        None => Ok(()),
                        Some(_) => Err(unsupported(fqn, "two values at one place")),
                    };
                }
                dict.entry(key.clone()).or_insert_with(|| Tree::container_for(rest))
            }
            (Tree::List(list), PathPart::Index(index)) => {
                if rest.is_empty() {
                    return match list.insert(*index, leaf) {
                        None => Ok(()),
                        Some(_) => Err(unsupported(fqn, "two values at one place")),
                    };
                }
                list.entry(*index).or_insert_with(|| Tree::container_for(rest))
            }
            _ => return Err(unsupported(fqn, "a place that is a dict to one key and a list to another")),
        };
        slot.insert(fqn, rest, leaf)
    }
}

/// A storage of the file to be.
enum PlannedStorage<'a> {
    Tensor(&'a str, &'a TensorEntry),
    Inside(&'a PlainTensor),
}

/// The pickle of a tree, and the storages that it speaks of.
#[derive(Default)]
struct Pickled<'a> {
    bytes: Vec<u8>,
    storages: Vec<PlannedStorage<'a>>,
    /// Positions without a value so far.
    gaps: usize,
}

impl<'a> Pickled<'a> {
    /// Writes the opcodes of a tree.
    fn put(&mut self, tree: &'a Tree<'a>, depth: usize) -> Result<(), FormatError> {
        check_depth(depth)?;
        match tree {
            Tree::Dict(dict) => {
                write::op(&mut self.bytes, write::EMPTY_DICT);
                write::op(&mut self.bytes, write::MARK);
                for (key, value) in dict {
                    write::text(&mut self.bytes, key);
                    self.put(value, depth + 1)?;
                }
                write::op(&mut self.bytes, write::SETITEMS);
            }
            Tree::List(list) => {
                write::op(&mut self.bytes, write::EMPTY_LIST);
                write::op(&mut self.bytes, write::MARK);
                let mut next = 0;
                for (&index, value) in list {
                    self.gaps = self.gaps.saturating_add(index - next);
                    if self.gaps > MAX_GAPS {
                        let (value, limit) = (self.gaps as u64, MAX_GAPS as u64);
                        return Err(FormatError::Limit {
                            what: "number of list positions without a value",
                            value,
                            limit,
                        });
                    }
                    // A list has no holes: an empty dict, which flattening leaves out, stands for a missing position.
                    (next..index).for_each(|_| write::op(&mut self.bytes, write::EMPTY_DICT));
                    self.put(value, depth + 1)?;
                    next = index.saturating_add(1);
                }
                write::op(&mut self.bytes, write::APPENDS);
            }
            Tree::Tensor(fqn, tensor) => {
                check_writable(tensor.properties.dtype)?;
                write_tensor(&mut self.bytes, self.storages.len(), tensor.properties.dtype, &tensor.shape);
                self.storages.push(PlannedStorage::Tensor(fqn, tensor));
            }
            Tree::Value(value) => {
                let mut inside: Vec<&PlainTensor> = Vec::new();
                put(&mut self.bytes, value, &mut inside, self.storages.len(), depth)?;
                self.storages.extend(inside.into_iter().map(PlannedStorage::Inside));
            }
        }
        Ok(())
    }
}

/// Checks that a tree is not too deep: paths come from files, and the functions that walk trees call themselves.
fn check_depth(depth: usize) -> Result<(), FormatError> {
    if depth >= MAX_DEPTH {
        return Err(FormatError::Limit { what: "nesting", value: depth as u64, limit: MAX_DEPTH as u64 });
    }
    Ok(())
}

/// Writes all of a checkpoint as one file of `torch.save`.
pub(crate) fn write(
    source: &dyn Checkpoint,
    staging: Staging,
    options: ConvertOptions<'_>,
) -> Result<Converted, FileError> {
    let metadata = source.metadata();
    let paths = metadata.planner_data.as_ref();
    let mut tree = match paths.and_then(|paths| paths.first()?.1.0.first()) {
        Some(PathPart::Index(_)) => Tree::List(BTreeMap::new()),
        _ => Tree::Dict(IndexMap::new()),
    };
    for (fqn, entry) in &metadata.entries {
        let path = paths.and_then(|paths| paths.get(fqn)).cloned();
        let path = path.unwrap_or_else(|| KeyPath(vec![PathPart::Key(fqn.clone())]));
        check_depth(path.0.len()).map_err(|source| FileError::Encode { fqn: fqn.clone(), source })?;
        let leaf = match entry {
            Entry::Tensor(tensor) => Tree::Tensor(fqn, tensor),
            Entry::Bytes(_) => Tree::Value(source.read_value(fqn)?),
        };
        if path.0.is_empty() && metadata.entries.len() == 1 {
            // The root itself is a tensor, or one value.
            tree = leaf;
        } else {
            tree.insert(fqn, &path.0, leaf)?;
        }
    }
    // The pickle is made first: it numbers the storages, whose lengths and places follow from it.
    let mut pickled = Pickled::default();
    write::proto(&mut pickled.bytes, 2);
    pickled.put(&tree, 0).map_err(|source| FileError::Encode { fqn: "data.pkl".to_owned(), source })?;
    write::op(&mut pickled.bytes, write::STOP);
    let Pickled { bytes, storages, .. } = pickled;

    let mut lengths = Vec::with_capacity(storages.len());
    let mut boxes = Vec::with_capacity(storages.len());
    for storage in &storages {
        let (shape, dtype, fqn) = match storage {
            PlannedStorage::Tensor(fqn, tensor) => (&tensor.shape, tensor.properties.dtype, *fqn),
            PlannedStorage::Inside(tensor) => (&tensor.shape, tensor.dtype, ""),
        };
        let numel = fsdp_layout::boxes::checked_numel(shape);
        let length = numel.and_then(|numel| (numel as u64).checked_mul(dtype.size_in_bytes()));
        lengths.push(length.ok_or_else(|| unsupported(fqn, "a tensor of absurd size"))?);
        boxes.push(TensorBox::whole(shape));
    }
    let root =
        staging.target().file_stem().and_then(|stem| stem.to_str()).unwrap_or("archive").replace(['/', '\\'], "_");
    let layout = ArchiveLayout::new(&root, bytes, &lengths);

    // Tensors inside values go by the number of their storage, which is no key of a checkpoint.
    let mut extra = IndexMap::new();
    let mut names = Vec::with_capacity(storages.len());
    for (index, storage) in storages.iter().enumerate() {
        names.push(match storage {
            PlannedStorage::Tensor(fqn, _) => (*fqn).to_owned(),
            PlannedStorage::Inside(tensor) => {
                let name = format!("\0storage {index}");
                extra.insert(name.clone(), *tensor);
                name
            }
        });
    }
    let streamed = Streamed { source, options, extra };
    let payloads: Vec<PlannedPayload<'_>> = (0..storages.len())
        .map(|index| PlannedPayload {
            fqn: &names[index],
            bounds: &boxes[index],
            offset: layout.storage_offset(index),
            length: lengths[index],
        })
        .collect();
    let file = staging.create_single(layout.length())?;
    // The header before a storage tells its checksum, so it is written once the storage is.
    let write_before = |index, crc| write_header(&file, &layout, index, crc);
    let written = write_payloads(&file, &payloads, &streamed, options.threads, Some(&write_before))?;
    let crcs: Vec<u32> = written.iter().map(|written| written.crc).collect();
    if crcs.is_empty() {
        write_header(&file, &layout, 0, 0)?;
    }
    file.write_at(layout.tail_offset(), &layout.tail(&crcs))?;
    file.finish()?;
    commit_file(staging, None)?;
    Ok(summary(source))
}

/// Writes the bytes before a storage, which tell its checksum; before the first storage lies all of the archive's head.
fn write_header(file: &StagedFile, layout: &ArchiveLayout, index: usize, crc: u32) -> Result<(), FileError> {
    if index == 0 {
        return file.write_at(0, &layout.head(crc));
    }
    let header = layout.storage_header(index, crc);
    file.write_at(layout.storage_offset(index) - header.len() as u64, &header)
}
