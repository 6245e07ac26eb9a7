//! Reads torch's `Metadata` pickle.

use std::collections::HashMap;

use fsdp_layout::{KeyPath, PathPart, TensorBox};
use indexmap::IndexMap;

use super::{
    BytesEntry, Chunk, Entry, MemoryFormat, Metadata, StorageInfo, StorageMeta, TensorEntry,
    TensorProperties,
};
use crate::budget::check_depth;
use crate::limits::{MAX_KEY_BYTES, is_sane_shape};
use crate::pickle::{Fields, Global, Node, NodeId, Pickle, PickleError, Walk, parse};

/// The name of what is charged, for errors.
const MEMORY: &str = "memory for metadata";

type Result<T> = std::result::Result<T, PickleError>;

/// Decodes a `.metadata` file (or a rank's `__{rank}.metadata`), of any torch that wrote this
/// format.
pub fn decode(bytes: &[u8]) -> Result<Metadata> {
    let parsed = parse(bytes)?;
    let pickle = &parsed;
    let budget = &mut Walk::new(pickle);
    let fields = pickle.state(
        pickle.root(),
        Global::Metadata,
        "torch.distributed.checkpoint's Metadata",
    )?;
    // The places come first, so that each chunk can take its own.
    let places = fields.find_some("storage_data");
    let mut storage_data = read_storage_data(pickle, budget, places)?;

    let mut entries = IndexMap::new();
    for &(key, value) in pickle.dict(fields.get("state_dict_metadata")?)? {
        let fqn = read_fqn(pickle, key)?;
        budget.charge(key, MEMORY, (fqn.len() + size_of::<Entry>()) as u64)?;
        let entry = if pickle.is_object(value, Global::BytesStorageMetadata) {
            Entry::Bytes(BytesEntry {
                stored: storage_data.remove(&(fqn, None)),
            })
        } else {
            Entry::Tensor(read_tensor(pickle, budget, value, fqn, &mut storage_data)?)
        };
        if entries.insert(fqn.to_owned(), entry).is_some() {
            return Err(pickle.invalid_error(key, "the same key stands twice in the metadata"));
        }
    }
    // Readers take the keys of entries. They would pass over bytes that are stored for another key.
    let stored_keys = storage_data.keys().map(|(fqn, _)| *fqn);
    let unlisted_keys = stored_keys.filter(|fqn| !entries.contains_key(*fqn));
    if let Some(fqn) = unlisted_keys.min() {
        let what = format!("it has a place for `{fqn}`, which is not among its tensors and values");
        return Err(pickle.invalid_error(places.unwrap_or(pickle.root()), what));
    }
    Ok(Metadata {
        entries,
        planner_data: fields
            .find_some("planner_data")
            .map(|id| read_planner_data(pickle, budget, id))
            .transpose()?,
        storage_meta: fields
            .find_some("storage_meta")
            .map(|id| read_storage_meta(pickle, budget, id))
            .transpose()?,
        version: read_text(pickle, &fields, "version")?,
        replicas: Vec::new(),
    })
}

/// Reads an attribute that is a text; `None` if there is none.
fn read_text(
    pickle: &Pickle<'_>,
    fields: &Fields<'_, '_>,
    field: &'static str,
) -> Result<Option<String>> {
    let id = fields.find_some(field);
    id.map(|id| pickle.str(id).map(str::to_owned)).transpose()
}

/// Reads a flat key.
fn read_fqn<'a>(pickle: &Pickle<'a>, id: NodeId) -> Result<&'a str> {
    let fqn = pickle.str(id)?;
    pickle.check_limit(id, "key length", fqn.len(), MAX_KEY_BYTES)?;
    Ok(fqn)
}

/// The places of items, by key and, for a chunk, its offsets.
type StorageData<'a> = HashMap<(&'a str, Option<Vec<usize>>), StorageInfo>;

