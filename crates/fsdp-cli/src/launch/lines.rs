//! The output of the processes, line by line, each with its rank before it.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::io::{BufRead as _, BufReader, Read};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::output::{self, Stream};

/// The longest line. Longer ones are broken.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// The time without output after which it counts as finished, although a process still holds a
/// pipe.
const QUIET_TIMEOUT: Duration = Duration::from_secs(1);

/// The time between two looks for a signal while output is being written.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

const STACK_BYTES: usize = 256 << 10;

/// The number of last lines on stderr that are kept of each process, and the longest that one may
/// be.
const LAST_LINES: usize = 8;
const LAST_LINE_BYTES: usize = 400;

/// The threads that copy the output of the processes.
pub(super) struct RankOutput {
    /// Nothing is ever sent: each thread holds a clone, and `ended` closes when all of them are
    /// dropped.
    running: Sender<Infallible>,
    ended: Receiver<Infallible>,
    copied: Arc<Copied>,
}

/// The progress of all threads, and what they keep.
#[derive(Default)]
struct Copied {
    /// The number of lines that are being written.
    writing: AtomicUsize,
    /// The number of lines that have been written.
    written: AtomicUsize,
    last: Mutex<LastLines>,
}

/// The last lines on stderr of each process.
pub(super) type LastLines = HashMap<usize, VecDeque<String>>;

/// Starts a thread of little memory for a rank.
///
/// # Errors
/// The system does not allow it.
pub(super) fn spawn(name: &str, rank: usize, work: impl FnOnce() + Send + 'static) -> Result<()> {
    thread::Builder::new()
        .name(format!("{name}-{rank}"))
        .stack_size(STACK_BYTES)
        .spawn(work)
        .with_context(|| format!("failed to start a thread for rank {rank}"))?;
    Ok(())
}

impl RankOutput {
    pub(super) fn new() -> Self {
        let (running, ended) = mpsc::channel();
        RankOutput {
            running,
            ended,
            copied: Arc::default(),
        }
    }

    /// Copies a stream of a process until it ends.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(super) fn copy(
        &self,
        rank: usize,
        from: Option<impl Read + Send + 'static>,
        to: Stream,
    ) -> Result<()> {
        // A stream of its own thread each: a process that fills one pipe must not wait for the
        // other.
        let from = from.expect("the processes are started with pipes");
        let running = self.running.clone();
        let copied = Arc::clone(&self.copied);
        spawn("lines", rank, move || {
            copied.copy(rank, from, to);
            // This is how `finish` notices that all threads have ended.
            drop(running);
        })
    }

    /// Waits until all output is written, and returns the last lines of each process. A process
    /// that has left the session may still hold a pipe; this does not wait for that process.
    /// Usually this waits even if the reader of this program's own output does not read, but no
    /// longer once `is_asked_to_end` returns `true`.
    pub(super) fn finish(self, mut is_asked_to_end: impl FnMut() -> bool) -> LastLines {
        drop(self.running);
        let mut quiet_since = Instant::now();
        let mut written_before = 0;
        while self.ended.recv_timeout(CHECK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            let is_asked = is_asked_to_end();
            let written = self.copied.written.load(Ordering::Acquire);
            let is_blocked = self.copied.writing.load(Ordering::Acquire) > 0;
            if written != written_before || is_blocked && !is_asked {
                quiet_since = Instant::now();
            } else if quiet_since.elapsed() >= QUIET_TIMEOUT {
                break;
            }
            written_before = written;
        }
        std::mem::take(&mut self.copied.lock_last())
    }
}

impl Copied {
    /// Copies one stream. If stdout is closed, the pipe is closed too, so that the process notices.
    fn copy(&self, rank: usize, from: impl Read, to: Stream) {
        let mut from = BufReader::new(from);
        let prefix = format!("[{rank}] ").into_bytes();
        let mut line = prefix.clone();
        while from
            .by_ref()
            .take(MAX_LINE_BYTES)
            .read_until(b'\n', &mut line)
            .is_ok_and(|read| read > 0)
        {
            // The last line of a process may end without a break, and very long lines are cut: each
            // piece becomes a line.
            if !line.ends_with(b"\n") {
                line.push(b'\n');
            }
            if to == Stream::Stderr {
                let mut last = self.lock_last();
                keep(&line[prefix.len()..], last.entry(rank).or_default());
            }
            // While a line is being written, output is not finished, however long that takes.
            self.writing.fetch_add(1, Ordering::AcqRel);
            let passed_on = output::pass_on(to, &line);
            self.writing.fetch_sub(1, Ordering::AcqRel);
            self.written.fetch_add(1, Ordering::AcqRel);
            if passed_on.is_err() {
                break;
            }
            line.truncate(prefix.len());
        }
    }

    fn lock_last(&self) -> MutexGuard<'_, LastLines> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Appends the start of a line to the last lines of a process, and drops the oldest of them.
fn keep(line: &[u8], last: &mut VecDeque<String>) {
    if last.len() == LAST_LINES {
        last.pop_front();
    }
    let start = &line[..line.len().min(LAST_LINE_BYTES)];
    last.push_back(String::from_utf8_lossy(start).trim_end().to_owned());
}
