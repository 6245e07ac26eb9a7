//! Waits for a library that does not tell when a call is over, so that this rank has to ask again
//! and again.

use std::thread;
use std::time::{Duration, Instant};

use crate::error::CommError;

/// The time between two checks of the other ranks while this one waits for the library.
pub(crate) const PEER_CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// The time that a call may still take after another rank has left, as that rank may have done its
/// part before.
pub(crate) const GRACE_PERIOD: Duration = Duration::from_millis(250);

/// The time for which a wait does not sleep. After that it sleeps for [`ASK_INTERVAL`] between two
/// checks.
const SPIN_INTERVAL: Duration = Duration::from_millis(2);

/// The time that a long wait sleeps between two checks.
const ASK_INTERVAL: Duration = Duration::from_micros(50);

/// The pause between two checks of a wait. It is short, as a library may make progress only while
/// it is called, but other ranks may need the processor.
#[derive(Debug)]
pub(crate) struct Pause {
    spin_until: Instant,
}

impl Pause {
    /// Begins the pauses of a wait.
    pub(crate) fn new() -> Self {
        Pause {
            spin_until: Instant::now() + SPIN_INTERVAL,
        }
    }

    /// Pauses until the next check: lets other threads run at first, and sleeps later.
    pub(crate) fn wait(&mut self) {
        if Instant::now() < self.spin_until {
            thread::yield_now()
        } else {
            thread::sleep(ASK_INTERVAL)
        }
    }
}

/// Waits until `is_done` returns `true`. `failure` returns the reason that this may never happen,
/// if there is one.
///
/// # Errors
/// The error of `is_done`; the reason that `failure` returns, once there has been one for
/// [`GRACE_PERIOD`].
pub(crate) fn wait_until(
    mut is_done: impl FnMut() -> Result<bool, CommError>,
    failure: impl Fn() -> Option<CommError>,
) -> Result<(), CommError> {
    let mut pause = Pause::new();
    let mut next_check = Instant::now() + PEER_CHECK_INTERVAL;
    let mut failing_since: Option<Instant> = None;
    while !is_done()? {
        pause.wait();
        // To look for lost ranks takes longer than to ask the library, so it is done less often.
        let now = Instant::now();
        if now < next_check {
            continue;
        }
        next_check = now + PEER_CHECK_INTERVAL;
        if let Some(failure) = failure()
            && failing_since.get_or_insert(now).elapsed() >= GRACE_PERIOD
        {
            return Err(failure);
        }
    }
    Ok(())
}
