//! `fsdp launch`: starts the processes of a job on this node, and ends them together.

mod arguments;
mod descendants;
mod exits;
mod gpus;
pub(crate) mod guard;
mod lines;
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "a system call between fork and exec")]
mod parent;
mod running;
mod signals;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use fsdp::comm::BLAME_DIR;
use tempfile::TempDir;

pub(crate) use self::arguments::{LaunchArguments, has_secret};
use self::descendants::{MARK, Mark};
pub(crate) use self::gpus::list_gpus;
use self::guard::Guard;
use self::lines::{LastLines, RankOutput};
use self::running::{JobEnd, RunningProcesses};
use self::signals::Events;
use crate::cpu_threads;
use crate::exit_codes;
use crate::failure::{CommandError, Stopped, usage_error};
use crate::output::{self, Stream};
use crate::text::or_word;

/// The longest duration that is used in computations with time. Longer ones are cut to it, so that
/// no point in time overflows.
const MAX_DURATION: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// An attempt that fails within this time has hardly begun to work: what made it fail may well
/// still be there.
const EARLY_FAILURE_WINDOW: Duration = Duration::from_secs(5);

/// The longest pause before an attempt.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Starts the processes of a job on this node, and waits for them: `fsdp launch`. If one fails, all
/// are started again, at most `--max-restarts` times. If the number of processes may shrink, the
/// ones that failed are left out.
///
/// # Errors
/// Processes that cannot be started; the exit code of the first that failed. None is left running
/// on return.
pub(crate) fn run(arguments: &LaunchArguments) -> Result<()> {
    // Mistakes in the options are found before anything is started.
    arguments.make_rendezvous(arguments.nproc.maximum, 0)?;
    // Listen for signals, before there is a process that a signal to this one would leave behind.
    let events = Events::listen()?;
    descendants::adopt_orphans();

    let mut attempts = Attempts::new(arguments);
    loop {
        let nproc_before = attempts.nproc;
        let start = Instant::now();
        let next = match run_attempt(&attempts, &events)? {
            AttemptOutcome::Done => return Ok(()),
            AttemptOutcome::Stopped => bail!(Stopped),
            AttemptOutcome::Regrows { unsaved } => attempts.regrow(unsaved)?,
            AttemptOutcome::Failed {
                failure,
                may_restart,
                lost_count,
            } => attempts.restart(failure, may_restart, lost_count, start.elapsed())?,
        };
        output::print_message(&attempts.announcement(&next, nproc_before));
        if events.was_asked_to_end_within(next.pause) {
            // A signal has asked this launcher to end while no process ran.
            match next.failure {
                Some(failure) => bail!(failure),
                None => bail!(Stopped),
            }
        }
    }
}

/// The attempts at a job, so far.
struct Attempts<'a> {
    arguments: &'a LaunchArguments,
    /// The number of processes of the next attempt.
    nproc: usize,
    restart_count: u32,
    /// The number of attempts in a row that have failed early.
    early_failures: u32,
    /// The time after which a job that has shrunk gets all its processes again.
    regrow_after: Option<Duration>,
    /// `true` if the last attempt began with all processes again, after the job had shrunk.
    has_regrown: bool,
}

/// The way to the next attempt.
struct NextAttempt {
    /// The failure that made it necessary, if there was one.
    failure: Option<CommandError>,
    pause: Duration,
    /// `true` if it counts as a restart.
    is_restart: bool,
}

impl<'a> Attempts<'a> {
    /// Returns the state before the first attempt.
    fn new(arguments: &'a LaunchArguments) -> Self {
        let regrow_after = arguments.regrow_after;
        Attempts {
            arguments,
            nproc: arguments.nproc.maximum,
            restart_count: 0,
            early_failures: 0,
            regrow_after: regrow_after.map(|seconds| capped_duration(seconds.get())),
            has_regrown: false,
        }
    }

    fn has_shrunk(&self) -> bool {
        self.nproc < self.arguments.nproc.maximum
    }

    /// Returns the time at which the next attempt should stop, to be followed by one with all
    /// processes; `None` if it has all processes, or need not regrow.
    fn stop_deadline(&self) -> Option<Instant> {
        match self.regrow_after {
            Some(timeout) if self.has_shrunk() => Some(Instant::now() + timeout),
            _ => None,
        }
    }

    /// Prepares an attempt with all processes. It is free if all processes have saved.
    ///
    /// # Errors
    /// Not all processes have saved, and no restart is left.
    fn regrow(&mut self, unsaved: Option<CommandError>) -> Result<NextAttempt> {
        self.nproc = self.arguments.nproc.maximum;
        self.has_regrown = true;
        self.early_failures = 0;
        let is_restart = unsaved.is_some();
        if let Some(failure) = &unsaved {
            output::print_message(
                "not all processes had saved before they ended: choose a longer `--grace`",
            );
            // This counts as a restart. So a program that never saves is not started over and over.
            self.count_restart(failure)?;
        }
        Ok(NextAttempt {
            failure: unsaved,
            pause: Duration::ZERO,
            is_restart,
        })
    }

