//! The GPUs of this machine, and what of them the calling thread uses.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crate::handles::{Handle, Handles, lock};
use crate::memory::{Address, Elements, Memory, device_of};
use crate::queue::{Marker, Queue, Work};

/// The codes of CUDA's driver.
pub(crate) mod code {
    pub(crate) type Code = u32;

    pub(crate) const SUCCESS: Code = 0;
    pub(crate) const INVALID_VALUE: Code = 1;
    pub(crate) const OUT_OF_MEMORY: Code = 2;
    pub(crate) const NO_DEVICE: Code = 100;
    pub(crate) const INVALID_DEVICE: Code = 101;
    pub(crate) const INVALID_CONTEXT: Code = 201;
    pub(crate) const OPERATING_SYSTEM: Code = 304;
    pub(crate) const INVALID_HANDLE: Code = 400;
    pub(crate) const NOT_FOUND: Code = 500;
    pub(crate) const NOT_READY: Code = 600;
    pub(crate) const LAUNCH_FAILED: Code = 719;
    pub(crate) const NOT_SUPPORTED: Code = 801;

    /// Returns the name and the meaning of a code, each with the zero that ends it in C.
    pub(crate) const fn text(code: Code) -> Option<(&'static str, &'static str)> {
        Some(match code {
            SUCCESS => ("CUDA_SUCCESS\0", "no error\0"),
            INVALID_VALUE => ("CUDA_ERROR_INVALID_VALUE\0", "invalid argument\0"),
            OUT_OF_MEMORY => ("CUDA_ERROR_OUT_OF_MEMORY\0", "out of memory\0"),
            NO_DEVICE => (
                "CUDA_ERROR_NO_DEVICE\0",
                "no CUDA-capable device is detected\0",
            ),
            INVALID_DEVICE => ("CUDA_ERROR_INVALID_DEVICE\0", "invalid device ordinal\0"),
            INVALID_CONTEXT => ("CUDA_ERROR_INVALID_CONTEXT\0", "invalid device context\0"),
            OPERATING_SYSTEM => (
                "CUDA_ERROR_OPERATING_SYSTEM\0",
                "a call of the operating system failed\0",
            ),
            INVALID_HANDLE => ("CUDA_ERROR_INVALID_HANDLE\0", "invalid resource handle\0"),
            NOT_FOUND => ("CUDA_ERROR_NOT_FOUND\0", "named symbol not found\0"),
            NOT_READY => ("CUDA_ERROR_NOT_READY\0", "device not ready\0"),
            LAUNCH_FAILED => ("CUDA_ERROR_LAUNCH_FAILED\0", "unspecified launch failure\0"),
            NOT_SUPPORTED => ("CUDA_ERROR_NOT_SUPPORTED\0", "operation not supported\0"),
            _ => return None,
        })
    }
}

use code::Code;

/// The most GPUs that there can be.
const MOST_DEVICES: usize = 16;
/// The bytes of a GPU's memory, unless a variable tells another number.
const MEMORY: u64 = 1 << 30;
/// The number of a thread's own stream.
const PER_THREAD: usize = 2;
/// The handle of a thread's own stream.
pub(crate) const PER_THREAD_STREAM: Handle = std::ptr::without_provenance_mut(PER_THREAD);

/// One GPU.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) memory: Memory,
    /// The number of the GPU on the host, whatever numbers the process gives to those that it sees.
    pub(crate) number: usize,
    /// The stream whose handle is null. It is made when it is first used.
    default: Mutex<Option<Arc<Queue>>>,
    queues: Mutex<Vec<Arc<Queue>>>,
    failure: Arc<OnceLock<String>>,
}

impl Device {
    /// Fails if work of this GPU has failed: nothing works any more then.
    pub(crate) fn check(&self) -> Result<(), Code> {
        if self.failure.get().is_some() {
            Err(code::LAUNCH_FAILED)
        } else {
            Ok(())
        }
    }

    /// Makes a GPU with so many bytes of memory; `None` if there is none for it.
    fn new(ordinal: usize, number: usize, capacity: u64) -> Option<Device> {
        let memory = Memory::new(ordinal, capacity, computes())
            .inspect_err(|error| say(&format!("no memory for a GPU: {error}")))
            .ok()?;
        Some(Device {
            memory,
            number,
            default: Mutex::new(None),
            queues: Mutex::new(Vec::new()),
            failure: Arc::new(OnceLock::new()),
        })
    }

    /// Makes a stream.
    pub(crate) fn start_queue(&self, is_blocking: bool) -> Result<Arc<Queue>, Code> {
        let failure = Arc::clone(&self.failure);
        let queue = Queue::start(is_blocking, delay(), move |error: String| {
            say(&format!("the GPU has failed: {error}"));
            failure.set(error).ok();
        })
        .map(Arc::new)
        .map_err(|_| code::OPERATING_SYSTEM)?;
        let mut queues = lock(&self.queues);
        // Queues that nobody else holds and that are empty are done.
        queues.retain(|queue| Arc::strong_count(queue) > 1 || !queue.last().is_reached());
        queues.push(Arc::clone(&queue));
        Ok(queue)
    }