/// Reads the places of all items, by key and offsets; none if there are none.
fn read_storage_data<'a>(
    pickle: &Pickle<'a>,
    budget: &mut Walk<'_, '_>,
    id: Option<NodeId>,
) -> Result<StorageData<'a>> {
    let Some(id) = id else {
        return Ok(HashMap::new());
    };
    let entries = pickle.dict(id)?;
    let mut storage_data = HashMap::with_capacity(entries.len());
    for &(key, value) in entries {
        let index_fields = pickle.state(key, Global::MetadataIndex, "a MetadataIndex")?;
        let offsets = index_fields
            .find_some("offset")
            .map(|id| pickle.sizes(id))
            .transpose()?;
        let info_fields = pickle.state(value, Global::StorageInfo, "a _StorageInfo")?;
        let mut transforms = Vec::new();
        if let Some(id) = info_fields.find_some("transform_descriptors") {
            for &transform in pickle.sequence(id)? {
                let text = pickle.str(transform)?;
                budget.charge(transform, MEMORY, (text.len() + size_of::<String>()) as u64)?;
                transforms.push(text.to_owned());
            }
        }
        let storage_info = StorageInfo {
            relative_path: pickle.str(info_fields.get("relative_path")?)?.to_owned(),
            offset: pickle.unsigned(info_fields.get("offset")?)?,
            length: pickle.unsigned(info_fields.get("length")?)?,
            transforms,
        };
        let info_bytes = size_of::<StorageInfo>() + storage_info.relative_path.len();
        budget.charge(value, MEMORY, info_bytes as u64)?;
        // From here on, the end of an item can be computed without care.
        if storage_info
            .offset
            .checked_add(storage_info.length)
            .is_none()
        {
            return Err(pickle.invalid_error(value, "an item ends beyond any file"));
        }
        storage_data.insert(
            (read_fqn(pickle, index_fields.get("fqn")?)?, offsets),
            storage_info,
        );
    }
    Ok(storage_data)
}

/// Reads the entry of a tensor, whose chunks get their places from `storage_data`. A shape that no
/// tensor can have is an error.
fn read_tensor<'a>(
    pickle: &Pickle<'a>,
    budget: &mut Walk<'_, '_>,
    id: NodeId,
    fqn: &'a str,
    storage_data: &mut StorageData<'a>,
) -> Result<TensorEntry> {
    let fields = pickle.state(
        id,
        Global::TensorStorageMetadata,
        "a TensorStorageMetadata or BytesStorageMetadata",
    )?;
    let shape = pickle.sizes(fields.get("size")?)?;
    // From here on, products of sizes cannot overflow.
    if !is_sane_shape(&shape) {
        return Err(pickle.invalid_error(id, "a tensor has too many elements"));
    }
    let chunks = pickle.sequence(fields.get("chunks")?)?.iter().map(|&id| {
        let chunk = pickle.state(id, Global::ChunkStorageMetadata, "a ChunkStorageMetadata")?;
        let offsets = pickle.sizes(chunk.get("offsets")?)?;
        let sizes = pickle.sizes(chunk.get("sizes")?)?;
        if offsets.len() != sizes.len() {
            return Err(pickle.invalid_error(id, "a chunk's offsets and sizes differ in number"));
        }
        let key = (fqn, Some(offsets));
        // Copied, not taken: an empty chunk may share its offsets with another one.
        let stored = storage_data.get(&key).cloned();
        let path_bytes = stored
            .as_ref()
            .map_or(0, |stored| stored.relative_path.len());
        budget.charge(
            id,
            MEMORY,
            (size_of::<Chunk>() + path_bytes + sizes.len() * 2 * size_of::<usize>()) as u64,
        )?;
        Ok(Chunk {
            bounds: TensorBox::new(key.1.expect("the key was made with offsets"), sizes),
            stored,
        })
    });
    let chunks = chunks.collect::<Result<_>>()?;
    Ok(TensorEntry {
        properties: read_properties(pickle, fields.get("properties")?)?,
        shape,
        chunks,
    })
}

