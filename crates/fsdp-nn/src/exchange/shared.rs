//! The state that all units of one model share: which of them are gathered, counts of forwards, of
//! changes of values and of bytes, and the readers for whom changes wait.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use candle_core::DType;

use tracing::info_span;

/// The state that all units of one model share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// `true` while backwards do not reduce gradients over ranks.
    no_sync: AtomicBool,
    /// `true` while backwards do not reduce gradients over replicas.
    no_all_reduce: AtomicBool,
    /// The dtype in which gradients are sent, if it is another than that of the reduction.
    sent_dtype: OnceLock<DType>,
    /// `true` once views of the shards have been lent to somebody who may write into them at any
    /// time.
    lent: AtomicBool,
    /// `true` once the check for parameters without a gradient has been made.
    looked_for_unreached: AtomicBool,
    /// Forwards of the model that are running, one inside the other.
    running: AtomicUsize,
    /// Forwards of the model so far.
    forwards: AtomicU64,
    /// Changes of values so far.
    changes: AtomicU64,
    /// Reductions of gradients so far.
    reductions: AtomicU64,
    /// `true` while the parameters have the values of an average, which has theirs.
    has_average: AtomicBool,
    /// The readers of the values, for whom changes wait.
    pub(crate) readers: Arc<Readers>,
    /// The units in the order in which they were made.
    units: Mutex<Vec<UnitState>>,
    /// Bytes of parameters that this rank holds now.
    bytes: AtomicUsize,
    /// The most bytes of parameters that this rank has ever held.
    peak_bytes: AtomicUsize,
}

/// A unit, for messages.
#[derive(Debug)]
struct UnitState {
    name: String,
    parameters: Vec<String>,
    /// `true` while the parameters are gathered.
    is_whole: bool,
}

/// A forward of the model, until it is dropped.
pub(crate) struct Forward<'a>(&'a Shared);

impl Drop for Forward<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Shared {
    /// Returns `true` if a backward reduces gradients.
    pub(crate) fn syncs(&self) -> bool {
        !self.no_sync.load(Ordering::Relaxed)
    }

    /// Turns the reduction of gradients off or on, and returns the previous setting.
    pub(crate) fn set_no_sync(&self, no_sync: bool) -> bool {
        self.no_sync.swap(no_sync, Ordering::Relaxed)
    }

