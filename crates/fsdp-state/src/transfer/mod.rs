//! Moving boxes of tensors between ranks: who sends what to whom, and the collectives that do it.

mod exchange;
mod hand;
mod packing;
mod route;

pub(crate) use exchange::{Exchange, Item};
pub(crate) use route::Layout;
