//! The description of a tensor in a pickle: a storage by key, and where the elements lie in it.

use fsdp_layout::boxes::row_major_strides;
use fsdp_layout::{DType, TensorBox};

use crate::error::FormatError;
use crate::limits::{MAX_STORAGE_KEY_BYTES, is_sane_shape};
use crate::pickle::write;
use crate::pickle::{Global, Node, NodeId, Pickle, PickleError, STORAGES, check_attributes};
use crate::strided::StridedLayout;

/// A tensor whose bytes are in a storage record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorRef {
    /// Key of the storage: the record `data/<key>`.
    pub storage: String,
    /// Bytes of the storage.
    pub storage_bytes: u64,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Vec<usize>,
    /// The places of the elements in the storage.
    pub layout: StridedLayout,
    /// The node that says how the tensor is quantized, if it is: a tuple `(scheme, scale, zero
    /// point)`, or `(scheme, scales, zero points, axis)`.
    pub quantizer: Option<NodeId>,
    /// `true` if the tensor has a class or attributes of its own in Python, which are not kept.
    pub loses_attributes: bool,
}

/// The most objects of a Parameter or of a tensor with attributes that wrap a plain tensor, one in
/// the other, and the tensor itself.
pub(super) const MAX_WRAPPERS: usize = 4;

impl TensorRef {
    /// Returns a row-major tensor that is all of its storage.
    pub(crate) fn row_major(
        storage: String,
        storage_bytes: u64,
        dtype: DType,
        shape: &[usize],
    ) -> TensorRef {
        let layout = StridedLayout {
            bounds: TensorBox::whole(shape),
            offset: 0,
            strides: torch_strides(shape),
        };
        TensorRef {
            storage,
            storage_bytes,
            dtype,
            shape: shape.to_vec(),
            layout,
            quantizer: None,
            loses_attributes: false,
        }
    }

    /// Returns about how many bytes its description takes.
    pub(crate) fn description_bytes(&self) -> u64 {
        // The shape, the strides, and the offsets and sizes of the bounds.
        (size_of::<TensorRef>() + self.storage.len() + 4 * size_of::<usize>() * self.shape.len())
            as u64
    }

    /// Returns the tensor that this node describes; `None` if it describes something else. A tensor
    /// that is malformed is an error, and so is one of a class that only running code could build.
    pub fn from_node(
        pickle: &Pickle<'_>,
        mut id: NodeId,
    ) -> Result<Option<TensorRef>, PickleError> {
        // Parameters and tensors with attributes wrap a plain one.
        let mut loses_attributes = false;
        for _ in 0..MAX_WRAPPERS {
            let Node::Object(object) = pickle.node(id) else {
                return Ok(None);
            };
            loses_attributes |= object
                .state
                .is_some_and(|state| has_attributes(pickle, state));
            let tensor = match (object.global, pickle.args(object)) {
                (Global::RebuildQTensor, [storage, offset, shape, strides, quantizer, ..]) => {
                    let plain_tensor =
                        read_tensor(pickle, id, [*storage, *offset, *shape, *strides], None)?;
                    Some(TensorRef {
                        quantizer: Some(*quantizer),
                        ..plain_tensor
                    })
                }
                // The arguments are (tensor, requires_grad, hooks), and then the attributes, if
                // there are any.
                (Global::RebuildParameter, [inner, more_arguments @ ..]) => {
                    loses_attributes |= more_arguments
                        .get(2)
                        .is_some_and(|&state| has_attributes(pickle, state));
                    id = *inner;
                    continue;
                }
                // (function, class, arguments, attributes): the arguments are those of the
                // function.
                (Global::RebuildFromTypeV2, [function, class, arguments, more_arguments @ ..]) => {
                    loses_attributes |= is_subclass(pickle, *class)
                        || more_arguments
                            .first()
                            .is_some_and(|&state| has_attributes(pickle, state));
                    let tensor = match (pickle.node(*function), pickle.sequence(*arguments)?) {
                        (Node::Global(Global::RebuildParameter), [inner, ..]) => {
                            id = *inner;
                            continue;
                        }
                        (Node::Global(global), arguments) => {
                            rebuild(pickle, id, *global, arguments)?
                        }
                        // The class says more about what it is.
                        (Node::Foreign(..), _)
                            if matches!(pickle.node(*class), Node::Foreign(..)) =>
                        {
                            return Err(pickle.expected_error(*class, "a class of plain tensors"));
                        }
                        _ => None,
                    };
                    if tensor.is_none() {
                        return Err(
                            pickle.expected_error(*function, "a function that rebuilds a tensor")
                        );
                    }
                    tensor
                }
                (global, args) => rebuild(pickle, id, global, args)?,
            };
            return Ok(tensor.map(|tensor| TensorRef {
                loses_attributes,
                ..tensor
            }));
        }
        Err(pickle.invalid_error(id, "a tensor is wrapped too many times"))
    }
}

/// Returns `true` if a class is not one of torch's own.
fn is_subclass(pickle: &Pickle<'_>, class: NodeId) -> bool {
    matches!(pickle.node(class), Node::Foreign(module, _) if *module != "torch" && !module.starts_with("torch."))
}

