//! Checkpoints of sharded models and optimizers: saves, loads, and all that can go wrong with them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod async_save;
mod branches;
mod bytes_read;
mod faults;
mod features;
mod from_checkpoint;
mod in_place;
mod incremental;
mod memory_tier;
mod overlapped;
mod plan_cache;
mod read_once;
mod reshard;
mod retention;
mod several_models;
