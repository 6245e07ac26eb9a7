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
    /// Nothing is ever sent: each thread holds a clone, and `end_receiver` closes when all of them
    /// are dropped.
    end_sender: Sender<Infallible>,
    end_receiver: Receiver<Infallible>,
    progress: Arc<Progress>,
}

/// The progress of all threads, and what they keep.
#[derive(Default)]
struct Progress {
    /// The number of lines that are being written.
    lines_in_writing: AtomicUsize,
    /// The number of lines that have been written.
    lines_written: AtomicUsize,
    last_lines: Mutex<LastLines>,
}

/// The last lines on stderr of each process.
pub(super) type LastLines = HashMap<usize, VecDeque<String>>;

/// Starts a thread of little memory for a rank.
///
/// # Errors
/// The system does not allow it.
pub(super) fn spawn_thread(
    name: &str,
    rank: usize,
    work: impl FnOnce() + Send + 'static,
) -> Result<()> {
    thread::Builder::new()
        .name(format!("{name}-{rank}"))
        .stack_size(STACK_BYTES)
        .spawn(work)
        .with_context(|| format!("failed to start a thread for rank {rank}"))?;
    Ok(())
}

impl RankOutput {
    /// Returns the output before any stream is copied.
    pub(super) fn new() -> Self {
        let (end_sender, end_receiver) = mpsc::channel();
        RankOutput {
            end_sender,
            end_receiver,
            progress: Arc::default(),
        }
    }

    /// Starts a thread that copies a stream of a process until it ends.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(super) fn copy(
        &self,
        rank: usize,
        source: Option<impl Read + Send + 'static>,
        target: Stream,
    ) -> Result<()> {
        // A stream of its own thread each: a process that fills one pipe must not wait for the
        // other.
        let source = source.expect("the processes are started with pipes");
        let end_sender = self.end_sender.clone();
        let progress = Arc::clone(&self.progress);
        spawn_thread("lines", rank, move || {
            progress.copy(rank, source, target);
            // This is how `finish` notices that all threads have ended.
            drop(end_sender);
        })
    }

    /// Waits until all output is written, and returns the last lines of each process. A process
    /// that has left the session may still hold a pipe; this does not wait for that process.
    /// Usually this waits even if the reader of this program's own output does not read, but no
    /// longer once `is_asked_to_end` returns `true`.
    pub(super) fn finish(self, mut is_asked_to_end: impl FnMut() -> bool) -> LastLines {
        drop(self.end_sender);
        let mut quiet_since = Instant::now();
        let mut lines_before = 0;
        while self.end_receiver.recv_timeout(CHECK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            let is_ending = is_asked_to_end();
            let lines_written = self.progress.lines_written.load(Ordering::Acquire);
            let is_blocked = self.progress.lines_in_writing.load(Ordering::Acquire) > 0;
            if lines_written != lines_before || is_blocked && !is_ending {
                quiet_since = Instant::now();
            } else if quiet_since.elapsed() >= QUIET_TIMEOUT {
                break;
            }
            lines_before = lines_written;
        }
        std::mem::take(&mut self.progress.lock_last_lines())
    }
}

impl Progress {
    /// Copies one stream. If stdout is closed, the pipe is closed too, so that the process notices.
    fn copy(&self, rank: usize, source: impl Read, target: Stream) {
        let mut source = BufReader::new(source);
        let prefix = format!("[{rank}] ").into_bytes();
        let mut line = prefix.clone();
        while source
            .by_ref()
            .take(MAX_LINE_BYTES)
            .read_until(b'\n', &mut line)
            .is_ok_and(|byte_count| byte_count > 0)
        {
            // The last line of a process may end without a break, and very long lines are cut: each
            // piece becomes a line.
            if !line.ends_with(b"\n") {
                line.push(b'\n');
            }
            if target == Stream::Stderr {
                let mut last_lines = self.lock_last_lines();
                keep_last_line(&line[prefix.len()..], last_lines.entry(rank).or_default());
            }
            // While a line is being written, output is not finished, however long that takes.
            self.lines_in_writing.fetch_add(1, Ordering::AcqRel);
            let outcome = output::pass_on(target, &line);
            self.lines_in_writing.fetch_sub(1, Ordering::AcqRel);
            self.lines_written.fetch_add(1, Ordering::AcqRel);
            if outcome.is_err() {
                break;
            }
            line.truncate(prefix.len());
        }
    }

    fn lock_last_lines(&self) -> MutexGuard<'_, LastLines> {
        self.last_lines
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Appends the start of a line to the last lines of a process, and drops the oldest of them.
fn keep_last_line(line: &[u8], last_lines: &mut VecDeque<String>) {
    if last_lines.len() == LAST_LINES {
        last_lines.pop_front();
    }
    let beginning = &line[..line.len().min(LAST_LINE_BYTES)];
    last_lines.push_back(String::from_utf8_lossy(beginning).trim_end().to_owned());
}
