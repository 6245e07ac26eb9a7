//! Non-tensor values: items of `torch.save`, from and to plain values.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use fsdp_digest::{Digest, Sum};
use fsdp_layout::boxes::checked_bytes;
use fsdp_layout::{DType, PlainTensor, PlainValue, PythonType, TensorBox, count_text};

use super::Result;
use super::numpy::{NumpyRef, write_numpy};
use super::storages::Storages;
use super::tensor_ref::{StorageRef, TensorRef, check_writable, write_tensor};
use crate::budget::{Budget, check_depth};
use crate::error::FormatError;
use crate::formats::opaque::describe_bytes;
use crate::limits::PICKLE_FACTOR;
use crate::payload::slot::Slot;
use crate::pickle::write;
use crate::pickle::{
    BUILTINS, COPIES, Global, Node, NodeId, ObjectNode, OpaqueNode, Pickle, PickleError, QSCHEMES,
    Walk, name_at, parse, parse_within,
};
use crate::storage::read_at::{BlockReader, ReadAt};
use crate::strided::StoredElements;
use crate::zip::{ArchiveLayout, Directory, ROOT, StoredRecords};

/// Encodes the item of a value: the same as `torch.save(value)` writes, except for the order of the
/// zip's records.
///
/// Fails for values nested deeper than 200 levels, and for quantized tensors in them.
///
/// ```
/// use fsdp_formats::internals::{decode_value, encode_value};
/// use fsdp_layout::PlainValue;
/// let betas = PlainValue::Tuple(vec![0.9.into(), 0.95.into()]);
/// assert_eq!(decode_value(&encode_value(&betas)?)?, betas);
/// # Ok::<(), fsdp_formats::FormatError>(())
/// ```
pub fn encode_value(value: &PlainValue) -> Result<Vec<u8>> {
    let (archive, tensors) = lay_out(value)?;
    let crcs: Vec<u32> = tensors
        .iter()
        .map(|tensor| crc32fast::hash(&tensor.data))
        .collect();
    // Without storages the head needs no checksum.
    let mut bytes = archive.head(crcs.first().copied().unwrap_or(0));
    for (index, tensor) in tensors.iter().enumerate() {
        // The head ends with the header of the first one.
        if index > 0 {
            bytes.extend_from_slice(&archive.storage_header(index, crcs[index]));
        }
        bytes.extend_from_slice(&tensor.data);
    }
    bytes.extend_from_slice(&archive.tail(&crcs));
    Ok(bytes)
}

/// Returns the length of the result of [`encode_value`], and fails for the same values.
pub fn value_item_length(value: &PlainValue) -> Result<u64> {
    Ok(lay_out(value)?.0.length())
}

/// Lays out the item of a value, and lists the tensors inside it, in the order of their storages.
fn lay_out(value: &PlainValue) -> Result<(ArchiveLayout, Vec<&PlainTensor>)> {
    let mut pickle = Vec::new();
    let mut tensors = Vec::new();
    write::proto(&mut pickle, 2);
    write_value(&mut pickle, value, &mut tensors, 0, 0)?;
    pickle.push(write::STOP);
    // The storages follow the pickle in the order in which it refers to them.
    let lengths: Vec<u64> = tensors
        .iter()
        .map(|tensor| tensor.data.len() as u64)
        .collect();
    Ok((ArchiveLayout::new(ROOT, pickle, &lengths), tensors))
}

/// Appends the opcodes of a value to `out`, and its tensors to `tensors`. Their storages are
/// numbered from `first_storage` on, in the order in which they are met. `depth` is the number of
/// containers around the value.
///
/// # Errors
/// A value nested too deep; a tensor that is quantized, or whose bytes do not fit its shape.
pub fn write_value<'v>(
    out: &mut Vec<u8>,
    value: &'v PlainValue,
    tensors: &mut Vec<&'v PlainTensor>,
    first_storage: usize,
    depth: usize,
) -> Result<()> {
    ValueWriter {
        out,
        tensors,
        first_storage,
    }
    .write(value, depth)
}

/// See [`write_value`].
struct ValueWriter<'o, 'v> {
    out: &'o mut Vec<u8>,
    tensors: &'o mut Vec<&'v PlainTensor>,
    first_storage: usize,
}

