//! Options that say which ranks get the result of a collective function, and where.

use std::fmt;

use candle_core::Device;
use serde::{Deserialize, Serialize};

use crate::error::StateError;

/// The ranks of a group that keep a result; the others take part and get nothing. torch's
/// `ranks_only`.
///
/// In torch an empty list means all ranks, and `cpu_offload` sets the list to rank 0 in some
/// functions. Here an empty list means no rank, and the device has no influence.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum KeepOn {
    /// Every rank.
    #[default]
    All,
    /// These ranks of the group; an empty list means no rank.
    Ranks(Vec<usize>),
}

impl KeepOn {
    /// Returns `true` if this rank of the group keeps the result.
    ///
    /// ```
    /// use fsdp_state::KeepOn;
    /// assert!(KeepOn::All.contains(3));
    /// assert!(!KeepOn::Ranks(vec![0, 2]).contains(3));
    /// ```
    #[must_use]
    pub fn contains(&self, rank: usize) -> bool {
        match self {
            KeepOn::All => true,
            KeepOn::Ranks(ranks) => ranks.contains(&rank),
        }
    }

    /// Checks that a group of `world_size` ranks has all these ranks.
    pub(crate) fn check(&self, world_size: usize) -> Result<(), StateError> {
        if let KeepOn::Ranks(ranks) = self
            && let Some(&rank) = ranks.iter().find(|&&rank| rank >= world_size)
        {
            return Err(StateError::NoSuchRank { rank, world_size });
        }
        Ok(())
    }
}

impl fmt::Display for KeepOn {
    /// Writes the ranks as an argument of a function, for errors about arguments that differ
    /// between ranks.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeepOn::All => f.write_str("keep on all ranks"),
            KeepOn::Ranks(ranks) => write!(f, "keep on ranks {ranks:?}"),
        }
    }
}

/// Options of [`gather_state_dict`](crate::gather_state_dict).
#[derive(Debug, Clone, Default)]
pub struct GatherOptions {
    /// The ranks that get the tensors: torch's `ranks_only`.
    pub keep_on: KeepOn,
    /// The device of the results; `None` leaves each tensor where this rank's part of it is (the
    /// CPU if it has none). May differ between ranks. torch's `cpu_offload` is `Some(Device::Cpu)`.
    pub device: Option<Device>,
}
