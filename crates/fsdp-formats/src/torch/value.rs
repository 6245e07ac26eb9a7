//! Non-tensor values: items of `torch.save`, from and to plain values.

use std::collections::{HashMap, HashSet};

use fsdp_digest::{Digest, Sum};
use fsdp_layout::{DType, PlainTensor, PlainValue, PythonType, TensorBox};

use super::storages::Storages;
use super::tensor_ref::{StorageRef, TensorRef, check_writable, write_tensor};
use super::zip::{ArchiveLayout, Directory, ROOT};
use crate::budget::Budget;
use crate::error::FormatError;
use crate::limits::{MAX_DEPTH, MAX_OBJECT_BYTES, PICKLE_FACTOR};
use crate::payload::slot::Slot;
use crate::pickle::write;
use crate::pickle::{
    BUILTINS, Global, Node, NodeId, ObjectNode, OpaqueNode, Pickle, PickleError, PickleErrorKind,
    QSCHEMES, Walk, name_at, parse, parse_within,
};
use crate::storage::read_at::{BlockReader, ReadAt};
use crate::strided::read_overlap;

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
pub fn encode_value(value: &PlainValue) -> Result<Vec<u8>, FormatError> {
    let (layout, tensors) = layout_of(value)?;
    let crcs: Vec<u32> = tensors
        .iter()
        .map(|tensor| crc32fast::hash(&tensor.data))
        .collect();
    let mut bytes = layout.head(crcs.first().copied().unwrap_or(0));
    for (index, tensor) in tensors.iter().enumerate() {
        if index > 0 {
            bytes.extend_from_slice(&layout.storage_header(index, crcs[index]));
        }
        bytes.extend_from_slice(&tensor.data);
    }
    bytes.extend_from_slice(&layout.tail(&crcs));
    Ok(bytes)
}

/// Returns the length of the result of [`encode_value`].
pub fn value_item_length(value: &PlainValue) -> Result<u64, FormatError> {
    Ok(layout_of(value)?.0.length())
}

/// Lays out the item of a value, and lists the tensors inside it.
fn layout_of(value: &PlainValue) -> Result<(ArchiveLayout, Vec<&PlainTensor>), FormatError> {
    let mut pickle = Vec::new();
    let mut tensors = Vec::new();
    write::proto(&mut pickle, 2);
    write_value(&mut pickle, value, &mut tensors, 0, 0)?;
    write::op(&mut pickle, write::STOP);
    let lengths: Vec<u64> = tensors
        .iter()
        .map(|tensor| tensor.data.len() as u64)
        .collect();
    Ok((ArchiveLayout::new(ROOT, pickle, &lengths), tensors))
}

