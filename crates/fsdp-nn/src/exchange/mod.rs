//! The collectives of units: what is gathered and reduced, and when.
//!
//! - `groups` are the ranks that a unit is exchanged with.
//! - `unit` gathers the parameters of one unit, and reduces its gradients.
//! - `order` knows in which order a model comes to its units.
//! - `worker` is a thread that runs collectives beside the computation, one after the other.
//! - `ahead` brings them together: it gathers the next units before the model comes to them, and lets the model go on
//!   while gradients are reduced.

mod ahead;
mod groups;
mod order;
mod unit;
mod worker;

pub(crate) use ahead::{Ahead, Moment, Phase};
pub(crate) use groups::Groups;
pub(crate) use unit::{Gathered, Reduction, UnitExchange};
pub(crate) use worker::{Ticket, Worker};