impl<'v> ValueWriter<'_, 'v> {
    /// Writes the opcodes of a value with so many containers around it.
    fn write(&mut self, value: &'v PlainValue, depth: usize) -> Result<()> {
        check_depth(depth)?;
        match value {
            PlainValue::None => self.out.push(write::NONE),
            PlainValue::Bool(value) => write::bool(self.out, *value),
            PlainValue::Int(value) => write::int(self.out, *value),
            PlainValue::BigInt(bytes) => write::big_int(self.out, bytes),
            PlainValue::Float(value) => write::float(self.out, *value),
            PlainValue::Str(value) => write::text(self.out, value),
            PlainValue::Bytes(value) => write::bytes(self.out, value),
            PlainValue::List(items) => self.write_list(items, depth)?,
            PlainValue::Tuple(items) => {
                write::open_tuple(self.out, items.len());
                for item in items {
                    self.write(item, depth + 1)?;
                }
                write::close_tuple(self.out, items.len());
            }
            PlainValue::Set(items) => self.write_set("set", items, depth)?,
            PlainValue::Typed(python_type, description) => {
                self.write_typed(*python_type, description, depth)?
            }
            PlainValue::Dict(entries) => {
                self.out.push(write::EMPTY_DICT);
                if !entries.is_empty() {
                    self.out.push(write::MARK);
                    for (key, value) in entries {
                        self.write(key, depth + 1)?;
                        self.write(value, depth + 1)?;
                    }
                    self.out.push(write::SETITEMS);
                }
            }
            PlainValue::Tensor(tensor) => self.write_tensor(tensor)?,
            other => {
                let what = format!("writing a value of type `{}`", other.type_name());
                return Err(FormatError::unsupported(what));
            }
        }
        Ok(())
    }

    /// Writes the opcodes of a tensor, whose elements follow the pickle in a storage. Bytes that do
    /// not fit its shape are an error.
    fn write_tensor(&mut self, tensor: &'v PlainTensor) -> Result<()> {
        check_writable(tensor.dtype)?;
        if checked_bytes(&tensor.shape, tensor.dtype) != Some(tensor.data.len()) {
            let expected = format!(
                "the bytes of a `{}` tensor of shape {:?}",
                tensor.dtype, tensor.shape
            );
            let found = count_text(tensor.data.len(), "byte", "bytes");
            return Err(FormatError::unexpected(expected, found));
        }
        let key = self.first_storage + self.tensors.len();
        write_tensor(self.out, key, tensor.dtype, &tensor.shape);
        self.tensors.push(tensor);
        Ok(())
    }

    /// Writes the opcodes of a list.
    fn write_list(&mut self, items: &'v [PlainValue], depth: usize) -> Result<()> {
        self.out.push(write::EMPTY_LIST);
        if !items.is_empty() {
            self.out.push(write::MARK);
            for item in items {
                self.write(item, depth + 1)?;
            }
            self.out.push(write::APPENDS);
        }
        Ok(())
    }

    /// Writes the opcodes of a set, which a builtin function makes of a list.
    fn write_set(&mut self, function: &str, items: &'v [PlainValue], depth: usize) -> Result<()> {
        write::global(self.out, "__builtin__", function);
        self.write_list(items, depth)?;
        write::close_tuple(self.out, 1);
        self.out.push(write::REDUCE);
        Ok(())
    }

    /// Writes the opcodes of an object of a type that a simpler value describes.
    fn write_typed(
        &mut self,
        python_type: PythonType,
        description: &'v PlainValue,
        depth: usize,
    ) -> Result<()> {
        match (python_type, description) {
            // Dtypes and quantization schemes are attributes of the module `torch`, not the results
            // of calls.
            (PythonType::DType | PythonType::QScheme, PlainValue::Str(name)) => {
                let attribute = name
                    .strip_prefix("torch.")
                    .filter(|attribute| Global::lookup("torch", attribute).is_some())
                    .ok_or_else(|| {
                        FormatError::unexpected(python_type.name(), format!("`{name}`"))
                    })?;
                write::global(self.out, "torch", attribute);
                return Ok(());
            }
            (PythonType::FrozenSet, PlainValue::Set(items)) => {
                return self.write_set("frozenset", items, depth);
            }
            (
                PythonType::NumpyArray | PythonType::NumpyScalar | PythonType::NumpyDType,
                description,
            ) => return write_numpy(self.out, python_type, description),
            (PythonType::Device, PlainValue::Str(name)) => {
                write::global(self.out, "torch", "device");
                let indexed = name
                    .split_once(':')
                    .and_then(|(kind, index)| Some((kind, index.parse().ok()?)));
                match indexed {
                    Some((kind, index)) => {
                        write::text(self.out, kind);
                        write::int(self.out, index);
                        write::close_tuple(self.out, 2);
                    }
                    None => {
                        write::text(self.out, name);
                        write::close_tuple(self.out, 1);
                    }
                }
            }
            (python_type, description) => {
                let (module, name) = python_type
                    .name()
                    .rsplit_once('.')
                    .unwrap_or(("__builtin__", python_type.name()));
                write::global(self.out, module, name);
                self.write(description, depth + 1)?;
                write::close_tuple(self.out, 1);
            }
        }
        self.out.push(write::REDUCE);
        Ok(())
    }
}

