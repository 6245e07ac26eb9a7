//! `metadata.pkl` of `torch_checkpointing`: the items with tensors that may be cut anew, their
//! files, and the places of their tensors. The other items are in no file but their own.
//!
//! ```text
//! 2.0   {metadata: {ITEM: {nested_path_to_metadata: {"[KEY, …]": [GROUP, …]},
//!                          rank_to_layout_info: {RANK: LAYOUT}}},
//!        world_size, version}
//! 1.0   {metadata: {"[ITEM, KEY, …]": [GROUP, …]},
//!        rank_to_layout_info_mappings: {RANK: {ITEM: LAYOUT}}, world_size}
//! GROUP   {sharding_metadata: {type, data}, ranks}
//! LAYOUT  {file_path, serialization_format: {type}}, or None for ITEM_RANK.pt
//! ```

use std::collections::{BTreeMap, HashMap};

use fsdp_layout::{DType, Placement, PlainValue, TensorBox};

use super::names::{FileKind, RankFile};
use super::placements::{
    LocalBox, PlacedTensor, Placements, RankGroup, Sharding, check_group, misplaced,
};
use crate::budget::check_depth;
use crate::error::FormatError;
use crate::limits::MAX_RANKS;
use crate::pickle::parse;
use crate::storage::paths::check_relative;
use crate::torch::value::value_of;

/// The name of the file.
pub(super) const METADATA: &str = "metadata.pkl";

/// The most boxes of one tensor that a rank may have.
const MAX_BOXES: usize = 1024;

/// The name of the description of a tensor by a mesh and placements.
const MESH_TYPE: &str = "DTensorShardingMetadata";

/// The name of the description of a tensor by the boxes of each rank.
const BOXES_TYPE: &str = "default_tensor_v1";

/// The content of the file.
#[derive(Debug)]
pub(super) struct Described {
    /// The number of ranks.
    pub(super) world_size: usize,
    /// The items, by name.
    pub(super) items: BTreeMap<String, DescribedItem>,
}

/// One item, as the file describes it.
#[derive(Debug, Default)]
pub(super) struct DescribedItem {
    /// The file of each rank, where it does not have the usual name.
    pub(super) files: BTreeMap<usize, (String, FileKind)>,
    /// The places of its tensors.
    pub(super) placements: Placements,
}

impl Described {
    /// Returns `true` for the content of such a file, rather than of another one of this name.
    pub(super) fn is_one(bytes: &[u8]) -> bool {
        let root = parse(bytes)
            .map_err(FormatError::from)
            .and_then(|pickle| value_of(&pickle, pickle.root()));
        root.is_ok_and(|root| {
            find(&root, "metadata").is_some() && find(&root, "world_size").is_some()
        })
    }

