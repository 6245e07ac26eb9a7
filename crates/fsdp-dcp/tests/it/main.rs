//! Tests of the crate from outside: real PyTorch checkpoints, whole saves, crashes.

#![expect(
    clippy::disallowed_methods,
    reason = "tests damage and move checkpoints by hand"
)]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod convert;
mod crash;
mod crash_convert;
mod deepspeed;
mod diff;
mod digests;
mod dtypes;
mod fixtures;
mod folder;
mod foreign;
mod legacy;
mod map;
mod megatron;
mod merge;
mod numpy_gguf;
mod opaque;
mod parallel_model;
mod rank_files;
#[path = "../common/sample.rs"]
mod sample;
mod save_load;
mod sidecars;
mod sound;
#[path = "../common/state.rs"]
mod state;
mod structure;
mod tensor_parallel;
mod truth;
mod verify;
mod weights;
