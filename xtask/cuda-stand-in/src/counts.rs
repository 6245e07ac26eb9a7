//! Counts of what a program has asked of its GPUs, for tests of how much a step of training asks.
//!
//! They are added to the file that a variable names, a line of JSON for each process, when the
//! process ends.

#![expect(unsafe_code, reason = "a function of C's library")]

use std::cell::Cell;
use std::ffi::c_int;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::machine::say;

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
    /// Copies within GPUs and between them.
    CopiesWithin,
    /// The bytes of all allocations.
    BytesAllocated,
    /// The bytes of copies from and to the host.
    BytesUp,
    BytesDown,
    /// The bytes of the host that were pinned.
    BytesPinned,
    /// Calls that waited for a GPU: for a stream, an event, a whole GPU, or a copy to memory that
    /// is not pinned.
    HostWaits,
    /// Calls that made a stream wait for an event.
    StreamWaits,
    /// Matrix products of `f32` in TF32.
    Tf32Products,
    /// Modules that are loaded as PTX, which a driver has to compile.
    PtxModules,
}

/// The names of what is counted, in the order of [`Counted`].
const NAMES: [&str; 15] = [
    "kernels",
    "memsets",
    "allocations",
    "events",
    "copies_up",
    "copies_down",
    "copies_within",
    "bytes_allocated",
    "bytes_up",
    "bytes_down",
    "bytes_pinned",
    "host_waits",
    "stream_waits",
    "tf32_products",
    "ptx_modules",
];

/// The counts of the process.
static COUNTS: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];

/// The bytes of GPU memory that are allocated where the streams are now.
static HELD_BYTES: AtomicU64 = AtomicU64::new(0);

/// The most of them since the last call of [`all`].
static MOST_BYTES: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The counts of this thread.
    static THREAD_COUNTS: Cell<[u64; NAMES.len()]> = const { Cell::new([0; NAMES.len()]) };
}

/// Adds one to a count.
pub(crate) fn count(counted: Counted) {
    add(counted, 1);
}

/// Adds a number to a count.
pub(crate) fn add(counted: Counted, number: usize) {
    COUNTS[counted as usize].fetch_add(number as u64, Ordering::Relaxed);
    let mut own = THREAD_COUNTS.get();
    own[counted as usize] += number as u64;
    THREAD_COUNTS.set(own);
}

/// Counts an allocation of so many bytes.
pub(crate) fn count_allocation(bytes: usize) {
    count(Counted::Allocations);
    add(Counted::BytesAllocated, bytes);
}

/// Counts bytes as held. Called where the stream comes to their allocation.
pub(crate) fn hold(bytes: u64) {
    let held = HELD_BYTES.fetch_add(bytes, Ordering::Relaxed) + bytes;
    MOST_BYTES.fetch_max(held, Ordering::Relaxed);
}

/// Counts bytes as held no longer. Called where the stream comes to free them.
pub(crate) fn release(bytes: u64) {
    HELD_BYTES.fetch_sub(bytes, Ordering::Relaxed);
}

/// The counts as programs get them.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Counts {
    /// The counts of the process, in the order of [`Counted`].
    process: [u64; NAMES.len()],
    /// The counts of the calling thread.
    thread: [u64; NAMES.len()],
    /// How often the thread's own stream was told to wait for an event, and how often the event had
    /// not been reached when the stream came to it.
    own_stream_waits: [u64; 2],
    /// The most bytes of GPU memory that were allocated at once, where streams come to allocate and
    /// free them, since the last call.
    most_bytes: u64,
}

/// Returns all counts, with those of the thread's own stream.
pub(crate) fn all(own_stream_waits: [u64; 2]) -> Counts {
    Counts {
        process: COUNTS.each_ref().map(|count| count.load(Ordering::Relaxed)),
        thread: THREAD_COUNTS.get(),
        own_stream_waits,
        most_bytes: MOST_BYTES.swap(HELD_BYTES.load(Ordering::Relaxed), Ordering::Relaxed),
    }
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
    let fields: Vec<String> = counts
        .chain([(&"most_bytes", &MOST_BYTES)])
        .map(|(name, count)| format!("\"{name}\":{}", count.load(Ordering::Relaxed)))
        .collect();
    // By one call, so that lines of two processes cannot mix.
    let line = format!("{{{}}}\n", fields.join(","));
    let file = OpenOptions::new().create(true).append(true).open(path);
    let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
    if let Err(error) = written {
        say(&format!("the counts cannot be written: {error}"));
    }
}
