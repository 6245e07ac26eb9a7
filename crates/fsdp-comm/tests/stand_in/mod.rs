//! The numbers that the stand-in for NVIDIA's libraries counts. A real driver counts nothing.

#![expect(
    unsafe_code,
    reason = "functions of C, by which the stand-in tells what it has counted"
)]

use libloading::Library;

/// The calls, and the bytes, that programs have asked of GPUs so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Demands {
    /// Launches of kernels, and matrix products.
    pub(crate) kernels: u64,
    pub(crate) memsets: u64,
    pub(crate) allocations: u64,
    pub(crate) events: u64,
    /// Copies from the host to GPUs.
    pub(crate) copies_up: u64,
    /// Copies from GPUs to the host.
    pub(crate) copies_down: u64,
    /// Copies within GPUs and between them.
    pub(crate) copies_within: u64,
    /// The bytes of all allocations.
    pub(crate) bytes_allocated: u64,
    /// The bytes of copies from and to the host.
    pub(crate) bytes_up: u64,
    pub(crate) bytes_down: u64,
    /// The bytes of the host's memory that were pinned.
    pub(crate) bytes_pinned: u64,
    /// Calls that waited for a GPU.
    pub(crate) host_waits: u64,
    /// Calls that made a stream wait for an event.
    pub(crate) stream_waits: u64,
    /// Matrix products of `f32` in TF32.
    pub(crate) tf32_products: u64,
    /// Modules that were loaded as PTX.
    pub(crate) ptx_modules: u64,
}

impl Demands {
    /// Returns the number of kernels and copies: all that takes a GPU time.
    pub(crate) fn work(&self) -> u64 {
        let copies = self.copies_up + self.copies_down + self.copies_within;
        self.kernels + self.memsets + copies
    }
}

/// The counts of the stand-in.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Counts {
    pub(crate) process: Demands,
    /// The demands of the calling thread.
    pub(crate) thread: Demands,
    /// How often the stream of the calling thread was told to wait for an event, and how often the
    /// event had not been reached when the stream came to it.
    pub(crate) own_stream_waits: [u64; 2],
    /// The most bytes of GPU memory that were allocated at once, where streams come to allocate and
    /// free them, since the last call.
    pub(crate) most_bytes: u64,
}

/// Returns the counts so far; `None` with a real driver.
pub(crate) fn counts() -> Option<Counts> {
    // SAFETY: the driver is loaded already.
    let driver = unsafe { Library::new("libcuda.so.1") }.expect("a GPU needs the driver");
    counted(driver, b"cudaStandInAllCounts")
}

/// Returns the number of ids that this process has made for communicators, and the number of splits
/// that it took part in; `None` with NVIDIA's library.
pub(crate) fn origins_of_communicators() -> Option<[u64; 2]> {
    // SAFETY: the library is loaded already.
    let library = unsafe { Library::new("libnccl.so.2") }.expect("a group over NCCL needs it");
    counted(library, b"ncclStandInOrigins")
}

/// Calls a function of the stand-in that writes its counts; `None` if the library is not the
/// stand-in.
fn counted<C: Default>(library: Library, function: &[u8]) -> Option<C> {
    let mut counts = C::default();
    // SAFETY: the function writes the numbers that the type has.
    let code = unsafe {
        let Ok(function) = library.get::<unsafe extern "C" fn(*mut C) -> u32>(function) else {
            // The stand-in has all of these functions.
            assert!(std::env::var_os("CUDA_STAND_IN_DIRECTORY").is_none());
            return None;
        };
        function(&mut counts)
    };
    assert_eq!(code, 0);
    Some(counts)
}
