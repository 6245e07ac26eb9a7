//! Sharded models: building, training, and their state.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod accumulation;
mod buffers;
mod building;
mod clipping;
mod comm_hook;
mod equivalence;
mod finishing;
mod frozen;
mod get_set;
mod ignored;
mod mixed_precision;
mod odd_parameters;
mod offload;
mod optimizers;
mod prefetch;
mod recompute;
mod scaling;
mod schedules;
mod stale;
mod state_dicts;
mod stepping;
mod summon;
mod two_models;
mod units;
mod unreached;
