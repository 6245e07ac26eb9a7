//! Starting ranks as threads, and turning their panics into errors.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use fsdp_layout::ErrorKind;

use super::turns::{TurnGuard, Turns};
use super::{Hub, LocalBackend, Membership};
use crate::backend::Members;
use crate::deadline::DEFAULT_DEADLINE;
use crate::error::{CommError, RankFailure, bounded};
use crate::group::ProcessGroup;
use crate::link::{LinkedBackend, SimulatedLink};
use crate::sync::lock;

/// Runs `f` on `world_size` threads, one for each rank, and returns their results in rank order.
///
/// # Errors
/// [`CommError::RankFailed`] names the ranks that panicked, the first to do so first. The
/// operations of other ranks that needed them have failed, as they do if a rank returns early.
/// [`CommError::InvalidArgument`] for no ranks, and [`CommError::Start`] for a thread that cannot
/// be started.
pub fn run_local<T, F>(world_size: usize, f: F) -> Result<Vec<T>, CommError>
where
    F: Fn(ProcessGroup) -> T + Sync,
    T: Send,
{
    let ranks = LocalRanks {
        world_size,
        ..LocalRanks::default()
    };
    ranks.run(f)
}

impl ProcessGroup {
    /// Returns a group of the calling rank alone. Its collectives wait for nobody. With it a rank
    /// runs a collective function on its own data alone.
    ///
    /// ```
    /// use fsdp_comm::{CommError, ProcessGroup};
    /// let group = ProcessGroup::alone();
    /// assert_eq!((group.rank(), group.world_size()), (0, 1));
    /// assert_eq!(group.all_gather_object(&7)?, [7]);
    /// # Ok::<(), CommError>(())
    /// ```
    #[must_use]
    pub fn alone() -> Self {
        let membership = Membership {
            hub: Arc::default(),
            rank: 0,
        };
        let backend = LocalBackend::new(Arc::new(membership), Members::world(0, 1));
        ProcessGroup::new(Arc::new(backend), DEFAULT_DEADLINE, 1)
    }
}

/// The options of [`run_local`].
///
/// ```
/// use std::time::Duration;
/// use fsdp_comm::{CommError, LocalRanks};
/// let ranks = LocalRanks {
///     world_size: 2,
///     deadline: Duration::from_millis(50),
///     ..LocalRanks::default()
/// };
/// let outcomes = ranks.run(|group| {
///     if group.rank() == 0 { group.barrier() } else { Ok(std::thread::sleep(Duration::from_millis(200))) }
/// })?;
/// assert!(matches!(&outcomes[0], Err(CommError::Timeout { missing, .. }) if *missing == [1]));
/// # Ok::<(), CommError>(())
/// ```
#[derive(Debug, Clone)]
pub struct LocalRanks {
    /// The number of ranks; 1 by default.
    pub world_size: usize,
    /// The deadline of the group that each rank gets; [`DEFAULT_DEADLINE`] by default.
    pub deadline: Duration,
    /// The stack size of each rank's thread. By default it is 256 MiB, because candle's backward
    /// pass recurses once for each node of the graph. It is address space: only the used part
    /// becomes memory.
    pub stack_bytes: usize,
    /// A simulated network link before each rank, for tests and benches; none by default.
    pub link: Option<SimulatedLink>,
    /// The order in which ranks run; the operating system decides by default.
    pub turns: Option<Arc<dyn Turns>>,
}

impl Default for LocalRanks {
    fn default() -> Self {
        LocalRanks {
            world_size: 1,
            deadline: DEFAULT_DEADLINE,
            stack_bytes: 256 << 20,
            link: None,
            turns: None,
        }
    }
}

impl LocalRanks {
    /// Runs `f` on all ranks: see [`run_local`].
    ///
    /// # Errors
    /// No ranks, ranks that could not be started, ranks that panicked.
    pub fn run<T, F>(&self, f: F) -> Result<Vec<T>, CommError>
    where
        F: Fn(ProcessGroup) -> T + Sync,
        T: Send,
    {
        if self.world_size == 0 {
            let message = "there must be at least one rank".to_owned();
            return Err(CommError::invalid_argument("run_local", message));
        }
        let hub = Arc::new(Hub {
            turns: self.turns.clone(),
            ..Hub::default()
        });
        let global_ranks: Vec<usize> = (0..self.world_size).collect();
        // The group is held until all ranks are done, so that a rank that starts late learns of the
        // error that ended it.
        let _world = hub.group(0, &global_ranks);
        let memberships: Vec<Arc<Membership>> = global_ranks
            .iter()
            .map(|&rank| {
                Arc::new(Membership {
                    hub: Arc::clone(&hub),
                    rank,
                })
            })
            .collect();
        // The failures are in the order of the panics, because the first one is the likely cause of
        // the others.
        let panics: Mutex<Vec<RankFailure>> = Mutex::default();
        let started = thread::scope(|scope| {
            let mut threads = Vec::with_capacity(self.world_size);
            // If a rank cannot be started, the remaining memberships are dropped, which tells the
            // started ranks.
            for (rank, membership) in memberships.into_iter().enumerate() {
                let panics = &panics;
                let f = &f;
                let thread = thread::Builder::new()
                    .name(format!("rank-{rank}"))
                    .stack_size(self.stack_bytes)
                    .spawn_scoped(scope, move || self.run_rank(membership, panics, f))
                    .map_err(|error| CommError::Start {
                        rank,
                        message: error.to_string(),
                    })?;
                threads.push(thread);
            }
            // A rank without a result has panicked, and has said so in `panics`.
            let results: Vec<Option<T>> = threads
                .into_iter()
                .map(|thread| thread.join().ok().flatten())
                .collect();
            Ok(results)
        });
        let results: Option<Vec<T>> = started?.into_iter().collect();
        results.ok_or_else(|| CommError::RankFailed {
            operation: "run_local".to_owned(),
            failures: lock(&panics).clone(),
        })
    }

    /// Runs the part of one rank on its thread. If it panics, this tells the other ranks, adds its
    /// failure to `panics`, and returns `None`.
    fn run_rank<T>(
        &self,
        membership: Arc<Membership>,
        panics: &Mutex<Vec<RankFailure>>,
        f: &impl Fn(ProcessGroup) -> T,
    ) -> Option<T> {
        let rank = membership.rank;
        let _turn = self
            .turns
            .as_ref()
            .map(|turns| TurnGuard::begin(turns, rank));
        // Values are dropped in the reverse order. So this makes the rank leave before its turn
        // ends.
        let membership = membership;
        let members = Members::world(rank, self.world_size);
        let backend = Arc::new(LocalBackend::new(Arc::clone(&membership), members));
        let backend = LinkedBackend::behind(backend, self.link);
        let group = ProcessGroup::new(backend, self.deadline, self.world_size);
        // `membership` outlives the unwinding, so that the others are told of the panic before they
        // see the rank leave.
        let panic = match catch_unwind(AssertUnwindSafe(|| f(group))) {
            Ok(result) => return Some(result),
            Err(panic) => panic,
        };
        let message = bounded(&format_args!("panicked: {}", panic_message(&*panic)));
        lock(panics).push(RankFailure {
            rank,
            kind: ErrorKind::Other,
            message: message.clone(),
        });
        membership.hub.leave(rank, &message);
        None
    }
}

/// Returns the text of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> &str {
    if let Some(text) = panic.downcast_ref::<&str>() {
        return text;
    }
    panic
        .downcast_ref::<String>()
        .map_or("no message", String::as_str)
}