    /// Prepares the attempt after a failure, without the processes that were lost.
    ///
    /// # Errors
    /// The failure, if it is final.
    fn restart(
        &mut self,
        failure: CommandError,
        may_restart: bool,
        lost_count: usize,
        elapsed: Duration,
    ) -> Result<NextAttempt> {
        let minimum = self.arguments.nproc.minimum;
        let is_refused = failure.exit_code == exit_codes::USAGE;
        // A number of processes that the program refuses is no reason to end a job that may have
        // fewer. Nothing was computed, so it is not a restart.
        if may_restart && is_refused && self.has_shrunk() && self.nproc > minimum {
            self.nproc -= 1;
            return Ok(NextAttempt {
                failure: Some(failure),
                pause: Duration::ZERO,
                is_restart: false,
            });
        }
        // Any other mistake on the command line would only be repeated.
        ensure!(may_restart && !is_refused, failure);
        self.count_restart(&failure)?;
        if let Some(regrow_after) = &mut self.regrow_after
            && self.has_regrown
            && elapsed < *regrow_after
        {
            // The attempt with all processes failed early: the machine still lacks something that
            // they need. Each such attempt costs a restart, so wait twice as long before the next
            // one.
            *regrow_after = regrow_after.saturating_mul(2).min(MAX_DURATION);
        }
        self.has_regrown = false;
        self.early_failures = if elapsed < EARLY_FAILURE_WINDOW {
            self.early_failures + 1
        } else {
            0
        };
        self.nproc = self.nproc.saturating_sub(lost_count).max(minimum);
        Ok(NextAttempt {
            failure: Some(failure),
            pause: pause_after(self.early_failures),
            is_restart: true,
        })
    }

    /// Counts a restart after a failure.
    ///
    /// # Errors
    /// The failure, if no restart is left.
    fn count_restart(&mut self, failure: &CommandError) -> Result<()> {
        ensure!(
            self.restart_count < self.arguments.max_restarts,
            failure.clone()
        );
        self.restart_count += 1;
        Ok(())
    }

    /// Returns a line about the next attempt, after one of `before` processes.
    fn announcement(&self, next: &NextAttempt, nproc_before: usize) -> String {
        let reason = or_word(next.failure.as_ref(), "all processes stopped and saved");
        let processes = match self.nproc {
            1 if nproc_before == 1 => "the process".to_owned(),
            1 => "1 process".to_owned(),
            count if count == nproc_before => format!("all {count} processes"),
            count => format!("{count} processes"),
        };
        let mut line = format!("{reason}; starting {processes} again");
        if !next.pause.is_zero() {
            line.push_str(&format!(" in {:?}", next.pause));
        }
        if next.is_restart {
            let max_restarts = self.arguments.max_restarts;
            line.push_str(&format!(
                " (restart {} of {max_restarts})",
                self.restart_count
            ));
        }
        line
    }
}

/// Returns a duration that was given in seconds, cut to the longest.
fn capped_duration(seconds: u64) -> Duration {
    Duration::from_secs(seconds).min(MAX_DURATION)
}

/// Returns the pause after this many attempts in a row that have failed early: none after the
/// first, then 1 second, 2, 4 and so on.
fn pause_after(early_failures: u32) -> Duration {
    let Some(doublings) = early_failures.checked_sub(2) else {
        return Duration::ZERO;
    };
    Duration::from_secs(2u64.saturating_pow(doublings)).min(MAX_PAUSE)
}

/// The outcome of one attempt at a job.
enum AttemptOutcome {
    Done,
    /// A signal stopped the processes, and they have saved.
    Stopped,
    /// The processes were stopped so that they can be started again in their full number. `unsaved`
    /// is the failure of one that has not saved.
    Regrows {
        unsaved: Option<CommandError>,
    },
    /// A process has failed. With `may_restart`, another attempt may succeed, without the processes
    /// that were lost.
    Failed {
        failure: CommandError,
        may_restart: bool,
        lost_count: usize,
    },
}

