//! Notes for the launcher: the ranks whose failure makes this rank fail.
//!
//! All ranks of a job fail when one does, and the first to end need not be the one that failed
//! first. So a rank that fails because of others names them in a file. `fsdp launch` then reports a
//! rank that named nobody.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::CommError;
use crate::sync::lock;

/// The environment variable with the directory of these notes. A rank that fails because of others
/// writes their numbers there, separated by spaces, to a file that is named by its own number.
/// Without the variable there are no notes.
pub const BLAME_DIR: &str = "FSDP_BLAME_DIR";

/// `true` while there is a note.
static HAS_NOTE: AtomicBool = AtomicBool::new(false);

/// Held while the note is changed.
static CHANGING: Mutex<()> = Mutex::new(());

/// Returns the outcome of an operation, after it has written, changed or removed the note of the
/// rank accordingly. A note that cannot be written is not an error.
pub(crate) fn record<T>(rank: usize, outcome: Result<T, CommError>) -> Result<T, CommError> {
    let blamed = match &outcome {
        Ok(_) => Vec::new(),
        Err(error) => blamed_ranks(rank, error),
    };
    // Nearly all operations succeed, and must not pay for a lock and a file: there is nothing to
    // write and nothing to remove.
    if (!blamed.is_empty() || HAS_NOTE.load(Ordering::Relaxed))
        && let Some(dir) = std::env::var_os(BLAME_DIR).filter(|dir| !dir.is_empty())
    {
        let _changing = lock(&CHANGING);
        HAS_NOTE.store(write_note(&dir, rank, &blamed), Ordering::Relaxed);
    }
    outcome
}

/// Writes the note, or removes it if there is nobody to name. Returns `true` if there is one now.
#[expect(
    clippy::disallowed_methods,
    reason = "a note is no checkpoint, and need not be durable"
)]
fn write_note(dir: &OsStr, rank: usize, blamed: &[usize]) -> bool {
    let file = Path::new(dir).join(rank.to_string());
    if blamed.is_empty() {
        // The program went on after the error of the old note, so that error is not the one that
        // ends it.
        return fs::remove_file(file).is_err();
    }
    let text: Vec<String> = blamed.iter().map(usize::to_string).collect();
    fs::write(file, text.join(" ")).is_ok()
}

/// Returns the ranks that caused an error; none if `rank` is one of them.
fn blamed_ranks(rank: usize, error: &CommError) -> Vec<usize> {
    let blamed = match error {
        CommError::RankLeft { rank, .. } | CommError::Aborted { rank, .. } => vec![*rank],
        CommError::Timeout { missing, .. } | CommError::Rendezvous { missing, .. } => {
            missing.clone()
        }
        CommError::RankFailed { failures, .. } => {
            failures.iter().map(|failure| failure.rank).collect()
        }
        _ => Vec::new(),
    };
    if blamed.contains(&rank) {
        Vec::new()
    } else {
        blamed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_never_blames_itself() {
        let aborted = CommError::Aborted {
            rank: 1,
            message: String::new(),
        };
        assert_eq!(blamed_ranks(0, &aborted), [1]);
        assert_eq!(blamed_ranks(1, &aborted), []);
    }

    #[test]
    fn only_the_ranks_that_a_rendezvous_misses_are_blamed() {
        let rendezvous = |missing: &[usize]| CommError::Rendezvous {
            address: String::new(),
            joined: vec![0, 1],
            missing: missing.to_vec(),
            message: String::new(),
        };
        assert_eq!(blamed_ranks(0, &rendezvous(&[3])), [3]);
        // It failed by itself.
        assert_eq!(blamed_ranks(0, &rendezvous(&[])), []);
        assert_eq!(blamed_ranks(3, &rendezvous(&[3])), []);
    }
}