/// Returns `true` if the state of an object has any attributes: a dict, or a tuple of a dict (or
/// `None`) and a dict of slots. Many tensors may share a longer tuple, so what else is in it is not
/// looked at.
fn has_attributes(pickle: &Pickle<'_>, state: NodeId) -> bool {
    match pickle.node(state) {
        Node::Tuple(_) => pickle
            .sequence(state)
            .is_ok_and(|parts| parts.iter().take(2).any(|&part| is_filled(pickle, part))),
        _ => is_filled(pickle, state),
    }
}

/// Returns `true` for a dict that is not empty.
fn is_filled(pickle: &Pickle<'_>, id: NodeId) -> bool {
    matches!(pickle.node(id), Node::Dict(attributes) if !attributes.is_empty())
}

/// Returns the tensor that one of torch's functions rebuilds from these arguments; `None` for other
/// functions.
fn rebuild(
    pickle: &Pickle<'_>,
    id: NodeId,
    function: Global,
    args: &[NodeId],
) -> Result<Option<TensorRef>, PickleError> {
    let (args, dtype, metadata) = match (function, args) {
        (
            Global::RebuildTensor | Global::RebuildTensorV2,
            [storage, offset, shape, strides, more_arguments @ ..],
        ) => (
            [*storage, *offset, *shape, *strides],
            None,
            more_arguments.get(2),
        ),
        (
            Global::RebuildTensorV3,
            [
                storage,
                offset,
                shape,
                strides,
                _grad,
                _hooks,
                dtype,
                more_arguments @ ..,
            ],
        ) => {
            let Node::Global(Global::DType(untyped_dtype)) = *pickle.node(*dtype) else {
                return Err(pickle.expected_error(*dtype, "a dtype"));
            };
            (
                [*storage, *offset, *shape, *strides],
                Some(untyped_dtype),
                more_arguments.first(),
            )
        }
        _ => return Ok(None),
    };
    if let Some(&metadata) = metadata {
        check_resolved(pickle, metadata)?;
    }
    read_tensor(pickle, id, args, dtype).map(Some)
}

/// Refuses, as opaque, a tensor with a pending conjugation or negation. torch applies these only
/// when they are needed, and saves just a flag, so the elements in the storage are not those of the
/// tensor.
fn check_resolved(pickle: &Pickle<'_>, metadata: NodeId) -> Result<(), PickleError> {
    let Node::Dict(flags) = pickle.node(metadata) else {
        return Ok(());
    };
    // Many tensors may share them.
    check_attributes(pickle.node(metadata)).map_err(|kind| pickle.error(metadata, kind))?;
    for &(key, value) in flags {
        let name = match (pickle.node(key), pickle.node(value)) {
            (Node::Str("conj"), Node::Bool(true)) => {
                "Tensor (its conjugation is pending: `resolve_conj`)"
            }
            (Node::Str("neg"), Node::Bool(true)) => {
                "Tensor (its negation is pending: `resolve_neg`)"
            }
            _ => continue,
        };
        return Err(pickle.opaque_error(value, name));
    }
    Ok(())
}

/// A storage that a pickle refers to.
pub(crate) struct StorageRef {
    /// Its key: the record `data/<key>`.
    pub(crate) key: String,
    /// Its length in bytes.
    pub(crate) bytes: u64,
    /// The type of its elements; `None` if it is untyped.
    dtype: Option<DType>,
    /// The node of its class.
    class: NodeId,
}

impl StorageRef {
    /// Returns the storage that this node, a persistent id, describes. Any other node is an error.
    pub(crate) fn from_node(pickle: &Pickle<'_>, id: NodeId) -> Result<Self, PickleError> {
        let Node::PersistentId(persistent) = *pickle.node(id) else {
            return Err(pickle.expected_error(id, "a storage"));
        };
        let [kind, class, key, _location, numel, ..] = *pickle.sequence(persistent)? else {
            return Err(pickle.expected_error(persistent, "a storage's five values"));
        };
        if pickle.str(kind)? != "storage" {
            return Err(pickle.expected_error(kind, "the word `storage`"));
        }
        let dtype = match pickle.node(class) {
            Node::Global(Global::TypedStorage(dtype)) => Some(*dtype),
            Node::Global(Global::UntypedStorage) => None,
            _ => return Err(pickle.expected_error(class, "a storage class")),
        };
        // The elements of an untyped storage are bytes.
        let bytes = pickle
            .unsigned(numel)?
            .checked_mul(dtype.map_or(1, DType::size_in_bytes))
            .ok_or_else(|| pickle.invalid_error(id, "a storage is too large"))?;
        Ok(StorageRef {
            key: storage_key(pickle, key)?.to_owned(),
            bytes,
            dtype,
            class,
        })
    }

    /// Returns torch's name of its class.
    pub(crate) fn class(&self) -> String {
        match self.dtype.and_then(storage_class) {
            Some(class) => format!("torch.{class}"),
            None => "torch.UntypedStorage".to_owned(),
        }
    }
}

