//! Counts of the bytes that a rank has moved.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

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
    /// Bytes of fingerprints, agreement and synchronization that went to other ranks.
    pub control_bytes_sent: u64,
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

    /// Returns the difference from an earlier reading of the same rank.
    #[must_use]
    pub fn since(&self, earlier: &Traffic) -> Traffic {
        Traffic {
            tensor_bytes_sent: self.tensor_bytes_sent - earlier.tensor_bytes_sent,
            tensor_bytes_received: self.tensor_bytes_received - earlier.tensor_bytes_received,
            object_bytes_sent: self.object_bytes_sent - earlier.object_bytes_sent,
            object_bytes_received: self.object_bytes_received - earlier.object_bytes_received,
            control_bytes_sent: self.control_bytes_sent - earlier.control_bytes_sent,
            collectives: self
                .collectives
                .iter()
                .map(|(&operation, count)| (operation, count - earlier.count(operation)))
                .filter(|&(_, count)| count > 0)
                .collect(),
        }
    }
}

/// The counters behind [`Traffic`], shared by all groups of a rank.
#[derive(Debug)]
pub(crate) struct Counters {
    tensor_sent: AtomicU64,
    tensor_received: AtomicU64,
    object_sent: AtomicU64,
    object_received: AtomicU64,
    control_sent: AtomicU64,
    collectives: Vec<AtomicU64>,
}

impl Counters {
    pub(crate) fn new() -> Self {
        Counters {
            tensor_sent: AtomicU64::new(0),
            tensor_received: AtomicU64::new(0),
            object_sent: AtomicU64::new(0),
            object_received: AtomicU64::new(0),
            control_sent: AtomicU64::new(0),
            collectives: Operation::ALL.iter().map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Counts a call of an operation.
    pub(crate) fn called(&self, operation: Operation) {
        if let Some(count) = self.collectives.get(operation as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts bytes of records, which ranks send to agree on what they do.
    pub(crate) fn control(&self, sent: usize) {
        self.control_sent.fetch_add(sent as u64, Ordering::Relaxed);
    }

    /// Counts the bytes of tensors or objects that an operation has sent to other ranks and
    /// received from them.
    pub(crate) fn moved(&self, operation: Operation, sent: usize, received: usize) {
        let (to, from) = if operation.moves_tensors() {
            (&self.tensor_sent, &self.tensor_received)
        } else {
            (&self.object_sent, &self.object_received)
        };
        to.fetch_add(sent as u64, Ordering::Relaxed);
        from.fetch_add(received as u64, Ordering::Relaxed);
    }

    /// Returns the counts so far.
    pub(crate) fn read(&self) -> Traffic {
        Traffic {
            tensor_bytes_sent: self.tensor_sent.load(Ordering::Relaxed),
            tensor_bytes_received: self.tensor_received.load(Ordering::Relaxed),
            object_bytes_sent: self.object_sent.load(Ordering::Relaxed),
            object_bytes_received: self.object_received.load(Ordering::Relaxed),
            control_bytes_sent: self.control_sent.load(Ordering::Relaxed),
            collectives: Operation::ALL
                .iter()
                .zip(&self.collectives)
                .map(|(&operation, count)| (operation, count.load(Ordering::Relaxed)))
                .filter(|&(_, count)| count > 0)
                .collect(),
        }
    }
}
