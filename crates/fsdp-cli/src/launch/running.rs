//! The running processes of a node: watched, signalled, and ended together.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ExitStatus};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use signal_hook::consts::SIGCHLD;

use super::descendants::{Mark, Processes};
use super::exits::{Exit, ranks_text};
use super::guard::Guard;
use super::lines::spawn_thread;
use super::signals::{Event, Events};
use crate::output;
use crate::stop::REQUESTS;

/// The time for the other processes to end by themselves after one has failed. They usually fail
/// because of it, and their messages say more than a signal. The process that really failed first
/// may be among them. Ranks blame one that has left after a second, and need about as long to leave
/// themselves.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(4);

/// The interval between two checks of the processes that ranks have started.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The processes of this node.
pub(super) struct RunningProcesses<'e> {
    children: BTreeMap<usize, Child>,
    /// The ranks whose own process has ended while processes that it has started may go on. They
    /// are still in `children`.
    outlived_ranks: BTreeSet<usize>,
    /// The status of the process that ended last of those that a rank's process has left behind.
    last_statuses: BTreeMap<usize, ExitStatus>,
    /// The time of the next check of the processes that ranks have started, if there is a reason
    /// for one.
    check_deadline: Option<Instant>,
    events: &'e Events,
    grace_timeout: Duration,
    guard: Guard,
    /// The processes of the machine, as they were when they were last needed.
    processes: Processes,
    stage: Stage,
    /// The time at which the processes are asked to stop, to be started again in another number.
    stop_deadline: Option<Instant>,
    /// The exits and signals so far.
    end: JobEnd,
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

/// The end of all processes.
#[derive(Debug, Default)]
pub(super) struct JobEnd {
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
    /// Returns a node without processes, which will have this mark. At `stop_deadline` they are
    /// asked to stop, with `grace_timeout` to do so.
    pub(super) fn new(
        events: &'e Events,
        grace_timeout: Duration,
        stop_deadline: Option<Instant>,
        guard: Guard,
        mark: Mark,
    ) -> Self {
        RunningProcesses {
            children: BTreeMap::new(),
            outlived_ranks: BTreeSet::new(),
            last_statuses: BTreeMap::new(),
            check_deadline: None,
            events,
            grace_timeout,
            guard,
            processes: Processes::new(mark),
            stage: Stage::Running,
            stop_deadline,
            end: JobEnd::default(),
        }
    }

