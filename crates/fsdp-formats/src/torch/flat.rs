//! The content of a file of `torch.save`: a nested state dict, flattened as DCP does it.
//!
//! Dicts are flattened, and lists that hold tensors or dicts; a tuple only where it holds a dict
//! with tensors. Other values are read when the file is opened, with the tensors that they hold.

use std::collections::HashSet;
use std::sync::Arc;

use fsdp_layout::{KeyPath, PathPart, PlainTensor, PlainValue};
use indexmap::IndexMap;

use super::legacy;
use super::sharded::{ShardedRef, is_sharded};
use super::storages::{InStorage, Storages};
use super::tensor_ref::TensorRef;
use super::value::{BesidePickle as _, COPIES, TensorLoader, convert, opaque_type};
use super::zip::Directory;
use crate::error::FormatError;
use crate::formats::assembled::{Elements, Held, Piece, Start};
use crate::formats::structure::{Structure, key_texts};
use crate::limits::MAX_OBJECT_BYTES;
use crate::pickle::{Node, NodeId, OpaqueNode, Pickle, Walk, parse};
use crate::storage::read_at::ReadAt;

/// The content of a file.
#[derive(Debug, Clone)]
pub(crate) struct FlatFile {
    /// All tensors and values, by flat key.
    pub(crate) found: IndexMap<String, (KeyPath, Leaf)>,
    /// The containers that they came from.
    pub(crate) structure: Structure,
    /// The names of the archive's storages, or where a legacy file has them.
    storages: Arc<Storages>,
}

/// A tensor or value of a file.
#[derive(Debug, Clone)]
pub(crate) enum Leaf {
    /// A whole tensor, and how it is quantized, if it is.
    Tensor(TensorRef, Option<PlainValue>),
    /// A rank's part of a tensor.
    Sharded(ShardedRef),
    /// A value.
    Value(Held),
}

impl FlatFile {
    /// Reads a file: its pickle and the values in it. Tensors are located, but not read.
    pub(crate) fn read(file: &dyn ReadAt) -> Result<Self, FormatError> {
        let mut start = [0; legacy::START_LENGTH];
        if file.len() >= start.len() as u64 {
            file.read_exact_at(0, &mut start)?;
        }
        if legacy::is_start(&start) {
            let (pickle, storages) = legacy::read(file)?;
            return Self::new(file, &pickle, storages);
        }
        Self::read_archive(file, Directory::read(file)?)
    }

    /// Reads a file that is an archive, whose directory has been read.
    pub(crate) fn read_archive(file: &dyn ReadAt, archive: Directory) -> Result<Self, FormatError> {
        archive.check_byte_order(file)?;
        if !archive.records.contains_key("data.pkl") {
            let what = "an archive without the record `data.pkl` of `torch.save`, as `torch.export.save` writes it,";
            return Err(FormatError::Unsupported {
                what: what.to_owned(),
            });
        }
        let pickle = archive.read_record(file, "data.pkl", MAX_OBJECT_BYTES)?;
        Self::new(file, &pickle, Storages::Archive(archive))
    }

    /// Flattens the state dict of a pickle whose storages are known.
    fn new(file: &dyn ReadAt, pickle: &[u8], storages: Storages) -> Result<Self, FormatError> {
        let parsed = parse(pickle)?;
        let mut flat = Flattener {
            pickle: &parsed,
            walk: Walk::new(&parsed),
            loader: TensorLoader::new(&storages, file),
            found: IndexMap::new(),
        };
        let structure = flat.flatten(parsed.root(), &KeyPath::default())?;
        let found = flat.found;
        Ok(FlatFile {
            found,
            structure,
            storages: Arc::new(storages),
        })
    }

    /// Reads a tensor of this file, which is `file`.
    pub(crate) fn tensor(
        &self,
        file: &dyn ReadAt,
        tensor: &TensorRef,
    ) -> Result<PlainTensor, FormatError> {
        TensorLoader::new(&self.storages, file).tensor(tensor)
    }

