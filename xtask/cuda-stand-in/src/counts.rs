//! Counts of what a program has asked of its GPUs, for tests of how much a step of training asks.
//!
//! They are added to the file that a variable names, a line of JSON for each process, when the
//! process ends.

#![expect(unsafe_code, reason = "a function of C's library")]

use std::ffi::c_int;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::machine::{self, say};

/// The variable that names the file.
const FILE: &str = "CUDA_STAND_IN_COUNTS";

/// A demand on a GPU that is counted.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Counted {
    /// Launches of kernels, and matrix products.
    Kernels,
    /// Memory that is filled with one byte.
    Memsets,
    Allocations,
    Events,
    /// Copies from the host to a GPU.
    CopiesUp,
    /// Copies from a GPU to the host.
    CopiesDown,
}

/// The names of what is counted, in the order of [`Counted`].
const NAMES: [&str; 6] = [
    "kernels",
    "memsets",
    "allocations",
    "events",
    "copies_up",
    "copies_down",
];

static COUNTS: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];

/// Counts one more.
pub(crate) fn count(counted: Counted) {
    COUNTS[counted as usize].fetch_add(1, Ordering::Relaxed);
}

/// Returns all counts, and the number of waits of the host.
pub(crate) fn all() -> [u64; NAMES.len() + 1] {
    let mut all = [machine::host_waits(); NAMES.len() + 1];
    for (number, count) in all.iter_mut().zip(&COUNTS) {
        *number = count.load(Ordering::Relaxed);
    }
    all
}

unsafe extern "C" {
    /// Lets a function be called when the process ends.
    fn atexit(function: extern "C" fn()) -> c_int;
}

/// Has the counts written when the process ends, if a file is named.
pub(crate) fn write_at_exit() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        if std::env::var_os(FILE).is_some() {
            // SAFETY: the function is there until the process ends, as this library is.
            unsafe { atexit(write) };
        }
    });
}

/// Adds a line with the counts to the file.
extern "C" fn write() {
    let Some(path) = std::env::var_os(FILE) else {
        return;
    };
    let counts = NAMES.iter().zip(&COUNTS);
    let mut fields: Vec<String> = counts
        .map(|(name, count)| format!("\"{name}\":{}", count.load(Ordering::Relaxed)))
        .collect();
    fields.push(format!("\"host_waits\":{}", machine::host_waits()));
    let file = OpenOptions::new().create(true).append(true).open(path);
    let written = file.and_then(|mut file| writeln!(file, "{{{}}}", fields.join(",")));
    if let Err(error) = written {
        say(&format!("the counts cannot be written: {error}"));
    }
}
