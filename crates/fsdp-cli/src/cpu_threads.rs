//! The number of CPU threads of a rank, and the pools that candle keeps for a whole process.
//!
//! candle sizes its pools by the machine when they are first used. Several ranks would then have as
//! many threads each as the machine has cores, and threads that wait for work spin on cores that
//! other ranks need.

use std::num::NonZeroUsize;

/// The variable that sizes candle's pools. candle cuts matrix products into as many parts, and its
/// pool for element-wise operations has as many threads unless `CANDLE_NUM_THREADS` says otherwise.
pub(crate) const THREADS_VARIABLE: &str = "RAYON_NUM_THREADS";

/// The variable that tells how often the threads of candle's own pool look for work before they
/// sleep.
pub(crate) const SPIN_VARIABLE: &str = "CANDLE_BARRIER_POOL_SPIN_LIMIT";

/// The value of [`SPIN_VARIABLE`] in training: some microseconds, where candle's own takes some
/// hundred.
pub(crate) const SPIN_LIMIT: u32 = 500;

/// Returns the number of threads that the environment variable of this process sets; `None` if it
/// sets none.
pub(crate) fn requested_threads() -> Option<NonZeroUsize> {
    std::env::var(THREADS_VARIABLE).ok()?.parse().ok()
}

/// Returns the number of threads that each of `ranks` gets if they share this machine: at least
/// one.
pub(crate) fn equal_share(ranks: usize) -> usize {
    (std::thread::available_parallelism().map_or(1, NonZeroUsize::get) / ranks.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_the_threads_of_the_machine_and_each_has_one_at_least() {
        let all = equal_share(1);
        assert_eq!(all, equal_share(0));
        assert_eq!(equal_share(2), (all / 2).max(1));
        assert_eq!(equal_share(usize::MAX), 1);
    }
}
