//! The thread that watches a computation: it gathers the unit that the computation waits for.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use fsdp_flat::storage::Withheld;

use crate::Result;
use crate::exchange::Phase;
use crate::handle::FlatParamHandle;

/// A wrapped unit whose parameters are gathered on demand.
#[derive(Debug)]
pub(super) struct WrappedUnit {
    pub(super) handle: Arc<FlatParamHandle>,
    pub(super) withheld: Withheld,
}

/// The shortest and the longest interval between two polls of the locks.
const LOOKS: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];

/// The interval to the next poll is this fraction of the time since the last gather. So a
/// computation never waits for a poll longer than this fraction of the time that it has computed.
const PART: u32 = 64;

/// Every so many polls all units are checked, and not only the one that is expected next.
const ALL: u32 = 8;

/// Watches a computation until `stopped` is closed. Sends to `begun` when all units are withheld.
/// Collectives: one all-gather over the shard group each time the computation comes to another
/// unit.
pub(super) fn watch(
    units: Vec<Arc<WrappedUnit>>,
    phase: Phase,
    stopped: &Receiver<()>,
    begun: Sender<()>,
) -> Result<()> {
    let mut watch = Watch {
        units,
        phase,
        whole: Vec::new(),
    };
    for unit in &watch.units {
        unit.withheld.withhold();
    }
    for unit in &watch.units {
        unit.withheld.wait()?;
    }
    // The receiver waits for this, so sending cannot fail.
    let _ = begun.send(());
    drop(begun);
    let (mut expected, mut since, mut looks) = (None, Instant::now(), 0);
    loop {
        let [shortest, longest] = LOOKS;
        match stopped.recv_timeout((since.elapsed() / PART).clamp(shortest, longest)) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        looks += 1;
        if let Some(awaited) = watch.awaited(expected, looks % ALL == 0) {
            watch.switch_to(awaited)?;
            expected = watch.after(awaited);
            since = Instant::now();
        }
    }
}

/// A computation that is watched. Dropping it, also in a panic, lets all readers continue.
struct Watch {
    units: Vec<Arc<WrappedUnit>>,
    phase: Phase,
    /// The units that are gathered now.
    whole: Vec<usize>,
}

impl Watch {
    /// Returns the unit that the computation waits for; `None` if it waits for none. Checks only
    /// the `expected` unit, unless there is none or `all` is `true`.
    fn awaited(&self, expected: Option<usize>, all: bool) -> Option<usize> {
        let is_awaited = |unit: &usize| self.units[*unit].withheld.is_awaited();
        match expected.filter(is_awaited) {
            None if all || expected.is_none() => (0..self.units.len()).find(is_awaited),
            awaited => awaited,
        }
    }

    /// Returns the unit that most models use next: the following one in a forward, the preceding
    /// one in a backward.
    fn after(&self, unit: usize) -> Option<usize> {
        match self.phase {
            Phase::Forward => Some(unit + 1).filter(|next| *next < self.units.len()),
            Phase::Backward => unit.checked_sub(1),
        }
    }

    /// Gathers a unit that the computation waits for, and releases those that it has left.
    fn switch_to(&mut self, unit: usize) -> Result<()> {
        let (left, kept): (Vec<usize>, Vec<usize>) = std::mem::take(&mut self.whole)
            .into_iter()
            .partition(|whole| self.has_left(*whole));
        self.whole = kept;
        // Release their memory before new memory is gathered.
        for left in left {
            let WrappedUnit { handle, withheld } = &*self.units[left];
            handle.withhold(withheld, self.phase == Phase::Forward)?;
        }
        let WrappedUnit { handle, withheld } = &*self.units[unit];
        handle.gather_on_demand(withheld, self.phase == Phase::Forward)?;
        self.whole.push(unit);
        Ok(())
    }

    /// Returns `true` if the computation, which now waits for another unit, no longer uses this
    /// one.
    ///
    /// One operation may read parameters of both units: it holds locks of this unit while it waits
    /// for the other. Withholding this unit now would be a deadlock, so it stays gathered until the
    /// computation waits for a further unit. The answer is the same on all ranks, because while the
    /// computation waits, the only locks held are those of the waiting operation.
    fn has_left(&self, unit: usize) -> bool {
        let WrappedUnit { handle, withheld } = &*self.units[unit];
        let is_released = self.phase == Phase::Backward || handle.reshards_after_forward();
        is_released && !withheld.is_in_use()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        for unit in &self.units {
            unit.withheld.let_go();
        }
        if self.phase == Phase::Forward {
            for unit in self.whole.drain(..) {
                self.units[unit].handle.end_on_demand();
            }
        }
    }
}