    /// Returns the keys of the tensors that have a class or attributes of their own in Python,
    /// which are not kept.
    pub(crate) fn tensors_without_attributes(&self) -> impl Iterator<Item = &str> {
        let loses =
            |leaf: &Leaf| matches!(leaf, Leaf::Tensor(tensor, _) if tensor.loses_attributes);
        self.found
            .iter()
            .filter(move |(_, (_, leaf))| loses(leaf))
            .map(|(fqn, _)| fqn.as_str())
    }

    /// Returns where a tensor of this file, whose name is `file`, lies. A storage that is missing
    /// or too short is an error.
    pub(crate) fn piece(&self, file: &Arc<str>, tensor: &TensorRef) -> Result<Piece, FormatError> {
        let about = self.storages.start(tensor)?;
        let start = Start::Near(about, Arc::new(InStorage::of(&self.storages, tensor)));
        Ok(Piece {
            file: file.clone(),
            start,
            layout: tensor.layout.clone(),
            elements: Elements::Plain,
        })
    }
}

/// Returns about how many bytes a part of a path takes.
fn part_length(part: &PathPart) -> usize {
    match part {
        PathPart::Key(key) => key.len() + size_of::<PathPart>(),
        PathPart::Index(_) => size_of::<PathPart>(),
    }
}

/// Gives every value of a nested state dict its flat key.
struct Flattener<'p, 'a> {
    pickle: &'p Pickle<'a>,
    walk: Walk,
    loader: TensorLoader<'p>,
    found: IndexMap<String, (KeyPath, Leaf)>,
}

impl Flattener<'_, '_> {
    /// Adds everything below a node, whose path in the state dict is `path`.
    fn flatten(&mut self, id: NodeId, path: &KeyPath) -> Result<Structure, FormatError> {
        let p = self.pickle;
        self.walk.enter(p, id)?;
        let structure = match p.node(id) {
            Node::Opaque(object) if self.is_module(id, object)? => {
                let mut items: Vec<(PlainValue, Structure)> = Vec::new();
                for (key, part) in self.module_parts(id, object)? {
                    let text = p.str(key)?;
                    self.charge_path(id, path, text)?;
                    items.push((
                        text.into(),
                        self.flatten(part, &path.child(PathPart::Key(text.to_owned())))?,
                    ));
                }
                Structure::Module(format!("{}.{}", object.module, object.name), items)
            }
            Node::Dict(entries) if !self.has_opaque_key(entries)? => {
                let mut keys = Vec::with_capacity(entries.len());
                for &(key, _) in entries {
                    keys.push(self.key(key)?);
                }
                let texts = key_texts(keys.iter());
                let mut items: Vec<(PlainValue, Structure)> = Vec::with_capacity(entries.len());
                for ((&(id_of_key, value), key), text) in entries.iter().zip(keys).zip(texts) {
                    let text = text.ok_or_else(|| unsupported_key(p, id_of_key))?;
                    self.charge_path(id, path, &text)?;
                    items.push((key, self.flatten(value, &path.child(PathPart::Key(text)))?));
                }
                Structure::Dict(items)
            }
            Node::List(items) if self.recurses(id)? => {
                Structure::List(self.flatten_all(items, path)?)
            }
            Node::Tuple(_) if self.has_tensors_in_dicts(id, false)? => {
                Structure::Tuple(self.flatten_all(p.sequence(id)?, path)?)
            }
            _ => {
                // The path and the flat key are kept in several places.
                let length: usize = path.0.iter().map(part_length).sum();
                self.walk
                    .charge(p, id, "memory for keys", 8 * length as u64)?;
                let fqn = path.flat_key();
                let leaf = self.leaf(id).map_err(|error| error.of_key(&fqn))?;
                if self
                    .found
                    .insert(fqn.clone(), (path.clone(), leaf))
                    .is_some()
                {
                    return Err(FormatError::Unsupported {
                        what: format!("two values with the flat key `{fqn}`"),
                    });
                }
                Structure::Leaf(fqn)
            }
        };
        self.walk.leave();
        Ok(structure)
    }

    /// Charges the path of an item of a container at a path, all of which is copied for each item.
    fn charge_path(&mut self, id: NodeId, path: &KeyPath, text: &str) -> Result<(), FormatError> {
        let length = path.0.iter().map(part_length).sum::<usize>() + text.len();
        Ok(self
            .walk
            .charge(self.pickle, id, "memory for keys", length as u64)?)
    }