/// Reads torch's `TensorProperties`.
fn read_properties(pickle: &Pickle<'_>, id: NodeId) -> Result<TensorProperties> {
    let expected_error =
        || pickle.expected_error(id, "TensorProperties with a state of 5 or 6 values");
    let Node::Object(object) = pickle.node(id) else {
        return Err(expected_error());
    };
    if object.global != Global::TensorProperties {
        return Err(expected_error());
    }
    let state = pickle.sequence(object.state.ok_or_else(expected_error)?)?;
    // Newer versions of torch add the strides of the saved object, which no loader uses.
    let (&[dtype, _layout, requires_grad, memory_format, pin_memory]
    | &[dtype, _layout, requires_grad, memory_format, pin_memory, _]) = state
    else {
        return Err(expected_error());
    };
    let Node::Global(Global::DType(dtype)) = *pickle.node(dtype) else {
        return Err(pickle.expected_error(dtype, "a dtype"));
    };
    Ok(TensorProperties {
        dtype,
        requires_grad: pickle.bool(requires_grad)?,
        memory_format: read_memory_format(pickle, memory_format)?,
        pin_memory: pickle.bool(pin_memory)?,
    })
}

/// Reads a memory format. One that torch does not have is an error.
fn read_memory_format(pickle: &Pickle<'_>, id: NodeId) -> Result<MemoryFormat> {
    let object = pickle.object(id)?;
    if let (Global::MemFormatEncoding, [code]) = (object.global, pickle.args(object)) {
        match pickle.int(*code)? {
            0 => return Ok(MemoryFormat::Contiguous),
            1 => return Ok(MemoryFormat::ChannelsLast),
            2 => return Ok(MemoryFormat::Preserve),
            _ => {}
        }
    }
    Err(pickle.invalid_error(id, "unknown memory format"))
}

/// Reads the paths of flat keys in the nested state dict.
fn read_planner_data(
    pickle: &Pickle<'_>,
    budget: &mut Walk<'_, '_>,
    id: NodeId,
) -> Result<IndexMap<String, KeyPath>> {
    let mut paths = IndexMap::new();
    for &(key, path) in pickle.dict(id)? {
        let fqn = read_fqn(pickle, key)?;
        budget.charge(key, MEMORY, fqn.len() as u64)?;
        let path_parts = pickle.sequence(path)?;
        check_depth(path_parts.len()).map_err(|over| pickle.error(path, over.into()))?;
        let mut parts = Vec::new();
        for &part in path_parts {
            let text_bytes = match pickle.node(part) {
                Node::Str(text) => text.len(),
                _ => 0,
            };
            budget.charge(part, MEMORY, (text_bytes + size_of::<PathPart>()) as u64)?;
            parts.push(match pickle.node(part) {
                Node::Int(_) => PathPart::Index(pickle.usize(part)?),
                _ => PathPart::Key(pickle.str(part)?.to_owned()),
            });
        }
        paths.insert(fqn.to_owned(), KeyPath(parts));
    }
    Ok(paths)
}

/// Reads torch's `StorageMeta`. Its `checkpoint_id` may be a text or a `pathlib.Path`.
fn read_storage_meta(
    pickle: &Pickle<'_>,
    budget: &mut Walk<'_, '_>,
    id: NodeId,
) -> Result<StorageMeta> {
    let fields = pickle.state(id, Global::StorageMeta, "a StorageMeta")?;
    let path = fields
        .find_some("checkpoint_id")
        .and_then(|id| pickle.object(id).ok())
        .filter(|object| matches!(object.global, Global::Path(_)));
    let checkpoint_id = match path {
        Some(path) => Some(budget.path_text(path)?),
        None => read_text(pickle, &fields, "checkpoint_id")?,
    };
    Ok(StorageMeta {
        checkpoint_id,
        save_id: read_text(pickle, &fields, "save_id")?,
        load_id: read_text(pickle, &fields, "load_id")?,
    })
}
