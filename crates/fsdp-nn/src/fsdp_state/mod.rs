//! State dicts of a sharded model and its optimizer over all ranks: torch's FSDP state-dict machinery.
//!
//! | module | what it holds |
//! |---|---|
//! | `settings` | [`StateDictType`], its configs, and the scope in which they hold |
//! | `model` | [`state_dict`] and [`load_state_dict`] of a model |
//! | `keys` | [`map_param_key_to_optim_keys`]: which parameters the ranks' optimizers have state for |
//! | `save` | [`optim_state_dict`]: local optimizer state to state by the model's names |
//! | `load` | [`optim_state_dict_to_load`] and what it is made of: state by names to local state |
//! | `build` | local state as it grows, value by value |
//! | `plan` | what a FlatParameter or a parameter makes of its saved state, or why it cannot |
//! | `rekey` | [`rekey_optim_state_dict`]: names and ids |
//! | `named` | [`full_optim_state_dict`] and the other functions of one layout each |
//!
//! # Optimizer state
//! There are two forms of an optimizer state dict. The *local* one is the optimizer's own: parameter ids (or names),
//! flat pieces of this rank ([`Optimizer::state_dict`](crate::Optimizer::state_dict)). The other, which is saved, is that
//! of the model without sharding: `{"state": {name: {entry: value}}, "param_groups": [{…, "params": [name]}]}`, with
//! whole tensors (`Full`) or boxes (`Sharded`). Parameters without state are left out. Each parameter has a `step`
//! tensor of its own.
//!
//! # What holds for every collective function here
//! Ranks agree before anything moves or changes: whatever is wrong on any rank is the same error on all of them. What
//! they are given they do not change, and tensors in what they return own their memory.

mod agree;
mod build;
mod error;
mod gather;
mod keys;
mod load;
mod local;
mod model;
mod named;
mod plan;
mod processed;
mod rekey;
mod resolve;
mod save;
mod settings;
mod user_state;

pub use error::OptimStateError;
pub use keys::{OptimStateKey, map_param_key_to_optim_keys};
pub use load::{
    OptimLoadOptions, flatten_optim_state, flatten_optim_state_dict, optim_state_dict_to_load, shard_orig_param_state,
};
pub use model::{load_state_dict, state_dict, state_dict_into};
pub use named::{
    flatten_sharded_optim_state_dict, full_optim_state_dict, scatter_full_optim_state_dict,
    shard_full_optim_state_dict, sharded_optim_state_dict,
};
pub use processed::{ProcessedState, ProcessedValue, broadcast_processed_state};
pub use rekey::{OptimStateKeyType, consume_prefix_in_state_dict_if_present, rekey_optim_state_dict};
pub use save::{optim_state_dict, optim_state_dict_into, unflatten_optim_state};
pub use settings::{
    FullOptimStateDictConfig, FullStateDictConfig, LocalOptimStateDictConfig, LocalStateDictConfig,
    OptimStateDictConfig, ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictConfig, StateDictSettings,
    StateDictType,
};

pub(crate) use settings::CurrentSettings;