    /// Waits for all work of all streams.
    pub(crate) fn synchronize(&self) {
        let queues = lock(&self.queues).clone();
        queues.iter().for_each(|queue| queue.last().wait());
    }

    fn default_queue(&self) -> Result<Arc<Queue>, Code> {
        let mut default = lock(&self.default);
        if let Some(queue) = &*default {
            return Ok(Arc::clone(queue));
        }
        let queue = self.start_queue(false)?;
        *default = Some(Arc::clone(&queue));
        Ok(queue)
    }

    /// Adds work to a stream, in its order with the default stream.
    pub(crate) fn push(&self, queue: &Arc<Queue>, work: Work) -> Marker {
        self.order_with_default(queue);
        queue.push(work)
    }

    /// Makes a stream wait for the default stream, and the default stream for others.
    fn order_with_default(&self, queue: &Arc<Queue>) {
        let default = lock(&self.default).clone();
        match default {
            // The default stream waits for all streams that block, and they wait for it.
            Some(default) if Arc::ptr_eq(&default, queue) => {
                let queues = lock(&self.queues).clone();
                queues
                    .iter()
                    .filter(|queue| queue.is_blocking)
                    .for_each(|other| queue.wait_for(other.last()));
            }
            Some(default) if queue.is_blocking => queue.wait_for(default.last()),
            _ => {}
        }
    }

    /// Returns memory, and waits for memory that is about to be freed if there is no other.
    pub(crate) fn allocate(&self, bytes: u64) -> Result<Address, Code> {
        if bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        self.memory.allocate(bytes).map_or_else(
            || {
                self.synchronize();
                self.memory.allocate(bytes).ok_or(code::OUT_OF_MEMORY)
            },
            Ok,
        )
    }
}

/// Returns the value of a variable that is a number.
pub(crate) fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn delay() -> Duration {
    static DELAY: OnceLock<Duration> = OnceLock::new();
    *DELAY.get_or_init(|| Duration::from_micros(number("CUDA_STAND_IN_DELAY_US").unwrap_or(0)))
}

/// Returns `true` unless kernels and products are only counted.
pub(crate) fn computes() -> bool {
    static COMPUTES: OnceLock<bool> = OnceLock::new();
    *COMPUTES.get_or_init(|| number("CUDA_STAND_IN_COMPUTES") != Some(0))
}

/// Returns ten times the compute capability of each GPU.
pub(crate) fn capability() -> i32 {
    number("CUDA_STAND_IN_CAPABILITY").map_or(90, |capability| capability as i32)
}

/// Returns the GPUs that this process sees.
pub(crate) fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let capacity = number("CUDA_STAND_IN_MEMORY")
            .unwrap_or(MEMORY)
            .next_multiple_of(1 << 12);
        let count = number("CUDA_STAND_IN_DEVICES")
            .map_or(1, |count| count as usize)
            .min(MOST_DEVICES);
        visible(count, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref())
            .into_iter()
            .enumerate()
            .map_while(|(ordinal, number)| Device::new(ordinal, number, capacity))
            .collect()
    })
}

/// Returns the numbers of the GPUs that a list in the form of `CUDA_VISIBLE_DEVICES` leaves.
fn visible(count: usize, list: Option<&str>) -> Vec<usize> {
    let Some(list) = list else {
        return (0..count).collect();
    };
    // The first entry that names no GPU ends the list.
    let numbers = list.split(',').map_while(|entry| entry.trim().parse().ok());
    numbers.take_while(|&number| number < count).collect()
}

/// The elements at an address of any GPU.
pub(crate) fn elements<T: Copy>(address: Address) -> Result<Elements<T>, String> {
    let device = device_of(address).and_then(|ordinal| devices().get(ordinal));
    device
        .ok_or_else(|| format!("{address:#x} is used as an address of a GPU, and is none"))?
        .memory
        .elements(address)
}

thread_local! {
    /// The GPU of the thread's current context.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
    /// The thread's own stream on each GPU.
    static OWN: RefCell<HashMap<usize, Arc<Queue>>> = RefCell::new(HashMap::new());
}

/// Makes a GPU's context the thread's, or none.
pub(crate) fn set_current(ordinal: Option<usize>) {
    CURRENT.set(ordinal);
}

/// Returns the number of the GPU of the thread's context.
pub(crate) fn current_ordinal() -> Option<usize> {
    CURRENT.get()
}

