//! The content of a file of `torch.save`: a nested state dict, flattened as DCP does it.
//!
//! Dicts are flattened, and lists that hold tensors or dicts; a tuple only where it holds a dict
//! with tensors. A dict or list of very many values without tensors, such as a log, stays one
//! value. Values are read when the file is opened, with the tensors that they hold.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use fsdp_layout::{KeyPath, PathPart, PlainTensor, PlainValue, PythonType};
use indexmap::IndexMap;
use tracing::warn;

use super::Result;
use super::legacy;
use super::numpy::NumpyRef;
use super::sharded::{ShardedRef, is_sharded};
use super::storages::Storages;
use super::tensor_ref::TensorRef;
use super::value::{LoadTensors as _, TensorLoader, convert};
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Elements, Held, Piece};
use crate::formats::checkpoint::KeyFilter;
use crate::formats::structure::{Structure, key_texts};
use crate::limits::MAX_FLAT_VALUES;
use crate::pickle::{COPIES, Fields, Global, Node, NodeId, OpaqueNode, Pickle, Walk, parse};
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::read_at::ReadAt;
use crate::zip::{Directory, StoredRecords};

/// The content of a file.
#[derive(Debug, Clone)]
pub(crate) struct FlatFile {
    /// The file's name in its directory.
    pub(crate) name: Arc<str>,
    /// The whole path of the file, for errors.
    path: PathBuf,
    /// All tensors and values, by flat key.
    pub(crate) found: Leaves,
    /// The containers that they came from.
    pub(crate) structure: Structure,
    /// The names of the archive's storages, or where a legacy file has them.
    storages: Storages,
}

/// The tensors and values of a file with their paths, by flat key.
pub(crate) type Leaves = IndexMap<String, (KeyPath, Leaf)>;

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

/// The parts of a file that are read, and which of them get flat keys.
#[derive(Clone, Copy)]
pub(crate) struct Selection<'s> {
    /// Returns `false` for the flat keys of very large values that are left out.
    pub(crate) is_wanted: KeyFilter<'s>,
    /// The keys at the top of the file below which everything gets a flat key of its own.
    pub(crate) flattened_keys: &'s [&'s str],
}

impl Default for Selection<'_> {
    /// Makes the selection of all that is in a file.
    fn default() -> Self {
        Selection {
            is_wanted: &|_| true,
            flattened_keys: &[],
        }
    }
}

impl FlatFile {
    /// Reads a file of this name: its pickle and the values in it, each at a flat key. Tensors are
    /// located, but not read. A dict or list of very many values without tensors stays one value.
    ///
    /// Logs a warning if some tensors have a class or attributes in Python that are not kept.
    pub(crate) fn read(directory: &CheckedDirectory, name: &str) -> Result<Self, FileError> {
        Self::read_with(directory, name, None, Selection::default())
    }

    /// Reads a file as [`FlatFile::read`] does, of which only some is wanted. `archive` is the
    /// directory of the file's records, if that was read already.
    pub(crate) fn read_with(
        directory: &CheckedDirectory,
        name: &str,
        archive: Option<Directory>,
        selection: Selection<'_>,
    ) -> Result<Self, FileError> {
        let file = directory.file(name)?;
        let (found, structure, storages) = flatten_file(&*file, archive, selection)
            .map_err(|source| directory.file_error(name, source))?;
        let flat = FlatFile {
            name: Arc::from(name),
            path: directory.path().join(name),
            found,
            structure,
            storages,
        };
        let mut simplified = flat.found.iter().filter(
            |(_, (_, leaf))| matches!(leaf, Leaf::Tensor(tensor, _) if tensor.loses_attributes),
        );
        if let Some((first_key, _)) = simplified.next() {
            let path = flat.path.display().to_string();
            let tensor_count = 1 + simplified.count();
            warn!(%path, tensors = tensor_count, first = first_key, "some tensors have a class or attributes of their own in Python, which are not kept");
        }
        Ok(flat)
    }

    /// Makes the content of a file of another format, which is described as one of torch is. The
    /// storages of its tensors are ranges of the file.
    pub(crate) fn of_other_format(
        directory: &CheckedDirectory,
        name: &str,
        (found, structure): (Leaves, Structure),
        storages: HashMap<String, Range<u64>>,
    ) -> Self {
        FlatFile {
            name: Arc::from(name),
            path: directory.path().join(name),
            found,
            structure,
            storages: Storages::Legacy(storages),
        }
    }

