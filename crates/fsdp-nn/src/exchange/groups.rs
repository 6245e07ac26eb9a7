//! The process groups that a model is sharded and replicated over.

use fsdp_comm::ProcessGroup;

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

    /// Returns `true` if nothing is shared with other ranks.
    pub(crate) const fn is_empty(&self) -> bool {
        self.shard.is_none() && self.replicate.is_none()
    }

    /// Returns the number of ranks that share a FlatParameter.
    pub(crate) fn shard_count(&self) -> usize {
        self.shard.as_ref().map_or(1, ProcessGroup::world_size)
    }
}
