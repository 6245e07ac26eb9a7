//! The names that a training program needs: `use fsdp::prelude::*`.

pub use fsdp_checkpoint::{
    LoadOptions, SaveOptions, StateDictOptions, get_state_dict, latest_checkpoint, list_checkpoints, load,
    load_in_place, save, set_state_dict,
};
pub use fsdp_comm::{ProcessGroup, ReduceOp, run_local};
pub use fsdp_flat::ShardedTensor;
pub use fsdp_layout::{DeviceMesh, PlainValue};
pub use fsdp_nn::algorithm::{AdagradOptions, AdamOptions, Algorithm, SgdOptions};
pub use fsdp_nn::{
    FsdpConfig, FullyShardedDataParallel, Optimizer, Scope, ShardedParameters, ShardingStrategy, Unit, UnitOutput,
};
pub use fsdp_state::{StateDict, StateValue};
