//! Units by name pattern ([`FsdpConfig::wrap`](crate::FsdpConfig::wrap)), in models whose code has no units.
//!
//! - `pattern` finds the unit of a parameter by its name.
//! - `watcher` sees when the forward comes to a layer: by the layer's tracing span.
//! - `units` gathers and releases: in forward by spans, in backward by the graph, which tells the order in which
//!   gradients come.

mod pattern;
mod units;
mod watcher;

pub(crate) use pattern::unit_of;
pub(crate) use units::WrappedUnits;
pub(crate) use watcher::Watcher;
