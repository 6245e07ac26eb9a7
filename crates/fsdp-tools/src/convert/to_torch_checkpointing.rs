//! Writing a directory of `torch_checkpointing`: for each item and rank a file of `torch.save`,
//! with the rank's rows of the tensors and all values, and `metadata.pkl`, which tells how the
//! tensors are cut. The library reads it on any number of ranks, through a resharder.

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Change, Checkpoint, Structure};
use fsdp_formats::internals::{Integrity, ROOT, pickle_write, write_value};
use fsdp_formats::metadata::TensorEntry;
use fsdp_layout::PlainValue;
use fsdp_layout::boxes::row_major_strides;

use super::copied::{commit_with_hashes, write_hashed};
use super::output::{Conversion, encode_error, unsupported};
use super::to_safetensors::{Sums, digests_of};
use super::to_torch::{Archive, check_unchanged, read_content};

/// The name of the file that describes the tensors.
const METADATA: &str = "metadata.pkl";

/// The item that holds all of a checkpoint that is one state dict.
const ONLY_ITEM: &str = "model";

/// The most numbers of ranks in `metadata.pkl`, which has all ranks for each tensor.
const MAX_LISTED_RANKS: usize = 1 << 24;

/// An item to be written.
struct Item<'s> {
    name: &'s str,
    structure: &'s Structure,
    /// The states of the ranks, if the item is another one on each; else none.
    by_rank: Vec<&'s Structure>,
}

/// Writes all of a checkpoint for so many ranks. Files of `torch.save` hold any value, so no file
/// has to hold values beside them, and `None` is returned.
pub(super) fn write(
    conversion: Conversion<'_>,
    ranks: usize,
    changes: &mut Vec<Change>,
) -> Result<Option<String>, FileError> {
    let source = conversion.source;
    let (structure, values) = read_content(source, changes)?;
    let items = split_into_items(source, &structure, ranks);
    let metadata = encode_metadata(source, &items, ranks)?;
    conversion.staging.claim()?;
    let mut integrity = Integrity {
        files: conversion.copied_files.copy_to(&conversion.staging)?,
        ..Integrity::default()
    };
    let mut sums = Sums::new();
    for item in &items {
        for rank in 0..ranks {
            let archive = Archive {
                root: ROOT,
                structure: item.by_rank.get(rank).unwrap_or(&item.structure),
                values: &values,
                rank: if item.by_rank.is_empty() { rank } else { 0 },
                ranks: if item.by_rank.is_empty() { ranks } else { 1 },
            };
            let name = format!("{}_{rank}.pt", item.name);
            let hashes = archive.write(&conversion, Some(&name), Some(&mut sums))?;
            integrity.files.insert(name, hashes);
        }
    }
    let digests = digests_of(source, &values, &sums);
    let staging = conversion.staging;
    source.check_elements_read()?;
    check_unchanged(source, staging.target(), &digests)?;
    // Where the states of ranks are in files of their own, a reader may find that they are the
    // same, and give them other keys than these digests have. Tensors in values get keys, too.
    if items.iter().all(|item| item.by_rank.is_empty()) && !values.values().any(gets_keys) {
        integrity.digests = Some(match &items[..] {
            [item] if std::ptr::eq(item.structure, &structure) => digests
                .iter()
                .map(|(fqn, digest)| (format!("{ONLY_ITEM}.{fqn}"), digest))
                .collect(),
            _ => digests,
        });
    }
    let hashes = write_hashed(&staging, METADATA, &metadata)?;
    integrity.files.insert(METADATA.to_owned(), hashes);
    commit_with_hashes(staging, &integrity)?;
    Ok(None)
}

/// Returns `true` for a value of whose parts a reader of these files makes tensors with keys.
fn gets_keys(value: &PlainValue) -> bool {
    match value {
        PlainValue::Tensor(_) => true,
        PlainValue::List(items) => items.iter().any(gets_keys),
        PlainValue::Dict(items) => items.iter().any(|(_, item)| gets_keys(item)),
        _ => false,
    }
}

