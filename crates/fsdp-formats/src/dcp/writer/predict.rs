//! Computes the places that items would have in files, from the plan alone and without writing.

use super::layout::tensor_offset;
use super::selected::cannot_write;
use crate::dcp::item::lay_out_tensor;
use crate::error::FileError;
use crate::metadata::{Entry, Metadata, StorageInfo};
use crate::plan::{GlobalPlan, SelectedItem};

/// Records in the metadata of a plan where a save to a directory would put every item, as
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
    let mut lengths = Vec::with_capacity(global.selections.len());
    for (rank, selection) in global.selections.iter().enumerate() {
        let name = format!("__{rank}_0.distcp");
        let mut end = 0;
        // Values come first, as in the file.
        for selected in &selection.kept {
            if let (fqn, Entry::Bytes(value)) = selected_entry(&mut global.metadata, selected) {
                let length = value_length(fqn);
                value.stored = Some(StorageInfo::new(&name, end, length));
                end += length;
            }
        }
        for selected in &selection.kept {
            if let (fqn, Entry::Tensor(tensor)) = selected_entry(&mut global.metadata, selected) {
                let chunk = &mut tensor.chunks[selected.chunk as usize];
                let item = lay_out_tensor(tensor.properties.dtype, &chunk.bounds.sizes)
                    .map_err(|source| cannot_write(fqn.to_owned(), source))?;
                let offset = tensor_offset(end, &item);
                chunk.stored = Some(StorageInfo::new(&name, offset, item.length()));
                end = offset + item.length();
            }
        }
        lengths.push(end);
    }
    Ok(lengths)
}

/// Returns the key and the entry of a selected item.
fn selected_entry<'m>(
    metadata: &'m mut Metadata,
    selected: &SelectedItem,
) -> (&'m str, &'m mut Entry) {
    let (fqn, entry) = metadata
        .entries
        .get_index_mut(selected.entry as usize)
        .expect("a plan selects entries of its own metadata");
    (fqn, entry)
}
