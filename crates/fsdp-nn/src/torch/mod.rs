//! torch's functions for state dicts of a sharded model and its optimizers, under torch's names.
//! Each chooses a source and a target, and calls [`load_state`](fsdp_state::load_state).
//!
//! | torch | here | source | target |
//! |---|---|---|---|
//! | `get_state_dict`, `get_model_state_dict`, `get_optimizer_state_dict` | [`get_state_dict`] … | live views | copies, or whole tensors |
//! | `set_state_dict`, `set_model_state_dict`, `set_optimizer_state_dict` | [`set_state_dict`] … | a dict on every rank or on rank 0 | the live model and optimizers |
//! | `FSDP.state_dict` | [`state_dict`], [`state_dict_into`] | live views | copies, or whole tensors |
//! | `FSDP.load_state_dict` | [`load_state_dict`] | a dict on every rank or on rank 0 | the live model |
//! | `FSDP.optim_state_dict` | [`optim_state_dict`], [`optim_state_dict_into`] | all ranks' local states, joined | copies, or whole tensors |
//! | `full_optim_state_dict`, `sharded_optim_state_dict` | [`full_optim_state_dict`], [`sharded_optim_state_dict`] | the same | the same |
//! | `FSDP.optim_state_dict_to_load` | [`optim_state_dict_to_load`] | a dict on every rank or on rank 0 | a local state dict |
//! | `shard_full_…`, `scatter_full_…`, `flatten_sharded_optim_state_dict` | [`shard_full_optim_state_dict`] … | the same | the same |
//! | `_flatten_optim_state_dict`, `_flatten_optim_state`, `_shard_orig_param_state` | [`flatten_optim_state_dict`] … | the same, or values that this rank has | the same |
//! | `_unflatten_optim_state` | [`unflatten_optim_state`] | one FlatParameter's local state | copies, or whole tensors |
//! | `_map_param_key_to_optim_keys`, `_broadcast_processed_state` | [`map_param_key_to_optim_keys`], [`broadcast_processed_state`] | – | – |
//! | `rekey_optim_state_dict`, `consume_prefix_in_state_dict_if_present` | [`rekey_optim_state_dict`] … | – | – |
//! | `state_dict_type`, `StateDictType` and its configs | [`StateDictSettings`] … | – | – |
//! | `_verify_osd_by_load`, `_verify_msd` | [`verify_osd_by_load`], [`verify_msd`] | a dict | fresh optimizers |
//! | `_gather_state_dict`, `_broadcast_state_dict`, `_distribute_state_dict`, … | in [`fsdp_state`] | a dict | fresh tensors |
//!
//! Arguments always come in the same order: the state, the parameters and optimizers, the options.
//!
//! # Optimizer state
//! There are two forms of an optimizer state dict. The *local* form belongs to one rank's
//! optimizer: its keys are parameter ids (or names), and its tensors are flat pieces of this rank
//! ([`Optimizer::state_dict`](crate::Optimizer::state_dict)). The other form, which is saved, is
//! that of the model without sharding: `{"state": {name: {entry: value}}, "param_groups": [{…,
//! "params": [name]}]}`, with whole tensors (`Full`) or sharded ones (`Sharded`). Parameters
//! without state are left out. Each parameter has its own `step` tensor.
//!
//! # Rules of every collective function here
//! Ranks agree before anything moves or changes: an error of one rank becomes the same error on all
//! of them. Arguments are not changed, and tensors in results own their memory.

mod get_set;
mod model;
mod optim;
mod options;
mod rekey;
mod state_dict_type;
mod verify;

pub use crate::model::state_dict_type::{StateDictConfig, StateDictSettings, StateDictType};
pub use crate::state::{OptimStateError, OptimStateKey, OptimStateKeyType};
pub use get_set::{
    get_model_state_dict, get_optimizer_state_dict, get_state_dict, set_model_state_dict,
    set_optimizer_state_dict, set_state_dict,
};
pub use model::{load_state_dict, state_dict, state_dict_into};
pub use optim::{
    OptimLoadOptions, broadcast_processed_state, flatten_optim_state, flatten_optim_state_dict,
    flatten_sharded_optim_state_dict, full_optim_state_dict, map_param_key_to_optim_keys,
    optim_state_dict, optim_state_dict_into, optim_state_dict_to_load,
    scatter_full_optim_state_dict, shard_full_optim_state_dict, shard_orig_param_state,
    sharded_optim_state_dict, unflatten_optim_state,
};
pub use options::StateDictOptions;
pub use rekey::{consume_prefix_in_state_dict_if_present, rekey_optim_state_dict};
pub use verify::{verify_msd, verify_osd_by_load};