/// Returns the items: the entries of the outermost dict, if their keys can be names of items, and
/// no tensor is among them. Any other checkpoint is one item.
fn split_into_items<'s>(
    source: &dyn Checkpoint,
    structure: &'s Structure,
    ranks: usize,
) -> Vec<Item<'s>> {
    if let Structure::Dict(entries) = structure
        && has_items(source, structure)
    {
        return entries
            .iter()
            .filter_map(|(key, structure)| {
                Some(Item {
                    name: key.as_str()?,
                    structure,
                    by_rank: states_of_ranks(source, structure, ranks).unwrap_or_default(),
                })
            })
            .collect();
    }
    vec![Item {
        name: ONLY_ITEM,
        structure,
        by_rank: Vec::new(),
    }]
}

/// Returns `true` if the entries of the outermost dict can be items.
pub(super) fn has_items(source: &dyn Checkpoint, structure: &Structure) -> bool {
    let Structure::Dict(entries) = structure else {
        return false;
    };
    let mut entries = entries.iter();
    entries.len() > 0 && entries.all(|(key, entry)| is_item_name(key) && !is_tensor(source, entry))
}

/// Returns `true` for a key that the library takes as the name of an item.
fn is_item_name(key: &PlainValue) -> bool {
    key.as_str().is_some_and(|name| {
        let mut characters = name.chars();
        !name.is_empty()
            && characters.all(|character| {
                character.is_ascii_alphanumeric() || matches!(character, '_' | '-')
            })
    })
}

/// Returns `true` for a leaf that is a tensor.
fn is_tensor(source: &dyn Checkpoint, structure: &Structure) -> bool {
    matches!(structure, Structure::Leaf(fqn) if source.metadata().tensor(fqn).is_some())
}

/// Returns the states of all ranks, if an item has them as `rank_0`, `rank_1` and so on; else
/// `None`.
fn states_of_ranks<'s>(
    source: &dyn Checkpoint,
    structure: &'s Structure,
    ranks: usize,
) -> Option<Vec<&'s Structure>> {
    let Structure::Dict(entries) = structure else {
        return None;
    };
    if entries.len() != ranks || ranks < 2 {
        return None;
    }
    let mut states = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        let name = format!("rank_{rank}");
        let (_, state) = entries
            .iter()
            .find(|(key, _)| key.as_str() == Some(&name))?;
        states.push(state);
    }
    // The tensors of one rank have no place in a description of those of all.
    let has_tensors = structure
        .leaves()
        .iter()
        .any(|fqn| source.metadata().tensor(fqn).is_some());
    (!has_tensors).then_some(states)
}