/// Appends the opcodes of a value to `out`, and its tensors to `tensors`. Their storages are
/// numbered from `first` on, in the order in which they are met. `depth` is the number of
/// containers around the value.
pub fn write_value<'v>(
    out: &mut Vec<u8>,
    value: &'v PlainValue,
    tensors: &mut Vec<&'v PlainTensor>,
    first: usize,
    depth: usize,
) -> Result<(), FormatError> {
    if depth >= MAX_DEPTH {
        return Err(FormatError::TooLarge {
            what: "nesting",
            value: depth as u64 + 1,
            limit: MAX_DEPTH as u64,
        });
    }
    match value {
        PlainValue::None => write::none(out),
        PlainValue::Bool(value) => write::bool(out, *value),
        PlainValue::Int(value) => write::int(out, *value),
        PlainValue::BigInt(bytes) => write::big_int(out, bytes),
        PlainValue::Float(value) => write::float(out, *value),
        PlainValue::Str(value) => write::text(out, value),
        PlainValue::Bytes(value) => {
            // Protocol 2 has no opcode for bytes. As Python does, write a call of `_codecs.encode`
            // on a text that has one character for each byte.
            write::global(out, "_codecs", "encode");
            write::text(
                out,
                &value
                    .iter()
                    .map(|&byte| char::from(byte))
                    .collect::<String>(),
            );
            write::text(out, "latin1");
            write::close_tuple(out, 2);
            write::op(out, write::REDUCE);
        }
        PlainValue::List(items) => write_list(out, items, tensors, first, depth)?,
        PlainValue::Tuple(items) => {
            write::open_tuple(out, items.len());
            items
                .iter()
                .try_for_each(|item| write_value(out, item, tensors, first, depth + 1))?;
            write::close_tuple(out, items.len());
        }
        PlainValue::Set(items) => {
            write::global(out, "__builtin__", "set");
            write_list(out, items, tensors, first, depth)?;
            write::close_tuple(out, 1);
            write::op(out, write::REDUCE);
        }
        PlainValue::Typed(of, description) => {
            write_typed(out, *of, description, tensors, first, depth)?
        }
        PlainValue::Dict(entries) => {
            write::op(out, write::EMPTY_DICT);
            if !entries.is_empty() {
                write::op(out, write::MARK);
                for (key, value) in entries {
                    write_value(out, key, tensors, first, depth + 1)?;
                    write_value(out, value, tensors, first, depth + 1)?;
                }
                write::op(out, write::SETITEMS);
            }
        }
        PlainValue::Tensor(tensor) => {
            check_writable(tensor.dtype)?;
            let numel = tensor
                .shape
                .iter()
                .try_fold(1u64, |numel, &size| numel.checked_mul(size as u64));
            let length = numel.and_then(|numel| numel.checked_mul(tensor.dtype.size_in_bytes()));
            if length != Some(tensor.data.len() as u64) {
                let expected = format!(
                    "the bytes of a `{}` tensor of shape {:?}",
                    tensor.dtype, tensor.shape
                );
                return Err(FormatError::unexpected(
                    expected,
                    format!("{} bytes", tensor.data.len()),
                ));
            }
            write_tensor(out, first + tensors.len(), tensor.dtype, &tensor.shape);
            tensors.push(tensor);
        }
        other => {
            return Err(FormatError::Unsupported {
                what: format!("writing a value of type `{}`", other.type_name()),
            });
        }
    }
    Ok(())
}

/// Writes the opcodes of a list, as [`write_value`] does.
fn write_list<'v>(
    out: &mut Vec<u8>,
    items: &'v [PlainValue],
    tensors: &mut Vec<&'v PlainTensor>,
    first: usize,
    depth: usize,
) -> Result<(), FormatError> {
    write::op(out, write::EMPTY_LIST);
    if !items.is_empty() {
        write::op(out, write::MARK);
        items
            .iter()
            .try_for_each(|item| write_value(out, item, tensors, first, depth + 1))?;
        write::op(out, write::APPENDS);
    }
    Ok(())
}

/// Writes the opcodes of an object of a type that a simpler value describes, as [`write_value`]
/// does.
fn write_typed<'v>(
    out: &mut Vec<u8>,
    of: PythonType,
    description: &'v PlainValue,
    tensors: &mut Vec<&'v PlainTensor>,
    first: usize,
    depth: usize,
) -> Result<(), FormatError> {
    match (of, description) {
        // Dtypes and quantization schemes are attributes of the module `torch`, not the results of
        // calls.
        (PythonType::DType | PythonType::QScheme, PlainValue::Str(name)) => {
            let known = name
                .strip_prefix("torch.")
                .filter(|name| Global::lookup("torch", name).is_some());
            let name =
                known.ok_or_else(|| FormatError::unexpected(of.name(), format!("`{name}`")))?;
            write::global(out, "torch", name);
            return Ok(());
        }
        (PythonType::Device, PlainValue::Str(name)) => {
            write::global(out, "torch", "device");
            match name
                .split_once(':')
                .map(|(kind, index)| (kind, index.parse()))
            {
                Some((kind, Ok(index))) => {
                    write::text(out, kind);
                    write::int(out, index);
                    write::close_tuple(out, 2);
                }
                _ => {
                    write::text(out, name);
                    write::close_tuple(out, 1);
                }
            }
        }
        (PythonType::FrozenSet, PlainValue::Set(items)) => {
            write::global(out, "__builtin__", "frozenset");
            write_list(out, items, tensors, first, depth)?;
            write::close_tuple(out, 1);
        }
        (of, description) => {
            let (module, name) = of
                .name()
                .rsplit_once('.')
                .unwrap_or(("__builtin__", of.name()));
            write::global(out, module, name);
            write_value(out, description, tensors, first, depth + 1)?;
            write::close_tuple(out, 1);
        }
    }
    write::op(out, write::REDUCE);
    Ok(())
}

