//! Calls of NCCL, whose functions are loaded by name at run time, and the memory that they use
//! while they run.
//!
//! cudarc's bindings are not used: candle's feature `cuda` would link them, so that no program
//! would start without NCCL, and they do not know the file name in NVIDIA's packages. Communicators
//! are non-blocking: a call returns at once, and [`NcclCommunicator::is_all_enqueued`] tells how
//! far it is.
//!
//! The error of a call is NCCL's own message.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};
use fsdp_layout::DType;
use libloading::Library;

use crate::backend::{Collective, Movement};
use crate::reduce::ReduceOp;

/// The file name of the library.
const LIBRARY_NAME: &str = "libnccl.so.2";
/// The file name of CUDA's driver, which NCCL needs.
const DRIVER_NAME: &str = "libcuda.so.1";
/// The first version whose configuration has all the fields that are set here, 2.18, as
/// `ncclGetVersion` writes it.
const MIN_VERSION: c_int = 21_800;

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
const UNDEFINED: c_int = c_int::MIN;
/// The color of a rank that is in none of the communicators that a split makes.
const NO_COLOR: c_int = -1;

type Raw = *mut c_void;
type Stream = *mut c_void;

/// The id of a communicator, which all its ranks must be given.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// NCCL's `ncclConfig_t` of 2.18. Later versions read it too, as `size` and `version` tell them its
/// fields.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Returns a configuration whose calls return before they are done, so that this process can
    /// look for lost ranks meanwhile.
    const fn non_blocking() -> Config {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: MIN_VERSION.cast_unsigned(),
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

macro_rules! functions {
    ($($field:ident: $name:literal, fn($($argument:ty),*) -> $result:ty;)*) => {
        /// NCCL's functions.
        #[derive(Debug)]
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
            /// The library that holds them.
            _library: Library,
        }

        impl Functions {
            /// Looks up all functions in the library. The error names the first that it lacks.
            fn find(library: Library) -> Result<Functions, String> {
                // SAFETY: the types are those of NCCL's header, and have not changed since 2.18.
                Ok(unsafe {
                    Functions {
                        $($field: *library
                            .get(concat!($name, "\0").as_bytes())
                            .map_err(|error| format!("it lacks `{}`: {error}", $name))?,)*
                        _library: library,
                    }
                })
            }
        }
    };
}

functions! {
    get_version: "ncclGetVersion", fn(*mut c_int) -> c_int;
    get_unique_id: "ncclGetUniqueId", fn(*mut UniqueId) -> c_int;
    init: "ncclCommInitRankConfig", fn(*mut Raw, c_int, UniqueId, c_int, *mut Config) -> c_int;
    split: "ncclCommSplit", fn(Raw, c_int, c_int, *mut Raw, *mut Config) -> c_int;
    get_async_error: "ncclCommGetAsyncError", fn(Raw, *mut c_int) -> c_int;
    get_error_string: "ncclGetErrorString", fn(c_int) -> *const c_char;
    get_last_error: "ncclGetLastError", fn(Raw) -> *const c_char;
    finalize: "ncclCommFinalize", fn(Raw) -> c_int;
    destroy: "ncclCommDestroy", fn(Raw) -> c_int;
    abort: "ncclCommAbort", fn(Raw) -> c_int;
    group_start: "ncclGroupStart", fn() -> c_int;
    group_end: "ncclGroupEnd", fn() -> c_int;
    all_gather: "ncclAllGather", fn(*const c_void, *mut c_void, usize, c_int, Raw, Stream) -> c_int;
    reduce_scatter: "ncclReduceScatter", fn(*const c_void, *mut c_void, usize, c_int, c_int, Raw, Stream) -> c_int;
    all_reduce: "ncclAllReduce", fn(*const c_void, *mut c_void, usize, c_int, c_int, Raw, Stream) -> c_int;
    broadcast: "ncclBroadcast", fn(*const c_void, *mut c_void, usize, c_int, c_int, Raw, Stream) -> c_int;
    send: "ncclSend", fn(*const c_void, usize, c_int, c_int, Raw, Stream) -> c_int;
    recv: "ncclRecv", fn(*mut c_void, usize, c_int, c_int, Raw, Stream) -> c_int;
}

