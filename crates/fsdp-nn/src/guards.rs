//! Guards: locks, and code that runs at the end of a scope, however that ends.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also if a thread has panicked with the lock: what the locks of this crate protect
/// is complete at any time.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A guard that calls a function when it is dropped.
pub(crate) struct OnDrop<F: FnMut()>(pub(crate) F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
