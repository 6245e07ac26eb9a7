//! `fsdp launch`: starts the processes of a job on this node, and ends them together.

mod arguments;
mod descendants;
mod exits;
pub(crate) mod guard;
mod lines;
mod notes;
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "a system call between fork and exec")]
mod parent;
mod running;
mod signals;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use fsdp::comm::BLAME_DIR;

pub(crate) use self::arguments::LaunchArguments;
use self::exits::Cause;
use self::guard::Guard;
use self::lines::{LastLines, Lines};
use self::running::{Ended, RunningProcesses};
use self::signals::Events;
use crate::cpu_threads;
use crate::exit_codes;
use crate::failure::Stopped;
use crate::job_failure::{JobError, RankEnded};
use crate::output;

/// The longest duration that is used in computations with time. Longer ones are cut to it, so that
/// no point in time overflows.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// An attempt that fails within this time has hardly begun to work: what made it fail may well
/// still be there.
const EARLY: Duration = Duration::from_secs(5);

/// The longest pause before an attempt.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Starts the processes of a job on this node, and waits for them: `fsdp launch`. If one fails, all
/// are started again, at most `--max-restarts` times. If the number of processes may shrink, the
/// ones that failed are left out.
///
/// # Errors
/// Processes that cannot be started; [`RankEnded`] for the first that failed. None is left running
/// on return.
pub(crate) fn run(arguments: &LaunchArguments) -> Result<()> {
    // Mistakes in the options are found before anything is started.
    let processes = arguments.nproc;
    arguments.place(processes.most, 0)?;
    // Listen for signals, before there is a process that a signal to this one would leave behind.
    let events = Events::listen()?;
    descendants::adopt_orphans();

    let mut attempts = Attempts::new(arguments);
    loop {
        let before = attempts.nproc;
        let start = Instant::now();
        let outcome = attempt(&attempts, &events)?;
        let next = match outcome {
            Outcome::Done => return Ok(()),
            Outcome::Stopped => return Err(Stopped.into()),
            Outcome::Regrows { unsaved } => attempts.regrow(unsaved)?,
            Outcome::Failed {
                failure,
                may_restart,
                lost,
            } => attempts.restart(failure, may_restart, lost, start.elapsed())?,
        };
        let Next {
            why,
            failure,
            pause,
            is_restart,
        } = next;
        let who = match attempts.nproc {
            1 if before == 1 => "the process".to_owned(),
            1 => "1 process".to_owned(),
            all if all == before => format!("all {all} processes"),
            some => format!("{some} processes"),
        };
        let after = if pause.is_zero() {
            String::new()
        } else {
            format!(" in {pause:?}")
        };
        let count = if is_restart {
            format!(
                " (restart {} of {})",
                attempts.restarts, arguments.max_restarts
            )
        } else {
            String::new()
        };
        output::talk(&format!("{why}; starting {who} again{after}{count}"));
        if events.requested_within(pause) {
            // A signal has asked this launcher to end while no process ran.
            return Err(failure.map_or_else(|| Stopped.into(), Into::into));
        }
    }
}

/// The attempts at a job, so far.
struct Attempts<'a> {
    arguments: &'a LaunchArguments,
    /// The number of processes of the next attempt.
    nproc: usize,
    restarts: u32,
    /// The number of attempts in a row that have failed early.
    early: u32,
    /// The time after which a job that has shrunk gets all its processes again.
    regrow_after: Option<Duration>,
    /// `true` if the last attempt began with all processes again, after the job had shrunk.
    has_regrown: bool,
}

/// The way to the next attempt.
struct Next {
    why: String,
    /// The failure that made it necessary, if there was one.
    failure: Option<RankEnded>,
    pause: Duration,
    /// `true` if it counts as a restart.
    is_restart: bool,
}

impl<'a> Attempts<'a> {
    fn new(arguments: &'a LaunchArguments) -> Self {
        let regrow_after = arguments
            .regrow_after
            .map(|seconds| Duration::from_secs(seconds.get()).min(LONGEST));
        let nproc = arguments.nproc.most;
        Attempts {
            arguments,
            nproc,
            restarts: 0,
            early: 0,
            regrow_after,
            has_regrown: false,
        }
    }

    /// Returns the time at which the next attempt should stop, to be followed by one with all
    /// processes.
    fn stop_at(&self) -> Option<Instant> {
        let has_shrunk = self.nproc < self.arguments.nproc.most;
        self.regrow_after
            .filter(|_| has_shrunk)
            .map(|after| Instant::now() + after)
    }

