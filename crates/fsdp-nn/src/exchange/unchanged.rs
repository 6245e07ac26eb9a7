//! Values that stay as they are while they are being read, such as by a save in the background.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fsdp_flat::storage::CopiesEnd;
use tracing::info_span;

use crate::error::Result;
use crate::guards::lock;

/// A guard, from [`ShardedParameters::keep_unchanged`](crate::ShardedParameters::keep_unchanged).
/// As long as it lives, the parameters, the state of their optimizers, and averages of them stay as
/// they are. Whatever would change them waits.
#[derive(Debug)]
pub struct Unchanged {
    readers: Arc<Readers>,
}

impl Unchanged {
    pub(super) fn new(readers: &Arc<Readers>) -> Self {
        lock(&readers.state).readers += 1;
        Unchanged {
            readers: Arc::clone(readers),
        }
    }

    /// Ends the guard, and returns for how long a change has waited so far; zero if none has. The
    /// changes go on once no other guard is left.
    pub fn release(self) -> Duration {
        let waiting_since = lock(&self.readers.state).waiting_since;
        waiting_since.map_or(Duration::ZERO, |start| start.elapsed())
    }

    /// Ends the guard like [`Self::release`] when all copies of the values have been given to the
    /// GPUs. Changes do not wait on the host any more: the next one makes the GPUs wait for the end
    /// of the copies first.
    pub fn release_after(self, end: Arc<CopiesEnd>) -> Duration {
        let mut state = lock(&self.readers.state);
        state.copies.retain(|copies| !copies.has_come());
        state.copies.push(end);
        drop(state);
        self.release()
    }
}

impl Drop for Unchanged {
    fn drop(&mut self) {
        let mut state = lock(&self.readers.state);
        state.readers -= 1;
        // The changes that wait go on. The next one waits for other readers, and its time begins
        // anew.
        if state.readers == 0 {
            state.waiting_since = None;
            self.readers.readers_ended.notify_all();
        }
    }
}

/// The readers of values that must not change meanwhile.
#[derive(Debug, Default)]
pub(super) struct Readers {
    state: Mutex<ReadersState>,
    readers_ended: Condvar,
}

#[derive(Debug, Default)]
struct ReadersState {
    /// The number of readers.
    readers: usize,
    /// The copies that GPUs may still be making, of values that they must not change before.
    copies: Vec<Arc<CopiesEnd>>,
    /// The time at which the first change began to wait for these readers.
    waiting_since: Option<Instant>,
}

impl Readers {
    /// Waits until nobody reads, and makes the GPUs wait for the copies that they are making.
    /// Called before any value changes.
    ///
    /// # Errors
    /// CUDA's: then no value may change.
    pub(super) fn wait(&self) -> Result<()> {
        let mut state = lock(&self.state);
        if state.readers > 0 {
            // Show in a trace for how long training stood still.
            let _span = info_span!("wait for a copy of the state").entered();
            state.waiting_since.get_or_insert_with(Instant::now);
            state = self
                .readers_ended
                .wait_while(state, |state| state.readers > 0)
                .unwrap_or_else(PoisonError::into_inner);
        }
        for copies in state.copies.iter().filter(|copies| !copies.has_come()) {
            copies.order_before_changes()?;
        }
        state.copies.clear();
        Ok(())
    }
}
