//! The running processes of a node: watched, signalled, and ended together.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::exit_codes;
use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::job_failure::RankEnded;
use crate::output;

/// An event while processes run.
#[derive(Debug)]
pub(super) enum Event {
    /// The process of this rank has ended. Its status has yet to be read.
    Ended(usize),
    /// This process received a signal.
    Signal(i32),
}

const STACK_BYTES: usize = 256 << 10;

/// The processes of this node. A process whose status has not been read keeps its id, so no signal can reach another
/// process.
pub(super) struct Ranks {
    running: BTreeMap<usize, Child>,
    events: Sender<Event>,
    happened: Receiver<Event>,
    grace: Duration,
}

impl Ranks {
    pub(super) fn new(events: Sender<Event>, happened: Receiver<Event>, grace: Duration) -> Self {
        Ranks { running: BTreeMap::new(), events, happened, grace }
    }

    /// Takes over a process, and starts a thread that waits for its end.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(super) fn watch(&mut self, rank: usize, child: Child) -> Result<()> {
        let process = Pid::from_child(&child);
        self.running.insert(rank, child);
        let events = self.events.clone();
        let watch = move || {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while matches!(waitid(WaitId::Pid(process), options), Err(rustix::io::Errno::INTR)) {}
            // Sending fails only when all is over.
            events.send(Event::Ended(rank)).ok();
        };
        let thread = thread::Builder::new().name(format!("watch-{rank}")).stack_size(STACK_BYTES);
        thread.spawn(watch).map(drop).with_context(|| format!("failed to start a thread for rank {rank}"))
    }

    /// Waits until all processes have ended.
    ///
    /// # Errors
    /// The first process that failed.
    pub(super) fn wait(mut self) -> Result<()> {
        let mut first = None;
        let mut kill_at = None;
        while !self.running.is_empty() {
            let left = kill_at.map(|at: Instant| at.saturating_duration_since(Instant::now()));
            let event = match left {
                Some(left) => self.happened.recv_timeout(left),
                None => self.happened.recv().map_err(RecvTimeoutError::from),
            };
            match event {
                // The first failure ends all other processes.
                Ok(Event::Ended(rank)) => {
                    let failure = self.reap(rank)?;
                    if let (Some(failure), None) = (failure, &first) {
                        if !self.running.is_empty() {
                            output::talk(&format!("{failure}; the other processes are told to end"));
                        }
                        first = Some(failure);
                        self.signal(Signal::TERM);
                        kill_at.get_or_insert_with(|| Instant::now() + self.grace);
                    }
                }
                // A signal to the launcher is for all processes.
                Ok(Event::Signal(number)) => {
                    if let Some(signal) = Signal::from_named_raw(number) {
                        self.signal(signal);
                    }
                    kill_at.get_or_insert_with(|| Instant::now() + self.grace);
                }
                // The grace period is over.
                Err(RecvTimeoutError::Timeout) => {
                    let ranks: Vec<String> = self.running.keys().map(usize::to_string).collect();
                    let grace = self.grace;
                    output::talk(&format!("still running {grace:?} later, and killed: rank {}", ranks.join(", ")));
                    self.signal(Signal::KILL);
                    kill_at = None;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        first.map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Reads the status of a process, and ends the processes that it has left running.
    fn reap(&mut self, rank: usize) -> Result<Option<RankEnded>> {
        let Some(mut child) = self.running.remove(&rank) else { return Ok(None) };
        kill_process_group(Pid::from_child(&child), Signal::KILL).ok();
        let status = child.wait().with_context(|| format!("failed to wait for rank {rank}"))?;
        Ok((!status.success()).then(|| RankEnded { rank, how: describe(status), code: code(status) }))
    }

    fn signal(&self, signal: Signal) {
        for child in self.running.values() {
            kill_process_group(Pid::from_child(child), signal).ok();
        }
    }
}

impl Drop for Ranks {
    /// Kills all processes that still run, so that none is left after an error.
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        for child in self.running.values_mut() {
            child.wait().ok();
        }
    }
}

/// Returns the exit code of a status, as shells do.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(exit_codes::INTERNAL)
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("failed with exit code {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => format!("failed: {status}"),
    }
}