    /// Prepares an attempt with all processes. It is free if all processes have saved.
    ///
    /// # Errors
    /// Not all processes have saved, and no restart is left.
    fn regrow(&mut self, unsaved: Option<RankEnded>) -> Result<Next> {
        self.nproc = self.arguments.nproc.most;
        (self.has_regrown, self.early) = (true, 0);
        let pause = Duration::ZERO;
        let Some(failure) = unsaved else {
            let why = "all processes stopped and saved".to_owned();
            return Ok(Next {
                why,
                failure: None,
                pause,
                is_restart: false,
            });
        };
        output::talk("not all processes had saved before they ended: choose a longer `--grace`");
        // This counts as a restart. So a program that never saves is not started over and over.
        if self.restarts == self.arguments.max_restarts {
            return Err(failure.into());
        }
        self.restarts += 1;
        Ok(Next {
            why: failure.to_string(),
            failure: Some(failure),
            pause,
            is_restart: true,
        })
    }

    /// Prepares the attempt after a failure, without the `lost` processes.
    ///
    /// # Errors
    /// The failure, if it is final.
    fn restart(
        &mut self,
        failure: RankEnded,
        may_restart: bool,
        lost: usize,
        lasted: Duration,
    ) -> Result<Next> {
        let least = self.arguments.nproc.least;
        let has_shrunk = self.nproc < self.arguments.nproc.most;
        // A number of processes that the program refuses is no reason to end a job that may have
        // fewer. Nothing was computed, so it is not a restart.
        if may_restart && failure.code == exit_codes::USAGE && has_shrunk && self.nproc > least {
            self.nproc -= 1;
            let (why, pause) = (failure.to_string(), Duration::ZERO);
            return Ok(Next {
                why,
                failure: Some(failure),
                pause,
                is_restart: false,
            });
        }
        // Any other mistake on the command line would only be repeated.
        if !may_restart
            || failure.code == exit_codes::USAGE
            || self.restarts == self.arguments.max_restarts
        {
            return Err(failure.into());
        }
        if std::mem::take(&mut self.has_regrown)
            && self.regrow_after.is_some_and(|after| lasted < after)
        {
            // The attempt with all processes failed early: the machine still lacks something that
            // they need. Each such attempt costs a restart, so wait twice as long before the next
            // one.
            self.regrow_after = self
                .regrow_after
                .map(|after| after.saturating_mul(2).min(LONGEST));
        }
        self.early = if lasted < EARLY { self.early + 1 } else { 0 };
        self.nproc = self.nproc.saturating_sub(lost).max(least);
        self.restarts += 1;
        let pause = pause_after(self.early);
        Ok(Next {
            why: failure.to_string(),
            failure: Some(failure),
            pause,
            is_restart: true,
        })
    }
}

/// Returns the pause after this many attempts in a row that have failed early: none after the
/// first, then 1 second, 2, 4 and so on.
fn pause_after(early: u32) -> Duration {
    let seconds = early
        .checked_sub(2)
        .map_or(0, |doubled| 1u64.checked_shl(doubled).unwrap_or(u64::MAX));
    Duration::from_secs(seconds).min(LONGEST_PAUSE)
}

/// The outcome of one attempt at a job.
enum Outcome {
    Done,
    /// A signal stopped the processes, and they have saved.
    Stopped,
    /// The processes were stopped so that they can be started again in their full number. `unsaved`
    /// is the failure of one that has not saved.
    Regrows {
        unsaved: Option<RankEnded>,
    },
    /// A process has failed. With `may_restart`, another attempt may succeed, without the processes
    /// that were lost.
    Failed {
        failure: RankEnded,
        may_restart: bool,
        lost: usize,
    },
}

