//! CUDA's driver: contexts, memory, streams and events.

#![expect(
    unsafe_code,
    reason = "functions of C, whose pointers their callers answer for"
)]

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};
use std::sync::{Arc, Mutex};

use crate::counts::{self, Counted, Counts, add, count, count_allocation};
use crate::handles::{Handle, Handles, lock};
use crate::libraries::MOST_SHARED_BYTES;
use crate::machine::code::{self, Code};
use crate::machine::{
    self, STREAMS, current, devices, elements, push, push_instant, push_marker, say, stream,
};
use crate::memory::{Address, device_of};
use crate::queue::{Marker, Work};

/// The attribute of a GPU that says if memory can be taken and freed in a stream's order.
const MEMORY_POOLS_SUPPORTED: c_int = 115;
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;
/// The attribute that says how much shared memory a block may have.
const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;
/// The flag of a stream that does not wait for the default stream.
const NON_BLOCKING: c_uint = 1;
/// The alignment of pinned memory.
const PAGE: usize = 4096;

/// Turns a result into the code that C programs get.
pub(crate) fn answer(result: Result<(), Code>) -> Code {
    result.err().unwrap_or(code::SUCCESS)
}

/// Writes to a caller's variable.
///
/// # Safety
/// The pointer is null, or points to a variable of this type.
pub(crate) unsafe fn give<T>(to: *mut T, value: T) -> Result<(), Code> {
    if to.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// Returns an error of a check on memory as a code, and explains it.
fn explain(error: String) -> Code {
    say(&error);
    code::INVALID_VALUE
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> Code {
    counts::write_at_exit();
    if devices().is_empty() {
        code::NO_DEVICE
    } else {
        code::SUCCESS
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Code {
    // SAFETY: the caller's pointer.
    answer(unsafe { give(count, devices().len() as c_int) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Code {
    if usize::try_from(ordinal).is_ok_and(|ordinal| ordinal < devices().len()) {
        // SAFETY: the caller's pointer.
        return answer(unsafe { give(device, ordinal) });
    }
    code::INVALID_DEVICE
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_int,
    _device: c_int,
) -> Code {
    let found = match attribute {
        MEMORY_POOLS_SUPPORTED => 1,
        COMPUTE_CAPABILITY_MAJOR => machine::capability() / 10,
        COMPUTE_CAPABILITY_MINOR => machine::capability() % 10,
        MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => MOST_SHARED_BYTES as c_int,
        _ => {
            say(&format!("attribute {attribute} of a GPU is not known"));
            return code::NOT_SUPPORTED;
        }
    };
    // SAFETY: the caller's pointer.
    answer(unsafe { give(value, found) })
}

/// Returns the handle of a GPU's context.
const fn context(ordinal: usize) -> Handle {
    std::ptr::without_provenance_mut(0x1000 + ordinal)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(made: *mut Handle, device: c_int) -> Code {
    // SAFETY: the caller's pointer.
    usize::try_from(device).map_or(code::INVALID_DEVICE, |ordinal| {
        answer(unsafe { give(made, context(ordinal)) })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> Code {
    code::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(found: *mut Handle) -> Code {
    let current = machine::current_ordinal().map_or(std::ptr::null_mut(), context);
    // SAFETY: the caller's pointer.
    answer(unsafe { give(found, current) })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(chosen: Handle) -> Code {
    let ordinal = (0..devices().len()).find(|&ordinal| context(ordinal) == chosen);
    if ordinal.is_none() && !chosen.is_null() {
        return code::INVALID_CONTEXT;
    }
    machine::set_current(ordinal);
    code::SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxDestroy_v2(_context: Handle) -> Code {
    // Only primary contexts are ever made.
    code::NOT_SUPPORTED
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> Code {
    count(Counted::HostWaits);
    answer(current().and_then(|device| {
        device.synchronize();
        device.check()
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(code: Code, text: *mut *const c_char) -> Code {
    // SAFETY: the caller's pointer.
    answer(
        code::text(code)
            .ok_or(code::INVALID_VALUE)
            .and_then(|found| unsafe { give(text, found.0.as_ptr().cast()) }),
    )
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(code: Code, text: *mut *const c_char) -> Code {
    // SAFETY: the caller's pointer.
    answer(
        code::text(code)
            .ok_or(code::INVALID_VALUE)
            .and_then(|found| unsafe { give(text, found.1.as_ptr().cast()) }),
    )
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(made: *mut Address, bytes: usize, on: Handle) -> Code {
    count_allocation(bytes);
    answer(stream(on).and_then(|(device, queue)| {
        // SAFETY: the caller's pointer.
        unsafe { give(made, device.allocate(bytes as u64)?) }?;
        // The memory may be taken earlier here than on a GPU, which takes it in the stream's order.
        queue.push_instant(Box::new(move || {
            counts::hold(bytes as u64);
            Ok(())
        }));
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(made: *mut Address, bytes: usize) -> Code {
    count_allocation(bytes);
    answer(current().and_then(|device| {
        // SAFETY: the caller's pointer.
        unsafe { give(made, device.allocate(bytes as u64)?) }?;
        counts::hold(bytes as u64);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: Address, on: Handle) -> Code {
    answer(stream(on).and_then(|(_, _)| {
        let owner = device_of(address)
            .and_then(|ordinal| devices().get(ordinal))
            .ok_or(code::INVALID_VALUE)?;
        if !owner.memory.is_allocated(address) {
            return Err(explain(format!(
                "{address:#x} is freed, and was not allocated"
            )));
        }
        // Only what the stream was given before may still use it.
        let work = move || owner.memory.free(address).map(counts::release);
        push_instant(on, Box::new(work)).map(drop)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: Address) -> Code {
    count(Counted::HostWaits);
    answer(current().and_then(|device| {
        device.synchronize();
        let freed = device.memory.free(address);
        freed.map(counts::release).map_err(explain)
    }))
}

/// The attribute of a pool that says if an allocation may wait for a stream that frees memory.
const REUSE_ALLOW_INTERNAL_DEPENDENCIES: c_int = 3;
/// The attribute of a pool: the bytes that it keeps when the host waits for a stream.
const RELEASE_THRESHOLD: c_int = 4;

/// Returns the handle of a GPU's pool of memory.
const fn pool(ordinal: c_int) -> Handle {
    std::ptr::without_provenance_mut(0x2000 + ordinal as usize)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetDefaultMemPool(found: *mut Handle, device: c_int) -> Code {
    if usize::try_from(device).is_ok_and(|ordinal| ordinal < devices().len()) {
        // SAFETY: the caller's pointer.
        return answer(unsafe { give(found, pool(device)) });
    }
    code::INVALID_DEVICE
}

/// Takes a setting of a pool, and ignores it: memory that is freed costs nothing here, and is taken
/// again only once it has been freed.
#[unsafe(no_mangle)]
extern "C" fn cuMemPoolSetAttribute(chosen: Handle, attribute: c_int, value: *const u64) -> Code {
    let is_pool = (0..devices().len()).any(|ordinal| pool(ordinal as c_int) == chosen);
    if !is_pool
        || ![RELEASE_THRESHOLD, REUSE_ALLOW_INTERNAL_DEPENDENCIES].contains(&attribute)
        || value.is_null()
    {
        return code::INVALID_VALUE;
    }
    code::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(made: *mut *mut c_void, bytes: usize, _flags: c_uint) -> Code {
    let Ok(layout) = Layout::from_size_align(bytes.max(1), PAGE) else {
        return code::INVALID_VALUE;
    };
    // SAFETY: the size is not zero.
    let memory = unsafe { alloc(layout) };
    if memory.is_null() {
        return code::OUT_OF_MEMORY;
    }
    // SAFETY: as many bytes as were allocated.
    unsafe { memory.write_bytes(0xff, bytes) };
    machine::pin(memory.addr(), bytes);
    add(Counted::BytesPinned, bytes);
    // SAFETY: the caller's pointer.
    answer(unsafe { give(made, memory.cast()) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFreeHost(memory: *mut c_void) -> Code {
    let Some(bytes) = machine::unpin(memory.addr()) else {
        return code::INVALID_VALUE;
    };
    count(Counted::HostWaits);
    devices().iter().for_each(machine::Device::synchronize);
    let Ok(layout) = Layout::from_size_align(bytes.max(1), PAGE) else {
        return code::INVALID_VALUE;
    };
    // SAFETY: `cuMemHostAlloc` made it with this layout, and no stream uses it any more.
    unsafe { dealloc(memory.cast(), layout) };
    code::SUCCESS
}

/// A pointer to the host's memory, for the thread of a stream.
struct Host(*mut u8);

// SAFETY: the program keeps the memory until the copy is over, as CUDA asks of it.
unsafe impl Send for Host {}

impl Host {
    /// Returns the bytes of the host at this pointer.
    ///
    /// # Safety
    /// There are as many, and nothing else changes them.
    unsafe fn bytes<'a>(&self, bytes: usize) -> &'a [u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.0, bytes) }
    }
}

/// Checks that a pointer is the host's and an address is a GPU's with so many bytes.
fn check(host: *const c_void, address: Address, bytes: usize) -> Result<(), Code> {
    if host.is_null() || device_of(host.addr() as u64).is_some() {
        return Err(explain(format!(
            "{host:?} is used as an address of the host, and is none"
        )));
    }
    elements::<u8>(address)
        .and_then(|there| there.first(bytes))
        .map(drop)
        .map_err(explain)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: Address,
    from: *const c_void,
    bytes: usize,
    on: Handle,
) -> Code {
    if bytes == 0 {
        return code::SUCCESS;
    }
    answer(check(from, to, bytes).and_then(|()| {
        count(Counted::CopiesUp);
        add(Counted::BytesUp, bytes);
        let host = Host(from.cast_mut().cast());
        let work: Work = if machine::is_pinned(from.addr(), bytes) {
            // Read only when the stream gets there: who changes pinned memory too early gets wrong
            // values. SAFETY: the caller keeps the memory until then.
            Box::new(move || elements::<u8>(to)?.fill_from(unsafe { host.bytes(bytes) }))
        } else {
            // SAFETY: the caller's memory.
            let copy = unsafe { host.bytes(bytes) }.to_vec();
            Box::new(move || elements::<u8>(to)?.fill_from(&copy))
        };
        push(on, work).map(drop)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: Address,
    bytes: usize,
    on: Handle,
) -> Code {
    if bytes == 0 {
        return code::SUCCESS;
    }
    answer(check(to, from, bytes).and_then(|()| {
        machine::check_copy_to_host()?;
        count(Counted::CopiesDown);
        add(Counted::BytesDown, bytes);
        let host = Host(to.cast());
        let is_pinned = machine::is_pinned(to.addr(), bytes);
        let copied = push(
            on,
            Box::new(move || {
                let copy = elements::<u8>(from)?.first(bytes)?.to_vec();
                // The whole value, which may cross threads, and not only its pointer.
                let host = host;
                // SAFETY: the caller keeps as many bytes until the stream has got here.
                unsafe { host.0.copy_from_nonoverlapping(copy.as_ptr(), bytes) };
                Ok(())
            }),
        )?;
        // Only copies to pinned memory go on after the call.
        if !is_pinned {
            count(Counted::HostWaits);
            copied.wait();
            return stream(on).and_then(|(device, _)| device.check());
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(to: Address, from: Address, bytes: usize, on: Handle) -> Code {
    if bytes == 0 {
        return code::SUCCESS;
    }
    count(Counted::CopiesWithin);
    let copied = push(
        on,
        Box::new(move || {
            let copy = elements::<u8>(from)?.first(bytes)?.to_vec();
            elements::<u8>(to)?.fill_from(&copy)
        }),
    );
    answer(copied.map(drop))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyPeerAsync(
    to: Address,
    _to_context: Handle,
    from: Address,
    _from_context: Handle,
    bytes: usize,
    on: Handle,
) -> Code {
    cuMemcpyDtoDAsync_v2(to, from, bytes, on)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(to: Address, value: c_uchar, bytes: usize, on: Handle) -> Code {
    count(Counted::Memsets);
    let set = push(
        on,
        Box::new(move || elements::<u8>(to)?.fill_from(&vec![value; bytes])),
    );
    answer(set.map(drop))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(made: *mut Handle, flags: c_uint) -> Code {
    answer(current().and_then(|device| {
        let ordinal = machine::current_ordinal().ok_or(code::INVALID_CONTEXT)?;
        let handle = STREAMS.add((ordinal, device.start_queue(flags & NON_BLOCKING == 0)?));
        // SAFETY: the caller's pointer.
        unsafe { give(made, handle) }
    }))
}

/// The priorities are ignored: all work begins as soon as it can.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(
    made: *mut Handle,
    flags: c_uint,
    _priority: c_int,
) -> Code {
    // SAFETY: the caller's pointer.
    unsafe { cuStreamCreate(made, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> Code {
    // SAFETY: the caller's pointers.
    answer(current().and_then(|_| unsafe { give(least, 0).and_then(|()| give(greatest, -5)) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(handle: Handle) -> Code {
    if STREAMS.remove(handle).is_some() {
        code::SUCCESS
    } else {
        code::INVALID_HANDLE
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(handle: Handle) -> Code {
    count(Counted::HostWaits);
    // Through a point in it, because the default stream has to wait for others.
    answer(push_marker(handle).and_then(|marker| {
        marker.wait();
        stream(handle).and_then(|(device, _)| device.check())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamIsCapturing(handle: Handle, status: *mut c_int) -> Code {
    // SAFETY: the caller's pointer.
    answer(stream(handle).and_then(|_| unsafe { give(status, 0) }))
}

/// Events: each with the point that it was last recorded at.
static EVENTS: Handles<Arc<Mutex<Marker>>> = Handles::new();

fn event(handle: Handle) -> Result<Arc<Mutex<Marker>>, Code> {
    EVENTS.get(handle).ok_or(code::INVALID_HANDLE)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(made: *mut Handle, _flags: c_uint) -> Code {
    count(Counted::Events);
    let handle = EVENTS.add(Arc::new(Mutex::new(Marker::reached())));
    // SAFETY: the caller's pointer.
    answer(current().and_then(|_| unsafe { give(made, handle) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(handle: Handle) -> Code {
    if EVENTS.remove(handle).is_some() {
        code::SUCCESS
    } else {
        code::INVALID_HANDLE
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(handle: Handle, on: Handle) -> Code {
    answer(event(handle).and_then(|event| {
        *lock(&event) = push_marker(on)?;
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(handle: Handle) -> Code {
    match event(handle) {
        Ok(event) if lock(&event).is_reached() => {
            answer(devices().iter().try_for_each(machine::Device::check))
        }
        Ok(_) => code::NOT_READY,
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(handle: Handle) -> Code {
    count(Counted::HostWaits);
    answer(event(handle).and_then(|event| {
        let marker = lock(&event).clone();
        marker.wait();
        devices().iter().try_for_each(machine::Device::check)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(handle: Handle, of: Handle, _flags: c_uint) -> Code {
    count(Counted::StreamWaits);
    answer(event(of).and_then(|event| {
        let marker = lock(&event).clone();
        let (_, queue) = stream(handle)?;
        queue.wait_and_count(marker);
        Ok(())
    }))
}

/// Tells what was counted. CUDA has no such function.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStandInAllCounts(counts: *mut Counts) -> Code {
    // A thread without a context has no stream of its own.
    let own_stream = stream(machine::PER_THREAD_STREAM);
    let waits = own_stream.map_or([0; 2], |(_, queue)| queue.waits());
    // SAFETY: the caller's pointer.
    answer(unsafe { give(counts, counts::all(waits)) })
}

/// Returns 1 if these bytes of the host are pinned, else 0. CUDA tells that in another way.
#[unsafe(no_mangle)]
extern "C" fn cudaStandInIsPinned(address: *const c_void, bytes: usize) -> c_int {
    c_int::from(machine::is_pinned(address.addr(), bytes))
}

/// Lets the next `after` copies to the host succeed, and the `count` copies behind them fail. The
/// GPU goes on. CUDA has no such function.
#[unsafe(no_mangle)]
extern "C" fn cudaStandInFailCopies(after: u64, count: u64) -> Code {
    machine::set_failing_copies(after, count);
    code::SUCCESS
}