    /// Reads the file's content.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, FormatError> {
        let pickle = parse(bytes)?;
        let root = value_of(&pickle, pickle.root())?;
        let world_size = find(&root, "world_size")
            .and_then(PlainValue::as_int)
            .and_then(|count| usize::try_from(count).ok())
            .filter(|count| (1..MAX_RANKS).contains(count))
            .ok_or_else(|| malformed("it tells no number of ranks"))?;
        let mut described = Described {
            world_size,
            items: BTreeMap::new(),
        };
        let version = match find(&root, "version") {
            Some(version) => version.as_str().unwrap_or_default(),
            None => "1.0",
        };
        match version {
            "1.0" => described.read_flat(&root)?,
            "2.0" => described.read_items(&root)?,
            version => {
                let what = format!("metadata of torch_checkpointing of version `{version}`");
                return Err(FormatError::unsupported(what));
            }
        }
        Ok(described)
    }

    /// Reads version 2.0, which has the items one by one.
    fn read_items(&mut self, root: &PlainValue) -> Result<(), FormatError> {
        for (item, notes) in dict_of(root, "metadata")? {
            let name = item_name(item)?;
            let described = self.items.entry(name.to_owned()).or_default();
            for (keys, groups) in dict_of(notes, "nested_path_to_metadata")? {
                let keys = parse_keys(keys)?;
                described.placements.add(keys, groups)?;
            }
            for (rank, layout) in dict_of(notes, "rank_to_layout_info")? {
                described.add_file(rank, layout)?;
            }
        }
        Ok(())
    }

    /// Reads version 1.0, which has the tensors of all items in one dict, and the files by rank.
    fn read_flat(&mut self, root: &PlainValue) -> Result<(), FormatError> {
        for (path, groups) in dict_of(root, "metadata")? {
            let mut keys = parse_keys(path)?;
            if keys.is_empty() {
                return Err(malformed("a path in it is empty"));
            }
            let item = keys.remove(0);
            let described = self.items.entry(item_name(&item)?.to_owned()).or_default();
            described.placements.add(keys, groups)?;
        }
        for (rank, layouts) in dict_of(root, "rank_to_layout_info_mappings")? {
            let PlainValue::Dict(layouts) = layouts else {
                return Err(malformed("the files of a rank are no dict"));
            };
            for (item, layout) in layouts {
                let described = self.items.entry(item_name(item)?.to_owned()).or_default();
                described.add_file(rank, layout)?;
            }
        }
        Ok(())
    }

    /// Finds the file at this path, and the places of its tensors; `None` if it is no rank's file
    /// of any item.
    pub(super) fn find_file(&self, path: &str) -> Option<(RankFile, &Placements)> {
        let mut listed = self.items.iter().flat_map(|(name, item)| {
            let mut files = item.files.iter();
            let found = files.find(|(_, (listed_path, _))| listed_path == path);
            found.map(|(rank, _)| (name.as_str(), *rank))
        });
        let (name, rank) = listed.next().or_else(|| {
            let (name, rank) = path.strip_suffix(".pt")?.rsplit_once('_')?;
            Some((name, rank.parse().ok()?))
        })?;
        let item = self.items.get(name)?;
        // A number may be written in other ways than in names.
        let (file_path, kind) = item.file_of(name, rank);
        (rank < self.world_size && file_path == path)
            .then(|| (RankFile::listed(path, name, rank, kind), &item.placements))
    }
}

impl DescribedItem {
    /// Returns the path and the format of the file that a rank has of this item.
    pub(super) fn file_of(&self, name: &str, rank: usize) -> (String, FileKind) {
        self.files
            .get(&rank)
            .cloned()
            .unwrap_or_else(|| (format!("{name}_{rank}.pt"), FileKind::Torch))
    }

    /// Adds the file of a rank. A path that leads out of the checkpoint is an error, and so is a
    /// format that is not known.
    fn add_file(&mut self, rank: &PlainValue, layout: &PlainValue) -> Result<(), FormatError> {
        if *layout == PlainValue::None {
            return Ok(());
        }
        // JSON makes texts of the ranks, and a version may have written them so.
        let rank = match rank {
            PlainValue::Str(text) => text.parse().ok(),
            rank => rank.as_int().and_then(|rank| usize::try_from(rank).ok()),
        }
        .filter(|rank| *rank < MAX_RANKS)
        .ok_or_else(|| malformed("the rank of a file is no number of a rank"))?;
        let path = find(layout, "file_path")
            .and_then(PlainValue::as_str)
            .ok_or_else(|| malformed("a file in it has no path"))?;
        check_relative(path).map_err(|reason| malformed(format!("the path `{path}`: {reason}")))?;
        let format = find(layout, "serialization_format")
            .and_then(|format| find(format, "type"))
            .and_then(PlainValue::as_str)
            .ok_or_else(|| malformed(format!("the file `{path}` has no format")))?;
        let kind = match format {
            "TorchSerialization" => FileKind::Torch,
            "SafetensorsSerialization" => FileKind::Safetensors,
            "JsonSerialization" => FileKind::Json,
            "RawSerialization" => FileKind::Raw,
            format => {
                let what = format!("the file `{path}` in the format `{format}`");
                return Err(FormatError::unsupported(what));
            }
        };
        self.files.insert(rank, (path.to_owned(), kind));
        Ok(())
    }
}

