//! The collectives of units: all-gathers of parameters, reductions of gradients, and their overlap
//! with the computation.
//!
//! - `agreement` turns one rank's error into one of all.
//! - `groups` holds the process groups that a unit is sharded and replicated over.
//! - `unit` gathers the parameters of one unit, and reduces its gradients.
//! - `gradient` puts gradients into the flat gradient of a unit, and adds them up.
//! - `device` does on a GPU what needs the GPU's memory.
//! - `shared` is what all units of a model share, and `unchanged` the guard for whom changes of
//!   their values wait.
//! - `mark` orders the work of several threads on one GPU.
//! - `order` records the order in which a model uses its units.
//! - `worker` is a thread that runs collectives, one after the other, while the model computes.
//! - `overlap` combines them: it prefetches units in the recorded order, and lets the model
//!   continue while gradients are reduced.

mod agreement;
pub(crate) mod device;
pub(crate) mod gradient;
mod groups;
mod mark;
mod order;
mod overlap;
mod shared;
mod unchanged;
mod unit;
mod worker;

pub(crate) use agreement::{agree, resolve_agreement};
pub(crate) use groups::Groups;
pub(crate) use overlap::{Overlap, Phase};
pub(crate) use shared::Shared;
pub use unchanged::Unchanged;
pub(crate) use unit::{Gathered, Reduction, UnitExchange};