/// Returns the functions of the library, which is loaded once.
///
/// # Errors
/// A library that is missing or too old.
fn functions() -> Result<&'static Functions, String> {
    static FUNCTIONS: OnceLock<Result<Functions, String>> = OnceLock::new();
    FUNCTIONS.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// Loads CUDA's driver and NCCL, and checks NCCL's version.
fn load() -> Result<Functions, String> {
    // NCCL loads the driver by itself, and would not say clearly that it is not there.
    open(DRIVER_NAME).map_err(|error| {
        format!(
            "CUDA's driver, `{DRIVER_NAME}`, cannot be loaded ({error}): it comes with NVIDIA's driver"
        )
    })?;
    let library = open(LIBRARY_NAME).map_err(|error| {
        format!(
            "NCCL, `{}`, cannot be loaded ({error}): install NVIDIA's package `libnccl2`, or tell in `LD_LIBRARY_PATH` \
             where it is",
            LIBRARY_NAME
        )
    })?;
    let functions = Functions::find(library)
        .map_err(|error| format!("NCCL, `{}`, is of no use: {error}", LIBRARY_NAME))?;
    let mut version = 0;
    // SAFETY: it writes a number.
    let code = unsafe { (functions.get_version)(&mut version) };
    if code != SUCCESS || version < MIN_VERSION {
        return Err(format!(
            "NCCL is too old: its version is {version}, and must be at least {MIN_VERSION} (2.18)"
        ));
    }
    Ok(functions)
}

/// Opens a library. The error is the message of the dynamic loader itself.
fn open(name: &str) -> Result<Library, String> {
    // SAFETY: what the library runs when it is loaded is NVIDIA's, and meant for that.
    unsafe { Library::new(name) }.map_err(|error| {
        std::error::Error::source(&error)
            .unwrap_or(&error)
            .to_string()
    })
}

/// Checks that NCCL and the driver can be loaded, and used as it is done here.
///
/// # Errors
/// The library that cannot be loaded, and the reason; a setting under which calls could not be
/// ended.
pub(super) fn check() -> Result<(), String> {
    refuse_blocking(std::env::var_os(BLOCKING).as_deref())?;
    functions().map(|_| ())
}

/// The variable by which NCCL makes communicators blocking, whatever a program asks for.
const BLOCKING: &str = "NCCL_COMM_BLOCKING";

/// Refuses blocking communicators: a call of one could not be ended if another rank is lost.
/// `value` is that of [`BLOCKING`], and the error says what to do.
fn refuse_blocking(value: Option<&OsStr>) -> Result<(), String> {
    if value.is_none_or(|value| value == "0") {
        return Ok(());
    }
    Err(format!(
        "`{BLOCKING}` makes NCCL wait in calls that could then not be ended if a rank is lost: \
         unset it"
    ))
}

/// Opens a GPU, and makes a stream for the operations of a communicator. They begin before other
/// work that waits for a place on the GPU, as all ranks wait for the last one to begin.
pub(super) fn open_stream(ordinal: usize) -> Result<Arc<CudaStream>, DriverError> {
    let context = CudaContext::new(ordinal)?;
    // With tracking, a new stream would wait for all work of the GPU.
    // SAFETY: no memory of a GPU is allocated in this context.
    unsafe { context.disable_event_tracking() };
    let (_, greatest_priority) = result::stream::get_priority_range()?;
    context.new_stream_with_priority(greatest_priority)
}

/// Creates the id of a new communicator, which one of its ranks does for all.
pub(super) fn unique_id() -> Result<UniqueId, String> {
    let functions = functions()?;
    let mut id = UniqueId([0; 128]);
    // SAFETY: it writes as many bytes as the type has.
    let code = unsafe { (functions.get_unique_id)(&mut id) };
    functions.check_begun(code, ptr::null_mut())?;
    Ok(id)
}

