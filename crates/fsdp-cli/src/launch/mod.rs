//! `fsdp launch`: starts the processes of a job on this node, and ends them together.

mod arguments;
mod lines;
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "a system call between fork and exec")]
mod parent;
mod ranks;

use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

pub(crate) use self::arguments::LaunchArguments;
use self::lines::Lines;
use self::ranks::{Event, Ranks};
use crate::cpu_threads;
use crate::job_failure::JobError;

/// Starts the processes of a job on this node, and waits for them: `fsdp launch`.
///
/// # Errors
/// Processes that cannot be started; [`RankEnded`](crate::job_failure::RankEnded) for the first that failed. None is left
/// running on return.
pub(crate) fn run(arguments: &LaunchArguments) -> Result<()> {
    let place = arguments.place()?;
    let (events, happened) = mpsc::channel();
    // Step 1: listen for signals, before there is a process that a signal to this one would leave behind.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("failed to listen for signals")?;
    let to = events.clone();
    let forward = move || signals.forever().try_for_each(|signal| to.send(Event::Signal(signal)));
    thread::Builder::new().name("signals".to_owned()).spawn(forward).context("failed to start a thread")?;

    // Step 2: start the processes. Each is watched before anything else can fail, so that a failure ends it.
    let mut ranks = Ranks::new(events, happened, Duration::from_secs(arguments.grace));
    let lines = Lines::new();
    for local_rank in 0..arguments.nproc {
        let rank = place.rank(local_rank);
        let mut child = command(arguments)?
            .envs(place.variables(local_rank))
            .spawn()
            .map_err(|source| JobError::Program { program: program(arguments), source })?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        ranks.watch(rank, child)?;
        lines.copy(rank, stdout, stderr)?;
    }
    // Step 3: wait for all processes, then for the rest of their output.
    let result = ranks.wait();
    lines.finish();
    result
}

fn command(arguments: &LaunchArguments) -> Result<Command> {
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
        command.env(cpu_threads::VARIABLE, cpu_threads::share(arguments.nproc).to_string());
    }
    #[cfg(target_os = "linux")]
    parent::end_with_this_process(&mut command);
    Ok(command)
}

fn program(arguments: &LaunchArguments) -> String {
    arguments.program.first().map(|program| program.to_string_lossy().into_owned()).unwrap_or_default()
}
