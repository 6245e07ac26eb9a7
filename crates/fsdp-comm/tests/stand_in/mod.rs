//! The numbers that the stand-in for NVIDIA's libraries counts. A real driver counts nothing.

#![expect(
    unsafe_code,
    reason = "functions of C, by which the stand-in tells what it has counted"
)]

use std::ptr;

use libloading::Library;

/// The handle of the stream of each thread.
const PER_THREAD_STREAM: usize = 2;

/// Returns the number of copies between the host and GPUs so far, and of their bytes; `None` with a
/// real driver.
pub(crate) fn host_copies() -> Option<[u64; 2]> {
    counted(driver(), b"cudaStandInHostCopies")
}

/// Returns how often the host has waited for GPUs so far; `None` with a real driver.
pub(crate) fn host_waits() -> Option<u64> {
    counted(driver(), b"cudaStandInHostWaits")
}

/// Returns how often this thread's stream was told to wait for an event so far, and how often the
/// event had not been reached then; `None` with a real driver.
pub(crate) fn stream_waits() -> Option<[u64; 2]> {
    let mut counts = [0; 2];
    let stream = ptr::without_provenance_mut::<std::ffi::c_void>(PER_THREAD_STREAM);
    // SAFETY: the driver is loaded already, and the function writes two numbers.
    let code = unsafe {
        let driver = driver();
        let function = driver
            .get::<unsafe extern "C" fn(*mut std::ffi::c_void, *mut [u64; 2]) -> u32>(
                b"cudaStandInStreamWaits",
            );
        function.ok()?(stream, &mut counts)
    };
    assert_eq!(code, 0);
    Some(counts)
}

fn driver() -> Library {
    // SAFETY: the driver is loaded already.
    unsafe { Library::new("libcuda.so.1") }.expect("a GPU needs the driver")
}

/// Returns the number of ids that this process has made for communicators, and the number of splits
/// that it took part in; `None` with NVIDIA's library.
pub(crate) fn origins_of_communicators() -> Option<[u64; 2]> {
    // SAFETY: the library is loaded already.
    let library = unsafe { Library::new("libnccl.so.2") }.expect("a group over NCCL needs it");
    counted(library, b"ncclStandInOrigins")
}

/// Returns what a function of the stand-in has counted.
fn counted<C: Default>(library: Library, function: &[u8]) -> Option<C> {
    let mut counts = C::default();
    // SAFETY: the function writes as many numbers as the type has.
    let code = unsafe {
        library
            .get::<unsafe extern "C" fn(*mut C) -> u32>(function)
            .ok()?(&mut counts)
    };
    assert_eq!(code, 0);
    Some(counts)
}