    /// Makes the error of this file from the reason.
    pub(crate) fn error(&self, source: FormatError) -> FileError {
        source.in_file(&self.path)
    }

    /// Reads the elements of a tensor of this file, which is `file`.
    pub(crate) fn load(&self, file: &dyn ReadAt, tensor: &TensorRef) -> Result<PlainTensor> {
        TensorLoader::new(&self.storages, file).tensor(tensor)
    }

    /// Returns the piece of this file that a tensor is. A storage that is missing or too short is
    /// an error.
    pub(crate) fn piece(&self, tensor: &TensorRef) -> Result<Piece, FileError> {
        let start = self
            .storages
            .find_start(&tensor.storage, tensor.storage_bytes)
            .map_err(|source| self.error(source))?;
        Ok(Piece {
            file: self.name.clone(),
            start,
            layout: tensor.layout.clone(),
            elements: Elements::Plain,
        })
    }
}

/// Returns about how many bytes of memory a path takes.
fn path_bytes(path: &KeyPath) -> usize {
    let key_bytes = path.0.iter().map(|part| match part {
        PathPart::Key(key) => key.len(),
        PathPart::Index(_) => 0,
    });
    key_bytes.sum::<usize>() + size_of_val(&path.0[..])
}

/// Gives every value of a nested state dict its flat key.
struct Flattener<'p, 'a> {
    walk: Walk<'p, 'a>,
    loader: TensorLoader<'p>,
    /// The dicts and lists that are not flattened, because they hold very many values.
    large: HashSet<NodeId>,
    /// Returns `true` for the flat keys of the large ones that are read. Others are left out.
    is_wanted: KeyFilter<'p>,
    found: Leaves,
}

/// The contents of a part of a state dict.
#[derive(Clone, Copy)]
struct Contents {
    /// The number of flat keys that it would have.
    keys: usize,
    /// `true` if it is a dict, or a list with one in it.
    has_dicts: bool,
    /// `true` if it holds tensors, objects that are never built, or the groups of an optimizer, so
    /// that nothing around it is one value.
    stays_apart: bool,
}

impl Contents {
    /// A value that is neither of containers nor of objects.
    const PLAIN: Contents = Contents {
        keys: 1,
        has_dicts: false,
        stays_apart: false,
    };
}

/// Reads a file's pickle, finds its storages, and flattens the state dict in it. Very large values
/// whose keys are not wanted are left out. An archive that `torch.export.save` has written is an
/// error.
fn flatten_file(
    file: &dyn ReadAt,
    archive: Option<Directory>,
    selection: Selection<'_>,
) -> Result<(Leaves, Structure, Storages)> {
    let mut start = [0; legacy::START_LENGTH];
    if archive.is_none() && file.len() >= start.len() as u64 {
        file.read_exact_at(0, &mut start)?;
    }
    let (pickle, storages) = if legacy::is_start(&start) {
        legacy::read(file)?
    } else {
        let archive = match archive {
            Some(archive) => archive,
            None => Directory::read(file)?,
        };
        if !archive.records.contains_key("data.pkl") {
            let what = "an archive without the record `data.pkl` of `torch.save`, as `torch.export.save` writes it,";
            return Err(FormatError::unsupported(what));
        }
        (
            archive.read_pickle(file)?,
            Storages::Archive(Arc::new(StoredRecords::new(archive))),
        )
    };
    let parsed = parse(&pickle)?;
    let mut flattener = Flattener {
        walk: Walk::new(&parsed),
        loader: TensorLoader::new(&storages, file),
        large: HashSet::new(),
        is_wanted: selection.is_wanted,
        found: Leaves::new(),
    };
    flattener.find_large_below(parsed.root(), selection.flattened_keys)?;
    let structure = flattener.flatten(parsed.root(), &KeyPath::default())?;
    let found = flattener.found;
    Ok((found, structure, storages))
}

