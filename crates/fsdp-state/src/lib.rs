//! State dicts, which map nested names to tensors (whole, sharded, or raw bytes) and plain values,
//! and the collectives on them.
//!
//! | module | what it holds |
//! |---|---|
//! | `state_dict` | [`StateDict`] and [`StateValue`] |
//! | `traverse` | walking a state dict, mapping its values, and reaching into it by path |
//! | `flatten` | nested to flat keys and back, by either of torch's two rules |
//! | `schema` | [`Schema`]: a state dict without its elements |
//! | [`engine`] | [`load_state`], which moves all state, from a [`Source`] to a [`Target`] |
//! | `transfer` | the collectives that move boxes of tensors between ranks |
//! | `lend` | [`Memory`] that a target lends to a source |
//! | `collectives` | gather, broadcast, distribute, reshard: each is a source and a target |
//! | `copy` | dicts of the same structure: made on the CPU, compared, copied |
//! | `report` | the differences that a load has found |
//!
//! # Rules for every function that takes a process group
//! - It is collective: every rank of the group calls it, in the same order as other collectives.
//! - It begins with an agreement. Ranks compare a hash of their arguments, keys, kinds, dtypes and
//!   shapes, and an error of one rank becomes an error on every rank. Nothing moves, and nothing
//!   changes, before that. A later failure is the same error on every rank too.
//! - The order of the keys in a rank's dict does not matter: collectives use the order of sorted
//!   paths.
//! - Tensors in the result own their memory. Arguments are unchanged.
//! - Tensors on a GPU are sent from there if the group has collectives on GPUs (NCCL), and through
//!   host memory otherwise.

mod collectives;
mod copy;
mod digest;
pub mod engine;
mod error;
mod flatten;
mod keep_on;
mod lend;
mod memory;
mod replicas;
mod report;
mod schema;
mod state_dict;
mod transfer;
mod traverse;

pub use collectives::{
    GatherCall, Reshard, all_gather_sharded_tensor, broadcast_state_dict, distribute_state_dict,
    gather, gather_sharded_tensor, gather_state_dict, gather_state_dict_into,
    reshard_sharded_tensor, reshard_sharded_tensors, reshard_state_dict,
};
pub use copy::{
    DeferredCopies, check_state_dict_similarity, copy_state_dict, copy_state_dict_deferring,
    create_cpu_state_dict, offload_state_dict_to_cpu,
};
pub use digest::digest_state_dict;
pub use engine::{LoadError, LoadOptions, Source, Target, check_state, is_part_of, load_state};
pub use error::{StateError, WrongTensor};
pub use flatten::{FlatStateDict, flatten_containers, flatten_state_dict, unflatten_state_dict};
pub use keep_on::{GatherOptions, KeepOn};
pub use lend::{Lend, Memory, lent_bytes};
pub use replicas::check_replicas;
pub use report::{LoadReport, Mismatch};
pub use schema::{Leaf, Schema};
pub use state_dict::{StateDict, StateValue};
pub use traverse::{
    get_element, get_element_mut, iterate_state_dict, set_element, traverse_state_dict,
};
