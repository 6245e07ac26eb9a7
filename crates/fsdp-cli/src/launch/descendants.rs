//! The processes that ranks have started: those of a rank's process group, and those that a rank
//! has left behind.

use std::collections::HashSet;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use rustix::process::{Pid, WaitOptions, getpid, waitpid};

/// Makes this process the parent of the processes that ranks leave behind, where the system can do
/// that. It then learns how they end.
pub(super) fn adopt_orphans() {
    #[cfg(target_os = "linux")]
    // Where it fails, such processes belong to the first process of the system, as they do by
    // default.
    rustix::process::set_child_subreaper(Some(getpid())).ok();
}

/// The processes of this machine. The list is empty where the system has no `/proc`.
pub(super) struct Processes(Vec<Process>);

/// A process of this machine.
#[derive(Debug, PartialEq, Eq)]
struct Process {
    id: Pid,
    /// `None` for the first process of the system.
    parent: Option<Pid>,
    /// `None` for a process of the kernel, and for one that is about to end.
    group: Option<Pid>,
    /// `true` if the process has ended, and its parent has not read its status yet.
    has_ended: bool,
}

impl Processes {
    /// Lists all processes.
    pub(super) fn list() -> Self {
        let mut processes = Vec::new();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            // Not all entries are processes, and a process may end meanwhile.
            if let Ok(stat) = fs::read_to_string(entry.path().join("stat")) {
                processes.extend(Process::parse(&stat));
            }
        }
        Processes(processes)
    }

    /// Returns `true` if a process of a group still runs.
    pub(super) fn has_running_process(&self, group: Pid) -> bool {
        let mut processes = self.0.iter();
        processes.any(|process| process.group == Some(group) && !process.has_ended)
    }

    /// Returns `true` if a process has ended, and its status has not been read yet.
    pub(super) fn has_ended(&self, id: Pid) -> bool {
        let mut processes = self.0.iter();
        processes.any(|process| process.id == id && process.has_ended)
    }

    /// Reads the statuses of the processes that ranks have left behind and that have ended, so that
    /// the system can forget them. Returns the group and the status of each. `rank_processes` are
    /// waited for elsewhere.
    pub(super) fn reap_orphans(&mut self, rank_processes: &HashSet<Pid>) -> Vec<(Pid, ExitStatus)> {
        let own_id = getpid();
        let mut statuses = Vec::new();
        for process in &mut self.0 {
            let is_orphan = process.parent == Some(own_id) && !rank_processes.contains(&process.id);
            if !is_orphan || !process.has_ended {
                continue;
            }
            match (
                process.group,
                waitpid(Some(process.id), WaitOptions::NOHANG),
            ) {
                (Some(group), Ok(Some((_, status)))) => {
                    statuses.push((group, ExitStatus::from_raw(status.as_raw())));
                }
                // Its main thread has ended, but others have not, so it has no status yet.
                (_, Ok(None)) => process.has_ended = false,
                _ => {}
            }
        }
        statuses
    }
}

impl Process {
    /// Parses a process's `stat` file; `None` if it has another form.
    fn parse(stat: &str) -> Option<Self> {
        // The name of the program is in parentheses, and may contain any characters.
        let (id, _) = stat.split_once(' ')?;
        let (_, fields) = stat.rsplit_once(") ")?;
        let mut fields = fields.split(' ');
        let has_ended = matches!(fields.next()?, "Z" | "X");
        Some(Process {
            id: parse_pid(id)?,
            parent: parse_pid(fields.next()?),
            group: parse_pid(fields.next()?),
            has_ended,
        })
    }
}

/// Parses the number of a process; `None` where there is none, which the system writes as 0 or -1.
fn parse_pid(field: &str) -> Option<Pid> {
    let raw_id = field.parse().ok()?;
    if raw_id > 0 {
        Pid::from_raw(raw_id)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_program_cannot_confuse() {
        let running = Process {
            id: Pid::from_raw(12).unwrap(),
            parent: Pid::from_raw(3),
            group: Pid::from_raw(4),
            has_ended: false,
        };
        assert_eq!(
            Process::parse("12 (a) Z (b) 7) S 3 4 5 0 -1\n"),
            Some(running)
        );
        assert!(Process::parse("12 (sh) Z 3 4 5 0\n").unwrap().has_ended);
        assert_eq!(Process::parse("12 (sh) S"), None);
        assert_eq!(Process::parse(""), None);
    }
}
