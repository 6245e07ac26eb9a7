//! Reading the chunks of a tensor that overlap with wanted boxes.

use fsdp_layout::TensorBox;
use fsdp_layout::boxes::checked_bytes;

use super::CheckpointReader;
use super::chunk_item::ChunkItem;
use super::items::ItemSource;
use crate::error::FileError;
use crate::formats::checkpoint::Checkpoint as _;
use crate::formats::lookup::{request_of, tensor_of};
use crate::formats::read::{Destination, ReadOptions};
use crate::formats::stream::check_expansion;
use crate::payload::slot::Slot;
use crate::plan::plan_load;
use crate::storage::read_at::{BlockReader, ReadAt};

impl CheckpointReader {
    /// Reads a whole tensor, and returns its row-major bytes, in the checkpoint's dtype.
    pub fn read_tensor(&self, fqn: &str) -> Result<Vec<u8>, FileError> {
        let tensor = tensor_of(&self.metadata, fqn)?;
        let bounds = TensorBox::whole(&tensor.shape);
        let request = request_of(&self.metadata, fqn, &bounds)?;
        // Plan before allocating, so that an absurd shape allocates nothing.
        plan_load(&self.metadata, [&request])?;
        let length = checked_bytes(&bounds.sizes, request.dtype).unwrap_or(usize::MAX);
        check_expansion(self, fqn, length as u64)?;
        let mut bytes = vec![0; length];
        self.read(
            vec![Destination::new(request, vec![&mut bytes])],
            ReadOptions::default(),
        )?;
        Ok(bytes)
    }

    /// Fills the parts of the slots' boxes that lie in the chunk of an item.
    pub(super) fn fill_from_chunk(
        &self,
        item: ChunkItem<'_>,
        slots: &mut [Slot<'_>],
    ) -> Result<(), FileError> {
        self.read_from_file(item.fqn, item.stored, |file| {
            let located = self.locate_tensor(file, item)?;
            let record = self.record_to_check(item, &located);
            let (unchecked, noted);
            let source: &dyn ReadAt = match &located.source {
                ItemSource::Memory(bytes) => bytes,
                // Bytes whose sums will be compared with a digest need no check of their hashes.
                ItemSource::File(file) if slots.iter().all(|slot| slot.is_compared) => {
                    unchecked = file.unchecked();
                    &unchecked
                }
                ItemSource::File(file) => match &record {
                    Some(record) => {
                        noted = record.reader(&**file);
                        &noted
                    }
                    None => &**file,
                },
            };
            let mut reader = BlockReader::new(source);
            for slot in slots {
                located
                    .tensor
                    .read(&mut reader, located.item_start, item.bounds, slot)?;
            }
            Ok(())
        })
    }
}