/// Starts the processes of one attempt, and waits until all have ended.
///
/// # Errors
/// Processes that cannot be started.
fn attempt(attempts: &Attempts<'_>, events: &Events) -> Result<Outcome> {
    let &Attempts {
        arguments, nproc, ..
    } = attempts;
    // On one node each attempt has its own secret and its own port: no process of another attempt
    // can join it.
    let place = arguments.place(nproc, attempts.restarts)?;
    // Step 1: start the processes. Each is watched before anything else can fail, so that a failure
    // ends it.
    let grace = Duration::from_secs(arguments.grace).min(LONGEST);
    let mut guard = Guard::start()?;
    let notes = notes::directory();
    if let Some(notes) = &notes {
        guard.remove(notes.path());
    }
    let mut ranks = RunningProcesses::new(events, grace, attempts.stop_at(), guard);
    let lines = Lines::new();
    for local_rank in 0..nproc {
        let rank = place.rank(local_rank);
        let mut command = command(arguments, nproc)?;
        command.envs(place.variables(local_rank));
        match &notes {
            Some(notes) => command.env(BLAME_DIR, notes.path()),
            None => command.env_remove(BLAME_DIR),
        };
        let mut child = command.spawn().map_err(|source| JobError::Program {
            program: program(arguments),
            source,
        })?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        ranks.watch(rank, child)?;
        lines.copy(rank, stdout, stderr)?;
    }
    // Step 2: wait for all processes, then for the rest of their output.
    let ended = ranks.wait();
    let mut got_signal = ended.as_ref().is_ok_and(|ended| ended.got_signal);
    let last_lines = lines.finish(|| {
        got_signal |= events.requested_within(Duration::ZERO);
        got_signal
    });
    let mut ended = ended?;
    ended.got_signal = got_signal;
    if got_signal {
        // Nobody may be reading stderr either.
        events.end_at_next_request();
    }
    Ok(report(
        ended,
        &last_lines,
        notes.as_ref().map(tempfile::TempDir::path),
    ))
}

/// Reports the exits of all processes, unless all went well.
fn report(ended: Ended, last_lines: &LastLines, notes: Option<&Path>) -> Outcome {
    let Ended {
        exits,
        first_signal: signal,
        got_signal,
        was_stopped,
    } = ended;
    let Some(cause) = exits::cause(&exits, notes) else {
        return Outcome::Done;
    };
    let lost = exits::lost(&exits, &cause, notes);
    let Cause { exit, because_of } = cause;
    let rank = exit.rank;
    let regrows = was_stopped && !got_signal;
    if !exit.is_failure() {
        if regrows {
            return Outcome::Regrows { unsaved: None };
        }
        output::talk("all processes stopped and saved, as they were told");
        return Outcome::Stopped;
    }
    if exits.len() > 1 {
        output::talk(&format!("all exits: {}", exits::list(&exits)));
    }
    let mut how = exit.describe();
    if let Some(signal) = signal {
        how.push_str(&format!(", after signal {signal} to `fsdp launch`"));
    } else if !because_of.is_empty() {
        how.push_str(&format!(" because of {}", exits::ranks_text(because_of)));
    }
    if signal.is_none() {
        let lines = last_lines.get(&rank).into_iter().flatten();
        let lines: String = lines.map(|line| format!("\n  {line}")).collect();
        if !lines.is_empty() {
            output::talk(&format!("the last lines of rank {rank}:{lines}"));
        }
    }
    let failure = RankEnded {
        rank,
        how,
        code: exit.code(),
    };
    if regrows
        && exits
            .iter()
            .all(|exit| exit.was_asked || !exit.is_failure())
    {
        // No process is lost: they were killed, or died of the signal, before they had saved.
        return Outcome::Regrows {
            unsaved: Some(failure),
        };
    }
    // After a signal to the launcher nobody wants a restart.
    Outcome::Failed {
        failure,
        may_restart: !got_signal,
        lost,
    }
}

/// Returns the command of one of `nproc` processes.
fn command(arguments: &LaunchArguments, nproc: usize) -> Result<Command> {
    use std::os::unix::process::CommandExt as _;

    let (program, rest) = arguments
        .program
        .split_first()
        .context("no program was named")?;
    let mut command = Command::new(program);
    command
        .args(rest)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // Here this variable is the number of processes of this node, but `fsdp train` would read it as
    // the number of all ranks.
    command.env_remove("FSDP_NPROC");
    // A group of its own, so that signals reach the processes that it starts too.
    command.process_group(0);
    if cpu_threads::asked().is_none() {
        // Programs that use candle get their share of the cores too.
        command.env(cpu_threads::VARIABLE, cpu_threads::share(nproc).to_string());
    }
    #[cfg(target_os = "linux")]
    parent::end_with_this_process(&mut command);
    Ok(command)
}

fn program(arguments: &LaunchArguments) -> String {
    arguments
        .program
        .first()
        .map(|program| program.to_string_lossy().into_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let pauses = [0, 1, 2, 3, 6, 7, 66, u32::MAX].map(|early| pause_after(early).as_secs());
        assert_eq!(pauses, [0, 0, 1, 2, 16, 30, 30, 30]);
    }
}