/// Encodes `metadata.pkl`. Ranks and tensors that would make it too large are an error.
fn encode_metadata(
    source: &dyn Checkpoint,
    items: &[Item<'_>],
    ranks: usize,
) -> Result<Vec<u8>, FileError> {
    let tensor_count = source.metadata().tensors().count();
    if tensor_count.saturating_mul(ranks) > MAX_LISTED_RANKS {
        let what = format!("{tensor_count} tensors for {ranks} ranks in `{METADATA}`");
        return Err(unsupported("", what));
    }
    let mut described = Vec::new();
    for item in items {
        let mut tensors = Vec::new();
        if item.by_rank.is_empty() {
            let mut path = Vec::new();
            visit_tensors(source, item.structure, &mut path, &mut |path, tensor| {
                let path = serde_json::Value::Array(path.to_vec()).to_string();
                tensors.push((path.into(), describe_tensor(tensor, ranks)));
            });
        }
        // The library lists the items with tensors only.
        if !tensors.is_empty() {
            let files = (0..ranks).map(|rank| (number(rank), PlainValue::None));
            let notes = dict([
                ("nested_path_to_metadata", PlainValue::Dict(tensors)),
                ("rank_to_layout_info", PlainValue::Dict(files.collect())),
            ]);
            described.push((item.name.into(), notes));
        }
    }
    let metadata = dict([
        ("metadata", PlainValue::Dict(described)),
        ("world_size", number(ranks)),
        ("version", "2.0".into()),
    ]);
    let mut bytes = Vec::new();
    pickle_write::proto(&mut bytes, 2);
    write_value(&mut bytes, &metadata, &mut Vec::new(), 0, 0)
        .map_err(|source| encode_error(METADATA, source))?;
    bytes.push(pickle_write::STOP);
    Ok(bytes)
}

/// Calls `visit` with each tensor in a structure, and the path of keys and positions to it.
fn visit_tensors(
    source: &dyn Checkpoint,
    structure: &Structure,
    path: &mut Vec<serde_json::Value>,
    visit: &mut dyn FnMut(&[serde_json::Value], &TensorEntry),
) {
    match structure {
        Structure::Leaf(fqn) => {
            if let Some(tensor) = source.metadata().tensor(fqn) {
                visit(path, tensor);
            }
        }
        Structure::Module(..) => visit_module(source, structure, "", path, visit),
        Structure::Dict(entries) => {
            for (key, entry) in entries {
                path.push(match key {
                    PlainValue::Int(number) => (*number).into(),
                    key => key.key_text().unwrap_or_default().into(),
                });
                visit_tensors(source, entry, path, visit);
                path.pop();
            }
        }
        Structure::List(entries) | Structure::Tuple(entries) => {
            for (index, entry) in entries.iter().enumerate() {
                path.push(index.into());
                visit_tensors(source, entry, path, visit);
                path.pop();
            }
        }
    }
}

/// Calls `visit` with each tensor in a module: each is at one key of its state dict, which is the
/// path below the module.
fn visit_module(
    source: &dyn Checkpoint,
    structure: &Structure,
    prefix: &str,
    path: &mut Vec<serde_json::Value>,
    visit: &mut dyn FnMut(&[serde_json::Value], &TensorEntry),
) {
    let Structure::Module(_, entries) = structure else {
        path.push(prefix.strip_suffix('.').unwrap_or(prefix).into());
        visit_tensors(source, structure, path, visit);
        path.pop();
        return;
    };
    for (key, entry) in entries {
        let name = format!("{prefix}{}.", key.key_text().unwrap_or_default());
        visit_module(source, entry, &name, path, visit);
    }
}

/// Describes a tensor of which each rank has its rows. A tensor without rows, and any tensor if
/// there is one rank, is whole on each.
fn describe_tensor(tensor: &TensorEntry, ranks: usize) -> PlainValue {
    let is_cut = ranks > 1 && !tensor.shape.is_empty();
    let placement = if is_cut {
        dict([("type", "Shard".into()), ("dim", number(0))])
    } else {
        dict([("type", "Replicate".into())])
    };
    // No trainer's mesh has this name. So the library finds that its own tensors are cut in another
    // way, and reads by this description. Where both are the same, it would look for DTensors in
    // the files.
    let mesh_names = match ranks {
        1 => PlainValue::None,
        _ => PlainValue::Tuple(vec!["fsdp_convert".into()]),
    };
    let mesh = dict([
        ("device_type", "cpu".into()),
        ("mesh_shape", PlainValue::Tuple(vec![number(ranks)])),
        (
            "mesh_data",
            PlainValue::Tuple((0..ranks).map(number).collect()),
        ),
        ("mesh_dim_names", mesh_names),
    ]);
    let data = dict([
        ("global_shape", numbers(&tensor.shape)),
        ("dtype", format!("torch.{}", tensor.properties.dtype).into()),
        ("stride", numbers(&row_major_strides(&tensor.shape))),
        ("mesh_spec", mesh),
        ("placements", PlainValue::List(vec![placement])),
    ]);
    let sharding = dict([("type", "DTensorShardingMetadata".into()), ("data", data)]);
    let group = dict([
        ("sharding_metadata", sharding),
        ("ranks", PlainValue::Tuple((0..ranks).map(number).collect())),
    ]);
    PlainValue::List(vec![group])
}

/// Makes a dict with texts as keys.
fn dict<const COUNT: usize>(entries: [(&str, PlainValue); COUNT]) -> PlainValue {
    let entries = entries.into_iter();
    PlainValue::Dict(entries.map(|(key, value)| (key.into(), value)).collect())
}

fn number(number: usize) -> PlainValue {
    PlainValue::Int(i64::try_from(number).unwrap_or(i64::MAX))
}

fn numbers(numbers: &[usize]) -> PlainValue {
    PlainValue::List(numbers.iter().copied().map(number).collect())
}