impl Functions {
    /// Turns the code of a call into a result. A call that has only begun is not an error.
    fn check_begun(&self, code: c_int, communicator: Raw) -> Result<(), String> {
        if code == SUCCESS || code == IN_PROGRESS {
            Ok(())
        } else {
            Err(self.describe(code, communicator))
        }
    }

    /// Returns NCCL's texts on an error code, and on the last error of a communicator.
    fn describe(&self, code: c_int, communicator: Raw) -> String {
        // SAFETY: both only look something up; the communicator is one of this process, or null.
        // Their texts are strings that live at least until the next call of NCCL.
        let (code_text, last_error) = unsafe {
            (
                copy_c_string((self.get_error_string)(code)),
                copy_c_string((self.get_last_error)(communicator)),
            )
        };
        let code_text = code_text.as_deref().unwrap_or("unknown error");
        match last_error.filter(|last_error| !last_error.is_empty()) {
            Some(last_error) => {
                let hint = hint_for(&last_error);
                format!("{code_text} (code {code}): {last_error}{hint}")
            }
            None => format!("{code_text} (code {code})"),
        }
    }
}

/// Returns what to do about an error of NCCL, to be appended to its text.
fn hint_for(last_error: &str) -> &'static str {
    // Later versions than 2.29 say it in another way, and name a setting of their own.
    if last_error.contains("Duplicate GPU") {
        ": start one rank for each GPU, or let several share one with `fsdp launch --ranks-per-gpu`"
    } else {
        ""
    }
}

/// Copies a C string; `None` for a null pointer.
///
/// # Safety
/// The pointer is null, or that of a string that ends with a zero byte.
unsafe fn copy_c_string(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    Some(
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    )
}

/// Returns NCCL's number of a dtype; `None` if NCCL does not compute with it.
pub(crate) const fn nccl_data_type(dtype: DType) -> Option<c_int> {
    Some(match dtype {
        DType::I8 => 0,
        DType::U8 => BYTE,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::U64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
        _ => return None,
    })
}

/// Returns NCCL's number of a dtype, or a message that NCCL does not compute with it.
fn checked_data_type(dtype: DType) -> Result<c_int, String> {
    nccl_data_type(dtype).ok_or_else(|| format!("it knows no {dtype}"))
}

const BYTE: c_int = 1;

/// Returns NCCL's number of a reduction.
const fn nccl_reduction(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Max => 2,
        ReduceOp::Avg => 4,
    }
}

/// Returns a number as NCCL's type for counts, or a message that it is too large.
fn to_c_int(number: usize) -> Result<c_int, String> {
    c_int::try_from(number).map_err(|_| format!("{number} is more than NCCL can count"))
}

/// One rank of a communicator.
#[derive(Debug)]
pub(super) struct NcclCommunicator {
    functions: &'static Functions,
    raw: Raw,
}

// SAFETY: NCCL lets any thread call a communicator, as long as only one does so at a time.
unsafe impl Send for NcclCommunicator {}

/// The place of a rank in the communicators that a split makes.
#[derive(Debug, Clone, Copy)]
pub(super) struct SplitPlace {
    /// Ranks of the same color get into the same communicator.
    pub(super) color: usize,
    /// Ranks of a communicator are numbered in ascending order of this.
    pub(super) key: usize,
}

/// A communicator that a split is about to make. NCCL's thread writes it at some time before the
/// split is over, so if it does not come to its end, the few bytes for it are never freed.
#[derive(Debug)]
pub(super) struct SplitResult {
    functions: &'static Functions,
    raw: ManuallyDrop<Box<AtomicPtr<c_void>>>,
}

