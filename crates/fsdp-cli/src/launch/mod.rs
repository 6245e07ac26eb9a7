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
use crate::job_failure::JobError;

/// # Errors
/// Processes that cannot be started; [`RankEnded`](crate::job_failure::RankEnded) for the first that failed. None is left
/// running on return.
pub(crate) fn run(arguments: &LaunchArguments) -> Result<()> {
    let place = arguments.place()?;
    let (events, happened) = mpsc::channel();
    // Before any process is there: from now on a signal ends them too.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("failed to listen for signals")?;
    let to = events.clone();
    let forward = move || signals.forever().try_for_each(|signal| to.send(Event::Signal(signal)));
    thread::Builder::new().name("signals".to_owned()).spawn(forward).context("failed to start a thread")?;

    let mut ranks = Ranks::new(events, happened, Duration::from_secs(arguments.grace));
    let lines = Lines::new();
    for local_rank in 0..arguments.nproc {
        let rank = place.rank(local_rank);
        let mut child = command(arguments)?
            .envs(place.variables(local_rank))
            .spawn()
            .map_err(|source| JobError::Program { program: program(arguments), source })?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        // Watched first: whatever fails from here on, it is ended.
        ranks.watch(rank, child)?;
        lines.copy(rank, stdout, stderr)?;
    }
    let result = ranks.wait();
    lines.finish();
    result
}

fn command(arguments: &LaunchArguments) -> Result<Command> {
    use std::os::unix::process::CommandExt as _;

    let (program, rest) = arguments.program.split_first().context("no program was named")?;
    let mut command = Command::new(program);
    command.args(rest).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // It is the number of processes of a node, which `fsdp train` would take for that of all.
    command.env_remove("FSDP_NPROC");
    // Signals go to what a process has started, too.
    command.process_group(0);
    #[cfg(target_os = "linux")]
    parent::end_with_this_process(&mut command);
    Ok(command)
}

fn program(arguments: &LaunchArguments) -> String {
    arguments.program.first().map(|program| program.to_string_lossy().into_owned()).unwrap_or_default()
}
