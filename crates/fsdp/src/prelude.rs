//! The names that a training program needs: `use fsdp::prelude::*`.

pub use fsdp_checkpoint::{
    Checkpointer, CheckpointerOptions, FromCheckpointOptions, LoadOptions, Retention, SaveOptions,
    Stateful, StatefulDict, TrainState, from_checkpoint,
};
pub use fsdp_comm::{ProcessGroup, ReduceOp, run_local};
pub use fsdp_flat::ShardedTensor;
pub use fsdp_layout::{DeviceMesh, PlainValue};
pub use fsdp_nn::{
    AveragedModel, Decay, FsdpConfig, FullyShardedDataParallel, GradScaler, Optimizer, Recomputed,
    Schedule, Scope, ShardedParameters, ShardedSampler, ShardingStrategy, Unit,
    algorithm::{
        AdagradOptions, AdamOptions, Algorithm, MuonOptions, ScheduleFreeOptions, SgdOptions,
    },
};
pub use fsdp_state::{StateDict, StateValue};
