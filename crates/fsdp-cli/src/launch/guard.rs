//! A process that ends the ranks if the launcher is killed.
//!
//! The system ends each rank's own process then, but not what that process has started, such as the program of
//! `fsdp launch -- sh -c '…'`. The guard is told of each process group through a pipe. The pipe is closed when the launcher
//! ends, in any way, and then the guard kills the groups that are left.

use std::collections::BTreeSet;
use std::io::{self, BufRead as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process_group};

/// The hidden command of the guard.
pub(crate) const COMMAND: &str = "launch-guard";

/// The launcher's end of the pipe to the guard.
pub(super) struct Guard {
    process: Child,
    pipe: Option<ChildStdin>,
}

impl Guard {
    /// Starts the guard.
    ///
    /// # Errors
    /// This program cannot be started again.
    pub(super) fn start() -> Result<Guard> {
        let mut command = Command::new(this_program()?);
        // It must outlive a signal to the launcher's group, such as that of Ctrl-C.
        command.arg(COMMAND).process_group(0).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut process = command.spawn().context("failed to start the guard of the processes")?;
        let pipe = process.stdin.take();
        Ok(Guard { process, pipe })
    }

    /// Has a process group killed if this process ends before [`forget`](Guard::forget).
    ///
    /// # Errors
    /// The guard has ended.
    pub(super) fn watch(&mut self, group: Pid) -> Result<()> {
        self.tell(&format!("+{}\n", group.as_raw_nonzero())).context("the guard of the processes has ended")
    }

    /// Takes back [`watch`](Guard::watch), after the group was ended. Its number may be given to another one.
    pub(super) fn forget(&mut self, group: Pid) {
        // A guard that has ended kills nothing.
        self.tell(&format!("-{}\n", group.as_raw_nonzero())).ok();
    }

    fn tell(&mut self, line: &str) -> io::Result<()> {
        self.pipe.as_mut().map_or(Ok(()), |pipe| pipe.write_all(line.as_bytes()))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.pipe.take());
        self.process.wait().ok();
    }
}

/// Guards process groups until stdin is closed: the guard's side.
pub(crate) fn run() {
    let mut groups = BTreeSet::new();
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        match line.split_at_checked(1).map(|(sign, number)| (sign, number.parse::<i32>())) {
            Some(("+", Ok(group))) => drop(groups.insert(group)),
            Some(("-", Ok(group))) => drop(groups.remove(&group)),
            _ => break,
        }
    }
    for group in groups.into_iter().filter_map(Pid::from_raw) {
        // It may have ended by itself.
        kill_process_group(group, Signal::KILL).ok();
    }
}

/// Returns the file of this program, which on Linux works even if it has been replaced since.
fn this_program() -> Result<PathBuf> {
    if cfg!(target_os = "linux") {
        return Ok(PathBuf::from("/proc/self/exe"));
    }
    std::env::current_exe().context("failed to find this program")
}
