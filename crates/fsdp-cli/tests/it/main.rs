//! The `fsdp` command from outside.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
#[cfg(feature = "train")]
#[path = "../metrics/mod.rs"]
mod metrics;

mod account;
mod commands;
mod digest;
mod lossless;
mod output;
mod overwrite;
mod pictures;
mod plan;
mod plurals;
mod runs;
mod sign;

#[cfg(feature = "train")]
mod branches;
#[cfg(feature = "train")]
mod equivalence;
#[cfg(feature = "train")]
mod failures;
#[cfg(feature = "train")]
mod init_from;
#[cfg(feature = "train")]
mod kill;
#[cfg(feature = "train")]
mod launch;
#[cfg(feature = "train")]
mod memory_tier;
#[cfg(feature = "train")]
mod report;
#[cfg(feature = "train")]
mod restart;
#[cfg(feature = "train")]
mod stop;
#[cfg(feature = "train")]
mod strangers;
#[cfg(feature = "train")]
mod train;
#[cfg(feature = "train")]
mod train_options;