/// Reads the value in an item, with the tensors in it. `item` must hold exactly the item.
///
/// An `OrderedDict` or `defaultdict` becomes a dict.
pub fn decode_value<S: ReadAt>(item: &S) -> Result<PlainValue, FormatError> {
    decode_value_within(item, Budget::new(item.len(), PICKLE_FACTOR), false)
}

/// Does the same as [`decode_value`], with a budget for the values. With `describes`, opaque
/// objects in it become dicts that describe them.
pub(crate) fn decode_value_within(
    item: &dyn ReadAt,
    budget: Budget,
    describes: bool,
) -> Result<PlainValue, FormatError> {
    let directory = Directory::read(item)?;
    directory.check_byte_order(item)?;
    let pickle = directory.read_record(item, "data.pkl", MAX_OBJECT_BYTES)?;
    let parsed = parse_within(&pickle, budget)?;
    let storages = Storages::Archive(directory);
    let mut loader = TensorLoader::new(&storages, item);
    let mut walk = if describes {
        Walk::describing(&parsed)
    } else {
        Walk::new(&parsed)
    };
    convert(&parsed, parsed.root(), &mut walk, &mut loader)
}

/// Reads the value of an item that `torch.save` made.
///
/// # Errors
/// Bytes that are no such item; a value that is opaque.
pub fn decode_item(item: &[u8]) -> Result<PlainValue, FormatError> {
    decode_value(&item)
}

/// Reads the value of an item that `torch.save` made, to be digested: opaque objects in it become
/// dicts that describe them.
///
/// # Errors
/// Bytes that are no such item.
pub fn describe_item(item: &[u8]) -> Result<PlainValue, FormatError> {
    decode_value_within(&item, Budget::new(item.len() as u64, PICKLE_FACTOR), true)
}

/// Returns the type of the object that makes the value of an item opaque, from its pickle alone;
/// `None` for a plain value.
pub(crate) fn opaque_type_of(
    item: &dyn ReadAt,
    budget: Budget,
) -> Result<Option<String>, FormatError> {
    let directory = Directory::read(item)?;
    directory.check_byte_order(item)?;
    let pickle = directory.read_record(item, "data.pkl", MAX_OBJECT_BYTES)?;
    let parsed = parse_within(&pickle, budget)?;
    match convert(
        &parsed,
        parsed.root(),
        &mut Walk::new(&parsed),
        &mut without_elements,
    ) {
        Ok(_) => Ok(None),
        Err(FormatError::Pickle(error)) => {
            opaque_type(&error).map(Some).ok_or_else(|| error.into())
        }
        Err(error) => Err(error),
    }
}

/// Describes the object of an item, without the elements of the tensors in it.
pub(crate) fn describe_object(
    item: &dyn ReadAt,
    budget: Budget,
) -> Result<PlainValue, FormatError> {
    let pickle = Directory::read(item)?.read_record(item, "data.pkl", MAX_OBJECT_BYTES)?;
    let parsed = parse_within(&pickle, budget)?;
    convert(
        &parsed,
        parsed.root(),
        &mut Walk::describing(&parsed),
        &mut without_elements,
    )
}