    /// Makes the key of a dict.
    fn key(&mut self, id: NodeId) -> Result<PlainValue, FormatError> {
        let p = self.pickle;
        convert(p, id, &mut self.walk, &mut |_: &TensorRef| {
            Err(unsupported_key(p, id))
        })
    }

    /// Returns `true` if a key of a dict is an object that only running code could build, as an
    /// enum or a number of NumPy is. Then nothing in the dict has a flat key, and all of it is one
    /// opaque value.
    fn has_opaque_key(&mut self, entries: &[(NodeId, NodeId)]) -> Result<bool, FormatError> {
        for &(key, _) in entries {
            // Nearly all keys are text.
            if matches!(self.pickle.node(key), Node::Str(_)) {
                continue;
            }
            match self.key(key) {
                Err(FormatError::Pickle(error)) if opaque_type(&error).is_some() => {
                    return Ok(true);
                }
                key => drop(key?),
            }
        }
        Ok(false)
    }

    /// Makes the value of a flat key.
    fn leaf(&mut self, id: NodeId) -> Result<Leaf, FormatError> {
        let p = self.pickle;
        match ShardedRef::of(p, id, &mut self.walk) {
            Ok(Some(sharded)) => return Ok(Leaf::Sharded(sharded)),
            Ok(None) => {}
            // The value is valid, but it is opaque.
            Err(FormatError::Unsupported { what }) => {
                self.walk.charge(p, id, COPIES, 2 * what.len() as u64)?;
                let description = PlainValue::Str(what.clone());
                return Ok(Leaf::Value(Held::Opaque(what, description)));
            }
            Err(error) => return Err(error),
        }
        let loader = &mut self.loader;
        let mut aside = self.walk.aside();
        let found = match TensorRef::of(p, id) {
            Ok(Some(tensor)) => {
                self.walk
                    .charge(p, id, "memory for tensors", tensor.description_bytes())?;
                let quantizer = match tensor.quantizer {
                    Some(quantizer) => Some(convert(p, quantizer, &mut self.walk, loader)?),
                    None => None,
                };
                return Ok(Leaf::Tensor(tensor, quantizer));
            }
            Ok(None) => convert(p, id, &mut self.walk, loader),
            Err(error) => Err(error.into()),
        };
        match found {
            Ok(value) => Ok(Leaf::Value(Held::Plain(value))),
            Err(FormatError::Pickle(error)) => {
                let Some(of) = opaque_type(&error) else {
                    return Err(error.into());
                };
                // Describe the opaque value now, because the pickle is not kept.
                let description = convert(p, id, &mut aside, loader)?;
                self.walk.resume(aside);
                Ok(Leaf::Value(Held::Opaque(of, description)))
            }
            Err(error) => Err(error),
        }
    }

    /// Adds what lies below the items of a list or tuple.
    fn flatten_all(
        &mut self,
        items: &[NodeId],
        path: &KeyPath,
    ) -> Result<Vec<Structure>, FormatError> {
        let items = items.iter().enumerate();
        items
            .map(|(index, &item)| self.flatten(item, &path.child(PathPart::Index(index))))
            .collect()
    }

    /// Returns `true` if a list holds a tensor or a dict, or a list that does.
    fn recurses(&mut self, id: NodeId) -> Result<bool, FormatError> {
        let p = self.pickle;
        self.walk.enter(p, id)?;
        let items = p.sequence(id)?;
        self.walk
            .charge(p, id, "expanded size", items.len() as u64)?;
        let mut found = false;
        for &item in items {
            found = match p.node(item) {
                Node::Dict(_) => true,
                Node::List(_) => self.recurses(item)?,
                Node::Tuple(_) => self.has_tensors_in_dicts(item, false)?,
                _ => self.is_tensor(item)?,
            };
            if found {
                break;
            }
        }
        self.walk.leave();
        Ok(found)
    }

