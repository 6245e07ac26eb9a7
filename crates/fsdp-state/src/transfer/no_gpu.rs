//! A rank's GPU, in a build without collectives on GPU memory.

use fsdp_comm::ProcessGroup;

use crate::error::StateError;

/// The memory of what the collectives of a rank's GPU move. This build has none.
#[derive(Debug)]
pub(super) enum Gpu {}

impl Gpu {
    /// Returns `None`: this build has no such collectives.
    pub(super) const fn of_group(_: &ProcessGroup) -> Result<Option<Self>, StateError> {
        Ok(None)
    }
}
