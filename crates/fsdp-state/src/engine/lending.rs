//! The memory of a target, lent to the source of a load.

use std::collections::{BTreeMap, HashMap};

use fsdp_flat::ShardedTensor;
use fsdp_flat::storage::{Upload, storage_id};

use super::target::{Target, Wanted};
use crate::error::StateError;
use crate::lend::{GPU_WINDOW_BYTES, Lend, Memory, WINDOW_BYTES};

/// Lends the target's memory to the source. If the target's own memory cannot be filled directly,
/// the source gets temporary memory, and the values are copied afterwards. That is so if
/// the memory is on a GPU and the values come from the host, if it has another dtype, or shares
/// elements with memory that was lent before, and in a staged load.
pub(super) struct Lending<'a, T> {
    target: &'a mut T,
    wanted: &'a [Wanted],
    /// `true` if the load is staged.
    is_staged: bool,
    /// The live tensors that have been lent.
    lent: Vec<ShardedTensor>,
    /// The stretches of live memory that have been lent, by where they begin: where each ends, and
    /// the index of its tensor in `lent`. They do not overlap.
    stretches: BTreeMap<Place, (usize, usize)>,
    /// The target's memory of tensors whose values go by temporary memory.
    replaced_memory: HashMap<usize, Memory>,
    /// The target's live memory, and the new values for it, in a staged load.
    staged: Vec<(Memory, ShardedTensor)>,
}

/// The use that a source makes of memory that it asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// It fills it with values that are on the host.
    FillOnHost,
    /// It fills it on the host, or puts a copy of its own value in its place.
    Replace,
    /// It fills it with values that are on a GPU.
    FillOnGpu,
}

/// A storage, and the position of an element in it.
type Place = (usize, usize);

impl<'a, T: Target> Lending<'a, T> {
    /// Begins to lend the memory of the wanted tensors.
    pub(super) fn new(target: &'a mut T, wanted: &'a [Wanted], is_staged: bool) -> Self {
        Lending {
            target,
            wanted,
            is_staged,
            lent: Vec::new(),
            stretches: BTreeMap::new(),
            replaced_memory: HashMap::new(),
            staged: Vec::new(),
        }
    }

    /// Returns the live memory of a staged load, and the new values for it.
    pub(super) fn into_staged(self) -> Vec<(Memory, ShardedTensor)> {
        self.staged
    }

    /// Records a live tensor as lent, and returns `None`. If a tensor that has been lent before has
    /// some of its elements, nothing is recorded, and that tensor is returned.
    fn record_as_lent(&mut self, tensor: &ShardedTensor) -> Option<&ShardedTensor> {
        let mut stretches = Vec::with_capacity(tensor.shards().len());
        for shard in tensor.shards() {
            if shard.bounds.is_empty() {
                continue;
            }
            let storage = storage_id(&shard.tensor);
            let start = shard.tensor.layout().start_offset();
            let end = start + shard.tensor.elem_count();
            // Stretches do not overlap, so only the last one that begins before the end of this one
            // can reach into it.
            let mut earlier_stretches = self.stretches.range((storage, 0)..(storage, end));
            if let Some((_, &(earlier_end, lent_index))) = earlier_stretches.next_back()
                && earlier_end > start
            {
                return Some(&self.lent[lent_index]);
            }
            stretches.push(((storage, start), (end, self.lent.len())));
        }
        // Only now, because a tensor that overlaps must leave no trace.
        self.stretches.extend(stretches);
        self.lent.push(tensor.clone());
        None
    }

