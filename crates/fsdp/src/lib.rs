//! Shard candle models over many ranks; save, load, reshard, verify and convert their state.

pub mod data;
pub mod exit_codes;
pub mod gpt;

pub use fsdp_comm::{CommError, ProcessGroup, ReduceOp, run_local};
pub use fsdp_flat::ShardedTensor;
pub use fsdp_layout::{DeviceMesh, PlainValue};
pub use fsdp_nn::{
    Algorithm, FsdpConfig, FullyShardedDataParallel, NnError, Optimizer, Scope, ShardedParameters, ShardingStrategy, Unit,
    UnitOutput,
};
pub use fsdp_state::{StateDict, StateValue};
