//! Ranks as threads, each with CPU threads of its own.

use std::num::NonZeroUsize;
use std::time::Duration;

use fsdp::comm::{CommError, DEFAULT_DEADLINE, LocalRanks, ProcessGroup};
use rayon::ThreadPoolBuilder;

use crate::cpu_threads;

/// The number of ranks, and the resources of each.
///
/// candle computes matrix products on the thread pool of the thread that calls it. On one pool for
/// all, ranks would wait for each other's work; here each rank has its own.
///
/// ```
/// use fsdp_cli::ranks::Ranks;
/// let ranks = Ranks { count: 2, ..Ranks::default() };
/// assert_eq!(ranks.run(|group| group.rank() * 10)?, [0, 10]);
/// # Ok::<(), fsdp::comm::CommError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ranks {
    /// The number of ranks.
    pub count: usize,
    /// The number of CPU threads of each rank. `None` shares the machine's threads equally, with at
    /// least one for each rank.
    pub threads: Option<NonZeroUsize>,
    /// The deadline of collectives.
    pub deadline: Duration,
}

impl Default for Ranks {
    fn default() -> Self {
        Ranks {
            count: 1,
            threads: None,
            deadline: DEFAULT_DEADLINE,
        }
    }
}

impl Ranks {
    /// Returns the number of CPU threads of each rank: `threads`, or else an equal share of the
    /// machine's.
    pub(crate) fn threads_per_rank(&self) -> usize {
        self.threads
            .map_or_else(|| cpu_threads::equal_share(self.count), NonZeroUsize::get)
    }

    /// Runs `work` on every rank, and returns the results in rank order.
    ///
    /// # Errors
    /// No ranks, ranks that could not be started, ranks that panicked.
    pub fn run<T: Send>(
        &self,
        work: impl Fn(ProcessGroup) -> T + Sync,
    ) -> Result<Vec<T>, CommError> {
        let ranks = LocalRanks {
            world_size: self.count,
            deadline: self.deadline,
            ..LocalRanks::default()
        };
        let results = ranks.run(|group| self.run_one(group.rank(), || work(group)))?;
        results.into_iter().collect()
    }

    /// Runs `work` on this thread as one of the ranks that share this machine, with CPU threads of
    /// its own. For ranks that are processes.
    ///
    /// # Errors
    /// The threads could not be started.
    pub(crate) fn run_one<T: Send>(
        &self,
        rank: usize,
        work: impl FnOnce() -> T + Send,
    ) -> Result<T, CommError> {
        // candle finds the pool of the thread that calls it, so work of this rank stays on its own
        // threads.
        let pool = ThreadPoolBuilder::new()
            .num_threads(self.threads_per_rank())
            .stack_size(LocalRanks::default().stack_bytes)
            .thread_name(move |thread| format!("rank-{rank}-{thread}"))
            .build()
            .map_err(|error| CommError::Start {
                rank,
                message: error.to_string(),
            })?;
        Ok(pool.install(work))
    }
}
