//! The running processes of a node: watched, signalled, and ended together.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ExitStatus};
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::descendants::Processes;
use super::exits::{Exit, ranks_text};
use super::guard::Guard;
use super::signals::{Event, Events};
use crate::output;
use crate::stop::REQUESTS;

/// The time for the other processes to end by themselves after one has failed. They usually fail
/// because of it, and their messages say more than a signal. The process that really failed first
/// may be among them.
const SETTLE: Duration = Duration::from_secs(2);

/// The time between two looks at the processes that ranks have started.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

const STACK_BYTES: usize = 256 << 10;

/// The processes of this node. The system does not reuse the id of a process until its status has
/// been read, so a signal cannot reach another process.
pub(super) struct RunningProcesses<'e> {
    running: BTreeMap<usize, Child>,
    /// The ranks whose own process has ended while processes that it has started may go on. They
    /// are still in `running`.
    outlived: BTreeSet<usize>,
    /// The status of the process that ended last of those that a rank's process has left behind.
    last: BTreeMap<usize, ExitStatus>,
    /// The time of the next look at the processes that ranks have started, if there is a reason for
    /// one.
    look_at: Option<Instant>,
    events: &'e Events,
    grace: Duration,
    guard: Guard,
    /// The processes that have ended, in the order in which they ended.
    exits: Vec<Exit>,
    stage: Stage,
    /// The time at which the processes are asked to stop, to be started again in another number.
    stop_at: Option<Instant>,
    was_stopped: bool,
    first_signal: Option<i32>,
    got_signal: bool,
}

/// The way in which the processes end.
#[derive(Debug, Clone, Copy)]
enum Stage {
    /// Nothing has failed.
    Running,
    /// A process has failed. The others are asked to end at this time, if they still run then.
    Settling(Instant),
    /// The processes were asked to end, because one failed or because the launcher was asked to
    /// end, and are killed at this time.
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
    pub(super) first_signal: Option<i32>,
    /// `true` if the launcher was asked to end, at whatever time.
    pub(super) got_signal: bool,
    /// `true` if the launcher asked the processes to stop because it was time to.
    pub(super) was_stopped: bool,
}

impl<'e> RunningProcesses<'e> {
    /// Returns a node without processes. At `stop_at` they are asked to stop, with `grace` to do
    /// so.
    pub(super) fn new(
        events: &'e Events,
        grace: Duration,
        stop_at: Option<Instant>,
        guard: Guard,
    ) -> Self {
        RunningProcesses {
            running: BTreeMap::new(),
            outlived: BTreeSet::new(),
            last: BTreeMap::new(),
            look_at: None,
            events,
            grace,
            guard,
            exits: Vec::new(),
            stage: Stage::Running,
            stop_at,
            was_stopped: false,
            first_signal: None,
            got_signal: false,
        }
    }

