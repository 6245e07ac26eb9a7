//! Reads torch's `Metadata` pickle.

use std::collections::HashMap;

use fsdp_layout::{KeyPath, PathPart, TensorBox};
use indexmap::IndexMap;

use super::{
    BytesEntry, Chunk, Entry, MemoryFormat, Metadata, StorageInfo, StorageMeta, TensorEntry,
    TensorProperties,
};
use crate::limits::{MAX_KEY_BYTES, is_sane_shape};
use crate::pickle::{Fields, Global, Node, NodeId, Pickle, PickleError, Walk, parse};

/// The name of what is charged, for errors.
const MEMORY: &str = "memory for metadata";

type Result<T> = std::result::Result<T, PickleError>;

/// Decodes a `.metadata` file (or a rank's `__{rank}.metadata`), of any torch that wrote this
/// format.
pub fn decode(bytes: &[u8]) -> Result<Metadata> {
    let pickle = parse(bytes)?;
    let p = &pickle;
    let budget = &mut Walk::new(p);
    let fields = p.state(
        p.root(),
        Global::Metadata,
        "torch.distributed.checkpoint's Metadata",
    )?;
    // The places come first, so that each chunk can take its own.
    let mut storage = read_storage_data(p, budget, fields.find_some("storage_data"))?;

    let mut entries = IndexMap::new();
    for &(key, value) in p.dict(fields.get("state_dict_metadata")?)? {
        let fqn = read_fqn(p, key)?;
        budget.charge(key, MEMORY, (fqn.len() + size_of::<Entry>()) as u64)?;
        let entry = if p.is_object(value, Global::BytesStorageMetadata) {
            Entry::Bytes(BytesEntry {
                stored: storage.remove(&(fqn, None)),
            })
        } else {
            Entry::Tensor(read_tensor(p, budget, value, fqn, &mut storage)?)
        };
        if entries.insert(fqn.to_owned(), entry).is_some() {
            return Err(p.invalid(key, "the same key stands twice in the metadata"));
        }
    }
    Ok(Metadata {
        entries,
        planner_data: fields
            .find_some("planner_data")
            .map(|id| read_planner_data(p, budget, id))
            .transpose()?,
        storage_meta: fields
            .find_some("storage_meta")
            .map(|id| read_storage_meta(p, id))
            .transpose()?,
        version: read_text(p, &fields, "version")?,
        replicas: Vec::new(),
    })
}

/// Reads an attribute that is a text; `None` if there is none.
fn read_text(
    p: &Pickle<'_>,
    fields: &Fields<'_, '_>,
    field: &'static str,
) -> Result<Option<String>> {
    let id = fields.find_some(field);
    id.map(|id| p.str(id).map(str::to_owned)).transpose()
}

/// Reads a flat key.
fn read_fqn<'a>(p: &Pickle<'a>, id: NodeId) -> Result<&'a str> {
    let fqn = p.str(id)?;
    p.check_limit(id, "key length", fqn.len(), MAX_KEY_BYTES)?;
    Ok(fqn)
}

type StorageData<'a> = HashMap<(&'a str, Option<Vec<usize>>), StorageInfo>;

/// Reads the places of all items, by key and offsets.
fn read_storage_data<'a>(
    p: &Pickle<'a>,
    budget: &mut Walk<'_, '_>,
    id: Option<NodeId>,
) -> Result<StorageData<'a>> {
    let Some(id) = id else {
        return Ok(HashMap::new());
    };
    let entries = p.dict(id)?;
    let mut storage = HashMap::with_capacity(entries.len());
    for &(key, value) in entries {
        let index = p.state(key, Global::MetadataIndex, "a MetadataIndex")?;
        let offsets = index
            .find_some("offset")
            .map(|id| p.sizes(id))
            .transpose()?;
        let info = p.state(value, Global::StorageInfo, "a _StorageInfo")?;
        let mut transforms = Vec::new();
        if let Some(id) = info.find_some("transform_descriptors") {
            for &transform in p.sequence(id)? {
                let text = p.str(transform)?;
                budget.charge(transform, MEMORY, (text.len() + size_of::<String>()) as u64)?;
                transforms.push(text.to_owned());
            }
        }
        let stored = StorageInfo {
            relative_path: p.str(info.get("relative_path")?)?.to_owned(),
            offset: p.unsigned(info.get("offset")?)?,
            length: p.unsigned(info.get("length")?)?,
            transforms,
        };
        let length = size_of::<StorageInfo>() + stored.relative_path.len();
        budget.charge(value, MEMORY, length as u64)?;
        // From here on, the end of an item can be computed without care.
        if stored.offset.checked_add(stored.length).is_none() {
            return Err(p.invalid(value, "an item ends beyond any file"));
        }
        storage.insert((read_fqn(p, index.get("fqn")?)?, offsets), stored);
    }
    Ok(storage)
}

