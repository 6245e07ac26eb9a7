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
#[path = "../../../crates/fsdp-dcp/tests/common/sample.rs"]
mod sample;
mod server;
#[path = "../../../crates/fsdp-dcp/tests/common/state.rs"]
mod state;
