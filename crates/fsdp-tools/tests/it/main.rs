//! Tests of the crate from outside: real PyTorch checkpoints, conversions, damage, crashes.

#![expect(
    clippy::disallowed_methods,
    reason = "tests damage and move checkpoints by hand"
)]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod changes;
mod convert;
#[path = "../../../fsdp-formats/tests/common/crash_at.rs"]
mod crash_at;
mod crash_convert;
mod damaged_npz;
mod deepspeed;
mod diff;
mod digests;
mod dtypes;
mod folder;
mod foreign;
mod large_values;
mod legacy;
mod map;
mod megatron;
mod merge;
mod merge_tied;
mod numpy_gguf;
mod numpy_values;
mod opaque;
mod parallel_model;
mod rank_files;
#[path = "../../../fsdp-formats/tests/common/sample.rs"]
mod sample;
mod sidecars;
mod sound;
#[path = "../../../fsdp-formats/tests/common/state.rs"]
mod state;
mod structure;
mod tensor_parallel;
mod torch_checkpointing;
#[path = "../../../fsdp-formats/tests/common/truth.rs"]
mod truth;
mod verify;
mod weights;
