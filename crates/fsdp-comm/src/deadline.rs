//! Deadlines: points in time whose computation cannot overflow.

use std::time::{Duration, Instant};

/// The time that an operation may take unless
/// [`ProcessGroup::with_deadline`](crate::ProcessGroup::with_deadline) says otherwise.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(60);

/// The longest timeout. Longer ones are cut to it, so that no point in time overflows.
pub(crate) const MAX_TIMEOUT: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Returns the deadline of something that begins now and may take `timeout`.
pub(crate) fn deadline_after(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(MAX_TIMEOUT)
}

/// Returns the time that is left until a deadline.
pub(crate) fn time_left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}
