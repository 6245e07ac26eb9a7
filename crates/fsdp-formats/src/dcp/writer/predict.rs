//! Computes the places that items would have in files, from the plan alone and without writing.

use super::layout::tensor_offset;
use crate::dcp::item::TensorItem;
use crate::error::FileError;
use crate::metadata::{Entry, Metadata, StorageInfo};
use crate::plan::{GlobalPlan, SelectedItem};

/// Notes in the metadata of a plan where a save to a directory would put every item, as
/// [`finish`](super::finish) does after one, and returns the length of each rank's file. Nothing is
/// read or written.
///
/// `value_length` is told a flat key, and returns the bytes of its item
/// ([`value_item_length`](super::value_item_length)).
///
/// # Errors
/// A tensor cannot be written to a file: its dtype is not one of torch's.
pub fn predict_file_lengths(
    global: &mut GlobalPlan,
    value_length: impl Fn(&str) -> u64,
) -> Result<Vec<u64>, FileError> {
    let metadata = &mut global.metadata;
    let files = global
        .selections
        .iter()
        .enumerate()
        .map(|(rank, selection)| {
            let name = format!("__{rank}_0.distcp");
            let mut at = 0;
            // Values come first, as in the file.
            for selected in &selection.kept {
                if let Some((fqn, Entry::Bytes(value))) =
                    metadata.entries.get_index_mut(selected.entry as usize)
                {
                    let length = value_length(fqn);
                    value.stored = Some(stored(&name, at, length));
                    at += length;
                }
            }
            for selected in &selection.kept {
                at = place_tensor(metadata, selected, &name, at)?;
            }
            Ok(at)
        });
    files.collect()
}

/// Notes the place of a chunk, if the selected item is one, after an item that ends at `at`.
/// Returns the chunk's end.
fn place_tensor(
    metadata: &mut Metadata,
    selected: &SelectedItem,
    file: &str,
    at: u64,
) -> Result<u64, FileError> {
    let Some((fqn, Entry::Tensor(tensor))) =
        metadata.entries.get_index_mut(selected.entry as usize)
    else {
        return Ok(at);
    };
    let Some(chunk) = tensor.chunks.get_mut(selected.chunk as usize) else {
        return Ok(at);
    };
    let item = TensorItem::new(tensor.properties.dtype, &chunk.bounds.sizes);
    let item = item.map_err(|source| FileError::Encode {
        fqn: fqn.clone(),
        source,
    })?;
    let offset = tensor_offset(at, &item);
    chunk.stored = Some(stored(file, offset, item.length()));
    Ok(offset + item.length())
}

fn stored(file: &str, offset: u64, length: u64) -> StorageInfo {
    StorageInfo {
        relative_path: file.to_owned(),
        offset,
        length,
        transforms: Vec::new(),
    }
}
