//! Shard candle models over many ranks, and save and load their state on any number of ranks.
//!
#![doc = include_str!("../README.md")]
//!
//! # Modules
//!
//! | module | what it holds |
//! |---|---|
//! | [`prelude`] | the names that a training program needs |
//! | [`nn`] | [`FullyShardedDataParallel`](nn::FullyShardedDataParallel), optimizers on shards, torch's names for their state |
//! | [`checkpoint`] | [`Checkpointer`](checkpoint::Checkpointer) and [`TrainState`](checkpoint::TrainState): runs saved and resumed; state dicts saved and loaded |
//! | [`ops`] | softmax, norms, attention and other operations of candle models, fast and with gradients |
//! | [`comm`] | process groups and collectives |
//! | [`state`], [`flat`], [`layout`] | state dicts, sharded tensors, and the arithmetic of both |
//! | [`formats`] | checkpoint files of all formats, without any tensor library |
//! | [`tools`] | conversion, verification, comparison, merging and signing of checkpoints |
//!
//! The `fsdp` command is in a separate package, `fsdp-cli`.

pub mod prelude;

pub use fsdp_checkpoint as checkpoint;
pub use fsdp_comm as comm;
pub use fsdp_flat as flat;
pub use fsdp_formats as formats;
pub use fsdp_layout as layout;
pub use fsdp_nn as nn;
pub use fsdp_ops as ops;
pub use fsdp_state as state;
pub use fsdp_tools as tools;