impl Flattener<'_, '_> {
    /// Adds everything below a node, whose path in the state dict is `path`, and returns its
    /// containers. Two values with one flat key are an error.
    fn flatten(&mut self, id: NodeId, path: &KeyPath) -> Result<Structure> {
        let pickle = self.walk.pickle;
        self.walk.enter(id)?;
        let structure = match pickle.node(id) {
            _ if self.large.contains(&id) => self.add_leaf(id, path)?,
            Node::Opaque(object) if self.is_module(id, object)? => {
                let items = self.flatten_module(id, object, path)?;
                Structure::Module(format!("{}.{}", object.module, object.name), items)
            }
            Node::Dict(entries) if !self.has_opaque_key(entries)? => {
                Structure::Dict(self.flatten_dict(id, entries, path)?)
            }
            Node::List(items) if self.holds_tensors_or_dicts(id)? => {
                Structure::List(self.flatten_all(items, path)?)
            }
            Node::Tuple(_) if self.has_tensors_in_dicts(id, false)? => {
                Structure::Tuple(self.flatten_all(pickle.sequence(id)?, path)?)
            }
            _ => self.add_leaf(id, path)?,
        };
        self.walk.leave();
        Ok(structure)
    }

    /// Adds the tensor or value of a node at its flat key. Two values with one flat key are an
    /// error.
    fn add_leaf(&mut self, id: NodeId, path: &KeyPath) -> Result<Structure> {
        // The path and the flat key are kept in several places.
        let path_cost_bytes = 8 * path_bytes(path) as u64;
        self.walk.charge(id, "memory for keys", path_cost_bytes)?;
        let fqn = path.flat_key();
        let leaf = self.read_leaf(id).map_err(|error| error.of_key(&fqn))?;
        let duplicate = self.found.insert(fqn.clone(), (path.clone(), leaf));
        if duplicate.is_some() {
            let what = format!(
                "a state dict in which two values have the flat key `{fqn}` (give one of them another \
                 name),"
            );
            return Err(FormatError::unsupported(what));
        }
        Ok(Structure::Leaf(fqn))
    }

    /// Adds the parameters, buffers and submodules of a module, and returns them by name.
    fn flatten_module(
        &mut self,
        id: NodeId,
        object: &OpaqueNode<'_>,
        path: &KeyPath,
    ) -> Result<Vec<(PlainValue, Structure)>> {
        let mut parts = Vec::new();
        for (key, part) in self.module_parts(id, object)? {
            let name = self.walk.pickle.str(key)?;
            let part_path = self.child_path(id, path, name.to_owned())?;
            parts.push((name.into(), self.flatten(part, &part_path)?));
        }
        Ok(parts)
    }

    /// Adds the entries of a dict, and returns them by key.
    fn flatten_dict(
        &mut self,
        id: NodeId,
        entries: &[(NodeId, NodeId)],
        path: &KeyPath,
    ) -> Result<Vec<(PlainValue, Structure)>> {
        let mut keys = Vec::with_capacity(entries.len());
        for &(key, _) in entries {
            keys.push(self.read_key(key)?);
        }
        let texts = key_texts(keys.iter());
        let mut items = Vec::with_capacity(entries.len());
        for ((&(_, value), key), text) in entries.iter().zip(keys).zip(texts) {
            let text = text.expect("a dict with a key that has no text is one value");
            let item_path = self.child_path(id, path, text)?;
            if self.large.contains(&value) && !(self.is_wanted)(&item_path.flat_key()) {
                continue;
            }
            items.push((key, self.flatten(value, &item_path)?));
        }
        Ok(items)
    }

    /// Returns the path of an item of a container at a path, and charges it, because all of it is
    /// copied for each item.
    fn child_path(&mut self, id: NodeId, path: &KeyPath, key: String) -> Result<KeyPath> {
        let child_bytes = path_bytes(path) + key.len();
        self.walk
            .charge(id, "memory for keys", child_bytes as u64)?;
        Ok(path.child(PathPart::Key(key)))
    }

    /// Returns the value of a key of a dict. A tensor in it is an error.
    fn read_key(&mut self, id: NodeId) -> Result<PlainValue> {
        self.walk.attempt(|walk| {
            convert(walk, id, &mut |_: &TensorRef| {
                Err(FormatError::unsupported("a tensor as the key of a dict"))
            })
        })
    }

