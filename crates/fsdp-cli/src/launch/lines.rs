//! The output of the processes, line by line, each with its rank before it.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::io::{BufRead as _, BufReader, Read};
use std::process::{ChildStderr, ChildStdout};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::output::{self, Stream};

/// The longest line. Longer ones are broken.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// The time without output after which it counts as finished, although a process still holds a pipe.
const QUIET: Duration = Duration::from_secs(1);

const STACK_BYTES: usize = 256 << 10;

/// The number of last lines on stderr that are kept of each process, and the longest that one may be.
const LAST_LINES: usize = 8;
const LAST_LINE_BYTES: usize = 400;

/// The threads that copy lines.
pub(super) struct Lines {
    running: Sender<Infallible>,
    ended: Receiver<Infallible>,
    writing: Arc<AtomicUsize>,
    last: Arc<Mutex<LastLines>>,
}

/// The last lines on stderr of each process.
pub(super) type LastLines = HashMap<usize, VecDeque<String>>;

impl Lines {
    pub(super) fn new() -> Self {
        let (running, ended) = mpsc::channel();
        Lines { running, ended, writing: Arc::default(), last: Arc::default() }
    }

    /// Copies the output of a process until it ends.
    ///
    /// # Errors
    /// Threads cannot be started.
    pub(super) fn copy(&self, rank: usize, stdout: Option<ChildStdout>, stderr: Option<ChildStderr>) -> Result<()> {
        if let Some(stdout) = stdout {
            self.start(rank, stdout, Stream::Stdout)?;
        }
        if let Some(stderr) = stderr {
            self.start(rank, stderr, Stream::Stderr)?;
        }
        Ok(())
    }

    fn start(&self, rank: usize, from: impl Read + Send + 'static, to: Stream) -> Result<()> {
        let (running, writing) = (self.running.clone(), Arc::clone(&self.writing));
        let last = (to == Stream::Stderr).then(|| Arc::clone(&self.last));
        let copy = move || {
            copy(rank, from, to, &writing, last.as_deref());
            drop(running);
        };
        let thread = thread::Builder::new().name(format!("lines-{rank}")).stack_size(STACK_BYTES);
        thread.spawn(copy).map(drop).with_context(|| format!("failed to start a thread for rank {rank}"))
    }

    /// Waits until all output is written, and returns the last lines of each process. A process that has left the session
    /// may still hold a pipe; this does not wait for it.
    pub(super) fn finish(self) -> LastLines {
        drop(self.running);
        while self.ended.recv_timeout(QUIET) == Err(RecvTimeoutError::Timeout) {
            if self.writing.load(Ordering::Acquire) == 0 {
                break;
            }
        }
        std::mem::take(&mut self.last.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Copies one stream. If stdout is closed, the pipe is closed too, so that the process notices.
fn copy(rank: usize, from: impl Read, to: Stream, writing: &AtomicUsize, last: Option<&Mutex<LastLines>>) {
    let mut from = BufReader::new(from);
    let prefix = format!("[{rank}] ").into_bytes();
    let mut line = prefix.clone();
    while from.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
        if !line.ends_with(b"\n") {
            line.push(b'\n');
        }
        if let Some(last) = last {
            keep(&line[prefix.len()..], last.lock().unwrap_or_else(PoisonError::into_inner).entry(rank).or_default());
        }
        // While a line is being written, output is not finished, however long that takes.
        writing.fetch_add(1, Ordering::AcqRel);
        let written = output::pass_on(to, &line);
        writing.fetch_sub(1, Ordering::AcqRel);
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