    /// Counts a reduction of gradients.
    pub(crate) fn count_reduction(&self) {
        self.reductions.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of reductions of gradients so far.
    pub(crate) fn reductions(&self) -> u64 {
        self.reductions.load(Ordering::Relaxed)
    }

    /// Returns `true` while the parameters have the values of an average.
    pub(crate) fn has_average(&self) -> bool {
        self.has_average.load(Ordering::Relaxed)
    }

    /// Records whether the parameters have the values of an average.
    pub(crate) fn set_has_average(&self, has_average: bool) {
        self.has_average.store(has_average, Ordering::Relaxed);
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

    /// Records that views of the shards were lent to be written into.
    pub(crate) fn lend(&self) {
        self.lent.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if somebody may write into views of the shards at any time.
    pub(crate) fn is_lent(&self) -> bool {
        self.lent.load(Ordering::Relaxed)
    }

    /// Returns `true` on the first call only: the caller then looks for parameters without a
    /// gradient.
    pub(crate) fn begin_look_for_unreached(&self) -> bool {
        !self.looked_for_unreached.swap(true, Ordering::Relaxed)
    }

    /// Returns `true` while exactly one forward of the model runs, and none inside of it.
    pub(crate) fn is_outermost(&self) -> bool {
        self.running.load(Ordering::Relaxed) == 1
    }

    /// Begins a forward of the model.
    pub(crate) fn begin_forward(&self) -> Forward<'_> {
        if self.running.fetch_add(1, Ordering::Relaxed) == 0 {
            self.forwards.fetch_add(1, Ordering::Relaxed);
        }
        Forward(self)
    }

    /// Returns the number of the current forward, or of the last one.
    pub(crate) fn forward(&self) -> u64 {
        self.forwards.load(Ordering::Relaxed)
    }

    /// Returns `true` if the shards may have been written since a forward gathered them. The same
    /// on every rank.
    pub(crate) fn may_be_stale(&self, gathered_in: u64) -> bool {
        let is_running = self.running.load(Ordering::Relaxed) > 0;
        self.lent.load(Ordering::Relaxed) && !(is_running && gathered_in == self.forward())
    }

    /// Counts a change of values, and returns its number: the number of changes so far.
    pub(crate) fn change(&self) -> u64 {
        self.changes.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns the number of the last change of values.
    pub(crate) fn last_change(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Adds a unit that is not gathered, and returns its number.
    pub(crate) fn add_unit(&self, name: &str, parameters: Vec<String>) -> usize {
        let mut units = self.units.lock().unwrap_or_else(PoisonError::into_inner);
        units.push(UnitState {
            name: name.to_owned(),
            parameters,
            is_whole: false,
        });
        units.len() - 1
    }

    /// Records whether a unit's parameters are gathered.
    pub(crate) fn set_whole(&self, unit: usize, whole: bool) {
        let mut units = self.units.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(unit) = units.get_mut(unit) {
            unit.is_whole = whole;
        }
    }

    /// Returns `true` if a unit's parameters are gathered.
    pub(crate) fn is_whole(&self, unit: usize) -> bool {
        let units = self.units.lock().unwrap_or_else(PoisonError::into_inner);
        units.get(unit).is_some_and(|unit| unit.is_whole)
    }

    /// Returns the names of the parameters that are not gathered now, and those of their units.
    pub(crate) fn sharded(&self) -> (Vec<String>, Vec<String>) {
        let units = self.units.lock().unwrap_or_else(PoisonError::into_inner);
        let sharded = units.iter().filter(|unit| !unit.is_whole);
        let parameters = sharded
            .clone()
            .flat_map(|unit| unit.parameters.clone())
            .collect();
        (parameters, sharded.map(|unit| unit.name.clone()).collect())
    }

    /// Counts bytes of parameters that are held from now on.
    pub(crate) fn count_held(&self, bytes: usize) {
        let now = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak_bytes.fetch_max(now, Ordering::Relaxed);
    }

    /// Counts bytes of parameters that are held no more.
    pub(crate) fn count_released(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn parameter_bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn peak_parameter_bytes(&self) -> usize {
        self.peak_bytes.load(Ordering::Relaxed)
    }
}

/// A guard, from [`ShardedParameters::keep_unchanged`](crate::ShardedParameters::keep_unchanged).
/// As long as it lives, the parameters, the state of their optimizers, and averages of them stay as
/// they are. Whatever would change them waits.
#[derive(Debug)]
pub struct Unchanged {
    readers: Arc<Readers>,
}

impl Unchanged {
    pub(crate) fn new(readers: &Arc<Readers>) -> Self {
        readers.begin();
        Unchanged {
            readers: Arc::clone(readers),
        }
    }

    /// Ends the guard, and returns for how long a change has waited so far; zero if none has. The
    /// changes go on once no other guard is left.
    pub fn release(self) -> Duration {
        self.readers.waited()
    }
}

impl Drop for Unchanged {
    fn drop(&mut self) {
        self.readers.end();
    }
}

/// The readers of values that must not change meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    state: Mutex<Reading>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Reading {
    /// The number of readers.
    readers: usize,
    /// The time at which the first change began to wait for these readers.
    waiting_since: Option<Instant>,
}

impl Readers {
    /// Waits until nobody reads. Called before any value changes.
    pub(crate) fn wait(&self) {
        let mut reading = self.lock();
        if reading.readers == 0 {
            return;
        }
        let _span = info_span!("wait for a copy of the state").entered();
        reading.waiting_since.get_or_insert_with(Instant::now);
        while reading.readers > 0 {
            reading = self
                .ended
                .wait(reading)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Adds a reader: changes wait from now on.
    fn begin(&self) {
        self.lock().readers += 1;
    }

    /// Removes a reader. If it was the last one, the changes that wait go on.
    fn end(&self) {
        let mut reading = self.lock();
        reading.readers -= 1;
        if reading.readers == 0 {
            reading.waiting_since = None;
            self.ended.notify_all();
        }
    }

    /// Returns for how long a change has waited so far; zero if none waits.
    fn waited(&self) -> Duration {
        self.lock()
            .waiting_since
            .map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn lock(&self) -> MutexGuard<'_, Reading> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
