//! Writing one file of `torch.save`.

use fsdp_layout::{KeyPath, PathPart, PlainTensor, PlainValue, TensorBox};
use indexmap::IndexMap;

use super::stream::Streamed;
use super::{ConvertOptions, Converted, summary};
use crate::checkpoint::Checkpoint;
use crate::durable::Staging;
use crate::error::{CheckpointError, FormatError};
use crate::item::{check_writable, put, write_tensor};
use crate::limits::MAX_DEPTH;
use crate::metadata::{Entry, TensorEntry};
use crate::pickle::write;
use crate::torch_zip::ArchiveLayout;
use crate::writer::{PlannedPayload, write_payloads};

/// The nested state dict that the flat keys came from.
enum Tree<'a> {
    Dict(IndexMap<String, Tree<'a>>),
    /// By position; positions without a value are empty dicts, which vanished when the list was flattened.
    List(Vec<Option<Tree<'a>>>),
    Tensor(&'a str, &'a TensorEntry),
    Value(PlainValue),
}

/// Longest list that paths may describe: positions come from files.
const MAX_LIST: usize = 1 << 20;

fn unsupported(fqn: &str, what: &str) -> CheckpointError {
    CheckpointError::Encode { fqn: fqn.to_owned(), source: FormatError::Unsupported { what: what.to_owned() } }
}

impl<'a> Tree<'a> {
    fn insert(&mut self, fqn: &str, path: &[PathPart], leaf: Tree<'a>) -> Result<(), CheckpointError> {
        let Some((part, rest)) = path.split_first() else {
            return Err(unsupported(fqn, "a value where others lie below"));
        };
        let below = || match rest.first() {
            Some(PathPart::Index(_)) => Tree::List(Vec::new()),
            _ => Tree::Dict(IndexMap::new()),
        };
        let slot = match (self, part) {
            (Tree::Dict(dict), PathPart::Key(key)) => {
                if rest.is_empty() {
                    return match dict.insert(key.clone(), leaf) {
                        None => Ok(()),
                        Some(_) => Err(unsupported(fqn, "two values at one place")),
                    };
                }
                dict.entry(key.clone()).or_insert_with(below)
            }
            (Tree::List(list), PathPart::Index(index)) if *index < MAX_LIST => {
                if list.len() <= *index {
                    list.resize_with(index + 1, || None);
                }
                let slot = &mut list[*index];
                if rest.is_empty() {
                    return match slot.replace(leaf) {
                        None => Ok(()),
                        Some(_) => Err(unsupported(fqn, "two values at one place")),
                    };
                }
                slot.get_or_insert_with(below)
            }
            _ => return Err(unsupported(fqn, "a place that is a dict to one key and a list to another")),
        };
        slot.insert(fqn, rest, leaf)
    }
}

/// A storage of the file to be.
enum Storage<'a> {
    Tensor(&'a str, &'a TensorEntry),
    Inside(&'a PlainTensor),
}

fn pickle<'a>(
    out: &mut Vec<u8>,
    tree: &'a Tree<'a>,
    storages: &mut Vec<Storage<'a>>,
    depth: usize,
) -> Result<(), FormatError> {
    if depth >= MAX_DEPTH {
        return Err(FormatError::Limit { what: "nesting", value: depth as u64 + 1, limit: MAX_DEPTH as u64 });
    }
    match tree {
        Tree::Dict(dict) => {
            write::op(out, write::EMPTY_DICT);
            write::op(out, write::MARK);
            for (key, value) in dict {
                write::text(out, key);
                pickle(out, value, storages, depth + 1)?;
            }
            write::op(out, write::SETITEMS);
        }
        Tree::List(list) => {
            write::op(out, write::EMPTY_LIST);
            write::op(out, write::MARK);
            for value in list {
                match value {
                    Some(value) => pickle(out, value, storages, depth + 1)?,
                    None => write::op(out, write::EMPTY_DICT),
                }
            }
            write::op(out, write::APPENDS);
        }
        Tree::Tensor(fqn, tensor) => {
            check_writable(tensor.properties.dtype)?;
            write_tensor(out, storages.len(), tensor.properties.dtype, &tensor.shape);
            storages.push(Storage::Tensor(fqn, tensor));
        }
        Tree::Value(value) => {
            let mut inside: Vec<&PlainTensor> = Vec::new();
            put(out, value, &mut inside, storages.len(), depth)?;
            storages.extend(inside.into_iter().map(Storage::Inside));
        }
    }
    Ok(())
}