/// Reads the value of an item that `torch.save` made, with the tensors in it. An `OrderedDict` or
/// `defaultdict` becomes a dict.
///
/// # Errors
/// Bytes that are no such item; a value that is opaque.
pub fn decode_value(item: &[u8]) -> Result<PlainValue> {
    let budget = Budget::new(item.len() as u64, PICKLE_FACTOR);
    decode_value_within(&item, budget, false)
}

/// Reads the value of an item that `torch.save` made, to be digested: opaque objects in it become
/// dicts that describe them.
///
/// # Errors
/// Bytes that are no such item.
pub fn describe_item(item: &[u8]) -> Result<PlainValue> {
    let budget = Budget::new(item.len() as u64, PICKLE_FACTOR);
    decode_value_within(&item, budget, true)
}

/// Reads the value of an item as [`decode_value`] does, with a budget for the values. With
/// `describes`, opaque objects in it become dicts that describe them.
pub(crate) fn decode_value_within(
    item: &dyn ReadAt,
    budget: Budget,
    describes: bool,
) -> Result<PlainValue> {
    let archive = Directory::read(item)?;
    let pickle = archive.read_pickle(item)?;
    let storages = Storages::Archive(Arc::new(StoredRecords::new(archive)));
    let mut loader = TensorLoader::new(&storages, item);
    convert_root(&pickle, budget, describes, &mut loader)
}

/// Parses a pickle, and turns its root object into a value. With `describes`, opaque objects in it
/// become dicts that describe them.
fn convert_root(
    pickle: &[u8],
    budget: Budget,
    describes: bool,
    loader: &mut dyn LoadTensors,
) -> Result<PlainValue> {
    let parsed = parse_within(pickle, budget)?;
    let mut walk = Walk::new(&parsed);
    walk.describes = describes;
    convert(&mut walk, parsed.root(), loader)
}

/// Returns the type of the object that makes the value of an item opaque, from its pickle alone;
/// `None` for a plain value. Any other reason why it cannot be read is an error.
pub(crate) fn opaque_type_of(item: &dyn ReadAt, budget: Budget) -> Result<Option<String>> {
    let pickle = Directory::read(item)?.read_pickle(item)?;
    match convert_root(&pickle, budget, false, &mut without_elements) {
        Ok(_) => Ok(None),
        Err(error) => error.opaque_type().map(Some).ok_or(error),
    }
}

/// Describes the object of an item, without the elements of the tensors in it.
pub(crate) fn describe_object(item: &dyn ReadAt, budget: Budget) -> Result<PlainValue> {
    let pickle = Directory::read(item)?.read_pickle(item)?;
    convert_root(&pickle, budget, true, &mut without_elements)
}

/// Returns a placeholder without elements for a tensor inside a value that is not read.
fn without_elements(tensor: &TensorRef) -> Result<PlainTensor> {
    Ok(PlainTensor {
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        data: Vec::new(),
    })
}

/// Returns `true` if two tensors are quantized alike, or neither is quantized.
pub(crate) fn is_same_quantizer(first: Option<&PlainValue>, second: Option<&PlainValue>) -> bool {
    match (first, second) {
        (Some(first), Some(second)) => first.same_bits(second),
        (first, second) => first.is_none() && second.is_none(),
    }
}

/// Reads the quantizer of the tensor that is the archive's root object; `None` if the root is not a
/// quantized tensor.
pub(crate) fn quantizer_of(archive: &Directory, source: &dyn ReadAt) -> Result<Option<PlainValue>> {
    let pickle = archive.read_pickle(source)?;
    let parsed = parse(&pickle)?;
    let Some(TensorRef {
        quantizer: Some(quantizer),
        ..
    }) = TensorRef::from_node(&parsed, parsed.root())?
    else {
        return Ok(None);
    };
    let storages = Storages::Archive(Arc::new(StoredRecords::new(archive.clone())));
    let mut loader = TensorLoader::new(&storages, source);
    convert(&mut Walk::new(&parsed), quantizer, &mut loader).map(Some)
}

