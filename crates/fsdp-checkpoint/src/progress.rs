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

    /// Notes that a save begins that writes this many bytes.
    pub(crate) fn expect(&self, total: u64) {
        self.written.store(0, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }

    pub(crate) fn add(&self, bytes: u64) {
        self.written.fetch_add(bytes, Ordering::Relaxed);
    }
}