/// Reads the entry of a tensor, whose chunks get their places.
fn read_tensor<'a>(
    p: &Pickle<'a>,
    budget: &mut Walk<'_, '_>,
    id: NodeId,
    fqn: &'a str,
    storage: &mut StorageData<'a>,
) -> Result<TensorEntry> {
    let fields = p.state(
        id,
        Global::TensorStorageMetadata,
        "a TensorStorageMetadata or BytesStorageMetadata",
    )?;
    let shape = p.sizes(fields.get("size")?)?;
    // From here on, products of sizes cannot overflow.
    if !is_sane_shape(&shape) {
        return Err(p.invalid(id, "a tensor has too many elements"));
    }
    let chunks = p.sequence(fields.get("chunks")?)?.iter().map(|&id| {
        let chunk = p.state(id, Global::ChunkStorageMetadata, "a ChunkStorageMetadata")?;
        let offsets = p.sizes(chunk.get("offsets")?)?;
        let sizes = p.sizes(chunk.get("sizes")?)?;
        if offsets.len() != sizes.len() {
            return Err(p.invalid(id, "a chunk's offsets and sizes differ in number"));
        }
        let key = (fqn, Some(offsets));
        // Copied, not taken: an empty chunk may share its offsets with another one.
        let stored = storage.get(&key).cloned();
        let path = stored
            .as_ref()
            .map_or(0, |stored| stored.relative_path.len());
        budget.charge(
            id,
            MEMORY,
            (size_of::<Chunk>() + path + sizes.len() * 2 * size_of::<usize>()) as u64,
        )?;
        Ok(Chunk {
            bounds: TensorBox::new(key.1.expect("the key was made with offsets"), sizes),
            stored,
        })
    });
    let chunks = chunks.collect::<Result<_>>()?;
    Ok(TensorEntry {
        properties: read_properties(p, fields.get("properties")?)?,
        shape,
        chunks,
    })
}

/// Reads torch's `TensorProperties`.
fn read_properties(p: &Pickle<'_>, id: NodeId) -> Result<TensorProperties> {
    let wrong = || p.wrong(id, "TensorProperties with a state of 5 or 6 values");
    let Node::Object(object) = p.node(id) else {
        return Err(wrong());
    };
    if object.global != Global::TensorProperties {
        return Err(wrong());
    }
    let state = p.sequence(object.state.ok_or_else(wrong)?)?;
    // torch before 2.6 noted no strides.
    let (dtype, requires_grad, memory_format, pin_memory, strides) = match *state {
        [dtype, _layout, grad, format, pin] => (dtype, grad, format, pin, None),
        [dtype, _layout, grad, format, pin, strides] => (dtype, grad, format, pin, Some(strides)),
        _ => return Err(wrong()),
    };
    let Node::Global(Global::DType(dtype)) = *p.node(dtype) else {
        return Err(p.wrong(dtype, "a dtype"));
    };
    let strides = strides
        .filter(|&id| *p.node(id) != Node::None)
        .map(|id| p.sizes(id))
        .transpose()?;
    Ok(TensorProperties {
        dtype,
        requires_grad: p.bool(requires_grad)?,
        memory_format: read_memory_format(p, memory_format)?,
        pin_memory: p.bool(pin_memory)?,
        strides,
    })
}

/// Reads a memory format.
fn read_memory_format(p: &Pickle<'_>, id: NodeId) -> Result<MemoryFormat> {
    let object = p.object(id)?;
    if let (Global::MemFormatEncoding, [value]) = (object.global, p.args(object)) {
        match p.int(*value)? {
            0 => return Ok(MemoryFormat::Contiguous),
            1 => return Ok(MemoryFormat::ChannelsLast),
            2 => return Ok(MemoryFormat::Preserve),
            _ => {}
        }
    }
    Err(p.invalid(id, "unknown memory format"))
}

/// Reads the paths of flat keys in the nested state dict.
fn read_planner_data(
    p: &Pickle<'_>,
    budget: &mut Walk<'_, '_>,
    id: NodeId,
) -> Result<IndexMap<String, KeyPath>> {
    let mut paths = IndexMap::new();
    for &(key, path) in p.dict(id)? {
        let fqn = read_fqn(p, key)?;
        budget.charge(key, MEMORY, fqn.len() as u64)?;
        let mut parts = Vec::new();
        for &part in p.sequence(path)? {
            let text = match p.node(part) {
                Node::Str(text) => text.len(),
                _ => 0,
            };
            budget.charge(part, MEMORY, (text + size_of::<PathPart>()) as u64)?;
            parts.push(match p.node(part) {
                Node::Int(_) => PathPart::Index(p.usize(part)?),
                _ => PathPart::Key(p.str(part)?.to_owned()),
            });
        }
        paths.insert(fqn.to_owned(), KeyPath(parts));
    }
    Ok(paths)
}

/// Reads torch's `StorageMeta`. Its `checkpoint_id` may be a text or a `pathlib.Path`.
fn read_storage_meta(p: &Pickle<'_>, id: NodeId) -> Result<StorageMeta> {
    let fields = p.state(id, Global::StorageMeta, "a StorageMeta")?;
    let path = fields
        .find_some("checkpoint_id")
        .and_then(|id| p.object(id).ok())
        .filter(|object| matches!(object.global, Global::Path(_)));
    let checkpoint_id = match path {
        Some(path) => {
            let parts = p.args(path).iter().map(|&part| p.str(part));
            let parts = parts.collect::<Result<Vec<_>>>()?;
            Some(parts.join("/").replacen("//", "/", 1))
        }
        None => read_text(p, &fields, "checkpoint_id")?,
    };
    Ok(StorageMeta {
        checkpoint_id,
        save_id: read_text(p, &fields, "save_id")?,
        load_id: read_text(p, &fields, "load_id")?,
    })
}
