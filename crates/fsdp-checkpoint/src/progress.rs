//! The progress of a save.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The bytes of tensors that this rank has written in a save, and those that it has to write.
/// Clones look at the same save.
#[derive(Debug, Clone, Default)]
pub struct SaveProgress {
    written: Arc<AtomicU64>,
    total: Arc<AtomicU64>,
}

impl SaveProgress {
    /// Returns the number of bytes written so far.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes that this rank writes in the save; 0 until that is planned.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Records that a save begins in which this rank writes `total_bytes`.
    pub(crate) fn begin_save(&self, total_bytes: u64) {
        self.written.store(0, Ordering::Relaxed);
        self.total.store(total_bytes, Ordering::Relaxed);
    }

    pub(crate) fn record_written(&self, bytes: u64) {
        self.written.fetch_add(bytes, Ordering::Relaxed);
    }
}