    /// Returns `true` if a key of a dict has no text: it is an object that only running code could
    /// build, as an enum is, a tensor, an int of more than 64 bits or a number of NumPy. Then
    /// nothing in the dict has a flat key, and all of it is one value.
    fn has_opaque_key(&mut self, entries: &[(NodeId, NodeId)]) -> Result<bool> {
        for &(key, _) in entries {
            // Nearly all keys are text.
            if matches!(self.walk.pickle.node(key), Node::Str(_)) {
                continue;
            }
            let key = match self.read_key(key) {
                Err(FormatError::Pickle(error)) if error.opaque_type().is_some() => {
                    return Ok(true);
                }
                Err(FormatError::Unsupported { .. }) => return Ok(true),
                key => key?,
            };
            // What NumPy makes of its numbers in text depends on its version.
            if holds_numpy(&key) || key.key_text().is_none() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the tensor or value of a flat key. One that only running code could build becomes an
    /// opaque value with its description.
    fn read_leaf(&mut self, id: NodeId) -> Result<Leaf> {
        match ShardedRef::from_node(&mut self.walk, id) {
            Ok(Some(sharded)) => return Ok(Leaf::Sharded(sharded)),
            Ok(None) => {}
            // The value is valid, but it is opaque.
            Err(FormatError::Unsupported { what }) => {
                self.walk.charge(id, COPIES, 2 * what.len() as u64)?;
                let description = PlainValue::Str(what.clone());
                return Ok(Leaf::Value(Held::Opaque(what, description)));
            }
            Err(error) => return Err(error),
        }
        // If the value turns out to be opaque, the walk begins again from here.
        let mut describing = self.walk.clone();
        describing.describes = true;
        let error = match TensorRef::from_node(self.walk.pickle, id) {
            Ok(Some(tensor)) => {
                let bytes = tensor.description_bytes();
                self.walk.charge(id, "memory for tensors", bytes)?;
                let quantizer = match tensor.quantizer {
                    Some(quantizer) => Some(convert(&mut self.walk, quantizer, &mut self.loader)?),
                    None => None,
                };
                return Ok(Leaf::Tensor(tensor, quantizer));
            }
            Ok(None) => match convert(&mut self.walk, id, &mut self.loader) {
                Ok(value) => return Ok(Leaf::Value(Held::Plain(value))),
                Err(FormatError::Pickle(error)) => error,
                Err(error) => return Err(error),
            },
            Err(error) => error,
        };
        let Some(opaque_type) = error.opaque_type() else {
            return Err(error.into());
        };
        // Describe the opaque value now, because the pickle is not kept.
        let description = convert(&mut describing, id, &mut self.loader)?;
        describing.describes = false;
        self.walk = describing;
        Ok(Leaf::Value(Held::Opaque(opaque_type, description)))
    }

    /// Adds what lies below the items of a list or tuple, and returns the items.
    fn flatten_all(&mut self, items: &[NodeId], path: &KeyPath) -> Result<Vec<Structure>> {
        let items = items.iter().enumerate();
        items
            .map(|(index, &item)| self.flatten(item, &path.child(PathPart::Index(index))))
            .collect()
    }

    /// Finds the dicts and lists below the root that stay one value, as [`Flattener::find_large`]
    /// does. The root has flat keys always, and so has all below these of its keys.
    fn find_large_below(&mut self, root: NodeId, flattened_keys: &[&str]) -> Result<()> {
        let pickle = self.walk.pickle;
        match pickle.node(root) {
            Node::Dict(entries) => {
                for &(key, value) in entries {
                    if !matches!(pickle.node(key), Node::Str(key) if flattened_keys.contains(key)) {
                        self.find_large(value)?;
                    }
                }
            }
            Node::List(_) | Node::Tuple(_) => {
                for &item in pickle.sequence(root)? {
                    self.find_large(item)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Finds the dicts and lists at and below a node that hold more values than are flattened, and
    /// neither tensors nor objects: the innermost ones, which count as one value in those around
    /// them. Returns what the node holds.
    fn find_large(&mut self, id: NodeId) -> Result<Contents> {
        let pickle = self.walk.pickle;
        let mut contents = Contents {
            keys: 0,
            ..Contents::PLAIN
        };
        match pickle.node(id) {
            Node::Dict(entries) => {
                self.walk.enter(id)?;
                contents.has_dicts = true;
                for &(key, value) in entries {
                    contents.stays_apart |=
                        matches!(pickle.node(key), Node::Opaque(_) | Node::Foreign(..));
                    self.add_contents(&mut contents, value)?;
                    // Optimizers expect the flat keys of their groups, however many there are.
                    if *pickle.node(key) == Node::Str(PARAM_GROUPS) {
                        self.large.remove(&value);
                        contents.stays_apart = true;
                    }
                }
            }
            Node::List(_) | Node::Tuple(_) => {
                self.walk.enter(id)?;
                for &item in pickle.sequence(id)? {
                    self.add_contents(&mut contents, item)?;
                }
                let is_flattened = match pickle.node(id) {
                    Node::List(_) => contents.has_dicts || contents.stays_apart,
                    // A tuple is flattened if a dict in it has tensors.
                    _ => contents.has_dicts && contents.stays_apart,
                };
                if !is_flattened {
                    contents.keys = 1;
                }
            }
            Node::Opaque(object) => {
                self.walk.charge(id, "expanded size", LOOK_COST_BYTES)?;
                return Ok(Contents {
                    stays_apart: NumpyRef::find(pickle, object).is_none(),
                    ..Contents::PLAIN
                });
            }
            Node::Global(Global::DType(_) | Global::QScheme(_)) => return Ok(Contents::PLAIN),
            Node::Object(object)
                if matches!(
                    object.global,
                    Global::Size | Global::Path(_) | Global::Device
                ) =>
            {
                return Ok(Contents::PLAIN);
            }
            Node::Object(_) | Node::Global(_) | Node::Foreign(..) | Node::PersistentId(_) => {
                return Ok(Contents {
                    stays_apart: true,
                    ..Contents::PLAIN
                });
            }
            _ => return Ok(Contents::PLAIN),
        }
        self.walk.leave();
        if contents.keys > MAX_FLAT_VALUES && !contents.stays_apart {
            self.large.insert(id);
            contents.keys = 1;
        }
        Ok(contents)
    }

    /// Adds what an item of a container holds to what the container holds.
    fn add_contents(&mut self, contents: &mut Contents, item: NodeId) -> Result<()> {
        self.walk.charge(item, "expanded size", 1)?;
        let of_item = self.find_large(item)?;
        contents.keys = contents.keys.saturating_add(of_item.keys);
        contents.has_dicts |= of_item.has_dicts;
        contents.stays_apart |= of_item.stays_apart;
        Ok(())
    }

    /// Returns `true` if a list holds a tensor or a dict, or a list that does.
    fn holds_tensors_or_dicts(&mut self, id: NodeId) -> Result<bool> {
        let pickle = self.walk.pickle;
        self.walk.enter(id)?;
        let items = pickle.sequence(id)?;
        self.walk.charge(id, "expanded size", items.len() as u64)?;
        let mut found = false;
        for &item in items {
            found = match pickle.node(item) {
                Node::Dict(_) => true,
                Node::List(_) => self.holds_tensors_or_dicts(item)?,
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

    /// Returns `true` if there is a tensor anywhere below the node, inside a dict. With `in_dict`,
    /// the node is inside one itself.
    fn has_tensors_in_dicts(&mut self, id: NodeId, in_dict: bool) -> Result<bool> {
        let pickle = self.walk.pickle;
        self.walk.enter(id)?;
        let mut found = false;
        match pickle.node(id) {
            Node::Dict(entries) => {
                for &(_, value) in entries {
                    found = found || self.has_tensors_in_dicts(value, true)?;
                }
            }
            Node::List(_) | Node::Tuple(_) => {
                for &item in pickle.sequence(id)? {
                    found = found || self.has_tensors_in_dicts(item, in_dict)?;
                }
            }
            _ => found = in_dict && self.is_tensor(id)?,
        }
        self.walk.leave();
        Ok(found)
    }

    /// Returns `true` if a node describes a tensor. One that is malformed is found when it is read.
    fn is_tensor(&mut self, id: NodeId) -> Result<bool> {
        let pickle = self.walk.pickle;
        if !matches!(pickle.node(id), Node::Object(_)) {
            return Ok(false);
        }
        // Lists may hold one object many times, so each look at its arguments is charged.
        self.walk.charge(id, "expanded size", LOOK_COST_BYTES)?;
        Ok(matches!(TensorRef::from_node(pickle, id), Ok(Some(_))) || is_sharded(pickle, id))
    }

    /// Returns `true` for an `nn.Module` that was saved whole: an object with the attributes of all
    /// modules.
    fn is_module(&mut self, id: NodeId, object: &OpaqueNode<'_>) -> Result<bool> {
        let attributes = attributes_of(self.walk.pickle, id, object);
        // Many objects may share one list of attributes, so each look through it is charged.
        let count = attributes.entries.len() as u64;
        self.walk.charge(id, "expanded size", count)?;
        Ok(MODULE_PARTS
            .iter()
            .all(|part| attributes.find(part).is_some()))
    }

    /// Returns the parameters, buffers and submodules of a module by name, without those that are
    /// `None` and without non-persistent buffers.
    fn module_parts(
        &mut self,
        id: NodeId,
        object: &OpaqueNode<'_>,
    ) -> Result<Vec<(NodeId, NodeId)>> {
        let pickle = self.walk.pickle;
        let mut parts = Vec::new();
        let mut excluded_names = HashSet::new();
        for &(key, value) in attributes_of(pickle, id, object).entries {
            match (pickle.node(key), pickle.node(value)) {
                (Node::Str(NOT_PERSISTENT), Node::Set(names)) => {
                    for &name in names {
                        self.charge_name(id, name)?;
                        excluded_names.extend(pickle.str(name));
                    }
                }
                (Node::Str(key), Node::Dict(parts_by_name)) if MODULE_PARTS.contains(key) => {
                    for &(name, part) in parts_by_name {
                        self.charge_name(id, name)?;
                        parts.push((name, part));
                    }
                }
                _ => {}
            }
        }
        parts.retain(|&(name, part)| {
            *pickle.node(part) != Node::None
                && !pickle
                    .str(name)
                    .is_ok_and(|name| excluded_names.contains(name))
        });
        Ok(parts)
    }

    /// Charges one of the names in the module at a node, which is recorded and looked up.
    fn charge_name(&mut self, id: NodeId, name: NodeId) -> Result<()> {
        let text_bytes = match self.walk.pickle.node(name) {
            Node::Str(text) => text.len() as u64,
            _ => 0,
        };
        Ok(self
            .walk
            .charge(id, "expanded size", NAME_COST_BYTES + text_bytes)?)
    }
}

/// Returns `true` for a value of NumPy, and for a tuple with one in it.
fn holds_numpy(value: &PlainValue) -> bool {
    match value {
        PlainValue::Typed(
            PythonType::NumpyArray | PythonType::NumpyScalar | PythonType::NumpyDType,
            _,
        ) => true,
        PlainValue::Tuple(items) => items.iter().any(holds_numpy),
        _ => false,
    }
}

/// The key of the groups of parameters of an optimizer.
const PARAM_GROUPS: &str = "param_groups";

/// The bytes that a look at the arguments of an object is charged, whether they describe a tensor.
const LOOK_COST_BYTES: u64 = 128;

/// The bytes that a name in a module is charged besides its text: a set of names that grows takes
/// most.
const NAME_COST_BYTES: u64 = 2 * size_of::<&str>() as u64;

/// The attributes of a module that hold its tensors and the modules below it.
const MODULE_PARTS: [&str; 3] = ["_parameters", "_buffers", "_modules"];

/// The attribute of a module with the names of the buffers that its state dict leaves out.
const NOT_PERSISTENT: &str = "_non_persistent_buffers_set";

/// Returns the attributes of an object of an unknown class. One whose state is no dict has none.
fn attributes_of<'p, 'a>(
    pickle: &'p Pickle<'a>,
    id: NodeId,
    object: &OpaqueNode<'_>,
) -> Fields<'p, 'a> {
    match object.state.map(|state| pickle.node(state)) {
        Some(Node::Dict(entries)) => pickle.fields(id, entries),
        _ => pickle.fields(id, &[]),
    }
}
