//! The processes that ranks have started, in whatever process group they are, and those that a rank
//! has left behind.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process, kill_process_group, waitpid,
};

/// Makes this process the parent of the processes that ranks leave behind, where the system can do
/// that. It then learns how they end.
pub(super) fn adopt_orphans() {
    #[cfg(target_os = "linux")]
    // Where it fails, such processes belong to the first process of the system, as they do by
    // default.
    rustix::process::set_child_subreaper(Some(getpid())).ok();
}

/// The variable by which the processes of an attempt are known. What a rank starts inherits it.
pub(super) const MARK: &str = "FSDP_LAUNCHED_AS";

/// The word that the processes of one attempt have in [`MARK`], before their rank.
#[derive(Debug, Clone)]
pub(super) struct Mark(String);

impl Mark {
    /// Returns a mark that no other attempt has.
    pub(super) fn random() -> Self {
        Mark(format!("{:016x}", rand::random::<u64>()))
    }

    /// Returns the mark with this text.
    pub(super) fn from_text(text: &str) -> Self {
        Mark(text.to_owned())
    }

    /// Returns the text of the mark, which is one word.
    pub(super) fn text(&self) -> &str {
        &self.0
    }

    /// Returns the value of [`MARK`] for a rank.
    pub(super) fn value(&self, rank: usize) -> String {
        format!("{}:{rank}", self.0)
    }

    /// Returns the rank that a process with these variables belongs to; `None` if it has not been
    /// started by this attempt.
    fn find_rank(&self, environment: &[u8]) -> Option<usize> {
        let prefix = format!("{MARK}={}:", self.0);
        let mut variables = environment.split(|&byte| byte == 0);
        let rank = variables.find_map(|variable| variable.strip_prefix(prefix.as_bytes()))?;
        std::str::from_utf8(rank).ok()?.parse().ok()
    }
}

/// The processes of this machine, and which of them belong to an attempt. A process that has left
/// the session of the launcher, as a daemon does, belongs to nobody. The list is empty where the
/// system has no `/proc`, or that of another container.
pub(super) struct Processes {
    mark: Mark,
    list: Vec<Process>,
}

/// A process of this machine.
#[derive(Debug, PartialEq, Eq)]
struct Process {
    id: Pid,
    /// `None` for the first process of the system.
    parent: Option<Pid>,
    /// `None` for a process of the kernel, for one that is about to end, and for a group or session
    /// that has been made outside of this container.
    group: Option<Pid>,
    session: Option<Pid>,
    /// `true` if the process has ended, and its parent has not read its status yet.
    has_ended: bool,
    /// The rank that has started it, or whose own process it is.
    rank: Option<usize>,
}

impl Processes {
    /// Returns an empty list for the attempt with this mark.
    pub(super) fn new(mark: Mark) -> Self {
        Processes {
            mark,
            list: Vec::new(),
        }
    }

