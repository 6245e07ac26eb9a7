//! The output of the processes, line by line, each with its rank before it.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::io::{BufRead as _, BufReader, Read};
use std::process::{ChildStderr, ChildStdout};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::output::{self, Stream};

/// The longest line. Longer ones are broken.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// The time without output after which it counts as finished, although a process still holds a
/// pipe.
const QUIET: Duration = Duration::from_secs(1);

/// The time between two looks for a signal while output is being written.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

const STACK_BYTES: usize = 256 << 10;

/// The number of last lines on stderr that are kept of each process, and the longest that one may
/// be.
const LAST_LINES: usize = 8;
const LAST_LINE_BYTES: usize = 400;

/// The threads that copy lines.
pub(super) struct Lines {
    /// Nothing is ever sent: each thread holds a clone, and `ended` closes when all of them are
    /// dropped.
    running: Sender<Infallible>,
    ended: Receiver<Infallible>,
    progress: Arc<Progress>,
    last: Arc<Mutex<LastLines>>,
}

/// The progress of all threads.
#[derive(Default)]
struct Progress {
    /// The number of lines that are being written.
    writing: AtomicUsize,
    /// The number of lines that have been written.
    written: AtomicUsize,
}

/// The last lines on stderr of each process.
pub(super) type LastLines = HashMap<usize, VecDeque<String>>;

impl Lines {
    pub(super) fn new() -> Self {
        let (running, ended) = mpsc::channel();
        Lines {
            running,
            ended,
            progress: Arc::default(),
            last: Arc::default(),
        }
    }

    /// Copies the output of a process until it ends.
    ///
    /// # Errors
    /// Threads cannot be started.
    pub(super) fn copy(
        &self,
        rank: usize,
        stdout: Option<ChildStdout>,
        stderr: Option<ChildStderr>,
    ) -> Result<()> {
        if let Some(stdout) = stdout {
            self.start(rank, stdout, Stream::Stdout)?;
        }
        if let Some(stderr) = stderr {
            self.start(rank, stderr, Stream::Stderr)?;
        }
        Ok(())
    }

    /// Starts the thread that copies one stream of a process. `running` is dropped when the thread
    /// ends, which is how [`finish`](Self::finish) notices that all threads have ended.
    fn start(&self, rank: usize, from: impl Read + Send + 'static, to: Stream) -> Result<()> {
        let (running, progress) = (self.running.clone(), Arc::clone(&self.progress));
        let last = (to == Stream::Stderr).then(|| Arc::clone(&self.last));
        let copy = move || {
            copy(rank, from, to, &progress, last.as_deref());
            drop(running);
        };
        let thread = thread::Builder::new()
            .name(format!("lines-{rank}"))
            .stack_size(STACK_BYTES);
        thread
            .spawn(copy)
            .map(drop)
            .with_context(|| format!("failed to start a thread for rank {rank}"))
    }

    /// Waits until all output is written, and returns the last lines of each process. A process
    /// that has left the session may still hold a pipe; this does not wait for that process.
    /// Usually this waits even if the reader of this program's own output does not read, but no
    /// longer once `is_asked_to_end` returns `true`.
    pub(super) fn finish(self, mut is_asked_to_end: impl FnMut() -> bool) -> LastLines {
        drop(self.running);
        let (mut quiet_since, mut written) = (Instant::now(), 0);
        while self.ended.recv_timeout(LOOK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            let (before, is_asked) = (written, is_asked_to_end());
            written = self.progress.written.load(Ordering::Acquire);
            let is_blocked = self.progress.writing.load(Ordering::Acquire) > 0;
            if written != before || is_blocked && !is_asked {
                quiet_since = Instant::now();
            } else if quiet_since.elapsed() >= QUIET {
                break;
            }
        }
        std::mem::take(&mut self.last.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Copies one stream. If stdout is closed, the pipe is closed too, so that the process notices.
fn copy(
    rank: usize,
    from: impl Read,
    to: Stream,
    progress: &Progress,
    last: Option<&Mutex<LastLines>>,
) {
    let mut from = BufReader::new(from);
    let prefix = format!("[{rank}] ").into_bytes();
    let mut line = prefix.clone();
    while from
        .by_ref()
        .take(MAX_LINE_BYTES)
        .read_until(b'\n', &mut line)
        .is_ok_and(|read| read > 0)
    {
        if !line.ends_with(b"\n") {
            line.push(b'\n');
        }
        if let Some(last) = last {
            keep(
                &line[prefix.len()..],
                last.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .entry(rank)
                    .or_default(),
            );
        }
        // While a line is being written, output is not finished, however long that takes.
        progress.writing.fetch_add(1, Ordering::AcqRel);
        let written = output::pass_on(to, &line);
        progress.writing.fetch_sub(1, Ordering::AcqRel);
        progress.written.fetch_add(1, Ordering::AcqRel);
        if written.is_err() {
            break;
        }
        line.truncate(prefix.len());
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
