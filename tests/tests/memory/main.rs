//! The memory that training, state dicts and checkpoints take, measured by a counting allocator.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod full_state_dict;
mod recompute;
mod resume;
mod training;
mod upload;

use std::sync::{Mutex, MutexGuard, PoisonError};

use fsdp_tests::counting_allocator::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Returns a guard that one test at a time can hold. The allocator counts the whole process, also
/// where a runner runs several tests in one.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
