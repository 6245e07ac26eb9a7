//! Kernels that the stand-in for CUDA's compiler has compiled for the host: libraries in the place
//! of machine code for GPUs.

#![expect(
    unsafe_code,
    reason = "functions of libraries, and the memory that their kernels use"
)]

use std::cell::Cell;
use std::ffi::{c_char, c_void};
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use libloading::Library;

use crate::machine::{elements, say};
use crate::memory::Address;
use crate::queue::Work;

/// The first bytes of a library.
const MAGIC: &[u8; 4] = b"\x7fELF";
/// The bytes of dynamic shared memory that a kernel may have without asking for more.
const SHARED_BYTES: usize = 48 << 10;
/// The most that it may ask for.
pub(crate) const MOST_SHARED_BYTES: usize = 227 << 10;

/// Returns the library in an image of a module; `None` if the image is something else.
///
/// # Safety
/// The image is a whole library, or text that ends with a zero.
pub(crate) unsafe fn open(image: *const c_char) -> Option<Result<Library, String>> {
    // SAFETY: a text is at least a zero, and the first byte that differs ends the comparison.
    let is_library = MAGIC
        .iter()
        .enumerate()
        .all(|(index, &byte)| unsafe { image.cast::<u8>().add(index).read() } == byte);
    // SAFETY: the caller's promise.
    is_library.then(|| unsafe { load(image.cast()) })
}

/// Loads a library of which all bytes are in memory.
///
/// # Safety
/// The image is a whole library.
unsafe fn load(image: *const u8) -> Result<Library, String> {
    // Its table of sections is the last part of it.
    // SAFETY: the fields of the header of a library of 64 bits.
    let len = unsafe {
        let sections = image.add(0x28).cast::<u64>().read_unaligned() as usize;
        let bytes_of_section = image.add(0x3a).cast::<u16>().read_unaligned();
        let section_count = image.add(0x3c).cast::<u16>().read_unaligned();
        sections + usize::from(bytes_of_section) * usize::from(section_count)
    };
    // SAFETY: the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts(image, len) };
    let mut file = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
    file.write_all(bytes).map_err(|error| error.to_string())?;
    // SAFETY: the library does nothing when it is loaded.
    unsafe { Library::new(file.path()) }.map_err(|error| error.to_string())
}

/// The function of a kernel, which binds arguments.
type Bind =
    unsafe extern "C" fn(*mut *mut c_void, extern "C" fn(Address) -> *mut c_void) -> *mut c_void;
/// The function of a library that runs a kernel with its arguments.
type Launch = unsafe extern "C" fn(*mut c_void, *const u32, *const u32, usize);

/// A kernel of a library.
#[derive(Debug)]
pub(crate) struct LibraryKernel {
    bind: Bind,
    launch: Launch,
    shared_bytes: AtomicUsize,
    /// The functions live as long as it.
    _library: Arc<Library>,
}

/// The blocks, the threads of a block, and the bytes of dynamic shared memory of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: [u32; 3],
    pub(crate) shared_bytes: usize,
}

/// A kernel with its arguments, for the thread of a stream.
struct Body(*mut c_void);

// SAFETY: it is run once, by one thread.
unsafe impl Send for Body {}

thread_local! {
    /// `true` if an argument of the launch is an address that nothing has.
    static IS_LOST: Cell<bool> = const { Cell::new(false) };
}

/// Returns where memory of a GPU is on the host.
extern "C" fn on_host(address: Address) -> *mut c_void {
    // A pointer that is left out.
    if address == 0 {
        return std::ptr::null_mut();
    }
    match elements::<u8>(address) {
        Ok(elements) => elements.as_ptr().cast(),
        Err(error) => {
            say(&error);
            IS_LOST.set(true);
            std::ptr::null_mut()
        }
    }
}

impl LibraryKernel {
    /// Returns the kernel with this name; `None` if the library has none.
    pub(crate) fn find(library: &Arc<Library>, name: &str) -> Option<Self> {
        // SAFETY: the types that the functions have in `cpu.h` of the kernels.
        unsafe {
            Some(LibraryKernel {
                bind: *library.get::<Bind>(name.as_bytes()).ok()?,
                launch: *library.get::<Launch>(b"launch_on_cpu").ok()?,
                shared_bytes: AtomicUsize::new(SHARED_BYTES),
                _library: Arc::clone(library),
            })
        }
    }

    /// Lets launches have more shared memory. Returns `false` if no GPU has as much.
    pub(crate) fn allow_shared_bytes(&self, bytes: usize) -> bool {
        self.shared_bytes.store(bytes, Ordering::Relaxed);
        bytes <= MOST_SHARED_BYTES
    }

    /// Reads the arguments of a launch. Returns the work, or `None` if one of them is an address
    /// that nothing has, or if the launch has more shared memory than the kernel may have.
    ///
    /// # Safety
    /// There is a pointer to each argument of the kernel.
    pub(crate) unsafe fn work(
        self: &Arc<Self>,
        arguments: *mut *mut c_void,
        shape: Shape,
    ) -> Option<Work> {
        if shape.shared_bytes > self.shared_bytes.load(Ordering::Relaxed) {
            say(&format!(
                "a launch has {} bytes of shared memory, and the kernel may not",
                shape.shared_bytes
            ));
            return None;
        }
        IS_LOST.set(false);
        // SAFETY: the caller's promise.
        let body = Body(unsafe { (self.bind)(arguments, on_host) });
        if IS_LOST.get() {
            return None;
        }
        let kernel = Arc::clone(self);
        Some(Box::new(move || {
            // The whole value, which may cross threads, and not only its pointer.
            let body = body;
            // SAFETY: `bind` has made it for this.
            unsafe {
                (kernel.launch)(
                    body.0,
                    shape.blocks.as_ptr(),
                    shape.threads.as_ptr(),
                    shape.shared_bytes,
                );
            }
            Ok(())
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_libraries_are_opened() {
        // SAFETY: a text, and one that ends before all bytes have been compared.
        let opened = unsafe { [open(c"kernel".as_ptr()), open(c"".as_ptr())] };
        assert!(opened.iter().all(Option::is_none));
    }
}