/// Starts the processes of one attempt, and waits until all have ended and their output is printed.
///
/// # Errors
/// Processes that cannot be started, or whose status cannot be read.
fn run_attempt(attempts: &Attempts<'_>, events: &Events) -> Result<AttemptOutcome> {
    let &Attempts {
        arguments, nproc, ..
    } = attempts;
    // On one node each attempt has its own secret and its own port: no process of another attempt
    // can join it.
    let rendezvous = arguments.make_rendezvous(nproc, attempts.restart_count)?;
    // Step 1: start the processes. Each is watched before anything else can fail, so that a failure
    // ends it.
    let mark = Mark::random();
    let mut guard = Guard::start(&mark)?;
    let blame_dir = exits::make_blame_dir();
    if let Some(blame_dir) = &blame_dir {
        guard.remove_at_end(blame_dir.path());
    }
    let grace_timeout = capped_duration(arguments.grace);
    let stop_deadline = attempts.stop_deadline();
    let mut ranks =
        RunningProcesses::new(events, grace_timeout, stop_deadline, guard, mark.clone());
    let output = RankOutput::new();
    for local_rank in 0..nproc {
        let rank = rendezvous.first_rank + local_rank;
        let mut command = make_command(arguments, nproc);
        command
            .envs(rendezvous.variables(local_rank))
            .env(MARK, mark.value(rank));
        match &blame_dir {
            Some(blame_dir) => command.env(BLAME_DIR, blame_dir.path()),
            None => command.env_remove(BLAME_DIR),
        };
        let mut child = command.spawn().with_context(|| {
            let program = arguments.program[0].display();
            usage_error(
                format!("failed to start `{program}`"),
                "check the program after `--`",
            )
        })?;
        let stdout = child.stdout.take();
        let stderr = child.stderr.take();
        ranks.watch(rank, child)?;
        output.copy(rank, stdout, Stream::Stdout)?;
        output.copy(rank, stderr, Stream::Stderr)?;
    }
    // Step 2: wait for all processes, then for the rest of their output.
    let outcome = ranks.wait();
    let mut got_signal = outcome.as_ref().is_ok_and(|end| end.got_signal);
    let last_lines = output.finish(|| {
        got_signal |= events.was_asked_to_end_within(Duration::ZERO);
        got_signal
    });
    let mut end = outcome?;
    end.got_signal = got_signal;
    if got_signal {
        // Nobody may be reading stderr either.
        events.end_at_next_request();
    }
    Ok(report_exits(
        end,
        &last_lines,
        blame_dir.as_ref().map(TempDir::path),
    ))
}

/// Reports how the processes have ended, and returns the outcome: `Done` if all went well,
/// `Regrows` or `Stopped` if all were stopped and have saved. A failure is returned, for the caller
/// to report; what helps to explain it is printed here.
fn report_exits(end: JobEnd, last_lines: &LastLines, blame_dir: Option<&Path>) -> AttemptOutcome {
    let exits = &end.exits;
    let Some(cause) = exits::find_cause(exits, blame_dir) else {
        return AttemptOutcome::Done;
    };
    let exit = cause.exit;
    let regrows = end.was_stopped && !end.got_signal;
    if !exit.is_failure() {
        if regrows {
            return AttemptOutcome::Regrows { unsaved: None };
        }
        let are_all_alike = exits.iter().all(|exit| !exit.status.success());
        output::print_message(&if are_all_alike {
            "all processes stopped and saved".to_owned()
        } else {
            exits::list_text(exits)
        });
        return AttemptOutcome::Stopped;
    }
    if exits.len() > 1 {
        output::print_message(&format!("all exits: {}", exits::list_text(exits)));
    }
    let lost_count = exits::count_lost_ranks(exits, &cause, blame_dir);
    let rank = exit.rank;
    let mut description = exit.describe();
    if let Some(signal) = end.first_signal {
        description.push_str(&format!(", after signal {signal} to `fsdp launch`"));
    } else {
        if !cause.blamed_ranks.is_empty() {
            let blamed_ranks = exits::ranks_text(cause.blamed_ranks);
            description.push_str(&format!(" because of {blamed_ranks}"));
        }
        if let Some(lines) = last_lines.get(&rank) {
            let lines: String = lines.iter().map(|line| format!("\n  {line}")).collect();
            output::print_message(&format!("the last lines of rank {rank}:{lines}"));
        }
    }
    let failure = CommandError {
        exit_code: exit.code(),
        message: format!("rank {rank} {description}"),
        hint: Some("see what it wrote, above"),
    };
    let mut failures = exits.iter().filter(|exit| exit.is_failure());
    if regrows && failures.all(|exit| exit.was_asked) {
        // No process is lost: they were killed, or died of the signal, before they had saved.
        return AttemptOutcome::Regrows {
            unsaved: Some(failure),
        };
    }
    // After a signal to the launcher nobody wants a restart.
    AttemptOutcome::Failed {
        failure,
        may_restart: !end.got_signal,
        lost_count,
    }
}

/// Returns the command of one of `nproc` processes.
fn make_command(arguments: &LaunchArguments, nproc: usize) -> Command {
    use std::os::unix::process::CommandExt as _;

    // clap requires the program.
    let mut command = Command::new(&arguments.program[0]);
    command
        .args(&arguments.program[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // Here this variable is the number of processes of this node, but `fsdp train` would read it as
    // the number of all ranks.
    command.env_remove("FSDP_NPROC");
    // A group of its own, so that signals reach the processes that it starts too.
    command.process_group(0);
    if cpu_threads::requested_threads().is_none() {
        // Programs that use candle get their share of the cores too.
        command.env(
            cpu_threads::THREADS_VARIABLE,
            cpu_threads::equal_share(nproc).to_string(),
        );
    }
    #[cfg(target_os = "linux")]
    parent::end_with_this_process(&mut command);
    command
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
