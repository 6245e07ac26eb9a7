//! Starting ranks as threads, and turning their panics into errors.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use fsdp_layout::ErrorKind;

use super::turns::{Turn, Turns};
use super::{Group, Hub, LocalBackend, Membership};
use crate::backend::Backend;
use crate::error::{CommError, RankFailure, bounded};
use crate::group::{DEFAULT_DEADLINE, ProcessGroup};
use crate::link::{LinkedBackend, SimulatedLink};

/// The stack size of each rank's thread. It is this large because candle's backward pass recurses
/// once for each node of the graph. It is address space: only the used part becomes memory.
pub const RANK_STACK_BYTES: usize = 256 << 20;

/// Runs `f` on `world_size` threads, one for each rank, and returns their results in rank order.
///
/// # Errors
/// [`CommError::RankFailed`] names the ranks that panicked, the first to do so first. The
/// operations of other ranks that needed them have failed, as they do if a rank returns early.
pub fn run_local<T, F>(world_size: usize, f: F) -> Result<Vec<T>, CommError>
where
    F: Fn(ProcessGroup) -> T + Sync,
    T: Send,
{
    LocalRanks::new(world_size).run(f)
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
        let hub = Arc::new(Hub::default());
        let group = hub.group(0, &[0]);
        let membership = Arc::new(Membership { hub, rank: 0 });
        ProcessGroup::new(Arc::new(LocalBackend {
            membership,
            group,
            rank: 0,
        }))
    }
}

/// The options of [`run_local`].
///
/// ```
/// use std::time::Duration;
/// use fsdp_comm::{CommError, LocalRanks};
/// let outcomes = LocalRanks::new(2).deadline(Duration::from_millis(50)).run(|group| {
///     if group.rank() == 0 { group.barrier() } else { Ok(std::thread::sleep(Duration::from_millis(200))) }
/// })?;
/// assert!(matches!(&outcomes[0], Err(CommError::Timeout { missing, .. }) if *missing == [1]));
/// # Ok::<(), CommError>(())
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct LocalRanks {
    world_size: usize,
    deadline: Duration,
    stack_bytes: usize,
    link: Option<SimulatedLink>,
    turns: Option<Arc<dyn Turns>>,
}

impl LocalRanks {
    /// Creates options for this many ranks, with [`DEFAULT_DEADLINE`] and [`RANK_STACK_BYTES`].
    pub fn new(world_size: usize) -> Self {
        LocalRanks {
            world_size,
            deadline: DEFAULT_DEADLINE,
            stack_bytes: RANK_STACK_BYTES,
            link: None,
            turns: None,
        }
    }

    /// Sets the deadline of the group that each rank gets.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets the stack size of each rank's thread.
    pub fn stack_bytes(mut self, stack_bytes: usize) -> Self {
        self.stack_bytes = stack_bytes;
        self
    }

    /// Puts a simulated network link before each rank, which all bytes from other ranks cross. For
    /// tests and benches.
    pub fn link(mut self, link: SimulatedLink) -> Self {
        self.link = Some(link);
        self
    }

    /// Lets `turns` decide which rank runs when, instead of the operating system.
    pub fn turns(mut self, turns: Arc<dyn Turns>) -> Self {
        self.turns = Some(turns);
        self
    }

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
            return Err(CommError::InvalidArgument {
                operation: "run_local".to_owned(),
                message,
            });
        }
        let hub = Arc::new(Hub {
            turns: self.turns.clone(),
            ..Hub::default()
        });
        let global_ranks: Vec<usize> = (0..self.world_size).collect();
        // The group is held until all ranks are done, so that a rank that starts late learns of the
        // error that ended it.
        let world = hub.group(0, &global_ranks);
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
                let (world, panics, f) = (&world, &panics, &f);
                let builder = thread::Builder::new()
                    .name(format!("rank-{rank}"))
                    .stack_size(self.stack_bytes);
                let thread = builder
                    .spawn_scoped(scope, move || self.run_rank(membership, world, panics, f))
                    .map_err(|error| CommError::Start {
                        rank,
                        message: error.to_string(),
                    })?;
                threads.push(thread);
            }
            Ok(threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or(Err(())))
                .collect::<Vec<_>>())
        });
        let results = started?;
        let failures = panics.into_inner().unwrap_or_else(PoisonError::into_inner);
        let failed = || CommError::RankFailed {
            operation: "run_local".to_owned(),
            failures: failures.clone(),
        };
        results
            .into_iter()
            .map(|result| result.map_err(|()| failed()))
            .collect()
    }

    /// Runs the part of one rank on its thread. If it panics, this tells the other ranks, adds its
    /// failure to `panics`, and returns `Err`.
    fn run_rank<T>(
        &self,
        membership: Arc<Membership>,
        world: &Arc<Group>,
        panics: &Mutex<Vec<RankFailure>>,
        f: &impl Fn(ProcessGroup) -> T,
    ) -> Result<T, ()> {
        let rank = membership.rank;
        let _turn = self.turns.as_ref().map(|turns| Turn::begin(turns, rank));
        // Values are dropped in the reverse order. So this makes the rank leave before its turn
        // ends.
        let membership = membership;
        let backend = LocalBackend {
            membership: Arc::clone(&membership),
            group: Arc::clone(world),
            rank,
        };
        let backend: Arc<dyn Backend> = Arc::new(backend);
        let backend = match self.link {
            Some(link) => Arc::new(LinkedBackend::new(backend, link)),
            None => backend,
        };
        let group = ProcessGroup::new(backend)
            .with_deadline(self.deadline)
            .with_ranks_on_host(self.world_size);
        // `membership` outlives the unwinding, so that the others are told of the panic before they
        // see the rank leave.
        catch_unwind(AssertUnwindSafe(|| f(group))).map_err(|panic| {
            let message = bounded(&format_args!("panicked: {}", panic_message(&*panic)));
            let failure = RankFailure {
                rank,
                kind: ErrorKind::Other,
                message: message.clone(),
            };
            panics
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(failure);
            membership.hub.leave(rank, &message);
        })
    }
}

/// Returns the text of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let message = panic.downcast_ref::<&str>().copied();
    message
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