impl Placements {
    /// Adds what is told of the tensor with these keys. A resharder of a user's own may describe it
    /// in a way that is not known. Then only its keys are.
    fn add(&mut self, keys: Vec<PlainValue>, groups: &PlainValue) -> Result<(), FormatError> {
        let texts: Vec<String> = keys.iter().filter_map(PlainValue::key_text).collect();
        let key = texts.join(".");
        let mut tensor = PlacedTensor {
            keys,
            groups: Vec::new(),
            group_of_rank: HashMap::new(),
        };
        for group in items_of(groups)? {
            match read_group(group).map_err(|error| error.of_key(&key))? {
                Some(group) => tensor.groups.push(group),
                None => {
                    tensor.groups.clear();
                    break;
                }
            }
        }
        if tensor.groups.len() > 1 {
            for (index, group) in tensor.groups.iter().enumerate() {
                let ranks = group.ranks.iter().map(|rank| (*rank, index));
                tensor.group_of_rank.extend(ranks);
            }
        }
        self.0.insert(key, tensor);
        Ok(())
    }
}

/// Reads how some ranks hold a tensor; `None` if that is described in a way that is not known.
fn read_group(group: &PlainValue) -> Result<Option<RankGroup>, FormatError> {
    let packed = required(group, "sharding_metadata")?;
    let data = required(packed, "data")?;
    let kind = required(packed, "type")?.as_str();
    if !kind.is_some_and(|kind| [MESH_TYPE, BOXES_TYPE].contains(&kind)) {
        return Ok(None);
    }
    let mut ranks = numbers_of(required(group, "ranks")?)?;
    ranks.sort_unstable();
    let shape = numbers_of(required(data, "global_shape")?)?;
    let dtype = required(data, "dtype")?.as_str().unwrap_or_default();
    let dtype = DType::from_torch_name(dtype.trim_start_matches("torch."))
        .ok_or_else(|| FormatError::unsupported(format!("the dtype `{dtype}`")))?;
    let sharding = if kind == Some(MESH_TYPE) {
        read_mesh(data)?
    } else {
        Sharding::Boxes(read_boxes(data)?)
    };
    let group = RankGroup {
        ranks,
        shape,
        dtype,
        sharding,
    };
    check_group(&group)?;
    Ok(Some(group))
}

/// Reads the mesh and the placements of a DTensor.
fn read_mesh(data: &PlainValue) -> Result<Sharding, FormatError> {
    let mesh = required(data, "mesh_spec")?;
    let mut placements = Vec::new();
    for placement in items_of(required(data, "placements")?)? {
        placements.push(read_placement(placement)?);
    }
    Ok(Sharding::Mesh {
        placements,
        mesh_shape: numbers_of(required(mesh, "mesh_shape")?)?,
        mesh_ranks: numbers_of(required(mesh, "mesh_data")?)?,
    })
}

/// Reads one placement.
fn read_placement(placement: &PlainValue) -> Result<Placement, FormatError> {
    Ok(match required(placement, "type")?.as_str() {
        Some("Shard") => Placement::Shard(number_of(required(placement, "dim")?)?),
        Some("StridedShard") => Placement::StridedShard {
            dim: number_of(required(placement, "dim")?)?,
            split_factor: number_of(required(placement, "split_factor")?)?,
        },
        Some("Replicate") => Placement::Replicate,
        name => {
            let what = format!("the placement `{}`", name.unwrap_or("no text"));
            return Err(FormatError::unsupported(what));
        }
    })
}

