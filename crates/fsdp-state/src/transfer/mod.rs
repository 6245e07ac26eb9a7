//! Moving boxes of tensors between ranks: who sends what to whom, and the collectives that do it.
//!
//! [`Layout`] is interval arithmetic that every rank does alike. [`Exchange`] carries it out, in
//! buckets of small tensors and windows of large ones, from the memory of state dicts straight into
//! memory that a target lends. In a group that has collectives on GPU memory, boxes are packed and
//! sent there.

mod exchange;
#[cfg_attr(not(feature = "nccl"), path = "no_gpu.rs")]
mod gpu;
#[cfg(feature = "nccl")]
mod on_gpu;
mod packing;
mod route;
mod slots;

pub(crate) use exchange::{Exchange, Item};
pub(crate) use packing::{BoxBytes, read_box};
pub(crate) use route::{BoxesPerRank, Layout, Piece, group_by_value, incomplete_error};