    /// Lists all processes that there are now.
    pub(super) fn refresh(&mut self) {
        let known_ranks: HashMap<Pid, usize> = self
            .list
            .iter()
            .filter_map(|process| Some((process.id, process.rank?)))
            .collect();
        self.list.clear();
        let own_stat = fs::read_to_string("/proc/self/stat").ok();
        let own_process = own_stat.and_then(|stat| Process::parse(&stat));
        // The numbers that the list of another container has are those of other processes here.
        let Some(own_process) = own_process.filter(|process| process.id == getpid()) else {
            return;
        };
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            // Not all entries are processes, and a process may end meanwhile.
            let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else {
                continue;
            };
            let Some(mut process) = Process::parse(&stat) else {
                continue;
            };
            if process.has_ended {
                // It has no variables any more.
                process.rank = known_ranks.get(&process.id).copied();
            } else if process.session == own_process.session
                && let Ok(environment) = fs::read(entry.path().join("environ"))
            {
                process.rank = self.mark.find_rank(&environment);
            }
            self.list.push(process);
        }
    }

    /// Returns `true` if a process of a rank still runs. `group` is the group of the rank's own
    /// process.
    pub(super) fn has_running_process(&self, rank: usize, group: Pid) -> bool {
        let mut running = self.running();
        running.any(|process| process.group == Some(group) || process.rank == Some(rank))
    }

    /// Returns `true` if a process has ended, and its status has not been read yet.
    pub(super) fn has_ended(&self, id: Pid) -> bool {
        let mut processes = self.list.iter();
        processes.any(|process| process.id == id && process.has_ended)
    }

    /// Sends a signal once to each of these groups, which are those of the ranks' own processes,
    /// and to all other processes of the attempt: to whole groups, so that it also reaches what a
    /// process is just starting, but never to a group in which others run too. Returns `false` if
    /// no process of the attempt runs.
    pub(super) fn send_signal(
        &self,
        rank_groups: impl Iterator<Item = Pid>,
        signal: Signal,
    ) -> bool {
        let mut groups: HashSet<Pid> = rank_groups.collect();
        let shared_groups: HashSet<Option<Pid>> = self
            .running()
            .filter(|process| process.rank.is_none())
            .map(|process| process.group)
            .collect();
        let mut has_processes = false;
        for process in self.running().filter(|process| process.rank.is_some()) {
            has_processes = true;
            match process.group {
                Some(group) if groups.contains(&group) => {}
                Some(group) if !shared_groups.contains(&Some(group)) => drop(groups.insert(group)),
                // It may have ended by now.
                _ => drop(kill_process(process.id, signal)),
            }
        }
        for group in groups {
            kill_process_group(group, signal).ok();
        }
        has_processes
    }

    /// Returns the processes that have not ended.
    fn running(&self) -> impl Iterator<Item = &Process> {
        self.list.iter().filter(|process| !process.has_ended)
    }

    /// Reads the statuses of the processes that ranks have left behind and that have ended, so that
    /// the system can forget them. Returns the rank and the status of each. `rank_processes` are
    /// the ranks' own, which are waited for elsewhere, as is `guard`.
    pub(super) fn reap_orphans(
        &mut self,
        rank_processes: &[(usize, Pid)],
        guard: Pid,
    ) -> Vec<(usize, ExitStatus)> {
        let own_id = getpid();
        let rank_of_process: HashMap<Pid, usize> = rank_processes
            .iter()
            .map(|&(rank, process)| (process, rank))
            .collect();
        let mut statuses = Vec::new();
        for process in &mut self.list {
            let is_orphan = process.parent == Some(own_id)
                && process.id != guard
                && !rank_of_process.contains_key(&process.id);
            if !is_orphan || !process.has_ended {
                continue;
            }
            let group_rank = || rank_of_process.get(&process.group?).copied();
            let rank = process.rank.or_else(group_rank);
            match (rank, waitpid(Some(process.id), WaitOptions::NOHANG)) {
                (Some(rank), Ok(Some((_, status)))) => {
                    statuses.push((rank, ExitStatus::from_raw(status.as_raw())));
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
            session: parse_pid(fields.next()?),
            has_ended,
            rank: None,
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
            session: Pid::from_raw(5),
            has_ended: false,
            rank: None,
        };
        assert_eq!(
            Process::parse("12 (a) Z (b) 7) S 3 4 5 0 -1\n"),
            Some(running)
        );
        assert!(Process::parse("12 (sh) Z 3 4 5 0\n").unwrap().has_ended);
        let of_container = Process::parse("12 (sh) S 1 0 0 0\n").unwrap();
        assert_eq!((of_container.group, of_container.session), (None, None));
        assert_eq!(Process::parse("12 (sh) S"), None);
        assert_eq!(Process::parse(""), None);
    }

    #[test]
    fn a_process_is_known_by_the_mark_of_its_own_attempt() {
        let mark = Mark::random();
        let environment = format!("HOME=/\0{MARK}={}\0RANK=9\0", mark.value(12));
        assert_eq!(mark.find_rank(environment.as_bytes()), Some(12));
        assert_eq!(Mark::random().find_rank(environment.as_bytes()), None);
        let quoted = format!("NOTE={MARK}={}\0", mark.value(12));
        assert_eq!(mark.find_rank(quoted.as_bytes()), None);
        assert_eq!(mark.find_rank(b""), None);
    }
}
