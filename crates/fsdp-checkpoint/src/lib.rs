//! State dicts of sharded models and optimizers, and the checkpoints that hold them.
//!
//! | module | what it holds |
//! |---|---|
//! | [`mod@save`], [`mod@load`] | a state dict to a checkpoint directory and back, at any number of ranks |
//! | [`in_place`] | the same load, into the memory of live tensors ([`load_in_place`]) |
//! | [`async_save`] | saves in the background |
//! | [`catalog`] | the checkpoints of a training run |
//! | `retention` | which of them stay ([`prune`]) |
//! | `template` | what to ask of a checkpoint for an optimizer ([`optimizer_template`]) |
//! | `verify` | whether a state dict is what was saved ([`verify_msd`], [`verify_osd_by_load`]) |
//! | [`state_dict`] | `get_state_dict`, `set_state_dict` and their model and optimizer halves |

pub mod async_save;
pub mod catalog;
mod error;
mod exchange;
mod from_rank0;
pub mod in_place;
mod incoming;
pub mod load;
mod names;
mod optim_format;
mod options;
mod plan;
mod progress;
mod retention;
mod rounds;
pub mod save;
pub mod state_dict;
mod template;
mod verify;

pub use async_save::AsyncSaver;
pub use catalog::{StepCheckpoint, latest_checkpoint, list_checkpoints, step_name, step_path};
pub use error::CheckpointError;
pub use fsdp_dcp::Location;
pub use fsdp_state::{KeepOn, LoadReport};
pub use in_place::load_in_place;
pub use load::{LoadOptions, load, load_whole};
pub use options::StateDictOptions;
pub use retention::{Retention, prune};
pub use save::{SaveOptions, SaveProgress, SaveReport, Saver, save};
pub use state_dict::{
    get_model_state_dict, get_optimizer_state_dict, get_state_dict, set_model_state_dict, set_optimizer_state_dict,
    set_state_dict,
};
pub use template::{init_optimizer_state, optimizer_template};
pub use verify::{verify_msd, verify_osd_by_load};