/// Reads the boxes of a tensor that a rank holds.
fn read_boxes(data: &PlainValue) -> Result<Vec<LocalBox>, FormatError> {
    let offsets = items_of(required(data, "global_offsets")?)?;
    let local_offsets = items_of(required(data, "local_offsets")?)?;
    let sizes = items_of(required(data, "local_sizes")?)?;
    if offsets.len() != sizes.len() || local_offsets.len() != sizes.len() {
        return Err(misplaced("its boxes do not have as many places as sizes"));
    }
    if sizes.len() > MAX_BOXES {
        let what = format!("a tensor of which one rank has more than {MAX_BOXES} boxes");
        return Err(FormatError::unsupported(what));
    }
    let mut boxes = Vec::with_capacity(sizes.len());
    for ((offsets, local_offsets), sizes) in offsets.iter().zip(local_offsets).zip(sizes) {
        boxes.push(LocalBox {
            bounds: TensorBox {
                offsets: numbers_of(offsets)?,
                sizes: numbers_of(sizes)?,
            },
            local_offsets: numbers_of(local_offsets)?,
        });
    }
    Ok(boxes)
}

/// Returns the keys of a path, which is a text of JSON: a list of texts and numbers.
fn parse_keys(path: &PlainValue) -> Result<Vec<PlainValue>, FormatError> {
    let text = path
        .as_str()
        .ok_or_else(|| malformed("a path in it is no text"))?;
    let keys: Vec<serde_json::Value> = serde_json::from_str(text)
        .map_err(|error| malformed(format!("the path `{text}`: {error}")))?;
    check_depth(keys.len())?;
    keys.into_iter()
        .map(|key| match key {
            serde_json::Value::String(key) => Ok(key.into()),
            serde_json::Value::Bool(key) => Ok(key.into()),
            key => key
                .as_i64()
                .map(PlainValue::from)
                .ok_or_else(|| malformed(format!("the path `{text}` has a key that is none"))),
        })
        .collect()
}

/// Returns the name of an item. One that is no part of a file's name is an error.
fn item_name(item: &PlainValue) -> Result<&str, FormatError> {
    item.as_str()
        .filter(|name| !name.is_empty() && !name.contains('/'))
        .ok_or_else(|| malformed("the name of an item is none"))
}

/// Makes the error of a file that is not what it should be.
fn malformed(reason: impl ToString) -> FormatError {
    FormatError::malformed("metadata of torch_checkpointing", reason)
}

/// Returns the value of a key of a dict; `None` if it has none, or `value` is no dict.
fn find<'v>(value: &'v PlainValue, key: &str) -> Option<&'v PlainValue> {
    let PlainValue::Dict(entries) = value else {
        return None;
    };
    entries
        .iter()
        .find(|(name, _)| name.as_str() == Some(key))
        .map(|(_, value)| value)
}

/// Returns the value of a key that must be there.
fn required<'v>(value: &'v PlainValue, key: &str) -> Result<&'v PlainValue, FormatError> {
    find(value, key).ok_or_else(|| malformed(format!("`{key}` is missing")))
}

/// Returns the entries of the dict at a key.
fn dict_of<'v>(
    value: &'v PlainValue,
    key: &str,
) -> Result<&'v [(PlainValue, PlainValue)], FormatError> {
    match required(value, key)? {
        PlainValue::Dict(entries) => Ok(entries),
        _ => Err(malformed(format!("`{key}` is no dict"))),
    }
}

/// Returns the items of a list or tuple.
fn items_of(value: &PlainValue) -> Result<&[PlainValue], FormatError> {
    match value.untyped() {
        PlainValue::List(items) | PlainValue::Tuple(items) => Ok(items),
        _ => Err(malformed("a list is expected where there is none")),
    }
}

/// Returns the number that a value is. A negative one is an error.
fn number_of(value: &PlainValue) -> Result<usize, FormatError> {
    value
        .as_int()
        .and_then(|number| usize::try_from(number).ok())
        .ok_or_else(|| malformed("a number is expected where there is none"))
}

/// Returns the numbers in a list or tuple.
fn numbers_of(value: &PlainValue) -> Result<Vec<usize>, FormatError> {
    items_of(value)?.iter().map(number_of).collect()
}
