//! `FullyShardedDataParallel` for candle, and the optimizers that step on shards.
//!
//! | module | contents |
//! |---|---|
//! | [`algorithm`] | the arithmetic of SGD, Adam, AdamW, Adagrad, Adafactor, Muon and schedule-free AdamW: pure functions on slices |
//! | [`state`] | the live state of models and optimizers: views of it, and a target that takes it |
//! | [`mod@torch`] | torch's functions for state dicts, under torch's names |
//! | [`fully_sharded`] | the sharded model: forward, backward, `no_sync` |
//! | [`optimizer`] | the optimizer over a sharded model's parameters |
//! | [`parameters`] | the parameters as one rank sees them |
//! | [`sampler`] | the samples that each rank sees |
//! | [`scope`] | the builder of a model |
//! | [`schedule`] | learning rates over the steps of a run |
//! | [`mod@unit`] | a module that is gathered and released as one |
//!
//! How it works: each parameter tensor is the output of a custom op on a tiny anchor variable.
//! candle's backward passes the parameter's gradient to that op, which collects it. The storage of
//! the parameter is released after the forward and filled again for the backward. Every weight and
//! graph node of the model shares that storage, so it needs no change.

mod agreement;
pub mod algorithm;
mod averaged;
mod build;
mod candle_error;
mod clip;
mod comm_hook;
mod config;
mod device;
mod error;
mod exchange;
pub mod fully_sharded;
mod gradient;
mod handle;
mod hooks;
mod init;
mod last_gradients;
mod optim_state_error;
pub mod optimizer;
pub mod parameters;
mod precision;
mod recompute;
mod registry;
mod requires_grad;
pub mod sampler;
mod scaler;
mod scaler_error;
pub mod schedule;
pub mod scope;
mod settings;
mod shared;
pub mod state;
mod strategy;
mod summon;
mod tasks;
pub mod torch;
mod unchanged;
pub mod unit;
mod unreached;

pub use algorithm::Algorithm;
pub use averaged::AveragedModel;
pub use clip::{ClipOptions, GradNorm, OnNonFinite};
pub use comm_hook::CommHook;
pub use config::{BackwardPrefetch, FsdpConfig};
pub use error::{NnError, Result};
pub use fully_sharded::FullyShardedDataParallel;
pub use optimizer::{Optimizer, ParamGroup};
pub use parameters::ShardedParameters;
pub use precision::MixedPrecision;
pub use recompute::{Recomputed, recompute};
pub use sampler::ShardedSampler;
pub use scaler::{GradScaler, GradScalerOptions};
pub use scaler_error::ScalerError;
pub use schedule::{Decay, Schedule};
pub use scope::Scope;
pub use strategy::ShardingStrategy;
pub use summon::FullParameters;
pub use unchanged::Unchanged;
pub use unit::{Unit, UnitOutput};