    /// Returns memory for the wanted boxes of one tensor, as [`Lend::lend_unfilled`] does, for this
    /// use. Memory for tensors on a GPU may be of the kind that goes there by itself, or the GPU's.
    fn lend_memory(
        &mut self,
        wanted_index: usize,
        purpose: Use,
    ) -> Result<Option<Memory>, StateError> {
        let Wanted {
            dtype,
            target_dtype,
            ..
        } = self.wanted[wanted_index];
        let mut memory = self.target.memory(&self.wanted[wanted_index])?;
        let mut is_shared = false;
        if self.target.lends_live(&self.wanted[wanted_index])
            && let Memory::Tensors(tensor) = &memory
        {
            // Two names of one tensor are filled once. Memory that shares only some elements with
            // other memory cannot be lent together with it, so its values go by temporary memory.
            match self.record_as_lent(tensor) {
                Some(earlier) if earlier.is_same_view(tensor) => return Ok(None),
                earlier => is_shared = earlier.is_some(),
            }
        }
        let by_temporary = is_shared || self.is_kept_back(wanted_index);
        if purpose == Use::FillOnGpu && dtype == target_dtype && !by_temporary {
            if let Some(live) = memory.on_gpu(dtype)? {
                return Ok(Some(live));
            }
            let device = self.target.device(&self.wanted[wanted_index]);
            if let Some(fresh) = memory.fresh_on_gpu(dtype, &device)? {
                return Ok(Some(fresh));
            }
        }
        // A conversion writes to the target's memory from temporary memory, so it must be there.
        if dtype != target_dtype {
            memory = memory.allocate()?;
        }
        if purpose != Use::Replace
            && !by_temporary
            && let Some(uploads) = memory.uploads(dtype)?
        {
            self.replaced_memory.insert(wanted_index, memory);
            return Ok(Some(uploads));
        }
        let Some(temporary) = memory.temporary(dtype, by_temporary)? else {
            return Ok(Some(memory));
        };
        self.replaced_memory.insert(wanted_index, memory);
        Ok(Some(Memory::Tensors(temporary)))
    }

    /// Returns `true` if the new values of a tensor are kept until all are there.
    fn is_kept_back(&self, wanted_index: usize) -> bool {
        self.is_staged && self.target.lends_live(&self.wanted[wanted_index])
    }
}

impl<T: Target> Lend for Lending<'_, T> {
    fn window_bytes(&self) -> usize {
        if self.target.is_on_gpu() {
            GPU_WINDOW_BYTES
        } else {
            WINDOW_BYTES
        }
    }

    fn lend(&mut self, wanted_index: usize) -> Result<Option<Memory>, StateError> {
        self.lend_memory(wanted_index, Use::FillOnHost)?
            .map(Memory::allocate)
            .transpose()
    }

    fn lend_unfilled(&mut self, wanted_index: usize) -> Result<Option<Memory>, StateError> {
        self.lend_memory(wanted_index, Use::Replace)
    }

    fn lend_on_gpu(&mut self, wanted_index: usize) -> Result<Option<Memory>, StateError> {
        self.lend_memory(wanted_index, Use::FillOnGpu)?
            .map(Memory::allocate)
            .transpose()
    }

    fn filled(&mut self, wanted_index: usize, memory: Memory) -> Result<(), StateError> {
        let Some(target_memory) = self.replaced_memory.remove(&wanted_index) else {
            // This is the target's memory itself.
            return self.target.filled(&self.wanted[wanted_index], memory);
        };
        let values = match memory {
            Memory::Tensors(values) => values,
            Memory::Uploads(uploads) => {
                // The GPU copies them while others are read. The load waits for that at its end.
                uploads.into_iter().try_for_each(Upload::finish)?;
                return self
                    .target
                    .filled(&self.wanted[wanted_index], target_memory);
            }
            _ => unreachable!("temporary memory is made of tensors, or goes to a GPU"),
        };
        if self.is_kept_back(wanted_index) {
            // All new values must be there before the first one takes effect.
            self.staged.push((target_memory, values));
            return Ok(());
        }
        // The values could not be read straight into the target's memory: copy them there.
        target_memory.fill_from(&values)?;
        self.target
            .filled(&self.wanted[wanted_index], target_memory)
    }
}
