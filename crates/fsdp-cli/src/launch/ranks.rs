//! The running processes of a node: watched, signalled, and ended together.

use std::collections::BTreeMap;
use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::exits::{Exit, ranges};
use super::guard::Guard;
use crate::output;

/// An event while processes run.
#[derive(Debug)]
pub(super) enum Event {
    /// The process of this rank has ended. Its status has yet to be read.
    Ended(usize),
    /// This process received a signal.
    Signal(i32),
}

/// The time for the other processes to end by themselves after one has failed. They usually fail because of it, and
/// their messages say more than a signal. The process that really failed first may be among them.
const SETTLE: Duration = Duration::from_secs(2);

const STACK_BYTES: usize = 256 << 10;

/// The processes of this node. The system does not reuse the id of a process until its status has been read, so a
/// signal cannot reach another process.
pub(super) struct Ranks<'e> {
    running: BTreeMap<usize, Child>,
    events: Sender<Event>,
    happened: &'e Receiver<Event>,
    grace: Duration,
    guard: Guard,
    /// The processes that have ended, in the order in which they ended.
    exits: Vec<Exit>,
    stage: Stage,
    /// The time at which the processes are told to stop, to be started again in another number.
    stop_at: Option<Instant>,
    was_stopped: bool,
}

/// The way in which the processes end.
#[derive(Debug, Clone, Copy)]
enum Stage {
    /// Nothing has failed.
    Running,
    /// A process has failed. The others are told to end at this time, if they still run then.
    Settling(Instant),
    /// The processes were told to end, because one failed or because the launcher was told to end, and are killed at this
    /// time.
    Ending(Instant),
    /// The processes were killed.
    Killed,
}

impl Stage {
    /// Returns the time at which the next stage begins.
    const fn until(self) -> Option<Instant> {
        match self {
            Stage::Running | Stage::Killed => None,
            Stage::Settling(until) | Stage::Ending(until) => Some(until),
        }
    }
}

/// The end of all processes.
#[derive(Debug)]
pub(super) struct Ended {
    /// The exits, in the order in which they happened.
    pub(super) exits: Vec<Exit>,
    /// The signal that the launcher passed on before any process failed.
    pub(super) signal: Option<i32>,
    /// `true` if the launcher was told to end, at whatever time.
    pub(super) was_told: bool,
    /// `true` if the launcher told the processes to stop because it was time to.
    pub(super) was_stopped: bool,
}

impl<'e> Ranks<'e> {
    /// Returns a node without processes. At `stop_at` they are told to stop, with `grace` to do so.
    pub(super) fn new(
        events: Sender<Event>,
        happened: &'e Receiver<Event>,
        grace: Duration,
        stop_at: Option<Instant>,
        guard: Guard,
    ) -> Self {
        let (running, exits, stage, was_stopped) = (BTreeMap::new(), Vec::new(), Stage::Running, false);
        Ranks { running, events, happened, grace, guard, exits, stage, stop_at, was_stopped }
    }

    /// Adds a process, and starts a thread that waits for its end.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(super) fn watch(&mut self, rank: usize, child: Child) -> Result<()> {
        let process = Pid::from_child(&child);
        self.running.insert(rank, child);
        self.guard.watch(process)?;
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
    /// The status of a process cannot be read.
    pub(super) fn wait(mut self) -> Result<Ended> {
        let (mut passed_on, mut was_told) = (None, false);
        while !self.running.is_empty() {
            let until = if matches!(self.stage, Stage::Running) { self.stop_at } else { self.stage.until() };
            let event = match until {
                Some(until) => self.happened.recv_timeout(until.saturating_duration_since(Instant::now())),
                None => self.happened.recv().map_err(RecvTimeoutError::from),
            };
            match event {
                Ok(Event::Ended(rank)) => self.reap(rank)?,
                // A signal to the launcher is for all processes.
                Ok(Event::Signal(number)) => {
                    was_told = true;
                    if let Some(signal) = Signal::from_named_raw(number) {
                        self.signal(signal);
                    }
                    match self.stage {
                        Stage::Running => {
                            passed_on.get_or_insert(number);
                            self.stage = Stage::Ending(Instant::now() + self.grace);
                        }
                        Stage::Settling(_) => self.stage = Stage::Ending(Instant::now() + self.grace),
                        Stage::Ending(_) | Stage::Killed => {}
                    }
                }
                Err(RecvTimeoutError::Timeout) => self.next_stage(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let exits = std::mem::take(&mut self.exits);
        Ok(Ended { exits, signal: passed_on, was_told, was_stopped: self.was_stopped })
    }

    /// Moves to the next stage, because the time of this one is over.
    fn next_stage(&mut self) {
        let still_running = ranges(self.running.keys().copied().collect());
        match self.stage {
            Stage::Settling(_) => {
                output::talk(&format!("still running, and told to end: {still_running}"));
                self.signal(Signal::TERM);
                self.stage = Stage::Ending(Instant::now() + self.grace);
            }
            Stage::Ending(_) => {
                let grace = self.grace;
                output::talk(&format!("still running {grace:?} later, and killed: {still_running}"));
                self.signal(Signal::KILL);
                self.stage = Stage::Killed;
            }
            Stage::Running => {
                self.was_stopped = true;
                self.signal(Signal::TERM);
                self.stage = Stage::Ending(Instant::now() + self.grace);
            }
            Stage::Killed => {}
        }
    }

    /// Reads the status of a process, and ends the processes that it has left running. A failure ends all other processes.
    fn reap(&mut self, rank: usize) -> Result<()> {
        let Some(mut child) = self.running.remove(&rank) else { return Ok(()) };
        let process = Pid::from_child(&child);
        kill_process_group(process, Signal::KILL).ok();
        // Forget the process before `wait` frees its id, which another process may get.
        self.guard.forget(process);
        let status = child.wait().with_context(|| format!("failed to wait for rank {rank}"))?;
        let exit = Exit::new(rank, status, matches!(self.stage, Stage::Ending(_) | Stage::Killed));
        self.exits.push(exit);
        if exit.is_failure() && matches!(self.stage, Stage::Running) {
            if !self.running.is_empty() {
                output::talk(&format!("rank {rank} {}; the other processes end too", exit.describe()));
            }
            self.stage = Stage::Settling(Instant::now() + SETTLE);
        }
        Ok(())
    }

    fn signal(&self, signal: Signal) {
        for child in self.running.values() {
            kill_process_group(Pid::from_child(child), signal).ok();
        }
    }
}

impl Drop for Ranks<'_> {
    /// Kills all processes that still run, so that none is left after an error.
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        for child in self.running.values_mut() {
            self.guard.forget(Pid::from_child(child));
            child.wait().ok();
        }
    }
}
