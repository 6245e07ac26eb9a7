//! The exits of a node's processes, and which of them caused the others.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::ExitStatus;
use std::{env, fs};

use tempfile::TempDir;

use crate::exit_codes;

/// The end of a process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Exit {
    pub(super) rank: usize,
    pub(super) status: ExitStatus,
    /// `true` if the launcher had asked the process to end before.
    pub(super) was_asked: bool,
}

impl Exit {
    /// Returns `true` if the other processes cannot go on after this.
    pub(super) fn is_failure(self) -> bool {
        !self.status.success() && self.code() != exit_codes::STOPPED
    }

    /// Returns the exit code, as shells do for signals.
    pub(super) fn code(self) -> u8 {
        let code = match (self.status.code(), self.status.signal()) {
            (Some(code), _) => code,
            (None, Some(signal)) => 128 + signal,
            (None, None) => return exit_codes::INTERNAL,
        };
        u8::try_from(code).unwrap_or(exit_codes::INTERNAL)
    }

    /// Returns a text on how the process ended, such as `failed with exit code 7`.
    pub(super) fn describe(self) -> String {
        match (self.status.code(), self.status.signal()) {
            (Some(0), _) => "succeeded".to_owned(),
            (Some(code), _) if code == i32::from(exit_codes::STOPPED) => {
                "stopped and saved".to_owned()
            }
            (Some(code), _) => format!("failed with exit code {code}"),
            (None, Some(signal)) => format!("died of signal {signal}"),
            (None, None) => format!("failed: {}", self.status),
        }
    }
}

/// The exit that caused the others. Its exit code becomes the job's.
#[derive(Debug)]
pub(super) struct Cause {
    pub(super) exit: Exit,
    /// The ranks that this rank named, in its note, as the reason for its failure.
    pub(super) blamed_ranks: Vec<usize>,
}

/// Returns the exit that caused the others; `None` if all processes succeeded. `exits` are in the
/// order of time. `blame_dir` is the directory of the notes in which ranks name the ranks because
/// of which they failed, if there is one.
pub(super) fn find_cause(exits: &[Exit], blame_dir: Option<&Path>) -> Option<Cause> {
    let unsuccessful = exits.iter().filter(|exit| !exit.status.success());
    let causes = unsuccessful.map(|&exit| Cause {
        exit,
        blamed_ranks: read_blamed_ranks(exit.rank, blame_dir),
    });
    // The best candidate is a rank that failed, that was not asked to end, and that named no other
    // rank. It failed first, even if others noticed its failure and ended before it did. Among
    // equals, the first exit is taken.
    causes.min_by_key(|cause| {
        (
            !cause.exit.is_failure(),
            cause.exit.was_asked,
            !cause.blamed_ranks.is_empty(),
        )
    })
}

/// Returns the number of ranks that a job has lost, which is at least 1. These are the ranks that
/// failed without being asked to end, and that named no other rank. There may be none, for example
/// if a rank only stopped answering. Then the ranks that `cause` names are counted.
pub(super) fn count_lost_ranks(exits: &[Exit], cause: &Cause, blame_dir: Option<&Path>) -> usize {
    let failed = exits
        .iter()
        .filter(|exit| exit.is_failure() && !exit.was_asked);
    let unprovoked_count = failed
        .filter(|exit| read_blamed_ranks(exit.rank, blame_dir).is_empty())
        .count();
    if unprovoked_count > 0 {
        unprovoked_count
    } else {
        cause.blamed_ranks.len().max(1)
    }
}

/// Returns the ranks that a rank has named in its note; none if it has left no note.
fn read_blamed_ranks(rank: usize, blame_dir: Option<&Path>) -> Vec<usize> {
    let Some(directory) = blame_dir else {
        return Vec::new();
    };
    // Most ranks have left no note.
    let Ok(note) = fs::read_to_string(directory.join(rank.to_string())) else {
        return Vec::new();
    };
    note.split_whitespace()
        .filter_map(|rank| rank.parse().ok())
        .collect()
}