    /// Adds a process, and starts a thread that waits for its end.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(super) fn watch(&mut self, rank: usize, child: Child) -> Result<()> {
        let process = Pid::from_child(&child);
        self.running.insert(rank, child);
        self.guard.watch(process)?;
        let events = self.events.sender.clone();
        let watch = move || {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while matches!(
                waitid(WaitId::Pid(process), options),
                Err(rustix::io::Errno::INTR)
            ) {}
            // Sending fails only when all is over.
            events.send(Event::Ended(rank)).ok();
        };
        let thread = thread::Builder::new()
            .name(format!("watch-{rank}"))
            .stack_size(STACK_BYTES);
        thread
            .spawn(watch)
            .map(drop)
            .with_context(|| format!("failed to start a thread for rank {rank}"))
    }

    /// Waits until all processes have ended.
    ///
    /// # Errors
    /// The status of a process cannot be read.
    pub(super) fn wait(mut self) -> Result<Ended> {
        while !self.running.is_empty() {
            let until = [self.stage_ends(), self.look_at]
                .into_iter()
                .flatten()
                .min();
            let event = match until {
                Some(until) => self
                    .events
                    .receiver
                    .recv_timeout(until.saturating_duration_since(Instant::now())),
                None => self.events.receiver.recv().map_err(RecvTimeoutError::from),
            };
            match event {
                Ok(Event::Ended(rank)) => self.ended(rank)?,
                Ok(Event::ChildEnded) => self.look_soon(),
                Ok(Event::Signal(number)) => self.pass_on(number),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            // This is checked after events too, so that many of them cannot keep the next stage
            // from coming.
            self.time_has_come()?;
        }
        let exits = std::mem::take(&mut self.exits);
        let (first_signal, got_signal, was_stopped) =
            (self.first_signal, self.got_signal, self.was_stopped);
        Ok(Ended {
            exits,
            first_signal,
            got_signal,
            was_stopped,
        })
    }

    /// Returns the time at which this stage ends by itself.
    fn stage_ends(&self) -> Option<Instant> {
        if matches!(self.stage, Stage::Running) {
            self.stop_at
        } else {
            self.stage.until()
        }
    }

    /// Asks for a look at the processes that ranks have started.
    fn look_soon(&mut self) {
        self.look_at
            .get_or_insert_with(|| Instant::now() + LOOK_INTERVAL);
    }

    /// Passes a signal to the launcher on to all processes. Those by which schedulers and terminals
    /// ask a program to stop begin the last stage.
    fn pass_on(&mut self, number: i32) {
        if let Some(signal) = Signal::from_named_raw(number) {
            self.signal(signal);
        }
        if !REQUESTS.contains(&number) {
            return;
        }
        self.got_signal = true;
        match self.stage {
            Stage::Running => {
                self.first_signal.get_or_insert(number);
                self.stage = Stage::Ending(Instant::now() + self.grace);
            }
            Stage::Settling(_) => self.stage = Stage::Ending(Instant::now() + self.grace),
            Stage::Ending(_) | Stage::Killed => {}
        }
    }

    /// Begins the next stage if that is due now, and looks at the processes that ranks have started
    /// if that is due.
    fn time_has_come(&mut self) -> Result<()> {
        if self.running.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        if self.stage_ends().is_some_and(|end| end <= now) {
            self.next_stage();
        }
        if self.look_at.is_some_and(|at| at <= now) {
            self.look_at = None;
            self.look()?;
        }
        Ok(())
    }

    /// Moves to the next stage, because the time of this one is over.
    fn next_stage(&mut self) {
        let still_running = ranks_text(self.running.keys().copied().collect());
        let are = if self.running.len() == 1 { "is" } else { "are" };
        match self.stage {
            Stage::Settling(_) => {
                output::talk(&format!(
                    "{still_running} {are} still running: sending SIGTERM"
                ));
                self.signal(Signal::TERM);
                self.stage = Stage::Ending(Instant::now() + self.grace);
            }
            Stage::Ending(_) => {
                let grace = self.grace;
                output::talk(&format!(
                    "{still_running} {are} still running after {grace:?}: sending SIGKILL"
                ));
                self.signal(Signal::KILL);
                self.stage = Stage::Killed;
                self.look_soon();
            }
            Stage::Running => {
                self.was_stopped = true;
                self.signal(Signal::TERM);
                self.stage = Stage::Ending(Instant::now() + self.grace);
            }
            Stage::Killed => {}
        }
    }

    /// Notes the end of a rank's own process.
    fn ended(&mut self, rank: usize) -> Result<()> {
        let Some(child) = self.running.get(&rank) else {
            return Ok(());
        };
        // If the rank's own process is a shell, it dies of a signal at once, while the program that
        // it has started still saves. That program has the same time to end. The signal need not
        // have come from this launcher: schedulers signal every process of a job.
        match self.stage {
            Stage::Ending(_) => {
                self.outlived.insert(rank);
                self.look_soon();
                Ok(())
            }
            Stage::Running | Stage::Settling(_) if died_of_request(Pid::from_child(child)) => {
                self.outlived.insert(rank);
                self.look()?;
                if matches!(self.stage, Stage::Running) && self.outlived.contains(&rank) {
                    self.stage = Stage::Settling(Instant::now() + SETTLE);
                }
                Ok(())
            }
            Stage::Running | Stage::Settling(_) | Stage::Killed => self.finish(rank),
        }
    }

    /// Looks at the processes that ranks have started: takes the status of those that have ended,
    /// and finishes each rank of which no process runs any more.
    fn look(&mut self) -> Result<()> {
        let processes = Processes::list();
        let ranks: Vec<(usize, Pid)> = self
            .running
            .iter()
            .map(|(&rank, child)| (rank, Pid::from_child(child)))
            .collect();
        let own: HashSet<Pid> = ranks
            .iter()
            .map(|&(_, process)| process)
            .chain([self.guard.process()])
            .collect();
        for (group, status) in processes.reap_orphans(&own) {
            // If a process that a rank has started ends before the rank's own process, that tells
            // nothing about the rank.
            let of_rank = ranks
                .iter()
                .find(|&&(_, process)| process == group && processes.has_ended(process));
            if let Some(&(rank, _)) = of_rank {
                self.last.insert(rank, status);
            }
        }
        for (rank, group) in ranks {
            let is_over = matches!(self.stage, Stage::Killed) || !processes.run_in(group);
            if is_over && self.outlived.contains(&rank) {
                self.finish(rank)?;
            }
        }
        if !self.outlived.is_empty() {
            self.look_soon();
        }
        Ok(())
    }

    /// Reads the status of a rank's process, and ends the processes that it has left running. A
    /// failure ends all other processes.
    fn finish(&mut self, rank: usize) -> Result<()> {
        self.outlived.remove(&rank);
        let Some(mut child) = self.running.remove(&rank) else {
            return Ok(());
        };
        let process = Pid::from_child(&child);
        kill_process_group(process, Signal::KILL).ok();
        // Forget the process before `wait` frees its id, which another process may get.
        self.guard.forget(process);
        let own = child
            .wait()
            .with_context(|| format!("failed to wait for rank {rank}"))?;
        // Where a shell died of the request to stop, the program that it has started tells how the
        // rank ended.
        let last = self.last.remove(&rank).filter(|_| {
            own.signal()
                .is_some_and(|signal| REQUESTS.contains(&signal))
        });
        let exit = Exit::new(
            rank,
            last.unwrap_or(own),
            matches!(self.stage, Stage::Ending(_) | Stage::Killed),
        );
        self.exits.push(exit);
        if exit.is_failure() && matches!(self.stage, Stage::Running) {
            if !self.running.is_empty() {
                output::talk(&format!(
                    "rank {rank} {}; the other processes end too",
                    exit.describe()
                ));
            }
            self.stage = Stage::Settling(Instant::now() + SETTLE);
        }
        Ok(())
    }

    /// Sends a signal to the process group of each rank.
    fn signal(&self, signal: Signal) {
        for child in self.running.values() {
            kill_process_group(Pid::from_child(child), signal).ok();
        }
    }
}

/// Returns `true` if a process has died of a signal by which programs are asked to stop. Its status
/// stays unread.
fn died_of_request(process: Pid) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    let status = waitid(WaitId::Pid(process), options).ok().flatten();
    status
        .and_then(|status| status.terminating_signal())
        .is_some_and(|signal| REQUESTS.contains(&signal))
}

impl Drop for RunningProcesses<'_> {
    /// Kills all processes that still run, so that none is left after an error.
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        for child in self.running.values_mut() {
            self.guard.forget(Pid::from_child(child));
            child.wait().ok();
        }
    }
}
