//! Files of `torch.save` as checkpoints: nested dicts flattened as DCP does it, tensors read by range.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fsdp_digest::StateDigest;
use fsdp_layout::{KeyPath, PathPart, PlainTensor, PlainValue, TensorBox};
use indexmap::IndexMap;

use crate::error::{FileError, FormatError};
use crate::formats::checkpoint::{Checkpoint, Format};
use crate::formats::lookup::no_value;
use crate::formats::read::OpenOptions;
use crate::formats::structure::{Structure, key_text};
use crate::limits::MAX_OBJECT_BYTES;
use crate::metadata::{BytesEntry, Chunk, Entry, Metadata, StorageInfo, TensorEntry, TensorProperties};
use crate::payload::slot::Slot;
use crate::pickle::{Node, NodeId, OpaqueNode, Pickle, PickleError, Walk, parse};
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::checked_file::CheckedFile;
use crate::storage::location::Location;
use crate::storage::read_at::{BlockReader, ReadAt};
use crate::strided::read_overlap;
use crate::torch::legacy;
use crate::torch::storages::Storages;
use crate::torch::tensor_ref::TensorRef;
use crate::torch::value::{TensorLoader, convert, is_opaque};
use crate::torch::zip::Directory;

/// One torch archive.
///
/// Dicts are flattened, and lists that hold tensors or dicts, as DCP does it; a tuple only where it holds a dict with
/// tensors.
/// Other values are read when the file is opened, with the tensors that they hold.
#[derive(Debug)]
pub(crate) struct TorchCheckpoint {
    path: PathBuf,
    directory: CheckedDirectory,
    file: Arc<CheckedFile>,
    storages: Storages,
    metadata: Metadata,
    tensors: HashMap<String, TensorRef>,
    values: HashMap<String, PlainValue>,
    /// The errors and the descriptions of values that hold objects of unknown types.
    opaque: HashMap<String, (PickleError, PlainValue)>,
    quantizers: HashMap<String, PlainValue>,
    structure: Structure,
}

impl TorchCheckpoint {
    /// Opens a file of `torch.save`, of any torch.
    pub(crate) fn open(location: impl Into<Location>, options: OpenOptions) -> Result<Self, FileError> {
        let location = location.into();
        let path = location.name();
        let (parent, name) = location.split()?;
        let directory = CheckedDirectory::open_beside(&parent, name, options.verify)?;
        let file = directory.file(name)?;
        let error = |source| FileError::File { path: path.to_owned(), source };
        let (pickle, storages) = read_pickle(&*file).map_err(error)?;
        let parsed = parse(&pickle).map_err(|source| error(source.into()))?;
        // Values are read now, since the pickle is not kept; tensors are only found.
        let mut flat = Flattener {
            pickle: &parsed,
            walk: Walk::new(&parsed),
            loader: TensorLoader::new(&storages, &*file),
            found: IndexMap::new(),
            quantizers: HashMap::new(),
        };
        let structure = flat.flatten(parsed.root(), &KeyPath::default()).map_err(error)?;
        let (found, quantizers) = (flat.found, flat.quantizers);
        let mut opened = TorchCheckpoint {
            path: path.to_owned(),
            file: file.clone(),
            storages,
            directory,
            metadata: Metadata { planner_data: Some(IndexMap::new()), ..Metadata::default() },
            tensors: HashMap::new(),
            values: HashMap::new(),
            opaque: HashMap::new(),
            quantizers,
            structure,
        };
        for (fqn, (path, leaf)) in found {
            let entry = match leaf {
                FlatValue::Value(value) => {
                    opened.values.insert(fqn.clone(), value);
                    Entry::Bytes(BytesEntry { stored: Some(place_in(name, 0, 0)) })
                }
                FlatValue::Opaque(error, description) => {
                    opened.opaque.insert(fqn.clone(), (error, description));
                    Entry::Bytes(BytesEntry { stored: Some(place_in(name, 0, 0)) })
                }
                FlatValue::Tensor(tensor) => {
                    let start = opened.storages.start(&tensor).map_err(error)?;
                    let bounds = TensorBox::whole(&tensor.shape);
                    let chunks = vec![Chunk { bounds, stored: Some(place_in(name, start, tensor.storage_bytes)) }];
                    let (properties, shape) = (TensorProperties::of(tensor.dtype), tensor.shape.clone());
                    opened.tensors.insert(fqn.clone(), tensor);
                    Entry::Tensor(TensorEntry { properties, shape, chunks })
                }
            };
            opened.metadata.planner_data.get_or_insert_default().insert(fqn.clone(), path);
            opened.metadata.entries.insert(fqn, entry);
        }
        Ok(opened)
    }

