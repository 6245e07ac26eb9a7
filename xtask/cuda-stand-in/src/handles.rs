//! Handles: the numbers by which C programs name streams, events, modules and the like.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The pointer that a C program keeps. It points to nothing.
pub(crate) type Handle = *mut c_void;

/// Objects by handle. A handle that is not in use is found out, which a pointer would not be.
#[derive(Debug)]
pub(crate) struct Handles<T> {
    objects: Mutex<Option<(usize, HashMap<usize, T>)>>,
}

/// The first handle. The numbers below it are streams that need not be made.
const FIRST: usize = 1 << 12;

impl<T: Clone> Handles<T> {
    pub(crate) const fn new() -> Self {
        Handles {
            objects: Mutex::new(None),
        }
    }

    /// Stores an object, and returns its handle.
    pub(crate) fn add(&self, object: T) -> Handle {
        let mut objects = lock(&self.objects);
        let (next, objects) = objects.get_or_insert_with(|| (FIRST, HashMap::new()));
        *next += 1;
        objects.insert(*next, object);
        std::ptr::without_provenance_mut(*next)
    }

    pub(crate) fn get(&self, handle: Handle) -> Option<T> {
        lock(&self.objects).as_ref()?.1.get(&handle.addr()).cloned()
    }

    pub(crate) fn remove(&self, handle: Handle) -> Option<T> {
        lock(&self.objects).as_mut()?.1.remove(&handle.addr())
    }
}

/// Locks a mutex whose value is whole even after a panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_that_was_removed_names_nothing() {
        let handles: Handles<u8> = Handles::new();
        let first = handles.add(1);
        let second = handles.add(2);
        assert_eq!(
            (handles.get(first), handles.get(second)),
            (Some(1), Some(2))
        );
        assert_eq!(handles.remove(first), Some(1));
        assert_eq!(
            (
                handles.get(first),
                handles.remove(first),
                handles.get(second)
            ),
            (None, None, Some(2))
        );
        assert_eq!(handles.get(std::ptr::null_mut()), None);
    }
}
