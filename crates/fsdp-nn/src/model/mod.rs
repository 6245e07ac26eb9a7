//! The sharded model: how it is declared and built, and its forward and backward.
//!
//! - `scope` is what the model's code builds itself with, and `registry` what it has declared.
//! - `build` makes units of the declarations, with initial values from `init`.
//! - `parameters` is the model as optimizers and state dicts see it, and `gradients` the end of its
//!   backward.
//! - `fully_sharded` is the model as a training loop sees it.
//! - `summon` lends whole parameters.
//! - `state_dict_type` is the choice of torch's type of state dicts.

mod build;
pub mod fully_sharded;
mod gradients;
mod init;
pub mod parameters;
mod registry;
pub mod scope;
pub(crate) mod state_dict_type;
mod summon;

pub use fully_sharded::{CommHook, FullyShardedDataParallel};
pub use parameters::ShardedParameters;
pub use registry::is_running_statistic;
pub use scope::Scope;
pub use summon::FullParameters;