/// Loads the tensors and storages that the values of a pickle refer to.
pub(crate) trait LoadTensors {
    /// Returns a tensor inside a value, with its elements.
    fn tensor(&mut self, tensor: &TensorRef) -> Result<PlainTensor>;

    /// Describes the first bytes of a storage that is itself inside an opaque object.
    fn storage(&mut self, key: &str, bytes: u64) -> Result<PlainValue>;
}

/// A function that returns tensors. Storages are then described by their lengths.
impl<F: FnMut(&TensorRef) -> Result<PlainTensor>> LoadTensors for F {
    fn tensor(&mut self, tensor: &TensorRef) -> Result<PlainTensor> {
        self(tensor)
    }

    fn storage(&mut self, _: &str, bytes: u64) -> Result<PlainValue> {
        Ok(PlainValue::Str(format!("{bytes} bytes")))
    }
}

/// A loader of the tensors inside values, up to a limit of bytes in all.
pub(crate) struct TensorLoader<'a> {
    storages: &'a Storages,
    source: &'a dyn ReadAt,
    /// The bytes of tensors that may still be loaded.
    budget: Budget,
    /// The bytes of storages that may still be digested.
    digest_budget: Budget,
    /// The digests of storages, by their keys and lengths, so that each is read once.
    digests: HashMap<(String, u64), Digest>,
}

impl<'a> TensorLoader<'a> {
    /// Makes a loader of tensors whose storages are in this file.
    pub(crate) fn new(storages: &'a Storages, source: &'a dyn ReadAt) -> Self {
        TensorLoader {
            storages,
            source,
            budget: Budget::new(source.len(), 1),
            digest_budget: Budget::new(source.len(), 1),
            digests: HashMap::new(),
        }
    }

    /// Reads the first `bytes` bytes of a storage, and returns their digest.
    fn digest(&self, key: &str, bytes: u64) -> Result<Digest> {
        /// The bytes that are read at once.
        const PIECE_BYTES: u64 = 1 << 20;
        let (record, start) = self.storages.find_data(self.source, key, bytes)?;
        let noted = record.map(|record| record.reader(self.source));
        let source = noted.as_ref().map_or(self.source, |noted| noted);
        let mut buffer = vec![0; bytes.min(PIECE_BYTES) as usize];
        let mut sum = Sum::default();
        let mut position = 0;
        while position < bytes {
            let piece = &mut buffer[..(bytes - position).min(PIECE_BYTES) as usize];
            source.read_exact_at(start + position, piece)?;
            sum.add_bytes(position, piece);
            position += piece.len() as u64;
        }
        Ok(sum.finish(DType::U8, &[bytes as usize]))
    }
}

impl LoadTensors for TensorLoader<'_> {
    fn tensor(&mut self, tensor: &TensorRef) -> Result<PlainTensor> {
        let element_bytes = tensor.dtype.size_in_bytes() as usize;
        let length = tensor.shape.iter().product::<usize>() * element_bytes;
        let (record, start) =
            self.storages
                .find_data(self.source, &tensor.storage, tensor.storage_bytes)?;
        let noted = record.map(|record| record.reader(self.source));
        let source = noted.as_ref().map_or(self.source, |noted| noted);
        // An expanded tensor is larger than its storage, and several tensors may share one.
        self.budget
            .charge("bytes of tensors in values", length as u64)?;
        let whole = TensorBox::whole(&tensor.shape);
        let mut data = vec![0; length];
        let mut slot = Slot::new(whole.clone(), &mut data);
        let stored = StoredElements {
            storage: start,
            element: element_bytes,
            layout: &tensor.layout,
        };
        stored.read(&mut BlockReader::new(source), &whole, &mut slot)?;
        Ok(PlainTensor {
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            data,
        })
    }

    fn storage(&mut self, key: &str, bytes: u64) -> Result<PlainValue> {
        let storage = (key.to_owned(), bytes);
        if !self.digests.contains_key(&storage) {
            // Storages of many lengths may be claimed to lie in one record.
            self.digest_budget
                .charge("bytes of storages in values", bytes)?;
            let digest = self.digest(key, bytes)?;
            self.digests.insert(storage.clone(), digest);
        }
        let digest = self.digests[&storage];
        Ok(PlainValue::Str(format!(
            "{bytes} bytes with the digest {digest}"
        )))
    }
}

