//! The process groups that a model is sharded and replicated over.

use fsdp_comm::ProcessGroup;

use super::device;
use crate::error::Result;

/// Makes another group of the same ranks.
fn duplicate(group: Option<&ProcessGroup>) -> Result<Option<ProcessGroup>> {
    let Some(group) = group else { return Ok(None) };
    Ok(group.subgroup(&(0..group.world_size()).collect::<Vec<usize>>())?)
}

/// The process groups that a model is sharded and replicated over.
#[derive(Debug, Clone)]
pub(crate) struct Groups {
    /// Ranks that each hold a shard; `None` if nothing is sharded.
    pub(crate) shard: Option<ProcessGroup>,
    /// Ranks that hold the same values as this one; `None` if there are no others.
    pub(crate) replicate: Option<ProcessGroup>,
}

impl Groups {
    /// Makes groups of the same ranks, whose operations cannot get mixed up with those of these
    /// groups. Collectives: the creation of as many subgroups as there are groups.
    pub(crate) fn duplicate(&self) -> Result<Groups> {
        Ok(Groups {
            shard: duplicate(self.shard.as_ref())?,
            replicate: duplicate(self.replicate.as_ref())?,
        })
    }

    /// Returns the same groups with the unit's name as a label. If ranks call collectives for
    /// different units, they get an error, and not each other's values.
    pub(crate) fn with_label(&self, unit: &str) -> Groups {
        let label = if unit.is_empty() {
            "the root unit".to_owned()
        } else {
            format!("unit {unit}")
        };
        Groups {
            shard: self.shard.as_ref().map(|group| group.with_label(&label)),
            replicate: self
                .replicate
                .as_ref()
                .map(|group| group.with_label(&label)),
        }
    }

    /// Returns `true` if the groups have operations on GPU memory.
    #[cfg(feature = "nccl")]
    pub(crate) fn moves_gpu_memory(&self) -> bool {
        self.device_groups().next().is_some()
    }

    #[cfg(not(feature = "nccl"))]
    #[expect(clippy::unused_self, reason = "there are operations on GPU memory")]
    pub(crate) const fn moves_gpu_memory(&self) -> bool {
        false
    }

    /// Returns a hash of the calls on GPU memory in this step. It is the same on all ranks whose
    /// models took the same way.
    #[cfg(feature = "nccl")]
    pub(crate) fn calls_hash(&self) -> u64 {
        // Multiplied, so that it matters which group has made which calls.
        self.device_groups().fold(0u64, |hash, device| {
            hash.wrapping_mul(31).wrapping_add(device.calls_hash())
        })
    }

    #[cfg(not(feature = "nccl"))]
    #[expect(clippy::unused_self, reason = "there are calls on GPU memory")]
    pub(crate) const fn calls_hash(&self) -> u64 {
        0
    }

    /// Begins a step. If `is_same`, the ranks made the same calls on GPU memory in the last one:
    /// they do not agree on those again.
    ///
    /// # Errors
    /// `is_same` is `false`, and ranks of a group have not made the same calls.
    #[cfg(feature = "nccl")]
    pub(crate) fn begin_step(&self, is_same: bool) -> Result<()> {
        for device in self.device_groups() {
            device.begin_step(is_same)?;
        }
        Ok(())
    }

    #[cfg(not(feature = "nccl"))]
    #[expect(
        clippy::unnecessary_wraps,
        clippy::unused_self,
        reason = "there are calls on GPU memory, which may fail"
    )]
    pub(crate) const fn begin_step(&self, _is_same: bool) -> Result<()> {
        Ok(())
    }

    /// Returns the operations of the groups on GPU memory, as far as they have any.
    #[cfg(feature = "nccl")]
    fn device_groups(&self) -> impl Iterator<Item = fsdp_comm::device::DeviceGroup<'_>> {
        self.all().filter_map(ProcessGroup::device)
    }

    /// Returns the groups that there are.
    fn all(&self) -> impl Iterator<Item = &ProcessGroup> {
        self.shard.iter().chain(&self.replicate)
    }

    /// Waits on the host until the GPU has done all collectives of the groups that are queued.
    ///
    /// # Errors
    /// The reason for which one of them has failed; the result of that one is undefined.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.all().try_for_each(device::synchronize)
    }

    /// Returns `true` if nothing is shared with other ranks.
    pub(crate) const fn is_empty(&self) -> bool {
        self.shard.is_none() && self.replicate.is_none()
    }

    /// Returns the number of ranks that share a FlatParameter.
    pub(crate) fn shard_count(&self) -> usize {
        self.shard.as_ref().map_or(1, ProcessGroup::world_size)
    }
}