/// Returns the key of a storage. Each tensor has a copy of it, so it must not be long: torch writes
/// a number.
pub(super) fn storage_key<'a>(pickle: &Pickle<'a>, key: NodeId) -> Result<&'a str, PickleError> {
    let text = pickle.str(key)?;
    let limit = MAX_STORAGE_KEY_BYTES;
    pickle.check_limit(key, "length of a storage's key", text.len(), limit)?;
    Ok(text)
}

/// Reads a tensor from the arguments with which torch rebuilds it, and checks that it lies in its
/// storage. `untyped_dtype` is the dtype where the storage has none.
fn read_tensor(
    pickle: &Pickle<'_>,
    id: NodeId,
    args: [NodeId; 4],
    untyped_dtype: Option<DType>,
) -> Result<TensorRef, PickleError> {
    let [storage, offset, shape, strides] = args;
    let storage = StorageRef::from_node(pickle, storage)?;
    let ((Some(dtype), None) | (None, Some(dtype))) = (storage.dtype, untyped_dtype) else {
        return Err(pickle.expected_error(storage.class, "a storage class"));
    };
    let shape = pickle.sizes(shape)?;
    let strides = pickle.sizes(strides)?;
    if shape.len() != strides.len() {
        return Err(pickle.invalid_error(id, "a tensor's shape and strides differ in length"));
    }
    let offset = pickle.unsigned(offset)?;
    if !is_sane_shape(&shape) {
        return Err(pickle.invalid_error(id, "a tensor has too many elements"));
    }
    let layout = StridedLayout {
        bounds: TensorBox::whole(&shape),
        offset,
        strides,
    };
    // A tensor without elements lies in its storage wherever that ends.
    if !shape.contains(&0) {
        let end = layout
            .last()
            .and_then(|last| last.checked_add(1)?.checked_mul(dtype.size_in_bytes()));
        if end.is_none_or(|end| end > storage.bytes) {
            return Err(pickle.invalid_error(id, "a tensor reaches beyond its storage"));
        }
    }
    Ok(TensorRef {
        storage: storage.key,
        storage_bytes: storage.bytes,
        dtype,
        shape,
        layout,
        quantizer: None,
        loses_attributes: false,
    })
}

/// Returns the name of torch's typed storage class; `None` where torch uses an untyped one.
fn storage_class(dtype: DType) -> Option<&'static str> {
    STORAGES
        .iter()
        .find(|(_, storage_dtype)| *storage_dtype == dtype)
        .map(|(class, _)| *class)
}

/// Checks that torch can rebuild a tensor of this type from its bytes alone.
pub fn check_writable(dtype: DType) -> Result<(), FormatError> {
    if dtype.is_quantized() {
        // Scale and zero point are not part of the elements.
        let what = format!("writing the quantized dtype `{dtype}` as a torch tensor");
        return Err(FormatError::unsupported(what));
    }
    if !dtype.is_in_torch() {
        let what = format!(
            "the dtype `{dtype}`, which torch lacks, in a format of torch's (convert to safetensors, or leave it out \
             with `--exclude`),"
        );
        return Err(FormatError::unsupported(what));
    }
    Ok(())
}

/// Writes the pickle of a row-major tensor whose bytes are the whole storage `key`.
pub fn write_tensor(out: &mut Vec<u8>, key: usize, dtype: DType, shape: &[usize]) {
    let numel: u64 = shape.iter().map(|&size| size as u64).product();
    // torch has no storage class for its newer types. The bytes of such a tensor are untyped, and
    // the function that rebuilds it is told the type.
    let class = storage_class(dtype);
    let (function, storage_length) = match class {
        Some(_) => ("_rebuild_tensor_v2", numel),
        None => ("_rebuild_tensor_v3", numel * dtype.size_in_bytes()),
    };
    write::global(out, "torch._utils", function);
    out.push(write::MARK);
    // The storage, as a persistent id.
    out.push(write::MARK);
    write::text(out, "storage");
    match class {
        Some(class) => write::global(out, "torch", class),
        None => write::global(out, "torch.storage", "UntypedStorage"),
    }
    write::text(out, &key.to_string());
    write::text(out, "cpu");
    write::unsigned(out, storage_length);
    out.extend_from_slice(&[write::TUPLE, write::BINPERSID]);
    // The offset, the shape, the strides, `requires_grad`, and no hooks.
    write::int(out, 0);
    write::sizes(out, shape);
    write::sizes(out, &torch_strides(shape));
    write::bool(out, false);
    write::global(out, "collections", "OrderedDict");
    out.extend_from_slice(&[write::EMPTY_TUPLE, write::REDUCE]);
    if class.is_none() {
        write::global(out, "torch", dtype.torch_name());
    }
    out.extend_from_slice(&[write::TUPLE, write::REDUCE]);
}

/// Returns row-major strides as torch has them: a dimension of 0 counts as 1.
fn torch_strides(shape: &[usize]) -> Vec<usize> {
    row_major_strides(&shape.iter().map(|&size| size.max(1)).collect::<Vec<_>>())
}
