//! Checkpoints in object stores: in memory with faults, and on a real server that speaks S3.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod commands;
mod conformance;
mod faults;
mod faulty;
#[path = "../../../crates/fsdp-formats/tests/common/load.rs"]
mod load;
#[path = "../../../crates/fsdp-formats/tests/common/sample.rs"]
mod sample;
mod server;
#[path = "../../../crates/fsdp-formats/tests/common/state.rs"]
mod state;
