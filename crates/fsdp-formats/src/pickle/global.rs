//! The list of known classes and functions. Objects of all others are opaque.

use fsdp_layout::{DType, PythonType};

/// A known global. It is never called, and only tells which kind of value an object is.
///
/// It takes two bytes, so that a [`Node`](super::node::Node) that holds one with its arguments
/// needs no allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Global {
    /// `torch.distributed.checkpoint.metadata.Metadata`
    Metadata,
    /// `…metadata.TensorStorageMetadata`
    TensorStorageMetadata,
    /// `…metadata.TensorProperties`
    TensorProperties,
    /// `…metadata._MEM_FORMAT_ENCODING`
    MemFormatEncoding,
    /// `…metadata.ChunkStorageMetadata`
    ChunkStorageMetadata,
    /// `…metadata.BytesStorageMetadata`
    BytesStorageMetadata,
    /// `…metadata.MetadataIndex`
    MetadataIndex,
    /// `…metadata.StorageMeta`
    StorageMeta,
    /// `torch.distributed.checkpoint.filesystem._StorageInfo`
    StorageInfo,
    /// `torch.Size`
    Size,
    /// `torch.float32` and its like.
    DType(DType),
    /// `torch.serialization._get_layout`
    GetLayout,
    /// `torch.device`
    Device,
    /// `torch.FloatStorage` and its like.
    TypedStorage(DType),
    /// `torch.storage.UntypedStorage`
    UntypedStorage,
    /// `torch._utils._rebuild_tensor`
    RebuildTensor,
    /// `torch._utils._rebuild_tensor_v2`
    RebuildTensorV2,
    /// `torch._utils._rebuild_tensor_v3`
    RebuildTensorV3,
    /// `torch._utils._rebuild_qtensor`
    RebuildQTensor,
    /// `torch._utils._rebuild_parameter`, the variant with state, and what rebuilds a tensor of a
    /// device such as XLA's: each makes it of the plain tensor that is its first argument.
    RebuildParameter,
    /// `torch._tensor._rebuild_from_type_v2`
    RebuildFromTypeV2,
    /// `torch.Tensor` or `torch.nn.parameter.Parameter`, as a class.
    TensorClass,
    /// `torch.per_tensor_affine` and its like: how a tensor is quantized. The position of its name
    /// in [`QSCHEMES`].
    QScheme(u8),
    /// `collections.OrderedDict`
    OrderedDict,
    /// `collections.defaultdict`; the factory is dropped.
    DefaultDict,
    /// `set`
    Set,
    /// `frozenset`
    FrozenSet,
    /// `dict`, `list`, `int`, `float`: builtins that a `defaultdict` or a `REDUCE` may name. The
    /// position of its name in [`BUILTINS`].
    Builtin(u8),
    /// `bytearray`
    ByteArray,
    /// `bytes`: how protocol 2 spells bytes of length 0.
    Bytes,
    /// `_codecs.encode`: how protocol 2 spells bytes.
    CodecsEncode,
    /// `pathlib.PosixPath` and its like.
    Path(PythonType),
}

/// torch's quantization schemes.
pub(crate) const QSCHEMES: &[&str] = &[
    "per_tensor_affine",
    "per_channel_affine",
    "per_tensor_symmetric",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
];
/// The known builtins.
pub(crate) const BUILTINS: &[&str] = &["dict", "list", "int", "long", "float"];

/// Returns the position of a name in a list of known names. It is a byte, so that nodes which hold
/// it stay small.
fn position_in(list: &[&str], name: &str) -> Option<u8> {
    u8::try_from(list.iter().position(|known| *known == name)?).ok()
}