pub(super) fn write(
    source: &dyn Checkpoint,
    staging: Staging,
    options: ConvertOptions<'_>,
) -> Result<Converted, CheckpointError> {
    let metadata = source.metadata();
    let mut tree = Tree::Dict(IndexMap::new());
    for (fqn, entry) in &metadata.entries {
        let path = metadata.planner_data.as_ref().and_then(|paths| paths.get(fqn)).cloned();
        let path = path.unwrap_or_else(|| KeyPath(vec![PathPart::Key(fqn.clone())]));
        let leaf = match entry {
            Entry::Tensor(tensor) => Tree::Tensor(fqn, tensor),
            Entry::Bytes(_) => Tree::Value(source.read_value(fqn)?),
        };
        match path.0.is_empty() && metadata.entries.len() == 1 {
            // The root itself is a tensor, or one value.
            true => tree = leaf,
            false => tree.insert(fqn, &path.0, leaf)?,
        }
    }
    let encode = |source| CheckpointError::Encode { fqn: "data.pkl".to_owned(), source };
    let mut bytes = Vec::new();
    let mut storages = Vec::new();
    write::proto(&mut bytes, 2);
    pickle(&mut bytes, &tree, &mut storages, 0).map_err(encode)?;
    write::op(&mut bytes, write::STOP);

    let mut lengths = Vec::with_capacity(storages.len());
    let mut boxes = Vec::with_capacity(storages.len());
    for storage in &storages {
        let (shape, dtype, fqn) = match storage {
            Storage::Tensor(fqn, tensor) => (&tensor.shape, tensor.properties.dtype, *fqn),
            Storage::Inside(tensor) => (&tensor.shape, tensor.dtype, ""),
        };
        let numel = fsdp_layout::boxes::checked_numel(shape);
        let length = numel.and_then(|numel| (numel as u64).checked_mul(dtype.size_in_bytes()));
        lengths.push(length.ok_or_else(|| unsupported(fqn, "a tensor of absurd size"))?);
        boxes.push(TensorBox::whole(shape));
    }
    let root =
        staging.target().file_stem().and_then(|stem| stem.to_str()).unwrap_or("archive").replace(['/', '\\'], "_");
    let layout = ArchiveLayout::new(&root, bytes, &lengths);

    // Tensors inside values go by the number of their storage, which is no key of a checkpoint.
    let mut extra = IndexMap::new();
    let mut names = Vec::with_capacity(storages.len());
    for (index, storage) in storages.iter().enumerate() {
        names.push(match storage {
            Storage::Tensor(fqn, _) => (*fqn).to_owned(),
            Storage::Inside(tensor) => {
                let name = format!("\0storage {index}");
                extra.insert(name.clone(), *tensor);
                name
            }
        });
    }
    let streamed = Streamed { source, options, extra };
    let payloads: Vec<PlannedPayload<'_>> = (0..storages.len())
        .map(|index| PlannedPayload {
            fqn: &names[index],
            bounds: &boxes[index],
            offset: layout.storage_offset(index),
            length: lengths[index],
        })
        .collect();
    let file = staging.create("file", layout.length())?;
    let written = write_payloads(&file, &payloads, &streamed, options.threads)?;
    let crcs: Vec<u32> = written.iter().map(|written| written.crc).collect();
    file.write_at(0, &layout.head(crcs.first().copied().unwrap_or(0)))?;
    for (index, crc) in crcs.iter().enumerate().skip(1) {
        let header = layout.storage_header(index, *crc);
        file.write_at(layout.storage_offset(index) - header.len() as u64, &header)?;
    }
    file.write_at(layout.tail_offset(), &layout.tail(&crcs))?;
    file.finish()?;
    staging.commit_file("file")?;
    Ok(summary(source))
}
