//! Units by name pattern ([`FsdpConfig::wrap`](crate::FsdpConfig::wrap)), in models whose code has
//! no units.
//!
//! candle has no hook for the use of a weight, but every operation locks the weight's storage
//! before it reads it. While a forward or a backward runs, the locks of all units that are not
//! gathered are held. So the computation blocks when it comes to a unit, and a second thread
//! notices that, gathers the unit, and lets the computation continue.
//!
//! - `pattern` finds the unit of a parameter by its name.
//! - `units` withholds the units' parameters (releases them and holds their locks) while a forward
//!   or a backward runs.
//! - `watch` is the second thread: it gathers the unit that the computation waits for, and releases
//!   the one before it.

mod pattern;
mod units;
mod watch;

pub(crate) use pattern::unit_of;
pub(crate) use units::WrappedUnits;
