//! Tests of the crate from outside: real PyTorch checkpoints, whole saves, crashes.

#![expect(
    clippy::disallowed_methods,
    reason = "tests damage and move checkpoints by hand"
)]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod crash;
#[path = "../common/crash_at.rs"]
mod crash_at;
mod fixtures;
#[path = "../common/load.rs"]
mod load;
mod lost_metadata;
#[path = "../common/sample.rs"]
mod sample;
mod save_load;
#[path = "../common/state.rs"]
mod state;
#[path = "../common/truth.rs"]
mod truth;
