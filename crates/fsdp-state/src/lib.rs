//! State dicts: nested names to tensors (whole, sharded, or raw bytes) and plain values, and what ranks do with them.
//!
//! | module | what it holds |
//! |---|---|
//! | [`state_dict`] | [`StateDict`] and [`StateValue`] |
//! | [`traverse`] | walking a state dict, and reaching into it by path |
//! | [`mod@flatten`] | nested to flat keys and back, by the two rules that torch has |
//! | [`iterate`] | a recursive map with callbacks for each kind of leaf |
//! | [`gather`] | sharded to whole, on the ranks that [`KeepOn`] names, all at once or tensor by tensor |
//! | [`broadcast`] | one rank's whole tensors to every rank's boxes |
//! | [`distribute`] | whole tensors that every rank holds to its boxes; sharded ones to other boxes |
//! | [`reshard`] | sharded tensors from any boxes to any boxes, all at once or tensor by tensor |
//! | [`offload`] | copies on the CPU |
//! | [`copy`] | dicts of the same structure: made, compared, copied |
//! | [`report`] | what a load found to differ |
//!
//! # What holds for every function that takes a process group
//! - It is collective: every rank of the group calls it, in the same order as other collectives.
//! - It first agrees: ranks compare a hash of their arguments, keys, kinds, dtypes and shapes, and any rank's own error
//!   becomes every rank's. Nothing moves, and nothing changes, before that. What goes wrong later ends in the same
//!   error on every rank too.
//! - The order of the keys in a rank's dict does not matter; collectives go by sorted path.
//! - Tensors in its result own their memory; those that it was given are unchanged.
//! - Tensors on a device travel through host memory.

pub mod broadcast;
mod companion;
pub mod copy;
pub mod distribute;
mod error;
pub mod flatten;
pub mod gather;
pub mod iterate;
mod keep_on;
mod load;
mod memory;
pub mod offload;
pub mod report;
pub mod reshard;
mod schema;
pub mod state_dict;
mod transfer;
pub mod traverse;

pub use broadcast::{broadcast_state_dict, broadcast_tensors};
pub use copy::{check_state_dict_similarity, copy_state_dict, create_cpu_state_dict};
pub use distribute::{distribute_state_dict, distribute_tensors, reshard_state_dict};
pub use error::StateError;
pub use flatten::{FlatStateDict, flatten_containers, flatten_state_dict, unflatten_state_dict};
pub use gather::{
    GatherOptions, all_gather_sharded_tensor, gather_sharded_tensor, gather_state_dict, gather_state_dict_into,
};
pub use iterate::{IterateOptions, Keep, StateDictCallbacks, iterate_state_dict};
pub use keep_on::KeepOn;
pub use load::LoadOptions;
pub use offload::{FullOrCpuOptions, maybe_full_or_cpu_state_dict, offload_state_dict_to_cpu};
pub use report::{LoadReport, Mismatch};
pub use reshard::{Reshard, reshard_sharded_tensor, reshard_sharded_tensors, reshard_sharded_tensors_into};
pub use state_dict::{StateDict, StateValue};
pub use traverse::{get_element, get_element_mut, set_element, traverse_state_dict};