/// Returns the GPU of the thread's context, if it has not failed.
pub(crate) fn current() -> Result<&'static Device, Code> {
    let device = current_ordinal()
        .and_then(|ordinal| devices().get(ordinal))
        .ok_or(code::INVALID_CONTEXT)?;
    device.check()?;
    Ok(device)
}

/// The streams that programs have made, each with the number of its GPU.
pub(crate) static STREAMS: Handles<(usize, Arc<Queue>)> = Handles::new();

/// Returns a stream and its GPU.
pub(crate) fn stream(handle: Handle) -> Result<(&'static Device, Arc<Queue>), Code> {
    let device = current()?;
    match handle.addr() {
        0 | 1 => Ok((device, device.default_queue()?)),
        PER_THREAD => {
            let ordinal = current_ordinal().ok_or(code::INVALID_CONTEXT)?;
            let own = OWN.try_with(|own| {
                let mut own = own.borrow_mut();
                if let Some(queue) = own.get(&ordinal) {
                    return Ok((device, Arc::clone(queue)));
                }
                let queue = device.start_queue(true)?;
                own.insert(ordinal, Arc::clone(&queue));
                Ok((device, queue))
            });
            // A thread that ends has no stream of its own any more.
            own.unwrap_or(Err(code::INVALID_HANDLE))
        }
        _ => {
            let (ordinal, queue) = STREAMS.get(handle).ok_or(code::INVALID_HANDLE)?;
            Ok((devices().get(ordinal).ok_or(code::INVALID_HANDLE)?, queue))
        }
    }
}

/// Adds work to a stream. Returns the point behind it.
pub(crate) fn push(handle: Handle, work: Work) -> Result<Marker, Code> {
    let (device, queue) = stream(handle)?;
    Ok(device.push(&queue, work))
}

/// Adds work that takes a GPU no time to a stream. Returns the point behind it.
pub(crate) fn push_instant(handle: Handle, work: Work) -> Result<Marker, Code> {
    let (device, queue) = stream(handle)?;
    device.order_with_default(&queue);
    Ok(queue.push_instant(work))
}

/// Adds a point to a stream, at which nothing is computed.
pub(crate) fn push_marker(handle: Handle) -> Result<Marker, Code> {
    push_instant(handle, Box::new(|| Ok(())))
}

/// The pinned parts of the host's memory: their addresses and lengths.
static PINNED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// Notes that memory of the host is pinned.
pub(crate) fn pin(address: usize, bytes: usize) {
    lock(&PINNED).insert(address, bytes);
}

/// Returns the length of pinned memory that starts here, which is pinned no more.
pub(crate) fn unpin(address: usize) -> Option<usize> {
    lock(&PINNED).remove(&address)
}

/// Returns `true` if these bytes of the host are pinned.
pub(crate) fn is_pinned(address: usize, bytes: usize) -> bool {
    let pinned = lock(&PINNED);
    let before = pinned.range(..=address).next_back();
    before.is_some_and(|(start, len)| address + bytes <= start + len)
}

/// The number of copies to the host that succeed before others fail, and the number of those
/// others.
static FAILING_COPIES: Mutex<[u64; 2]> = Mutex::new([0; 2]);

/// Lets the next `after` copies to the host succeed, and the `count` copies behind them fail.
pub(crate) fn set_failing_copies(after: u64, count: u64) {
    *lock(&FAILING_COPIES) = [after, count];
}

/// Counts a copy to the host towards the copies that [`set_failing_copies`] lets fail.
///
/// # Errors
/// This copy is one that has to fail.
pub(crate) fn check_copy_to_host() -> Result<(), Code> {
    let mut failing = lock(&FAILING_COPIES);
    let [after, count] = *failing;
    if after == 0 && count > 0 {
        failing[1] -= 1;
        return Err(code::INVALID_VALUE);
    }
    failing[0] = after.saturating_sub(1);
    Ok(())
}

/// Writes a line to stderr: there is nobody else to tell what a code does not.
#[expect(
    clippy::print_stderr,
    reason = "a library that C programs load has no other way to explain a failure"
)]
pub(crate) fn say(line: &str) {
    eprintln!("stand-in for CUDA: {line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_leaves_the_gpus_that_it_names() {
        assert_eq!(visible(3, None), [0, 1, 2]);
        assert_eq!(visible(3, Some("2,0")), [2, 0]);
        assert_eq!(visible(3, Some("1,7,0")), [1]);
        assert_eq!(visible(3, Some("")), [0_usize; 0]);
    }

    #[test]
    fn only_whole_parts_of_pinned_memory_are_pinned() {
        pin(1000, 100);
        assert!(is_pinned(1000, 100) && is_pinned(1050, 50));
        assert!(!is_pinned(1050, 51) && !is_pinned(999, 2));
        assert_eq!((unpin(1000), unpin(1000)), (Some(100), None));
        assert!(!is_pinned(1000, 1));
    }
}