/// Returns the plain value of a pickle's node. A tensor in it is an error, because a pickle does
/// not hold its bytes.
pub fn value_of(pickle: &Pickle<'_>, id: NodeId) -> Result<PlainValue> {
    convert(&mut Walk::new(pickle), id, &mut |_: &TensorRef| {
        Err(FormatError::unsupported("a tensor inside this value"))
    })
}

/// Makes the error of a value that is of a known class, but is not a plain value.
fn not_plain_error(pickle: &Pickle<'_>, id: NodeId) -> PickleError {
    let name = match pickle.node(id) {
        Node::Global(global) => global.description(),
        Node::Object(object) => object.global.description(),
        Node::PersistentId(_) => "Storage".to_owned(),
        other => other.kind().to_owned(),
    };
    pickle.opaque_error(id, name)
}

/// Describes an opaque object as a dict: its type, its arguments, its state, and the items and
/// entries that were added to it.
fn describe_opaque(
    walk: &mut Walk<'_, '_>,
    id: NodeId,
    object: &OpaqueNode<'_>,
    loader: &mut dyn LoadTensors,
) -> Result<PlainValue> {
    // Its type, and the names of its other parts, whose values are charged when they are made.
    let name_bytes = 2 * DESCRIPTION_COST_BYTES + (object.module.len() + object.name.len()) as u64;
    walk.charge(id, COPIES, name_bytes)?;
    let class = format!("{}.{}", object.module, object.name);
    let mut description = vec![("$type".into(), class.into())];
    let args = walk.pickle.sequence(object.args);
    if !args.is_ok_and(<[NodeId]>::is_empty) {
        description.push(("args".into(), convert(walk, object.args, loader)?));
    }
    if let Some(state) = object.state {
        description.push(("state".into(), convert(walk, state, loader)?));
    }
    if !object.items.is_empty() {
        let items = convert_all(walk, &object.items, loader)?;
        description.push(("items".into(), PlainValue::List(items)));
    }
    if !object.entries.is_empty() {
        let mut entries = Vec::new();
        for &(key, value) in &object.entries {
            let key = convert(walk, key, loader)?;
            entries.push((key, convert(walk, value, loader)?));
        }
        description.push(("entries".into(), PlainValue::Dict(entries)));
    }
    Ok(PlainValue::Dict(description))
}

/// Describes a storage that is itself in an opaque object: its class, and its bytes.
fn describe_storage(
    walk: &mut Walk<'_, '_>,
    id: NodeId,
    storage: &StorageRef,
    loader: &mut dyn LoadTensors,
) -> Result<PlainValue> {
    // Two keys and two values, with their texts.
    walk.charge(id, COPIES, 3 * DESCRIPTION_COST_BYTES)?;
    let bytes = loader.storage(&storage.key, storage.bytes)?;
    Ok(describe_bytes(storage.class(), bytes))
}

/// Returns a tensor inside a value. One that is quantized is opaque there, because nothing would
/// keep its scale.
fn convert_tensor(
    walk: &mut Walk<'_, '_>,
    id: NodeId,
    tensor: &TensorRef,
    loader: &mut dyn LoadTensors,
) -> Result<PlainValue> {
    walk.charge(id, COPIES, size_of_val(&tensor.shape[..]) as u64)?;
    let Some(quantizer) = tensor.quantizer else {
        return Ok(PlainValue::Tensor(loader.tensor(tensor)?));
    };
    if !walk.describes {
        let name = "Tensor (quantized, inside another value)";
        return Err(walk.pickle.opaque_error(id, name).into());
    }
    let quantizer = convert(walk, quantizer, loader)?;
    let elements = PlainValue::Tensor(loader.tensor(tensor)?);
    Ok(PlainValue::Dict(vec![
        ("$type".into(), "torch.Tensor".into()),
        ("elements".into(), elements),
        ("quantizer".into(), quantizer),
    ]))
}