/// Returns the name at a position that [`position_in`] returned for this list.
pub(crate) fn name_at(list: &[&'static str], position: u8) -> &'static str {
    list[usize::from(position)]
}

/// torch's typed storages, by class name.
pub(crate) const STORAGES: &[(&str, DType)] = &[
    ("FloatStorage", DType::F32),
    ("DoubleStorage", DType::F64),
    ("HalfStorage", DType::F16),
    ("BFloat16Storage", DType::BF16),
    ("LongStorage", DType::I64),
    ("IntStorage", DType::I32),
    ("ShortStorage", DType::I16),
    ("CharStorage", DType::I8),
    ("ByteStorage", DType::U8),
    ("BoolStorage", DType::Bool),
    ("ComplexFloatStorage", DType::Complex64),
    ("ComplexDoubleStorage", DType::Complex128),
    ("QInt8Storage", DType::QInt8),
    ("QUInt8Storage", DType::QUInt8),
    ("QInt32Storage", DType::QInt32),
];

impl Global {
    /// Returns the text that describes the global. Digests of opaque values depend on it, so it
    /// must never change.
    pub(crate) fn description(self) -> String {
        match self {
            Global::QScheme(position) => format!("QScheme({:?})", name_at(QSCHEMES, position)),
            Global::Builtin(position) => format!("Builtin({:?})", name_at(BUILTINS, position)),
            other => format!("{other:?}"),
        }
    }

    /// Returns the global of this name, if it is on the list.
    pub(crate) fn lookup(module: &str, name: &str) -> Option<Global> {
        use Global::*;
        Some(match module {
            // torch 1.13 kept the first four elsewhere.
            "torch.distributed.checkpoint.metadata"
            | "torch.distributed._shard.checkpoint.metadata"
            | "torch.distributed._shard.sharded_tensor.metadata" => match name {
                "Metadata" => Metadata,
                "TensorStorageMetadata" => TensorStorageMetadata,
                "TensorProperties" => TensorProperties,
                "_MEM_FORMAT_ENCODING" | "MEM_FORMAT_ENCODING" => MemFormatEncoding,
                "ChunkStorageMetadata" => ChunkStorageMetadata,
                "BytesStorageMetadata" => BytesStorageMetadata,
                "MetadataIndex" => MetadataIndex,
                "StorageMeta" => StorageMeta,
                _ => return None,
            },
            "torch.distributed.checkpoint.filesystem"
            | "torch.distributed._shard.checkpoint.filesystem" => match name {
                "_StorageInfo" => StorageInfo,
                _ => return None,
            },
            // The same fields, under a name of Megatron-core's.
            "megatron.core.dist_checkpointing.strategies.torch" if name == "MCoreMetadata" => {
                Metadata
            }
            "torch" => match name {
                "Size" => Size,
                "device" => Device,
                "Tensor" => TensorClass,
                _ if name.starts_with("per_") => QScheme(position_in(QSCHEMES, name)?),
                _ => match fsdp_layout::DType::from_torch_name(name) {
                    Some(dtype) if dtype.is_in_torch() => DType(dtype),
                    _ => TypedStorage(STORAGES.iter().find(|(class, _)| *class == name)?.1),
                },
            },
            "torch.serialization" if name == "_get_layout" => GetLayout,
            "torch.storage" if name == "UntypedStorage" || name == "_UntypedStorage" => {
                UntypedStorage
            }
            "torch._utils" => match name {
                "_rebuild_tensor" => RebuildTensor,
                "_rebuild_tensor_v2" => RebuildTensorV2,
                "_rebuild_tensor_v3" => RebuildTensorV3,
                "_rebuild_qtensor" => RebuildQTensor,
                "_rebuild_parameter"
                | "_rebuild_parameter_with_state"
                | "_rebuild_device_tensor_from_cpu_tensor" => RebuildParameter,
                _ => return None,
            },
            "torch._tensor" if name == "_rebuild_from_type_v2" => RebuildFromTypeV2,
            "torch.nn.parameter" if name == "Parameter" => TensorClass,
            "collections" => match name {
                "OrderedDict" => OrderedDict,
                "defaultdict" => DefaultDict,
                _ => return None,
            },
            "builtins" | "__builtin__" => match name {
                "set" => Set,
                "frozenset" => FrozenSet,
                "bytearray" => ByteArray,
                "bytes" => Bytes,
                _ => Builtin(position_in(BUILTINS, name)?),
            },
            "_codecs" if name == "encode" => CodecsEncode,
            "pathlib" | "pathlib._local" => match name {
                "Path" | "PosixPath" => Path(PythonType::PosixPath),
                "WindowsPath" => Path(PythonType::WindowsPath),
                "PurePath" | "PurePosixPath" => Path(PythonType::PurePosixPath),
                "PureWindowsPath" => Path(PythonType::PureWindowsPath),
                _ => return None,
            },
            _ => return None,
        })
    }
}