/// Makes the directory in which ranks note the ranks because of which they failed. Returns `None`
/// where none can be made: the notes are a help that no job depends on.
pub(super) fn make_blame_dir() -> Option<TempDir> {
    // The last two are for a `TMPDIR` that cannot be used.
    let places = [env::temp_dir(), "/tmp".into(), "/dev/shm".into()];
    let directory = places
        .iter()
        .find_map(|place| tempfile::tempdir_in(place).ok());
    if directory.is_none() {
        tracing::warn!(
            "no directory for temporary files: a rank that fails because of another one cannot \
             note that"
        );
    }
    directory
}

/// Lists all exits, those that are alike together: `rank 1 failed with exit code 7; ranks 0, 2-3
/// succeeded`.
pub(super) fn list_text(exits: &[Exit]) -> String {
    let mut ranks_by_description: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for exit in exits {
        let mut description = exit.describe();
        if exit.was_asked && exit.is_failure() {
            description.push_str(" after being asked to end");
        }
        ranks_by_description
            .entry(description)
            .or_default()
            .push(exit.rank);
    }
    let texts: Vec<String> = ranks_by_description
        .into_iter()
        .map(|(description, ranks)| format!("{} {description}", ranks_text(ranks)))
        .collect();
    texts.join("; ")
}

/// Returns some ranks as text: `rank 3`, or `ranks 0, 2-5`.
pub(super) fn ranks_text(mut ranks: Vec<usize>) -> String {
    ranks.sort_unstable();
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &rank in &ranks {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => ranges.push((rank, rank)),
        }
    }
    let texts: Vec<String> = ranges
        .into_iter()
        .map(|range| match range {
            (first, last) if first == last => first.to_string(),
            (first, last) => format!("{first}-{last}"),
        })
        .collect();
    let plural = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{plural} {}", texts.join(", "))
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "notes are no checkpoints")]
mod tests {
    use super::*;

    fn exit(rank: usize, code: i32) -> Exit {
        Exit {
            rank,
            status: ExitStatus::from_raw(code << 8),
            was_asked: false,
        }
    }

    #[test]
    fn the_rank_that_names_nobody_is_the_cause_whatever_the_order_of_exits() {
        let notes = tempfile::tempdir().unwrap();
        fs::write(notes.path().join("0"), "1").unwrap();
        fs::write(notes.path().join("2"), "0 1").unwrap();
        let killed = Exit {
            rank: 3,
            status: ExitStatus::from_raw(9),
            was_asked: true,
        };
        for exits in [
            [exit(0, 16), exit(2, 16), exit(1, 7), killed],
            [killed, exit(1, 7), exit(2, 16), exit(0, 16)],
        ] {
            let cause = find_cause(&exits, Some(notes.path())).unwrap();
            assert_eq!(count_lost_ranks(&exits, &cause, Some(notes.path())), 1);
            assert_eq!(
                (cause.exit.rank, cause.exit.code(), cause.blamed_ranks),
                (1, 7, vec![])
            );
        }
        let two = [exit(1, 7), exit(3, 9), exit(0, 16), exit(2, 16)];
        assert_eq!(
            count_lost_ranks(
                &two,
                &find_cause(&two, Some(notes.path())).unwrap(),
                Some(notes.path())
            ),
            2
        );
        // The rank that caused the failure is on another node, or hangs.
        let exits = [exit(4, 0), exit(0, 16), killed];
        let cause = find_cause(&exits, Some(notes.path())).unwrap();
        assert_eq!(count_lost_ranks(&exits, &cause, Some(notes.path())), 1);
        assert_eq!((cause.exit.rank, cause.blamed_ranks), (0, vec![1]));
    }

    #[test]
    fn exits_are_listed_by_their_likeness() {
        let exits = [exit(2, 16), exit(0, 16), exit(1, 0), exit(3, 16)];
        assert_eq!(
            list_text(&exits),
            "ranks 0, 2-3 failed with exit code 16; rank 1 succeeded"
        );
    }
}