/// Turns a node into a value, with the tensors in it.
///
/// It calls itself for nested values, so everything that needs more than a little of the stack is a
/// function of its own: 200 levels fit into the 2 MiB of a thread, also in a build that is not
/// optimized.
pub(crate) fn convert(
    walk: &mut Walk<'_, '_>,
    id: NodeId,
    loader: &mut dyn LoadTensors,
) -> Result<PlainValue> {
    walk.enter(id)?;
    let pickle = walk.pickle;
    let value = match pickle.node(id) {
        Node::Tuple(_) => PlainValue::Tuple(convert_all(walk, pickle.sequence(id)?, loader)?),
        Node::List(items) => PlainValue::List(convert_all(walk, items, loader)?),
        Node::Set(items) => PlainValue::Set(convert_all(walk, items, loader)?),
        Node::FrozenSet(items) => {
            walk.charge(id, COPIES, DESCRIPTION_COST_BYTES)?;
            let set = PlainValue::Set(convert_all(walk, items, loader)?);
            PlainValue::typed(PythonType::FrozenSet, set)
        }
        Node::Dict(entries) => convert_dict(walk, id, entries, loader)?,
        Node::Object(object) => {
            walk.charge(id, COPIES, DESCRIPTION_COST_BYTES)?;
            convert_object(walk, id, object, loader)?
        }
        Node::Opaque(object) if walk.describes => describe_opaque(walk, id, object, loader)?,
        Node::Opaque(object) => convert_numpy(walk, id, object)?,
        Node::PersistentId(inner) if walk.describes => match StorageRef::from_node(pickle, id) {
            Ok(storage) => describe_storage(walk, id, &storage, loader)?,
            // A persistent id that is not that of a storage of a known class.
            Err(_) => convert(walk, *inner, loader)?,
        },
        _ => convert_leaf(walk, id)?,
    };
    walk.leave();
    Ok(value)
}

/// The bytes that a node of a known type is charged: the object and its description are a value
/// each, and names are texts.
const DESCRIPTION_COST_BYTES: u64 = 2 * size_of::<PlainValue>() as u64;

/// Turns a node that holds no other ones into a value. A pickle may refer to one text many times,
/// so each copy is charged: a small file cannot fill the memory. In a walk that describes, types
/// and functions become their names.
fn convert_leaf(walk: &mut Walk<'_, '_>, id: NodeId) -> Result<PlainValue> {
    let pickle = walk.pickle;
    let node = pickle.node(id);
    let copied_bytes = match node {
        Node::Str(text) => text.len() as u64,
        Node::Bytes(bytes) | Node::ByteArray(bytes) => bytes.len() as u64,
        Node::BigInt(bytes) => size_of_val(*bytes) as u64,
        Node::Global(_) => DESCRIPTION_COST_BYTES,
        Node::Foreign(module, name) => (module.len() + name.len()) as u64,
        _ => 0,
    };
    walk.charge(id, COPIES, copied_bytes)?;
    Ok(match node {
        Node::None => PlainValue::None,
        Node::Bool(value) => PlainValue::Bool(*value),
        Node::Int(value) => PlainValue::Int(*value),
        Node::BigInt(bytes) => PlainValue::BigInt(bytes.to_vec()),
        Node::Float(value) => PlainValue::Float(*value),
        Node::Str(text) => PlainValue::Str((*text).to_owned()),
        Node::Bytes(bytes) => PlainValue::Bytes(bytes.to_vec()),
        Node::ByteArray(bytes) => {
            PlainValue::typed(PythonType::ByteArray, PlainValue::Bytes(bytes.to_vec()))
        }
        Node::Global(Global::DType(dtype)) => {
            PlainValue::typed(PythonType::DType, format!("torch.{}", dtype.torch_name()))
        }
        Node::Global(Global::QScheme(scheme)) => PlainValue::typed(
            PythonType::QScheme,
            format!("torch.{}", name_at(QSCHEMES, *scheme)),
        ),
        Node::Foreign(module, name) if walk.describes => format!("{module}.{name}").into(),
        Node::Global(global) if walk.describes => match global {
            Global::Bytes => "builtins.bytes".into(),
            Global::Builtin(name) => format!("builtins.{}", name_at(BUILTINS, *name)).into(),
            other => other.description().into(),
        },
        Node::Global(_) | Node::PersistentId(_) => return Err(not_plain_error(pickle, id).into()),
        _ => return Err(pickle.expected_error(id, "a plain value").into()),
    })
}

