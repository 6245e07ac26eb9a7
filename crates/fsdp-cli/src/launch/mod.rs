//! `fsdp launch`: starts the processes of a job on this node, and ends them together.

mod arguments;
mod exits;
pub(crate) mod guard;
mod lines;
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "a system call between fork and exec")]
mod parent;
mod ranks;

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use fsdp::comm::BLAME_DIR;
use signal_hook::iterator::Signals;

pub(crate) use self::arguments::LaunchArguments;
use self::exits::Cause;
use self::guard::Guard;
use self::lines::{LastLines, Lines};
use self::ranks::{Ended, Event, Ranks};
use crate::cpu_threads;
use crate::exit_codes;
use crate::failure::Stopped;
use crate::job_failure::{JobError, RankEnded};
use crate::output;
use crate::stop::signals_to_stop;

/// The longest duration that is used in computations with time. Longer ones are cut to it, so that no point in time
/// overflows.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Starts the processes of a job on this node, and waits for them: `fsdp launch`. If one fails, all are started again,
/// at most `--max-restarts` times. If the number of processes may shrink, the ones that failed are left out.
///
/// # Errors
/// Processes that cannot be started; [`RankEnded`] for the first that failed. None is left running on return.
pub(crate) fn run(arguments: &LaunchArguments) -> Result<()> {
    // Mistakes in the options are found before anything is started.
    let processes = arguments.nproc;
    arguments.place(processes.most, 0)?;
    let (events, happened) = mpsc::channel();
    // Listen for signals, before there is a process that a signal to this one would leave behind.
    let mut signals = Signals::new(signals_to_stop()).context("failed to listen for signals")?;
    let to = events.clone();
    let forward = move || signals.forever().try_for_each(|signal| to.send(Event::Signal(signal)));
    thread::Builder::new().name("signals".to_owned()).spawn(forward).context("failed to start a thread")?;

    let (mut nproc, mut restarts) = (processes.most, 0);
    loop {
        let regrow_after = arguments.regrow_after.filter(|_| nproc < processes.most);
        let stop_at = regrow_after.map(|seconds| Instant::now() + Duration::from_secs(seconds.get()).min(LONGEST));
        let before = nproc;
        let why = match attempt(arguments, nproc, restarts, stop_at, &events, &happened)? {
            Outcome::Done => return Ok(()),
            Outcome::Stopped => return Err(Stopped.into()),
            Outcome::Regrows => {
                nproc = processes.most;
                "all processes stopped and saved".to_owned()
            }
            Outcome::Failed { failure, may_restart, lost } => {
                if !may_restart || restarts == arguments.max_restarts {
                    return Err(failure.into());
                }
                nproc = nproc.saturating_sub(lost).max(processes.least);
                restarts += 1;
                failure.to_string()
            }
        };
        let of = arguments.max_restarts;
        let again = match nproc {
            all if all == before => "all processes are".to_owned(),
            1 => "1 process is".to_owned(),
            left => format!("{left} processes are"),
        };
        output::talk(&format!("{why}: {again} started again (restart {restarts} of {of})"));
    }
}

/// The outcome of one attempt at a job.
enum Outcome {
    Done,
    /// A signal stopped the processes, and they have saved.
    Stopped,
    /// The processes have saved, and can be started again in their full number.
    Regrows,
    /// A process has failed. With `may_restart`, another attempt may succeed, without the processes that were lost.
    Failed {
        failure: RankEnded,
        may_restart: bool,
        lost: usize,
    },
}

/// Starts `nproc` processes, and waits until all have ended. At `stop_at` they are told to stop.
///
/// # Errors
/// Processes that cannot be started.
fn attempt(
    arguments: &LaunchArguments,
    nproc: usize,
    restarts: u32,
    stop_at: Option<Instant>,
    events: &Sender<Event>,
    happened: &Receiver<Event>,
) -> Result<Outcome> {
    // Each attempt has its own secret, and on one node its own port: no process of another attempt can join it.
    let place = arguments.place(nproc, restarts)?;
    // Step 1: start the processes. Each is watched before anything else can fail, so that a failure ends it.
    let grace = Duration::from_secs(arguments.grace).min(LONGEST);
    let mut ranks = Ranks::new(events.clone(), happened, grace, stop_at, Guard::start()?);
    let notes = tempfile::tempdir().context("failed to make a directory for the ranks' notes")?;
    let lines = Lines::new();
    for local_rank in 0..nproc {
        let rank = place.rank(local_rank);
        let mut child = command(arguments, nproc)?
            .envs(place.variables(local_rank))
            .env(BLAME_DIR, notes.path())
            .spawn()
            .map_err(|source| JobError::Program { program: program(arguments), source })?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        ranks.watch(rank, child)?;
        lines.copy(rank, stdout, stderr)?;
    }
    // Step 2: wait for all processes, then for the rest of their output.
    let ended = ranks.wait();
    let last_lines = lines.finish();
    Ok(report(ended?, &last_lines, notes.path()))
}

/// Reports the exits of all processes, unless all went well.
fn report(ended: Ended, last_lines: &LastLines, notes: &Path) -> Outcome {
    let Ended { exits, signal, was_told, was_stopped } = ended;
    let Some(cause) = exits::cause(&exits, notes) else { return Outcome::Done };
    let lost = exits::lost(&exits, &cause, notes);
    let Cause { exit, because_of } = cause;
    let rank = exit.rank;
    if !exit.is_failure() {
        if was_stopped && !was_told {
            return Outcome::Regrows;
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
        how.push_str(&format!(" because of {}", exits::ranges(because_of)));
    }
    if signal.is_none() {
        let lines = last_lines.get(&rank).into_iter().flatten();
        let lines: String = lines.map(|line| format!("\n  {line}")).collect();
        if !lines.is_empty() {
            output::talk(&format!("the last lines of rank {rank}:{lines}"));
        }
    }
    let code = exit.code();
    // After a signal to the launcher nobody wants a restart, and a mistake on the command line would only be repeated.
    let may_restart = !was_told && code != exit_codes::USAGE;
    Outcome::Failed { failure: RankEnded { rank, how, code }, may_restart, lost }
}

/// Returns the command of one of `nproc` processes.
fn command(arguments: &LaunchArguments, nproc: usize) -> Result<Command> {
    use std::os::unix::process::CommandExt as _;

    let (program, rest) = arguments.program.split_first().context("no program was named")?;
    let mut command = Command::new(program);
    command.args(rest).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // It is the number of processes of this node, but `fsdp train` would read it as the number of all ranks.
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
    arguments.program.first().map(|program| program.to_string_lossy().into_owned()).unwrap_or_default()
}
