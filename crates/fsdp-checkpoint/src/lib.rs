//! Sharded checkpoints of training runs: saved, loaded, and removed when they are old.
//!
//! | module | what it holds |
//! |---|---|
//! | `checkpointer` | [`Checkpointer`]: saves, loads and removes the checkpoints of a run |
//! | `stateful` | the state that it saves and loads: [`Stateful`], and [`TrainState`] |
//! | `stateful_dict`, `part` | [`StatefulDict`]: several of them in one checkpoint, each below a key of its own |
//! | `save`, `load` | [`save()`], [`load()`], [`load_in_place()`]: a state dict to a checkpoint directory and back, on any number of ranks |
//! | `from_checkpoint` | [`from_checkpoint()`]: a model built from a checkpoint of any format |
//! | `source` | [`CheckpointSource`]: a checkpoint of any format as the source of a load |
//! | `background` | saves in the background |
//! | `memory_tier` | the newest steps of a run, in the memory of the hosts |
//! | `catalog`, `retention` | [`list_checkpoints`], [`Retention`]: the checkpoints of a run, and which of them are kept |
//!
//! Every load calls `fsdp_state`'s [`load_state`](fsdp_state::load_state) with a
//! [`CheckpointSource`]. Loads of state from other ranks use the same function with another source.

mod background;
mod catalog;
mod checkpointer;
mod compare;
mod digest;
mod error;
mod from_checkpoint;
mod load;
mod local_state;
mod memory_tier;
mod parent;
mod part;
mod plan;
mod progress;
mod retention;
mod rounds;
mod save;
mod shared_read;
mod source;
mod stateful;
mod stateful_dict;
mod threads;

pub use catalog::{
    StepCheckpoint, latest_checkpoint, list_checkpoints, list_newest_first, list_to_resume,
    step_name, step_path,
};
pub use checkpointer::{CheckpointName, Checkpointer, CheckpointerOptions, RunFacts};
pub use digest::{check_replicas, state_digest};
pub use error::CheckpointError;
pub use from_checkpoint::{FromCheckpointOptions, from_checkpoint};
pub use fsdp_formats::Location;
pub use fsdp_nn::torch::{
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, get_state_dict,
    set_model_state_dict, set_optimizer_state_dict, set_state_dict,
};
pub use fsdp_state::{KeepOn, LoadOptions, LoadReport, WrongTensor};
pub use load::{load, load_in_place, load_whole};
pub use part::CheckpointPart;
pub use progress::SaveProgress;
pub use retention::{Retention, prune};
pub use save::{STORAGE_DEADLINE, SaveOptions, SaveReport, save};
pub use source::CheckpointSource;
pub use stateful::{KeptUnchanged, Stateful, TrainState};
pub use stateful_dict::StatefulDict;
