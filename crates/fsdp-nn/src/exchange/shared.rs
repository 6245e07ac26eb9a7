//! The state that all units of one model share.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use candle_core::DType;

use super::unchanged::{Readers, Unchanged};
use super::unit::UnitExchange;
use crate::error::{NnError, Result};
use crate::guards::OnDrop;

/// The state that all units of one model share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// The units by their numbers; set once all of them are made.
    units: OnceLock<Vec<Arc<UnitExchange>>>,
    pub(crate) memory: Memory,
    pub(crate) reductions: Reductions,
    pub(crate) forwards: Forwards,
    pub(crate) values: Values,
}

impl Shared {
    /// Sets the units of the model, by their numbers, once all of them are made.
    pub(crate) fn complete(&self, units: Vec<Arc<UnitExchange>>) {
        self.units
            .set(units)
            .expect("the units of a model are built once");
    }

    /// Returns the units by their numbers.
    pub(super) fn units(&self) -> &[Arc<UnitExchange>] {
        self.units
            .get()
            .expect("a model computes only after all of its units are built")
    }

    /// Converts an error of a computation. candle's error about released memory becomes one that
    /// names the sharded units.
    pub(crate) fn explain_error(&self, error: candle_core::Error) -> NnError {
        NnError::from_computation(error, || {
            let mut parameters = Vec::new();
            let mut units = Vec::new();
            for unit in self.units().iter().filter(|unit| !unit.is_unsharded()) {
                parameters.extend_from_slice(unit.layout.fqns());
                units.push(unit.name.clone());
            }
            (parameters, units)
        })
    }

    /// Returns `true` if the shards may have been written since the forward with the number
    /// `gathered_in_forward` gathered them. The same on every rank.
    pub(crate) fn may_be_stale(&self, gathered_in_forward: u64) -> bool {
        self.values.is_lent() && !self.forwards.is_running_as(gathered_in_forward)
    }
}

/// The bytes of parameters on this rank.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    held_bytes: AtomicUsize,
    peak_bytes: AtomicUsize,
}

impl Memory {
    /// Counts bytes of parameters that are held from now on.
    pub(crate) fn count_held(&self, bytes: usize) {
        // Other threads count too, so take the peak of what this one has seen.
        let held_bytes = self.held_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak_bytes.fetch_max(held_bytes, Ordering::Relaxed);
    }

    /// Counts bytes of parameters that are held no more.
    pub(crate) fn count_released(&self, bytes: usize) {
        self.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Returns the bytes of parameters that this rank holds now.
    pub(crate) fn held_bytes(&self) -> usize {
        self.held_bytes.load(Ordering::Relaxed)
    }

    /// Returns the most bytes of parameters that this rank has ever held.
    pub(crate) fn peak_bytes(&self) -> usize {
        self.peak_bytes.load(Ordering::Relaxed)
    }
}

/// How gradients are reduced, and how often they have been.
#[derive(Debug, Default)]
pub(crate) struct Reductions {
    /// `true` while backwards do not reduce gradients over ranks.
    no_sync: AtomicBool,
    /// `true` while backwards do not reduce gradients over replicas.
    no_all_reduce: AtomicBool,
    /// The dtype in which gradients are sent, if it is another than that of the reduction.
    sent_dtype: OnceLock<DType>,
    count: AtomicU64,
}

impl Reductions {
    /// Returns `true` if a backward reduces gradients.
    pub(crate) fn syncs(&self) -> bool {
        !self.no_sync.load(Ordering::Relaxed)
    }

    /// Turns the reduction of gradients off or on, and returns the previous setting.
    pub(crate) fn set_no_sync(&self, no_sync: bool) -> bool {
        self.no_sync.swap(no_sync, Ordering::Relaxed)
    }

    /// Returns `true` if a backward reduces gradients over replicas too.
    pub(crate) fn all_reduces(&self) -> bool {
        !self.no_all_reduce.load(Ordering::Relaxed)
    }

    /// Turns the reduction of gradients over replicas off or on.
    pub(crate) fn set_no_all_reduce(&self, no_all_reduce: bool) {
        self.no_all_reduce.store(no_all_reduce, Ordering::Relaxed);
    }

    /// Returns the dtype in which gradients are sent, if it is another than that of the reduction.
    pub(crate) fn sent_dtype(&self) -> Option<DType> {
        self.sent_dtype.get().copied()
    }

    /// Sets the dtype in which gradients are sent. Returns `false` if one has been set already,
    /// which stays.
    pub(crate) fn set_sent_dtype(&self, dtype: DType) -> bool {
        self.sent_dtype.set(dtype).is_ok()
    }

    /// Counts a reduction of gradients.
    pub(crate) fn count_reduction(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of reductions of gradients so far.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

/// The forwards of the model.
#[derive(Debug, Default)]
pub(crate) struct Forwards {
    /// The forwards that are running, one inside the other.
    running_count: AtomicUsize,
    /// The forwards so far; those inside others do not count.
    count: AtomicU64,
}

impl Forwards {
    /// Begins a forward of the model, which runs until the result is dropped.
    pub(crate) fn begin(&self) -> OnDrop<impl FnMut()> {
        // A forward inside another one, such as that of a recomputed part, continues it.
        if self.running_count.fetch_add(1, Ordering::Relaxed) == 0 {
            self.count.fetch_add(1, Ordering::Relaxed);
        }
        OnDrop(|| _ = self.running_count.fetch_sub(1, Ordering::Relaxed))
    }

    /// Returns `true` while exactly one forward of the model runs, and none inside of it.
    pub(crate) fn is_outermost(&self) -> bool {
        self.running_count.load(Ordering::Relaxed) == 1
    }

    /// Returns the number of the current forward, or of the last one.
    pub(crate) fn last_number(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns `true` while the forward with this number runs.
    fn is_running_as(&self, number: u64) -> bool {
        self.running_count.load(Ordering::Relaxed) > 0 && number == self.last_number()
    }
}

/// The changes of the parameters' values, and the readers for whom they wait.
#[derive(Debug, Default)]
pub(crate) struct Values {
    /// The version of the values: the number of changes so far, as in torch's `_version`.
    version: AtomicU64,
    /// `true` once views of the shards have been lent to somebody who may write into them at any
    /// time.
    is_lent: AtomicBool,
    readers: Arc<Readers>,
}

impl Values {
    /// Counts a change of values, and returns the new version.
    pub(crate) fn next_version(&self) -> u64 {
        self.version.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns the version of the values, which rises with each change.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Relaxed)
    }

    /// Records that views of the shards were lent to be written into.
    pub(crate) fn lend(&self) {
        self.is_lent.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if somebody may write into views of the shards at any time.
    fn is_lent(&self) -> bool {
        self.is_lent.load(Ordering::Relaxed)
    }

    /// Returns a guard for whom changes wait; `None` if views have been lent to be written into.
    pub(crate) fn keep_unchanged(&self) -> Option<Unchanged> {
        if self.is_lent() {
            None
        } else {
            Some(Unchanged::new(&self.readers))
        }
    }

    /// Waits until nobody keeps the values unchanged. Call it before any value changes.
    ///
    /// # Errors
    /// CUDA's.
    pub(crate) fn wait_for_readers(&self) -> Result<()> {
        self.readers.wait()
    }
}
