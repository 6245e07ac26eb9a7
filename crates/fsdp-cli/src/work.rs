//! The options of the commands that read or write a whole checkpoint.

use std::num::NonZeroUsize;

use clap::Args;

use crate::parsers::one_to;

/// The largest number of threads that may be asked for.
const MAX_THREADS: u64 = 4096;

/// The option `--threads`.
#[derive(Debug, Args)]
pub(crate) struct Threads {
    /// Threads that do the work [default: one for each core]
    #[arg(long, value_name = "N", value_parser = one_to(MAX_THREADS))]
    threads: Option<usize>,
}

impl Threads {
    /// Returns the number of threads to use: by default one for each core of the machine.
    pub(crate) fn count(&self) -> usize {
        // Reading waits for storage more than for cores, but hashing and casting do not.
        self.threads
            .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, NonZeroUsize::get))
    }
}

/// The options of a command that may take long.
#[derive(Debug, Args)]
pub(crate) struct Work {
    #[command(flatten)]
    pub(crate) threads: Threads,
    /// One JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
    /// No progress, neither a bar nor lines
    #[arg(long)]
    pub(crate) no_progress: bool,
}
