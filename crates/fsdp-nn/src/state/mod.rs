//! The state of a sharded model and its optimizers: views of it, and a target that takes it.
//!
//! | file | what it holds |
//! |---|---|
//! | `names` | the one rule for names of tied parameters, and the keys of state in a dict |
//! | `groups` | `param_groups`: read, written, and matched with live ones |
//! | `saved` | the optimizer state that a source holds, sorted by parameter |
//! | `entry` | saved entries on their way to an optimizer's state: the only reader of them |
//! | `views` | views of the live state: [`live_model_state_dict`], [`live_optim_state_dict`] |
//! | `live` | [`LiveTarget`]: a live model and its optimizers take state |
//! | `local` | an optimizer's local state dict, by ids or by its own names: torch's `Optimizer.state_dict` and `load_state_dict` |
//! | `join` | all ranks' local optimizer states as one state dict by the model's names |
//! | `agree` | errors that travel between ranks as the types that they are |

mod agree;
mod entry;
mod groups;
mod join;
mod live;
mod local;
mod names;
mod saved;
mod views;

pub use crate::error::OptimStateError;
pub(crate) use groups::{
    SavedGroup, make_group_dicts, make_optim_dict, read_param_groups, to_plain,
};
pub use join::OptimStateKey;
pub(crate) use join::{join, resolve_keys};
pub(crate) use live::ExactLoad;
pub use live::{LiveTarget, StatePrefixes};
pub(crate) use local::{
    EMPTY_PIECES, LocalStates, PortableStates, load_exactly, load_from_this_rank,
};
pub use names::OptimStateKeyType;
pub(crate) use names::{find_key_type, names_that_count};
pub use views::{MissingState, live_model_state_dict, live_optim_state_dict};
pub(crate) use views::{live_states_and_groups, persistent_buffers};
