//! The collectives of units: all-gathers of parameters, reductions of gradients, and their overlap
//! with the computation.
//!
//! - `groups` holds the process groups that a unit is sharded and replicated over.
//! - `unit` gathers the parameters of one unit, and reduces its gradients.
//! - `order` records the order in which a model uses its units.
//! - `worker` is a thread that runs collectives, one after the other, while the model computes.
//! - `overlap` combines them: it prefetches units in the recorded order, and lets the model
//!   continue while gradients are reduced.

mod groups;
mod order;
mod overlap;
mod unit;
mod worker;

pub(crate) use groups::Groups;
pub(crate) use overlap::{Moment, Overlap, Phase};
pub(crate) use unit::{Reduction, UnitExchange};