/// Returns a placeholder without elements for a tensor inside a value that is not read.
fn without_elements(tensor: &TensorRef) -> Result<PlainTensor, FormatError> {
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

/// Reads the quantizer of the tensor that is the archive's root object.
pub(crate) fn quantizer_of(
    archive: &Directory,
    source: &dyn ReadAt,
) -> Result<Option<PlainValue>, FormatError> {
    let pickle = archive.read_record(source, "data.pkl", MAX_OBJECT_BYTES)?;
    let parsed = parse(&pickle)?;
    let quantizer = TensorRef::of(&parsed, parsed.root())?.and_then(|tensor| tensor.quantizer);
    let Some(quantizer) = quantizer else {
        return Ok(None);
    };
    let storages = Storages::Archive(archive.clone());
    let mut loader = TensorLoader::new(&storages, source);
    convert(&parsed, quantizer, &mut Walk::new(&parsed), &mut loader).map(Some)
}

/// The storages beside a pickle in its file, for the values that refer to them.
pub(crate) trait BesidePickle {
    /// Returns a tensor inside a value, with its elements.
    fn tensor(&mut self, tensor: &TensorRef) -> Result<PlainTensor, FormatError>;

    /// Describes the first bytes of a storage that is itself inside an opaque object.
    fn storage(&mut self, key: &str, bytes: u64) -> Result<PlainValue, FormatError>;
}

/// A function that returns tensors. Storages are then described by their lengths.
impl<F: FnMut(&TensorRef) -> Result<PlainTensor, FormatError>> BesidePickle for F {
    fn tensor(&mut self, tensor: &TensorRef) -> Result<PlainTensor, FormatError> {
        self(tensor)
    }

    fn storage(&mut self, _: &str, bytes: u64) -> Result<PlainValue, FormatError> {
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
    to_digest: Budget,
    /// The digests of storages, by their keys and lengths, so that each is read once.
    digests: HashMap<(String, u64), Digest>,
}

impl<'a> TensorLoader<'a> {
    /// Makes a loader of tensors whose storages are in this file.
    pub(crate) fn new(storages: &'a Storages, source: &'a dyn ReadAt) -> Self {
        let budget = || Budget::new(source.len(), 1);
        TensorLoader {
            storages,
            source,
            budget: budget(),
            to_digest: budget(),
            digests: HashMap::new(),
        }
    }

    /// Returns the digest of the first bytes of a storage.
    fn digest(&self, key: &str, bytes: u64) -> Result<Digest, FormatError> {
        /// The bytes that are read at once.
        const AT_ONCE: u64 = 1 << 20;
        let start = self.storages.data_offset_of(self.source, key, bytes)?;
        let mut buffer = vec![0; bytes.min(AT_ONCE) as usize];
        let mut sum = Sum::default();
        let mut at = 0;
        while at < bytes {
            let piece = &mut buffer[..(bytes - at).min(AT_ONCE) as usize];
            self.source.read_exact_at(start + at, piece)?;
            sum.add_bytes(at, piece);
            at += piece.len() as u64;
        }
        Ok(sum.finish(DType::U8, &[bytes as usize]))
    }
}

impl BesidePickle for TensorLoader<'_> {
    fn tensor(&mut self, tensor: &TensorRef) -> Result<PlainTensor, FormatError> {
        let element = tensor.dtype.size_in_bytes() as usize;
        let length = tensor.shape.iter().product::<usize>() * element;
        let start = self.storages.data_offset(self.source, tensor)?;
        // An expanded tensor is larger than its storage, and several tensors may share one.
        self.budget
            .charge("bytes of tensors in values", length as u64)?;
        let whole = TensorBox::whole(&tensor.shape);
        let mut data = vec![0; length];
        let mut slot = Slot::new(whole.clone(), &mut data);
        read_overlap(
            &mut BlockReader::new(self.source),
            start,
            element,
            &tensor.layout,
            &whole,
            &mut slot,
        )?;
        Ok(PlainTensor {
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            data,
        })
    }

    fn storage(&mut self, key: &str, bytes: u64) -> Result<PlainValue, FormatError> {
        let known = self.digests.get(&(key.to_owned(), bytes)).copied();
        let digest = match known {
            Some(digest) => digest,
            None => {
                // Storages of many lengths may be claimed to lie in one record.
                self.to_digest
                    .charge("bytes of storages in values", bytes)?;
                let digest = self.digest(key, bytes)?;
                self.digests.insert((key.to_owned(), bytes), digest);
                digest
            }
        };
        Ok(PlainValue::Str(format!(
            "{bytes} bytes with the digest {digest}"
        )))
    }
}

/// Returns the plain value of a pickle's node. A tensor in it is an error, because a pickle does
/// not hold its bytes.
pub fn value_of(pickle: &Pickle<'_>, id: NodeId) -> Result<PlainValue, FormatError> {
    convert(pickle, id, &mut Walk::new(pickle), &mut |_: &TensorRef| {
        Err(FormatError::Unsupported {
            what: "a tensor inside this value".to_owned(),
        })
    })
}

/// Returns the error of a value that is of a known class, but is not a plain value.
fn unnamed(p: &Pickle<'_>, id: NodeId) -> PickleError {
    let name = match p.node(id) {
        Node::Global(global) => global.description(),
        Node::Object(object) => object.global.description(),
        Node::PersistentId(_) => "Storage".to_owned(),
        other => other.kind().to_owned(),
    };
    p.error(
        id,
        PickleErrorKind::Global {
            module: "torch".to_owned(),
            name,
        },
    )
}

/// Returns the type of an opaque object, if the error is that of one.
pub(crate) fn opaque_type(error: &PickleError) -> Option<String> {
    match &error.kind {
        PickleErrorKind::Global { module, name } => Some(format!("{module}.{name}")),
        _ => None,
    }
}

/// Describes an opaque object as a dict: its type, its arguments, its state, and the items and
/// entries that were added to it.
fn described(
    p: &Pickle<'_>,
    id: NodeId,
    object: &OpaqueNode<'_>,
    walk: &mut Walk,
    beside: &mut dyn BesidePickle,
) -> Result<PlainValue, FormatError> {
    // Its type, and the names of its other parts, whose values are charged when they are made.
    walk.charge(
        p,
        id,
        COPIES,
        2 * DESCRIBED + (object.module.len() + object.name.len()) as u64,
    )?;
    let mut parts = vec![(
        "$type".into(),
        format!("{}.{}", object.module, object.name).into(),
    )];
    if !p.sequence(object.args).is_ok_and(<[NodeId]>::is_empty) {
        parts.push(("args".into(), convert(p, object.args, walk, beside)?));
    }
    if let Some(state) = object.state {
        parts.push(("state".into(), convert(p, state, walk, beside)?));
    }
    if !object.items.is_empty() {
        parts.push((
            "items".into(),
            PlainValue::List(convert_all(p, &object.items, walk, beside)?),
        ));
    }
    if !object.entries.is_empty() {
        let mut entries = Vec::new();
        for &(key, value) in &object.entries {
            entries.push((
                convert(p, key, walk, beside)?,
                convert(p, value, walk, beside)?,
            ));
        }
        parts.push(("entries".into(), PlainValue::Dict(entries)));
    }
    Ok(PlainValue::Dict(parts))
}

/// Describes a storage that is itself in an opaque object: its class, and its bytes.
fn described_storage(
    p: &Pickle<'_>,
    id: NodeId,
    storage: &StorageRef,
    walk: &mut Walk,
    beside: &mut dyn BesidePickle,
) -> Result<PlainValue, FormatError> {
    // Two keys and two values, with their texts.
    walk.charge(p, id, COPIES, 3 * DESCRIBED)?;
    let bytes = beside.storage(&storage.key, storage.bytes)?;
    Ok(PlainValue::Dict(vec![
        ("$type".into(), storage.class().into()),
        ("data".into(), bytes),
    ]))
}

/// Returns a tensor inside a value. One that is quantized is opaque there, because nothing would
/// keep its scale.
fn tensor_in_value(
    p: &Pickle<'_>,
    id: NodeId,
    tensor: &TensorRef,
    walk: &mut Walk,
    beside: &mut dyn BesidePickle,
) -> Result<PlainValue, FormatError> {
    walk.charge(p, id, COPIES, size_of_val(&tensor.shape[..]) as u64)?;
    let Some(quantizer) = tensor.quantizer else {
        return Ok(PlainValue::Tensor(beside.tensor(tensor)?));
    };
    if !walk.describes() {
        let (module, name) = (
            "torch".to_owned(),
            "Tensor (quantized, inside another value)".to_owned(),
        );
        return Err(p.error(id, PickleErrorKind::Global { module, name }).into());
    }
    let quantizer = convert(p, quantizer, walk, beside)?;
    Ok(PlainValue::Dict(vec![
        ("$type".into(), "torch.Tensor".into()),
        (
            "elements".into(),
            PlainValue::Tensor(beside.tensor(tensor)?),
        ),
        ("quantizer".into(), quantizer),
    ]))
}

/// Turns a node into a value, with the tensors in it, which lie `beside` the pickle.
///
/// It calls itself for nested values, so everything that needs more than a little of the stack is a
/// function of its own: 200 levels fit into the 2 MiB of a thread, also in a build that is not
/// optimized.
pub(crate) fn convert(
    p: &Pickle<'_>,
    id: NodeId,
    walk: &mut Walk,
    beside: &mut dyn BesidePickle,
) -> Result<PlainValue, FormatError> {
    walk.enter(p, id)?;
    let value = match p.node(id) {
        Node::Tuple(_) => PlainValue::Tuple(convert_all(p, p.sequence(id)?, walk, beside)?),
        Node::List(items) => PlainValue::List(convert_all(p, items, walk, beside)?),
        Node::Set(items) => PlainValue::Set(convert_all(p, items, walk, beside)?),
        Node::FrozenSet(items) => {
            walk.charge(p, id, COPIES, DESCRIBED)?;
            PlainValue::typed(
                PythonType::FrozenSet,
                PlainValue::Set(convert_all(p, items, walk, beside)?),
            )
        }
        Node::Dict(entries) => convert_dict(p, id, entries, walk, beside)?,
        Node::Object(object) => {
            walk.charge(p, id, COPIES, DESCRIBED)?;
            convert_object(p, id, object, walk, beside)?
        }
        Node::Opaque(object) if walk.describes() => described(p, id, object, walk, beside)?,
        Node::PersistentId(inner) if walk.describes() => match StorageRef::of(p, id) {
            Ok(storage) => described_storage(p, id, &storage, walk, beside)?,
            // A persistent id that is not that of a storage of a known class.
            Err(_) => convert(p, *inner, walk, beside)?,
        },
        _ => leaf(p, id, walk)?,
    };
    walk.leave();
    Ok(value)
}

/// The name, in errors of the budget, of the texts, bytes and names that are copied from a pickle.
pub(crate) const COPIES: &str = "copies of text and bytes";

/// The bytes that a node of a known type is charged: the object and its description are a value
/// each, and names are texts.
const DESCRIBED: u64 = 2 * size_of::<PlainValue>() as u64;

/// Turns a node that holds no other ones into a value. A pickle may refer to one text many times,
/// so each copy is charged: a small file cannot fill the memory. In a walk that describes, types
/// and functions become their names.
fn leaf(p: &Pickle<'_>, id: NodeId, walk: &mut Walk) -> Result<PlainValue, FormatError> {
    let copied = match p.node(id) {
        Node::Str(text) => text.len() as u64,
        Node::Bytes(bytes) | Node::ByteArray(bytes) => bytes.len() as u64,
        Node::BigInt(bytes) => bytes.len() as u64,
        Node::Global(_) => DESCRIBED,
        Node::Foreign(module, name) => (module.len() + name.len()) as u64,
        _ => 0,
    };
    walk.charge(p, id, COPIES, copied)?;
    Ok(match p.node(id) {
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
        Node::Foreign(module, name) if walk.describes() => {
            PlainValue::Str(format!("{module}.{name}"))
        }
        Node::Global(Global::Bytes) if walk.describes() => {
            PlainValue::Str("builtins.bytes".to_owned())
        }
        Node::Global(Global::Builtin(name)) if walk.describes() => {
            PlainValue::Str(format!("builtins.{}", name_at(BUILTINS, *name)))
        }
        Node::Global(global) if walk.describes() => PlainValue::Str(global.description()),
        Node::Global(_) | Node::PersistentId(_) => return Err(unnamed(p, id).into()),
        _ => return Err(p.wrong(id, "a plain value").into()),
    })
}

/// Turns nodes into values.
fn convert_all(
    p: &Pickle<'_>,
    items: &[NodeId],
    walk: &mut Walk,
    beside: &mut dyn BesidePickle,
) -> Result<Vec<PlainValue>, FormatError> {
    // Not an iterator, whose functions would each take a part of the stack at each level; and no
    // capacity for all, because a list that holds itself has its items once for each level.
    let mut values = Vec::new();
    for &item in items {
        values.push(convert(p, item, walk, beside)?);
    }
    Ok(values)
}

/// Turns the entries of a dict into a value.
fn convert_dict(
    p: &Pickle<'_>,
    id: NodeId,
    entries: &[(NodeId, NodeId)],
    walk: &mut Walk,
    beside: &mut dyn BesidePickle,
) -> Result<PlainValue, FormatError> {
    let mut dict = Vec::new();
    for &(key, value) in entries {
        let key = convert(p, key, walk, beside)?;
        dict.push((key, convert(p, value, walk, beside)?));
    }
    // A dict of Python has each key once, and other formats would keep only one of the values.
    if has_text_twice(&dict) {
        return Err(p
            .error(
                id,
                PickleErrorKind::Value {
                    what: "a dict has a key twice",
                },
            )
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

/// Turns an object of a known type into a value.
fn convert_object(
    p: &Pickle<'_>,
    id: NodeId,
    object: &ObjectNode,
    walk: &mut Walk,
    beside: &mut dyn BesidePickle,
) -> Result<PlainValue, FormatError> {
    if let Some(value) = plain_object(p, id, object, walk)? {
        return Ok(value);
    }
    match TensorRef::of(p, id) {
        Ok(Some(tensor)) => tensor_in_value(p, id, &tensor, walk, beside),
        Err(error) if !(walk.describes() && opaque_type(&error).is_some()) => Err(error.into()),
        _ if walk.describes() => {
            let mut parts = vec![("$type".into(), object.global.description().into())];
            for (name, part) in [("args", Some(object.args)), ("state", object.state)] {
                if let Some(part) = part {
                    parts.push((name.into(), convert(p, part, walk, beside)?));
                }
            }
            Ok(PlainValue::Dict(parts))
        }
        _ => Err(unnamed(p, id).into()),
    }
}

/// Returns the text of a node, and charges this reference and a copy of it.
fn copied_text<'a>(p: &Pickle<'a>, id: NodeId, walk: &mut Walk) -> Result<&'a str, PickleError> {
    let text = p.str(id)?;
    walk.charge(p, id, COPIES, (size_of::<&str>() + text.len()) as u64)?;
    Ok(text)
}

/// Returns the value of a `torch.Size`, a path or a device; `None` for objects of other types. Many
/// references may lead to one object, so all that is copied of it is charged.
fn plain_object(
    p: &Pickle<'_>,
    id: NodeId,
    object: &ObjectNode,
    walk: &mut Walk,
) -> Result<Option<PlainValue>, FormatError> {
    Ok(Some(match (object.global, p.args(object)) {
        (Global::Size, _) => {
            let sizes: Vec<_> = p
                .sizes(id)?
                .into_iter()
                .map(|size| PlainValue::Int(size as i64))
                .collect();
            walk.charge(p, id, COPIES, size_of_val(&sizes[..]) as u64)?;
            PlainValue::typed(PythonType::Size, PlainValue::Tuple(sizes))
        }
        (Global::Path(of), parts) => {
            let parts = parts
                .iter()
                .map(|&part| copied_text(p, part, walk))
                .collect::<Result<Vec<_>, _>>()?;
            // The first part of an absolute path is `/` itself.
            PlainValue::typed(of, parts.join("/").replacen("//", "/", 1))
        }
        (Global::Device, [kind]) => {
            PlainValue::typed(PythonType::Device, copied_text(p, *kind, walk)?)
        }
        (Global::Device, [kind, index]) => PlainValue::typed(
            PythonType::Device,
            format!("{}:{}", copied_text(p, *kind, walk)?, p.int(*index)?),
        ),
        _ => return Ok(None),
    }))
}