    /// Fills boxes of a tensor from the record of its storage.
    fn read_from_record(&self, tensor: &TensorRef, slots: &mut [Slot<'_>]) -> Result<(), FormatError> {
        let start = self.storages.data_offset(&*self.file, tensor)?;
        let element = tensor.dtype.size_in_bytes() as usize;
        let mut reader = BlockReader::new(&*self.file);
        for slot in slots {
            let bounds = slot.bounds.clone();
            read_overlap(&mut reader, start, element, &tensor.layout, &bounds, slot)?;
        }
        Ok(())
    }
}

fn place_in(file: &str, offset: u64, length: u64) -> StorageInfo {
    StorageInfo { relative_path: file.to_owned(), offset, length, transforms: Vec::new() }
}

/// Returns about how many bytes a part of a path takes.
fn part_length(part: &PathPart) -> usize {
    match part {
        PathPart::Key(key) => key.len() + size_of::<PathPart>(),
        PathPart::Index(_) => size_of::<PathPart>(),
    }
}

/// Reads the pickle of a file, and finds its storages.
fn read_pickle(file: &dyn ReadAt) -> Result<(Vec<u8>, Storages), FormatError> {
    let mut start = [0; 4];
    if file.len() >= start.len() as u64 {
        file.read_exact_at(0, &mut start)?;
    }
    if start == legacy::START {
        return legacy::read(file);
    }
    let archive = Directory::read(file)?;
    archive.check_byte_order(file)?;
    let pickle = archive.read_record(file, "data.pkl", MAX_OBJECT_BYTES)?;
    Ok((pickle, Storages::Archive(archive)))
}

/// A value with a flat key.
enum FlatValue {
    Tensor(TensorRef),
    Value(PlainValue),
    /// A value with an object of an unknown type in it: the error of whoever needs it, and its description.
    Opaque(PickleError, PlainValue),
}

/// Gives every value of a nested state dict its flat key.
struct Flattener<'p, 'a> {
    pickle: &'p Pickle<'a>,
    walk: Walk,
    loader: TensorLoader<'p>,
    found: IndexMap<String, (KeyPath, FlatValue)>,
    quantizers: HashMap<String, PlainValue>,
}

impl Flattener<'_, '_> {
    /// Adds what lies below a node, whose place in the state dict is `path`.
    fn flatten(&mut self, id: NodeId, path: &KeyPath) -> Result<Structure, FormatError> {
        let p = self.pickle;
        self.walk.enter(p, id)?;
        let structure = match p.node(id) {
            Node::Opaque(object) if is_module(p, object) => {
                let mut items: Vec<(PlainValue, Structure)> = Vec::new();
                for (key, part) in module_parts(p, object) {
                    let text = p.str(key)?;
                    items.push((text.into(), self.flatten(part, &path.child(PathPart::Key(text.to_owned())))?));
                }
                Structure::Module(format!("{}.{}", object.module, object.name), items)
            }
            Node::Dict(entries) => {
                let mut items: Vec<(PlainValue, Structure)> = Vec::with_capacity(entries.len());
                for &(key, value) in entries {
                    let kind = p.node(key).kind();
                    let unsupported = || FormatError::Unsupported { what: format!("{kind} as the key of a dict") };
                    let key = convert(p, key, &mut self.walk, &mut |_| Err(unsupported()))?;
                    let text = key_text(&key).ok_or_else(unsupported)?;
                    // All of the path is copied for each key.
                    let length: usize = path.0.iter().map(part_length).sum::<usize>() + text.len();
                    self.walk.charge(p, id, "memory for keys", length as u64)?;
                    items.push((key, self.flatten(value, &path.child(PathPart::Key(text)))?));
                }
                Structure::Dict(items)
            }
            Node::List(items) if self.recurses(id)? => Structure::List(self.flatten_all(items, path)?),
            Node::Tuple(_) if self.has_tensors_in_dicts(id, false)? => {
                Structure::Tuple(self.flatten_all(p.sequence(id)?, path)?)
            }
            _ => {
                // The path and the flat key are kept in several places.
                let length: usize = path.0.iter().map(part_length).sum();
                self.walk.charge(p, id, "memory for keys", 8 * length as u64)?;
                let fqn = path.flat_key();
                let leaf = self.leaf(id, &fqn)?;
                if self.found.insert(fqn.clone(), (path.clone(), leaf)).is_some() {
                    return Err(FormatError::Unsupported { what: format!("two values with the flat key `{fqn}`") });
                }
                Structure::Leaf(fqn)
            }
        };
        self.walk.leave();
        Ok(structure)
    }

    /// Makes what lies at a flat key.
    fn leaf(&mut self, id: NodeId, fqn: &str) -> Result<FlatValue, FormatError> {
        let p = self.pickle;
        let loader = &mut self.loader;
        let mut load = |tensor: &TensorRef| -> Result<PlainTensor, FormatError> { loader.load(tensor) };
        let mut aside = self.walk.aside();
        let found = match TensorRef::of(p, id) {
            Ok(Some(tensor)) => {
                if let Some(quantizer) = tensor.quantizer {
                    let quantizer = convert(p, quantizer, &mut self.walk, &mut load)?;
                    self.quantizers.insert(fqn.to_owned(), quantizer);
                }
                return Ok(FlatValue::Tensor(tensor));
            }
            Ok(None) => convert(p, id, &mut self.walk, &mut load),
            Err(error) => Err(error.into()),
        };
        match found {
            Ok(value) => Ok(FlatValue::Value(value)),
            // It is described now, since the pickle is not kept.
            Err(FormatError::Pickle(error)) if is_opaque(&error) => {
                let description = convert(p, id, &mut aside, &mut load)?;
                self.walk.resume(aside);
                Ok(FlatValue::Opaque(error, description))
            }
            Err(error) => Err(error),
        }
    }

