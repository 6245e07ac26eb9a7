//! Counts of the bytes that a rank has moved.

use std::collections::BTreeMap;

use crate::record::Operation;

/// The bytes that one rank has sent to and received from other ranks since it started, over all its
/// groups.
///
/// Bytes that a rank keeps for itself are not counted. The bytes of
/// [`barrier`](crate::ProcessGroup::barrier), [`agree`](crate::ProcessGroup::agree) and the
/// fingerprints of all operations are control traffic.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// Bytes of tensor elements that went to other ranks, counted once for each receiving rank.
    pub tensor_bytes_sent: u64,
    /// Bytes of tensor elements that came from other ranks.
    pub tensor_bytes_received: u64,
    /// Bytes of objects that went to other ranks.
    pub object_bytes_sent: u64,
    /// Bytes of objects that came from other ranks.
    pub object_bytes_received: u64,
    /// Bytes of fingerprints, agreement and synchronization that went to other ranks: a few for
    /// each message by which ranks agree, and what ranks tell each other about an operation.
    pub control_bytes_sent: u64,
    /// The number of rounds that this rank began in order to agree with others on a call, whether
    /// or not they succeeded. Calls on GPU memory that all ranks expect have none.
    pub agreements: u64,
    /// The number of calls of each operation, whether or not they succeeded. Operations that were
    /// never called are absent.
    pub collectives: BTreeMap<Operation, u64>,
}

impl Traffic {
    /// Returns the number of calls of an operation.
    #[must_use]
    pub fn count(&self, operation: Operation) -> u64 {
        self.collectives.get(&operation).copied().unwrap_or(0)
    }

    /// Returns the number of tensor bytes sent and received.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.tensor_bytes_sent + self.tensor_bytes_received
    }

    /// Counts the bytes of a tensor, or of objects, that went to other ranks and came from them.
    pub(crate) fn record_payload(&mut self, is_tensor: bool, sent: usize, received: usize) {
        let (sent_so_far, received_so_far) = if is_tensor {
            (&mut self.tensor_bytes_sent, &mut self.tensor_bytes_received)
        } else {
            (&mut self.object_bytes_sent, &mut self.object_bytes_received)
        };
        *sent_so_far += sent as u64;
        *received_so_far += received as u64;
    }

    /// Returns the difference from an earlier reading of the same rank.
    #[must_use]
    pub fn since(&self, earlier: &Traffic) -> Traffic {
        Traffic {
            tensor_bytes_sent: self.tensor_bytes_sent - earlier.tensor_bytes_sent,
            tensor_bytes_received: self.tensor_bytes_received - earlier.tensor_bytes_received,
            object_bytes_sent: self.object_bytes_sent - earlier.object_bytes_sent,
            object_bytes_received: self.object_bytes_received - earlier.object_bytes_received,
            control_bytes_sent: self.control_bytes_sent - earlier.control_bytes_sent,
            agreements: self.agreements - earlier.agreements,
            collectives: self
                .collectives
                .iter()
                .map(|(&operation, count)| (operation, count - earlier.count(operation)))
                .filter(|&(_, count)| count > 0)
                .collect(),
        }
    }
}