    /// Returns `true` if there is a tensor anywhere below the node, inside a dict.
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
            _ => found = in_dict && self.is_tensor(id)?,
        }
        self.walk.leave();
        Ok(found)
    }

    /// Returns `true` if a node describes a tensor. One that is malformed is found when it is read.
    fn is_tensor(&mut self, id: NodeId) -> Result<bool, FormatError> {
        let p = self.pickle;
        if !matches!(p.node(id), Node::Object(_)) {
            return Ok(false);
        }
        // Lists may hold one object many times, so each look at its arguments is charged.
        self.walk.charge(p, id, "expanded size", LOOK)?;
        Ok(matches!(TensorRef::of(p, id), Ok(Some(_))) || is_sharded(p, id))
    }

    /// Returns `true` for an `nn.Module` that was saved whole: an object with the attributes of all
    /// modules.
    fn is_module(&mut self, id: NodeId, object: &OpaqueNode<'_>) -> Result<bool, FormatError> {
        let p = self.pickle;
        let attributes = attributes(p, object);
        // Many objects may share one list of attributes, so each look through it is charged.
        self.walk
            .charge(p, id, "expanded size", attributes.len() as u64)?;
        let has = |part: &str| {
            attributes
                .iter()
                .any(|(key, _)| matches!(p.node(*key), Node::Str(key) if *key == part))
        };
        Ok(MODULE_PARTS.iter().all(|part| has(part)))
    }

    /// Returns the parameters, buffers and submodules of a module by name, without those that are
    /// `None` and without non-persistent buffers.
    fn module_parts(
        &mut self,
        id: NodeId,
        object: &OpaqueNode<'_>,
    ) -> Result<Vec<(NodeId, NodeId)>, FormatError> {
        let p = self.pickle;
        let (mut parts, mut left_out) = (Vec::new(), HashSet::new());
        for &(key, value) in attributes(p, object) {
            match (p.node(key), p.node(value)) {
                (Node::Str(NOT_PERSISTENT), Node::Set(names)) => {
                    for &name in names {
                        self.charge_name(id, name)?;
                        left_out.extend(p.str(name));
                    }
                }
                (Node::Str(key), Node::Dict(found)) if MODULE_PARTS.contains(key) => {
                    for &(name, part) in found {
                        self.charge_name(id, name)?;
                        parts.push((name, part));
                    }
                }
                _ => {}
            }
        }
        parts.retain(|&(name, part)| {
            *p.node(part) != Node::None && !p.str(name).is_ok_and(|name| left_out.contains(name))
        });
        Ok(parts)
    }

    /// Charges one of the names in the module at a node, which is noted and looked up.
    fn charge_name(&mut self, id: NodeId, name: NodeId) -> Result<(), FormatError> {
        let length = if let Node::Str(text) = self.pickle.node(name) {
            text.len() as u64
        } else {
            0
        };
        Ok(self
            .walk
            .charge(self.pickle, id, "expanded size", NOTED + length)?)
    }
}

/// Returns the error of a key of a dict that has no text.
fn unsupported_key(p: &Pickle<'_>, key: NodeId) -> FormatError {
    let kind = match p.node(key) {
        Node::BigInt(_) => "an int of more than 64 bits",
        other => other.kind(),
    };
    FormatError::Unsupported {
        what: format!("{kind} as the key of a dict"),
    }
}

/// The bytes that a look at the arguments of an object is charged, whether they describe a tensor.
const LOOK: u64 = 128;

/// The bytes that a name in a module is charged besides its text: a set of names that grows takes
/// most.
const NOTED: u64 = 2 * size_of::<&str>() as u64;

/// The attributes of a module that hold its tensors and the modules below it.
const MODULE_PARTS: [&str; 3] = ["_parameters", "_buffers", "_modules"];

/// The attribute of a module with the names of the buffers that its state dict leaves out.
const NOT_PERSISTENT: &str = "_non_persistent_buffers_set";

/// Returns the attributes of an object.
fn attributes<'p>(p: &'p Pickle<'_>, object: &OpaqueNode<'_>) -> &'p [(NodeId, NodeId)] {
    object
        .state
        .and_then(|state| p.dict(state).ok())
        .unwrap_or_default()
}