    /// Adds what lies below the items of a list or tuple.
    fn flatten_all(&mut self, items: &[NodeId], path: &KeyPath) -> Result<Vec<Structure>, FormatError> {
        let items = items.iter().enumerate();
        items.map(|(index, &item)| self.flatten(item, &path.child(PathPart::Index(index)))).collect()
    }

    /// Returns `true` if a list holds a tensor or a dict, or a list that does.
    fn recurses(&mut self, id: NodeId) -> Result<bool, FormatError> {
        let p = self.pickle;
        self.walk.enter(p, id)?;
        let mut found = false;
        for &item in p.sequence(id)? {
            found = match p.node(item) {
                Node::Dict(_) => true,
                Node::List(_) => self.recurses(item)?,
                Node::Tuple(_) => self.has_tensors_in_dicts(item, false)?,
                _ => is_tensor(p, item),
            };
            if found {
                break;
            }
        }
        self.walk.leave();
        Ok(found)
    }

    /// Returns `true` if a tensor lies anywhere below, with a dict on the way to it.
    fn has_tensors_in_dicts(&mut self, id: NodeId, in_dict: bool) -> Result<bool, FormatError> {
        let p = self.pickle;
        self.walk.enter(p, id)?;
        let mut found = false;
        match p.node(id) {
            Node::Dict(entries) => {
                for &(_, value) in entries {
                    found = found || self.has_tensors_in_dicts(value, true)?;
                }
            }
            Node::List(_) | Node::Tuple(_) => {
                for &item in p.sequence(id)? {
                    found = found || self.has_tensors_in_dicts(item, in_dict)?;
                }
            }
            _ => found = in_dict && is_tensor(p, id),
        }
        self.walk.leave();
        Ok(found)
    }
}

/// Returns `true` if a node describes a tensor. One that is malformed is found when it is read.
fn is_tensor(p: &Pickle<'_>, id: NodeId) -> bool {
    matches!(TensorRef::of(p, id), Ok(Some(_)))
}

/// The attributes of a module that hold its tensors and the modules below it.
const MODULE_PARTS: [&str; 3] = ["_parameters", "_buffers", "_modules"];

/// Returns `true` for an `nn.Module` that was saved whole.
fn is_module(p: &Pickle<'_>, object: &OpaqueNode<'_>) -> bool {
    let attributes = object.state.and_then(|state| p.dict(state).ok()).unwrap_or_default();
    let has = |part: &str| attributes.iter().any(|(key, _)| p.str(*key).is_ok_and(|key| key == part));
    MODULE_PARTS.iter().all(|part| has(part))
}

/// Returns the parameters, buffers and modules of a module, by their names; those that are `None` are left out.
fn module_parts(p: &Pickle<'_>, object: &OpaqueNode<'_>) -> Vec<(NodeId, NodeId)> {
    let attributes = object.state.and_then(|state| p.dict(state).ok()).unwrap_or_default();
    let is_part = |key: &NodeId| p.str(*key).is_ok_and(|key| MODULE_PARTS.contains(&key));
    let parts = attributes.iter().filter(|(key, _)| is_part(key)).filter_map(|(_, part)| p.dict(*part).ok()).flatten();
    parts.copied().filter(|(_, part)| *p.node(*part) != Node::None).collect()
}

impl Checkpoint for TorchCheckpoint {
    fn format(&self) -> Format {
        Format::Torch
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn structure(&self) -> Option<&Structure> {
        Some(&self.structure)
    }

    fn directory(&self) -> &CheckedDirectory {
        &self.directory
    }

    fn digests(&self) -> Option<&StateDigest> {
        self.directory.digests()
    }

    fn read_boxes(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        let Some(tensor) = self.tensors.get(fqn) else { return Err(no_value(&self.metadata, fqn)) };
        self.read_from_record(tensor, slots).map_err(|source| FileError::Item {
            fqn: fqn.to_owned(),
            path: self.path.clone(),
            offset: 0,
            source,
        })
    }

    fn quantizer(&self, fqn: &str) -> Result<Option<PlainValue>, FileError> {
        Ok(self.quantizers.get(fqn).cloned())
    }

    fn describe_value(&self, fqn: &str) -> Result<PlainValue, FileError> {
        match self.opaque.get(fqn) {
            Some((_, description)) => Ok(description.clone()),
            None => self.read_value(fqn),
        }
    }

    fn read_value(&self, fqn: &str) -> Result<PlainValue, FileError> {
        if let Some((error, _)) = self.opaque.get(fqn) {
            let source = error.clone().into();
            return Err(FileError::Item { fqn: fqn.to_owned(), path: self.path.clone(), offset: 0, source });
        }
        self.values.get(fqn).cloned().ok_or_else(|| no_value(&self.metadata, fqn))
    }
}