impl SplitResult {
    /// Returns the new communicator, once [`NcclCommunicator::is_all_enqueued`] of the one that is
    /// split has returned `true`. There is none for a rank without a color.
    pub(super) fn take(self) -> Option<NcclCommunicator> {
        let SplitResult { functions, raw } = self;
        let raw = ManuallyDrop::into_inner(raw).load(Ordering::Acquire);
        (!raw.is_null()).then_some(NcclCommunicator { functions, raw })
    }
}

impl NcclCommunicator {
    /// Begins to join the other ranks that were given this id, on the GPU of the thread's current
    /// context.
    pub(super) fn begin(
        id: UniqueId,
        rank: usize,
        ranks: usize,
    ) -> Result<NcclCommunicator, String> {
        let functions = functions()?;
        let rank = to_c_int(rank)?;
        let ranks = to_c_int(ranks)?;
        let mut raw = ptr::null_mut();
        let mut config = Config::non_blocking();
        // SAFETY: `raw` is written at once, and the configuration is read before the call returns.
        let code = unsafe { (functions.init)(&mut raw, ranks, id, rank, &mut config) };
        functions.check_begun(code, ptr::null_mut())?;
        // A call that has only begun must have made the handle, with which it is watched.
        if raw.is_null() {
            return Err("it made no communicator".to_owned());
        }
        Ok(NcclCommunicator { functions, raw })
    }

    /// Begins to make communicators of some of the ranks each. All ranks of this communicator call
    /// it, while no other call is under way; those with `None` get no new one.
    /// [`Self::is_all_enqueued`] tells when that is done.
    pub(super) fn begin_split(&self, place: Option<SplitPlace>) -> Result<SplitResult, String> {
        let (color, key) = match place {
            Some(SplitPlace { color, key }) => (to_c_int(color)?, to_c_int(key)?),
            None => (NO_COLOR, 0),
        };
        let result = SplitResult {
            functions: self.functions,
            raw: ManuallyDrop::new(Box::default()),
        };
        // SAFETY: a live communicator. What NCCL writes to is freed only after it has been written,
        // in `SplitResult::take`. Without a configuration the new communicators get that of this
        // one.
        let code = unsafe {
            (self.functions.split)(self.raw, color, key, result.raw.as_ptr(), ptr::null_mut())
        };
        self.functions.check_begun(code, self.raw)?;
        Ok(result)
    }

    /// Returns `true` if all calls that were begun have been handed to the GPU. The error is that
    /// of a call which has failed since it began.
    pub(super) fn is_all_enqueued(&self) -> Result<bool, String> {
        let mut status = SUCCESS;
        // SAFETY: a live communicator; it writes a number.
        let code = unsafe { (self.functions.get_async_error)(self.raw, &mut status) };
        self.functions.check_begun(code, self.raw)?;
        self.functions.check_begun(status, self.raw)?;
        Ok(status == SUCCESS)
    }

    /// Begins a collective on a stream of the communicator's GPU.
    pub(super) fn call(&self, call: &Movement, stream: &CudaStream) -> Result<(), String> {
        let functions = self.functions;
        let raw = self.raw;
        let stream: Stream = stream.cu_stream().cast();
        // SAFETY: the memory at these addresses is as long as the counts say on every rank, and it
        // is freed and used for other things only behind an event of the stream after this call, or
        // after the communicator has been aborted.
        let code = unsafe {
            match *call {
                Movement::Collective {
                    kind,
                    send,
                    receive,
                    count,
                    dtype,
                } => {
                    let send = as_source(send);
                    let receive = as_destination(receive);
                    let dtype = checked_data_type(dtype)?;
                    match kind {
                        Collective::AllGather => {
                            (functions.all_gather)(send, receive, count, dtype, raw, stream)
                        }
                        Collective::ReduceScatter(op) => {
                            let op = nccl_reduction(op);
                            (functions.reduce_scatter)(send, receive, count, dtype, op, raw, stream)
                        }
                        Collective::AllReduce(op) => {
                            let op = nccl_reduction(op);
                            (functions.all_reduce)(send, receive, count, dtype, op, raw, stream)
                        }
                        Collective::Broadcast(root) => {
                            let root = to_c_int(root)?;
                            (functions.broadcast)(send, receive, count, dtype, root, raw, stream)
                        }
                    }
                }
                Movement::Exchange {
                    ref send,
                    ref receive,
                } => {
                    functions.check_begun((functions.group_start)(), raw)?;
                    let begun = self.exchange(send, receive, stream);
                    // A group that was begun must be ended, whatever happened within.
                    let ended = functions.check_begun((functions.group_end)(), raw);
                    return begun.and(ended);
                }
            }
        };
        functions.check_begun(code, raw)
    }

