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
//! Inside, `model` is the sharded model as a whole, `unit` one unit of it and its hooks in candle's
//! autograd, and `exchange` the collectives of units. `train` has what surrounds a step: clipping,
//! loss scaling, averages, schedules and samplers. `error` has the errors of all of them, and
//! `guards` the locks and guards.
//!
//! How it works: each parameter tensor is the output of a custom op on a tiny anchor variable.
//! candle's backward passes the parameter's gradient to that op, which collects it. The storage of
//! the parameter is released after the forward and filled again for the backward. Every weight and
//! graph node of the model shares that storage, so it needs no change.

pub mod algorithm;
mod config;
mod error;
mod exchange;
mod guards;
mod model;
pub mod optimizer;
pub mod state;
mod tasks;
pub mod torch;
mod train;
pub mod unit;

pub use algorithm::Algorithm;
pub use config::{BackwardPrefetch, FsdpConfig, MixedPrecision, ShardingStrategy};
pub use error::{BuildError, NnError, Result, ScalerError, StateDictError};
pub use exchange::Unchanged;
#[doc(hidden)]
pub use model::is_running_statistic;
pub use model::{
    CommHook, FullParameters, FullyShardedDataParallel, Scope, ShardedParameters, fully_sharded,
    parameters, scope,
};
pub use optimizer::{Optimizer, ParamGroup};
pub use train::sampler::ShardedSampler;
pub use train::schedule::{Decay, Schedule};
pub use train::{
    AveragedModel, ClipOptions, FinishOptions, FinishedStep, GradNorm, GradScaler,
    GradScalerOptions, OnNonFinite, sampler, schedule,
};
pub use unit::{Recomputed, Unit, UnitOutput, recompute};
