//! Units by name pattern ([`FsdpConfig::wrap`](crate::FsdpConfig::wrap)), in models whose code has no units.
//!
//! - `pattern` finds the unit of a parameter by its name.
//! - `units` withholds the units' parameters while a forward or a backward runs.
//! - `watch` gathers the unit that the computation waits for, and releases the one that it has left.

mod pattern;
mod units;
mod watch;

pub(crate) use pattern::unit_of;
pub(crate) use units::WrappedUnits;