/// Returns the value of NumPy that an object of an unknown class is. All other objects are opaque.
fn convert_numpy(
    walk: &mut Walk<'_, '_>,
    id: NodeId,
    object: &OpaqueNode<'_>,
) -> Result<PlainValue> {
    let pickle = walk.pickle;
    let Some(numpy) = NumpyRef::find(pickle, object) else {
        return Err(pickle.expected_error(id, "a plain value").into());
    };
    // Many references may lead to one array, and each makes a copy of it.
    walk.charge(id, COPIES, numpy.memory_bytes())?;
    Ok(numpy.into_value())
}

/// Turns nodes into values, in order.
fn convert_all(
    walk: &mut Walk<'_, '_>,
    items: &[NodeId],
    loader: &mut dyn LoadTensors,
) -> Result<Vec<PlainValue>> {
    // Not an iterator, whose functions would each take a part of the stack at each level; and no
    // capacity for all, because a list that holds itself has its items once for each level.
    let mut values = Vec::new();
    for &item in items {
        values.push(convert(walk, item, loader)?);
    }
    Ok(values)
}

/// Turns the entries of a dict into a value. A text that is the key of two entries is an error.
fn convert_dict(
    walk: &mut Walk<'_, '_>,
    id: NodeId,
    entries: &[(NodeId, NodeId)],
    loader: &mut dyn LoadTensors,
) -> Result<PlainValue> {
    let mut dict = Vec::new();
    for &(key, value) in entries {
        let key = convert(walk, key, loader)?;
        dict.push((key, convert(walk, value, loader)?));
    }
    // A dict of Python has each key once, and other formats would keep only one of the values.
    if has_text_twice(&dict) {
        return Err(walk
            .pickle
            .invalid_error(id, "a dict has a key twice")
            .into());
    }
    Ok(PlainValue::Dict(dict))
}

/// Returns `true` if two keys of a dict are the same text.
fn has_text_twice(dict: &[(PlainValue, PlainValue)]) -> bool {
    let mut texts = HashSet::new();
    dict.iter()
        .filter_map(|(key, _)| key.as_str())
        .any(|text| !texts.insert(text))
}

/// Turns an object of a known type into a value. One that is no tensor and no plain value becomes a
/// dict in a walk that describes, and is an error otherwise.
fn convert_object(
    walk: &mut Walk<'_, '_>,
    id: NodeId,
    object: &ObjectNode,
    loader: &mut dyn LoadTensors,
) -> Result<PlainValue> {
    if let Some(value) = convert_plain_object(walk, id, object)? {
        return Ok(value);
    }
    match TensorRef::from_node(walk.pickle, id) {
        Ok(Some(tensor)) => return convert_tensor(walk, id, &tensor, loader),
        // An opaque tensor can be described, but one that is malformed cannot.
        Err(error) if !walk.describes || error.opaque_type().is_none() => {
            return Err(error.into());
        }
        Ok(None) | Err(_) => {}
    }
    if !walk.describes {
        return Err(not_plain_error(walk.pickle, id).into());
    }
    let mut description = vec![("$type".into(), object.global.description().into())];
    description.push(("args".into(), convert(walk, object.args, loader)?));
    if let Some(state) = object.state {
        description.push(("state".into(), convert(walk, state, loader)?));
    }
    Ok(PlainValue::Dict(description))
}

/// Returns the value of a `torch.Size`, a path or a device; `None` for objects of other types. Many
/// references may lead to one object, so all that is copied of it is charged.
fn convert_plain_object(
    walk: &mut Walk<'_, '_>,
    id: NodeId,
    object: &ObjectNode,
) -> Result<Option<PlainValue>> {
    let pickle = walk.pickle;
    Ok(Some(match (object.global, pickle.args(object)) {
        (Global::Size, _) => {
            let mut items: Vec<PlainValue> = Vec::new();
            for size in pickle.sizes(id)? {
                items.push((size as i64).into());
            }
            walk.charge(id, COPIES, size_of_val(&items[..]) as u64)?;
            PlainValue::typed(PythonType::Size, PlainValue::Tuple(items))
        }
        (Global::Path(path_type), _) => PlainValue::typed(path_type, walk.path_text(object)?),
        (Global::Device, [kind]) => PlainValue::typed(PythonType::Device, walk.copy_text(*kind)?),
        (Global::Device, [kind, index]) => {
            let name = format!("{}:{}", walk.copy_text(*kind)?, pickle.int(*index)?);
            PlainValue::typed(PythonType::Device, name)
        }
        _ => return Ok(None),
    }))
}