    /// Sends and receives, within a group.
    fn exchange(
        &self,
        send: &[(CUdeviceptr, usize)],
        receive: &[(CUdeviceptr, usize)],
        stream: Stream,
    ) -> Result<(), String> {
        let functions = self.functions;
        let raw = self.raw;
        for (rank, (&(source, sent_bytes), &(destination, received_bytes))) in
            send.iter().zip(receive).enumerate()
        {
            let rank = to_c_int(rank)?;
            if sent_bytes > 0 {
                // SAFETY: as in `call`.
                functions.check_begun(
                    unsafe {
                        (functions.send)(as_source(source), sent_bytes, BYTE, rank, raw, stream)
                    },
                    raw,
                )?;
            }
            if received_bytes > 0 {
                // SAFETY: as in `call`.
                functions.check_begun(
                    unsafe {
                        (functions.recv)(
                            as_destination(destination),
                            received_bytes,
                            BYTE,
                            rank,
                            raw,
                            stream,
                        )
                    },
                    raw,
                )?;
            }
        }
        Ok(())
    }

    /// Begins to leave the other ranks. [`Self::is_all_enqueued`] tells when that is done.
    pub(super) fn finalize(&self) -> Result<(), String> {
        // SAFETY: a live communicator, on which nothing runs.
        self.functions
            .check_begun(unsafe { (self.functions.finalize)(self.raw) }, self.raw)
    }

    /// Frees a communicator that has left the other ranks.
    pub(super) fn destroy(self) {
        // SAFETY: it is finalized, and is used no more.
        let code = unsafe { (self.functions.destroy)(self.raw) };
        if let Err(error) = self.functions.check_begun(code, ptr::null_mut()) {
            tracing::warn!(error, "an NCCL communicator could not be freed");
        }
        std::mem::forget(self);
    }
}

impl Drop for NcclCommunicator {
    /// Aborts calls that still run, so that kernels which wait for other ranks end.
    fn drop(&mut self) {
        // SAFETY: a live communicator, which is used no more.
        let code = unsafe { (self.functions.abort)(self.raw) };
        if let Err(error) = self.functions.check_begun(code, ptr::null_mut()) {
            tracing::warn!(error, "an NCCL communicator could not be aborted");
        }
    }
}

const fn as_source(address: CUdeviceptr) -> *const c_void {
    ptr::without_provenance(address as usize)
}

const fn as_destination(address: CUdeviceptr) -> *mut c_void {
    ptr::without_provenance_mut(address as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_is_laid_out_as_in_the_header() {
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
    }

    #[test]
    fn a_library_that_is_not_there_is_named() {
        let error = open("libnobody-has-this.so.7").unwrap_err();
        assert!(error.contains("libnobody-has-this.so.7"), "{error}");
    }

    #[test]
    fn blocking_communicators_are_refused() {
        for value in [None, Some("0")] {
            assert_eq!(refuse_blocking(value.map(OsStr::new)), Ok(()));
        }
        let refused = refuse_blocking(Some(OsStr::new("1"))).unwrap_err();
        assert!(refused.contains("NCCL_COMM_BLOCKING"), "{refused}");
    }

    #[test]
    fn a_library_that_is_another_lacks_functions() {
        let Ok(library) = open("libc.so.6") else {
            return;
        };
        let error = Functions::find(library).unwrap_err();
        assert!(error.contains("`ncclGetVersion`"), "{error}");
    }
}
