//! Moving boxes of tensors between ranks: who sends what to whom, and the collectives that do it.
//!
//! [`Layout`] is interval arithmetic that every rank does alike. [`Exchange`] carries it out, in
//! buckets of small tensors and windows of large ones, from the memory of state dicts straight into
//! memory that a target lends.

mod exchange;
mod packing;
mod route;
mod slots;

pub(crate) use exchange::{Exchange, Item};
pub(crate) use packing::{BoxBytes, read_box};
pub(crate) use route::{BoxesPerRank, Layout, Piece, group_by_value, incomplete_error};
