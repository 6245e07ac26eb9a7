//! The option `--threads` of the commands that read or write a whole checkpoint.

use std::num::NonZeroUsize;

use clap::builder::RangedU64ValueParser;

/// The largest number of threads that may be asked for.
const MAX_THREADS: u64 = 4096;

/// Returns the parser of the option.
pub(crate) fn count() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=MAX_THREADS)
}

/// Returns the number of threads to use: one for each core of the machine, unless told.
pub(crate) fn or_all_cores(threads: Option<usize>) -> usize {
    threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, NonZeroUsize::get))
}
