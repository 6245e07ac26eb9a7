//! A process that ends what the ranks have started, also if the launcher is killed.
//!
//! The system ends each rank's own process then, but not what that process has started, such as the
//! program of `fsdp launch -- sh -c '…'`. The guard is told of the attempt's mark and of each
//! rank's process group through a pipe. The pipe is closed when an attempt is over or the launcher
//! has ended, in any way, and then the guard kills what is left of the attempt, and removes the
//! directory of the ranks' notes.

use std::collections::BTreeSet;
use std::io::{self, BufRead as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal};
use signal_hook::iterator::Signals;

use super::descendants::{MARK, Mark, Processes};
use crate::stop::REQUESTS;

/// The hidden command of the guard.
pub(crate) const COMMAND: &str = "launch-guard";

/// How often the guard looks for processes that are left: one may have been started while the
/// others were killed.
const SWEEPS: usize = 5;

/// The launcher's end of the pipe to the guard.
pub(super) struct Guard {
    process: Child,
    pipe: Option<ChildStdin>,
}

impl Guard {
    /// Starts the guard of the attempt with this mark.
    ///
    /// # Errors
    /// This program cannot be started again.
    pub(super) fn start(mark: &Mark) -> Result<Guard> {
        // On Linux this names the program even if its file has been replaced since.
        let program = if cfg!(target_os = "linux") {
            PathBuf::from("/proc/self/exe")
        } else {
            std::env::current_exe().context("failed to find this program")?
        };
        let mut process = Command::new(program)
            .arg(COMMAND)
            // The guard must outlive a signal to the launcher's process group, such as that of
            // Ctrl-C. So it gets a group of its own.
            .process_group(0)
            // If this is a job in a rank of another one, its guard must outlive that rank.
            .env_remove(MARK)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("failed to start the guard of the processes")?;
        let pipe = process.stdin.take();
        let mut guard = Guard { process, pipe };
        guard
            .write_line(&format!("#{}\n", mark.text()))
            .context("the guard of the processes has ended")?;
        Ok(guard)
    }

    /// Has a process group killed if this process ends before [`forget`](Guard::forget).
    ///
    /// # Errors
    /// The guard has ended.
    pub(super) fn watch(&mut self, group: Pid) -> Result<()> {
        self.write_line(&format!("+{}\n", group.as_raw_nonzero()))
            .context("the guard of the processes has ended")
    }

    /// Takes back [`watch`](Guard::watch) after the group has ended, because the system may give
    /// its number to other processes.
    pub(super) fn forget(&mut self, group: Pid) {
        // A guard that has ended kills nothing.
        self.write_line(&format!("-{}\n", group.as_raw_nonzero()))
            .ok();
    }

    /// Has a directory removed when this process ends, if it is still there then.
    pub(super) fn remove_at_end(&mut self, directory: &Path) {
        // The pipe is for lines of text. A directory with another name may stay behind.
        if let Some(directory) = directory
            .to_str()
            .filter(|directory| !directory.contains('\n'))
        {
            self.write_line(&format!("={directory}\n")).ok();
        }
    }

    /// Returns the guard's process.
    pub(super) fn process(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    /// Writes a line to the guard's pipe.
    fn write_line(&mut self, line: &str) -> io::Result<()> {
        let pipe = self.pipe.as_mut().expect("it is closed only on drop");
        pipe.write_all(line.as_bytes())
    }
}

impl Drop for Guard {
    /// Ends the guard, which kills what is left of the attempt but leaves the directory, and waits
    /// for it.
    fn drop(&mut self) {
        // This process goes on, reads the notes, and removes them itself.
        self.write_line("=\n").ok();
        drop(self.pipe.take());
        self.process.wait().ok();
    }
}

/// Guards process groups until stdin is closed: the guard's side.
#[expect(clippy::disallowed_methods, reason = "notes are no checkpoints")]
pub(crate) fn run() {
    // A request to stop that goes to all processes of a job reaches this one too. Ignore it: the
    // guard is needed until the launcher has ended.
    let _ignored_signals = Signals::new(REQUESTS);
    let mut groups = BTreeSet::new();
    let mut directory = None;
    let mut marked = None;
    // A line that the launcher cannot have written ends the watch, as its end does.
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        let Some((sign, argument)) = line.split_at_checked(1) else {
            break;
        };
        match (sign, argument.parse::<i32>()) {
            ("+", Ok(group)) => drop(groups.insert(group)),
            ("-", Ok(group)) => drop(groups.remove(&group)),
            ("#", _) => marked = Some(Processes::new(Mark::from_text(argument))),
            ("=", _) => directory = (!argument.is_empty()).then(|| PathBuf::from(argument)),
            _ => break,
        }
    }
    let groups: Vec<Pid> = groups.into_iter().filter_map(Pid::from_raw).collect();
    if let Some(mut processes) = marked {
        for _ in 0..SWEEPS {
            processes.refresh();
            // Groups of which all processes have ended by themselves are no groups any more.
            if !processes.send_signal(groups.iter().copied(), Signal::KILL) {
                break;
            }
        }
    }
    if let Some(directory) = directory {
        // The launcher may have removed it.
        std::fs::remove_dir_all(directory).ok();
    }
}
