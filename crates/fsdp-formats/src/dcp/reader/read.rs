//! Reading the chunks of a tensor that overlap with wanted boxes.

use fsdp_layout::TensorBox;

use super::CheckpointReader;
use super::error::ReadError;
use super::items::{Bytes, ChunkItem};
use crate::error::FileError;
use crate::formats::lookup::{check_length, request_of, tensor_of};
use crate::formats::read::{Destination, ReadOptions, byte_length};
use crate::metadata::{Chunk, Replica};
use crate::payload::slot::Slot;
use crate::plan::{LoadPlan, LoadPlanError, LoadRequest, ReadPlanOptions, plan_load};
use crate::storage::read_at::BlockReader;

impl CheckpointReader {
    /// Reads a whole tensor.
    pub fn read_tensor(&self, fqn: &str) -> Result<Vec<u8>, FileError> {
        let tensor = tensor_of(&self.metadata, fqn)?;
        // Plan before allocating, so that an absurd shape allocates nothing.
        let bounds = TensorBox::whole(&tensor.shape);
        let request = request_of(&self.metadata, fqn, &bounds)?;
        plan_load(
            &self.metadata,
            std::slice::from_ref(&request),
            ReadPlanOptions::default(),
        )?;
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

    /// Plans a read, and checks that the files that it needs are there and long enough.
    pub(super) fn check_planned(
        &self,
        requests: &[LoadRequest],
        options: ReadPlanOptions,
    ) -> Result<LoadPlan, FileError> {
        let plan = plan_load(&self.metadata, requests, options)?;
        for read in &plan.reads {
            let fqn = &requests[read.request].fqn;
            let tensor = tensor_of(&self.metadata, fqn)?;
            self.check_item(ChunkItem::new(fqn, tensor, &tensor.chunks[read.chunk])?)?;
        }
        Ok(plan)
    }

    /// Fills boxes of a tensor, chunk by chunk: each item is located once for all boxes.
    pub(super) fn fill(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        let tensor = tensor_of(&self.metadata, fqn)?;
        for chunk in &tensor.chunks {
            let is_wanted = slots
                .iter()
                .any(|slot| chunk.bounds.intersect(&slot.bounds).is_some());
            if is_wanted {
                self.fill_from(ChunkItem::new(fqn, tensor, chunk)?, slots)?;
            }
        }
        Ok(())
    }

    /// Reads a box of a chunk from another of its copies, in the checkpoint's dtype.
    pub(super) fn read_copy(
        &self,
        replica: &Replica,
        bounds: &TensorBox,
        dst: &mut [u8],
    ) -> Result<(), FileError> {
        let Replica {
            fqn,
            bounds: Some(whole),
            stored,
        } = replica
        else {
            return Err(FileError::NotStored {
                fqn: replica.fqn.clone(),
            });
        };
        let dtype = tensor_of(&self.metadata, fqn)?.properties.dtype;
        check_length(fqn, bounds, dtype.size_in_bytes(), dst)?;
        let item = ChunkItem {
            fqn,
            dtype,
            bounds: whole,
            stored,
        };
        self.fill_from(item, &mut [Slot::new(bounds.clone(), dst)])
    }

    /// Fills the parts of boxes that lie in one chunk.
    fn fill_from(&self, item: ChunkItem<'_>, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        self.fill_located(item, slots)
            .map_err(|error| self.item_error(item.fqn, item.stored, error))
    }

    fn fill_located(&self, item: ChunkItem<'_>, slots: &mut [Slot<'_>]) -> Result<(), ReadError> {
        let located = self.locate(item)?;
        // What a digest will be compared with need not be hashed too.
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
