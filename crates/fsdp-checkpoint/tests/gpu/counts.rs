//! The copies and waits that the stand-in for NVIDIA's libraries counts, and the copies that it
//! lets fail. A real driver counts nothing.

#![expect(unsafe_code, reason = "functions of C, which only the stand-in has")]

use std::ffi::{c_int, c_void};

use libloading::Library;

use crate::stand_in;

/// The numbers of bytes that the stand-in has counted in the process, and of waits of this thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) to_host: u64,
    pub(crate) to_device: u64,
    pub(crate) pinned: u64,
    pub(crate) host_waits: u64,
    pub(crate) stream_waits: u64,
}

/// Returns what the stand-in has counted so far; zeros with a real driver.
pub(crate) fn counts() -> Counts {
    let stand_in::Counts {
        process, thread, ..
    } = stand_in::counts().unwrap_or_default();
    Counts {
        to_host: process.bytes_down,
        to_device: process.bytes_up,
        pinned: process.bytes_pinned,
        host_waits: thread.host_waits,
        stream_waits: thread.stream_waits,
    }
}

/// Returns `true` if there are counts: not with a real driver.
pub(crate) fn has_counts() -> bool {
    stand_in::counts().is_some()
}

impl Counts {
    /// Returns what was counted since an earlier time.
    pub(crate) fn since(self, earlier: Counts) -> Counts {
        Counts {
            to_host: self.to_host - earlier.to_host,
            to_device: self.to_device - earlier.to_device,
            pinned: self.pinned - earlier.pinned,
            host_waits: self.host_waits - earlier.host_waits,
            stream_waits: self.stream_waits - earlier.stream_waits,
        }
    }
}

/// Returns the numbers of kernels, memsets, allocations, events, copies to GPUs, copies from them,
/// and waits of the host so far; zeros with a real driver.
pub(crate) fn demands() -> [u64; 7] {
    let demands = stand_in::counts().unwrap_or_default().process;
    [
        demands.kernels,
        demands.memsets,
        demands.allocations,
        demands.events,
        demands.copies_up,
        demands.copies_down,
        demands.host_waits,
    ]
}

/// Returns `true` if these bytes of the host are pinned; `false` with a real driver.
pub(crate) fn is_pinned(bytes: &[u8]) -> bool {
    let driver = driver();
    // SAFETY: the function only looks at the address.
    unsafe {
        driver
            .get::<unsafe extern "C" fn(*const c_void, usize) -> c_int>(b"cudaStandInIsPinned\0")
            .is_ok_and(|function| function(bytes.as_ptr().cast(), bytes.len()) == 1)
    }
}

/// Lets `after` more copies from GPUs to the host succeed, and the `count` that follow fail.
/// Returns `false` with a real driver.
pub(crate) fn fail_copies(after: u64, count: u64) -> bool {
    let driver = driver();
    // SAFETY: the function takes two numbers.
    unsafe {
        driver
            .get::<unsafe extern "C" fn(u64, u64) -> u32>(b"cudaStandInFailCopies\0")
            .is_ok_and(|function| function(after, count) == 0)
    }
}

fn driver() -> Library {
    // SAFETY: the driver is loaded already.
    unsafe { Library::new("libcuda.so.1") }.expect("a GPU needs the driver")
}