    /// Adds a process, and starts a thread that waits for its end.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(super) fn watch(&mut self, rank: usize, child: Child) -> Result<()> {
        let process = Pid::from_child(&child);
        self.children.insert(rank, child);
        self.guard.watch(process)?;
        let events = self.events.sender.clone();
        spawn_thread("watch", rank, move || {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while waitid(WaitId::Pid(process), options).is_err_and(|error| error == Errno::INTR) {}
            // Sending fails only when all is over.
            events.send(Event::Ended(rank)).ok();
        })
    }

    /// Waits until all processes have ended.
    ///
    /// # Errors
    /// The status of a process cannot be read.
    pub(super) fn wait(mut self) -> Result<JobEnd> {
        while !self.children.is_empty() {
            let deadlines = [self.stage_deadline(), self.check_deadline];
            let next_deadline = deadlines.into_iter().flatten().min();
            match self.events.next(next_deadline) {
                Ok(Event::Ended(rank)) => self.handle_end(rank)?,
                Ok(Event::Signal(SIGCHLD)) => self.check_descendants_soon(),
                Ok(Event::Signal(signal_number)) => self.pass_on(signal_number),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            // This is checked after events too, so that many of them cannot keep the next stage
            // from coming.
            self.act_on_deadlines()?;
        }
        Ok(std::mem::take(&mut self.end))
    }

    /// Returns the time at which this stage ends by itself; `None` if it does not.
    fn stage_deadline(&self) -> Option<Instant> {
        match self.stage {
            Stage::Running => self.stop_deadline,
            Stage::Settling(deadline) | Stage::Ending(deadline) => Some(deadline),
            Stage::Killed => None,
        }
    }

    /// Asks for a check of the processes that ranks have started.
    fn check_descendants_soon(&mut self) {
        self.check_deadline
            .get_or_insert_with(|| Instant::now() + CHECK_INTERVAL);
    }

    /// Passes a signal to the launcher on to all processes. Those by which schedulers and terminals
    /// ask a program to stop begin the last stage.
    fn pass_on(&mut self, signal_number: i32) {
        if let Some(signal) = Signal::from_named_raw(signal_number) {
            self.send_signal(signal);
        }
        if !is_request(signal_number) {
            return;
        }
        self.end.got_signal = true;
        if matches!(self.stage, Stage::Running) {
            self.end.first_signal = Some(signal_number);
        }
        if matches!(self.stage, Stage::Running | Stage::Settling(_)) {
            self.stage = Stage::Ending(Instant::now() + self.grace_timeout);
        }
    }

    /// Begins the next stage if that is due now, and checks the processes that ranks have started
    /// if that is due.
    fn act_on_deadlines(&mut self) -> Result<()> {
        if self.children.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        if self
            .stage_deadline()
            .is_some_and(|deadline| deadline <= now)
        {
            self.begin_next_stage();
        }
        if self.check_deadline.is_some_and(|deadline| deadline <= now) {
            self.check_deadline = None;
            self.check_descendants()?;
        }
        Ok(())
    }

    /// Moves to the next stage, because the time of this one is over. Asks the processes to end, or
    /// kills those that were asked.
    fn begin_next_stage(&mut self) {
        let still_running = ranks_text(self.children.keys().copied().collect());
        let verb = if self.children.len() == 1 {
            "is"
        } else {
            "are"
        };
        match self.stage {
            Stage::Settling(_) => {
                output::print_message(&format!(
                    "{still_running} {verb} still running: sending SIGTERM"
                ));
                self.send_signal(Signal::TERM);
                self.stage = Stage::Ending(Instant::now() + self.grace_timeout);
            }
            Stage::Ending(_) => {
                let grace = self.grace_timeout;
                output::print_message(&format!(
                    "{still_running} {verb} still running after {grace:?}: sending SIGKILL"
                ));
                self.send_signal(Signal::KILL);
                self.stage = Stage::Killed;
                self.check_descendants_soon();
            }
            Stage::Running => {
                self.end.was_stopped = true;
                self.send_signal(Signal::TERM);
                self.stage = Stage::Ending(Instant::now() + self.grace_timeout);
            }
            Stage::Killed => {}
        }
    }

    /// Handles the end of a rank's own process: finishes the rank, unless processes that it has
    /// started may still save.
    ///
    /// # Errors
    /// The status of a process cannot be read.
    fn handle_end(&mut self, rank: usize) -> Result<()> {
        let Some(child) = self.children.get(&rank) else {
            return Ok(());
        };
        // If the rank's own process is a shell, it dies of a signal at once, while the program that
        // it has started still saves. That program has the same time to end. The signal need not
        // have come from this launcher: schedulers signal every process of a job.
        match self.stage {
            Stage::Ending(_) => {
                self.outlived_ranks.insert(rank);
                self.check_descendants_soon();
            }
            Stage::Running | Stage::Settling(_) if died_of_request(Pid::from_child(child)) => {
                self.outlived_ranks.insert(rank);
                self.check_descendants()?;
                if matches!(self.stage, Stage::Running) && self.outlived_ranks.contains(&rank) {
                    self.stage = Stage::Settling(Instant::now() + SETTLE_TIMEOUT);
                }
            }
            Stage::Running | Stage::Settling(_) | Stage::Killed => self.finish(rank)?,
        }
        Ok(())
    }

    /// Checks the processes that ranks have started: takes the status of those that have ended,
    /// and finishes each rank of which no process runs any more.
    fn check_descendants(&mut self) -> Result<()> {
        self.processes.refresh();
        let ranks: Vec<(usize, Pid)> = self
            .children
            .iter()
            .map(|(&rank, child)| (rank, Pid::from_child(child)))
            .collect();
        for (rank, status) in self.processes.reap_orphans(&ranks, self.guard.process()) {
            // If a process that a rank has started ends before the rank's own process, that tells
            // nothing about the rank.
            let mut own_process = ranks.iter().filter(|(other, _)| *other == rank);
            if own_process.any(|&(_, process)| self.processes.has_ended(process)) {
                self.last_statuses.insert(rank, status);
            }
        }
        for (rank, group) in ranks {
            let is_over = matches!(self.stage, Stage::Killed)
                || !self.processes.has_running_process(rank, group);
            if is_over && self.outlived_ranks.contains(&rank) {
                self.finish(rank)?;
            }
        }
        if !self.outlived_ranks.is_empty() {
            self.check_descendants_soon();
        }
        Ok(())
    }

    /// Reads the status of a rank's process, records its exit, and kills the processes of its group
    /// that are left. The first failure lets the other processes settle, and then ends them.
    ///
    /// # Errors
    /// The status cannot be read.
    fn finish(&mut self, rank: usize) -> Result<()> {
        self.outlived_ranks.remove(&rank);
        let Some(mut child) = self.children.remove(&rank) else {
            return Ok(());
        };
        let process = Pid::from_child(&child);
        kill_process_group(process, Signal::KILL).ok();
        // Forget the process before `wait` frees its id, which another process may get.
        self.guard.forget(process);
        let mut status = child
            .wait()
            .with_context(|| format!("failed to wait for rank {rank}"))?;
        // Where a shell died of the request to stop, the program that it has started tells how the
        // rank ended.
        if let Some(orphan_status) = self.last_statuses.remove(&rank)
            && status.signal().is_some_and(is_request)
        {
            status = orphan_status;
        }
        let exit = Exit {
            rank,
            status,
            was_asked: matches!(self.stage, Stage::Ending(_) | Stage::Killed),
        };
        self.end.exits.push(exit);
        if exit.is_failure() && matches!(self.stage, Stage::Running) {
            if !self.children.is_empty() {
                output::print_message(&format!(
                    "rank {rank} {}; the other processes end too",
                    exit.describe()
                ));
            }
            self.stage = Stage::Settling(Instant::now() + SETTLE_TIMEOUT);
        }
        Ok(())
    }

    /// Sends a signal to the processes of all ranks and to what they have started.
    fn send_signal(&mut self, signal: Signal) {
        // Listed first: a process that dies of the signal may be the only one in its group that is
        // known to be a rank's.
        self.processes.refresh();
        // Where processes cannot be listed, the groups of the ranks are all that is known. The
        // system does not reuse the id of a child before its status has been read.
        let rank_groups = self.children.values().map(Pid::from_child);
        self.processes.send_signal(rank_groups, signal);
    }
}

/// Returns `true` if a process has died of a signal by which programs are asked to stop. Its status
/// stays unread.
fn died_of_request(process: Pid) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    match waitid(WaitId::Pid(process), options) {
        Ok(Some(status)) => status.terminating_signal().is_some_and(is_request),
        _ => false,
    }
}

/// Returns `true` for a signal by which programs are asked to stop.
fn is_request(signal: i32) -> bool {
    REQUESTS.contains(&signal)
}

impl Drop for RunningProcesses<'_> {
    /// Kills all processes that still run, so that none is left after an error.
    fn drop(&mut self) {
        self.send_signal(Signal::KILL);
        for child in self.children.values_mut() {
            self.guard.forget(Pid::from_child(child));
            child.wait().ok();
        }
    }
}
