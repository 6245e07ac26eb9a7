//! A backend that is slowed down to the speed of a network, for tests and benches that overlap
//! communication and computation.

use std::cell::Cell;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::backend::{Backend, Members, Planner, Round, Tally, Vote};
use crate::deadline::time_left;
use crate::error::CommError;
use crate::sync::lock;

/// A simulated network link: each operation takes its latency, and the bytes of other ranks take as
/// long as over a link of this speed. Small payloads, up to 4 KiB, come with the agreement, and
/// take no time beside the latency. Waiting takes no processor time. See
/// [`LocalRanks::link`](crate::LocalRanks) and [`TcpOptions::link`](crate::TcpOptions).
///
/// ```
/// use std::time::{Duration, Instant};
/// use fsdp_comm::{LocalRanks, SimulatedLink};
/// let link = SimulatedLink { latency: Duration::from_millis(2), bytes_per_second: 1_000_000 };
/// let ranks = LocalRanks { world_size: 2, link: Some(link), ..LocalRanks::default() };
/// let begun = Instant::now();
/// ranks.run(|group| {
///     let mut both = [0u8; 20_000];
///     group.all_gather_into(&mut both, &[1; 10_000])
/// })?.into_iter().collect::<Result<Vec<()>, _>>()?;
/// // 10,000 bytes from the other rank.
/// assert!(begun.elapsed() >= Duration::from_millis(12));
/// # Ok::<(), fsdp_comm::CommError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimulatedLink {
    /// The time until the first byte arrives.
    pub latency: Duration,
    /// The bytes that arrive in a second after that; 0 stands for no limit.
    pub bytes_per_second: u64,
}

impl SimulatedLink {
    /// Returns the time for which some bytes occupy the link.
    fn transfer_time(&self, bytes: usize) -> Duration {
        // A speed of 0, which stands for no limit, gives no time that there is.
        Duration::try_from_secs_f64(bytes as f64 / self.bytes_per_second as f64).unwrap_or_default()
    }
}

/// The link of one rank, which all its groups share.
#[derive(Debug)]
struct Link {
    options: SimulatedLink,
    /// The time at which the last byte so far has left the link.
    free_at: Mutex<Instant>,
}

impl Link {
    /// Waits until some bytes have crossed the link, behind the bytes that already occupy it.
    fn wait_for_transfer(&self, bytes: usize) {
        let arrival = {
            let mut free_at = lock(&self.free_at);
            *free_at = (*free_at).max(Instant::now()) + self.options.transfer_time(bytes);
            *free_at + self.options.latency
        };
        thread::sleep(time_left(arrival));
    }
}

/// A backend behind a simulated link.
#[derive(Debug)]
pub(crate) struct LinkedBackend {
    inner: Arc<dyn Backend>,
    link: Arc<Link>,
}

impl LinkedBackend {
    /// Puts a backend behind a simulated link, if there is one. The link is idle at first.
    pub(crate) fn behind(inner: Arc<dyn Backend>, link: Option<SimulatedLink>) -> Arc<dyn Backend> {
        let Some(options) = link else {
            return inner;
        };
        let free_at = Mutex::new(Instant::now());
        let link = Arc::new(Link { options, free_at });
        Arc::new(LinkedBackend { inner, link })
    }
}

impl Backend for LinkedBackend {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn members(&self) -> &Members {
        self.inner.members()
    }

    fn round<'p>(
        &self,
        round: &Round<'_>,
        vote: &Vote<'_>,
        send: &[u8],
        plan: Planner<'p, '_>,
    ) -> Result<(), CommError> {
        let received_bytes = Cell::new(0);
        let measuring_planner = Box::new(|tally: &Tally| {
            let plan = plan(tally)?;
            if let Some(plan) = &plan {
                received_bytes.set(plan.moved_bytes(self.members().rank).1);
            }
            Ok(plan)
        });
        self.inner.round(round, vote, send, measuring_planner)?;
        self.link.wait_for_transfer(received_bytes.get());
        Ok(())
    }

    fn subgroup(&self, round: &Round<'_>, members: Members) -> Result<Arc<dyn Backend>, CommError> {
        Ok(Arc::new(LinkedBackend {
            inner: self.inner.subgroup(round, members)?,
            link: Arc::clone(&self.link),
        }))
    }

    fn abort(&self, round: u64, error: &CommError) {
        self.inner.abort(round, error);
    }
}
