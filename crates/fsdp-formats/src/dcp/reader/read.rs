//! Reading the chunks of a tensor that overlap with wanted boxes.

use fsdp_layout::TensorBox;

use super::CheckpointReader;
use super::chunk_item::ChunkItem;
use super::error::ReadError;
use super::items::Bytes;
use crate::error::FileError;
use crate::formats::lookup::{request_of, tensor_of};
use crate::formats::read::{Destination, ReadOptions, byte_length};
use crate::metadata::Chunk;
use crate::payload::slot::Slot;
use crate::plan::{LoadPlanError, plan_load};
use crate::storage::read_at::BlockReader;

impl CheckpointReader {
    /// Reads a whole tensor.
    pub fn read_tensor(&self, fqn: &str) -> Result<Vec<u8>, FileError> {
        let tensor = tensor_of(&self.metadata, fqn)?;
        // Plan before allocating, so that an absurd shape allocates nothing.
        let bounds = TensorBox::whole(&tensor.shape);
        let request = request_of(&self.metadata, fqn, &bounds)?;
        plan_load(&self.metadata, [&request])?;
        let length = byte_length(&bounds, tensor.properties.dtype)
            .filter(|&length| can_hold(&tensor.chunks, length))
            .ok_or_else(|| LoadPlanError::Size {
                fqn: fqn.to_owned(),
                saved: tensor.shape.clone(),
                wanted: Vec::new(),
            })?;
        let mut bytes = vec![0; length];
        self.read(
            vec![Destination::new(request, vec![&mut bytes])],
            ReadOptions::default(),
        )?;
        Ok(bytes)
    }

    /// Fills the parts of boxes that lie in one chunk.
    pub(super) fn fill_from(
        &self,
        item: ChunkItem<'_>,
        slots: &mut [Slot<'_>],
    ) -> Result<(), FileError> {
        self.fill_located(item, slots)
            .map_err(|error| self.item_error(item.fqn, item.stored, error))
    }

    fn fill_located(&self, item: ChunkItem<'_>, slots: &mut [Slot<'_>]) -> Result<(), ReadError> {
        let located = self.locate(item)?;
        // Bytes whose sums will be compared with a digest need no check of their hashes.
        let unchecked = match &located.bytes {
            Bytes::File(file) if slots.iter().all(|slot| slot.is_compared) => {
                Some(file.unchecked())
            }
            _ => None,
        };
        let source = unchecked
            .as_ref()
            .map_or(located.bytes.source(), |file| file);
        let mut reader = BlockReader::new(source);
        for slot in slots {
            located
                .tensor
                .read(&mut reader, located.start, item.bounds, slot)?;
        }
        Ok(())
    }
}

/// Returns `true` if items of these lengths can hold this many bytes. Without a transform, an item
/// is never shorter than its data.
fn can_hold(chunks: &[Chunk], length: usize) -> bool {
    let stored = chunks.iter().filter_map(|chunk| chunk.stored.as_ref());
    let total = stored.fold(0u64, |total, stored| {
        let most = if stored.transforms.is_empty() {
            stored.length
        } else {
            u64::MAX
        };
        total.saturating_add(most)
    });
    length as u64 <= total
}
