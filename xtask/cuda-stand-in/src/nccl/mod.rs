//! NCCL: communicators whose ranks are processes or threads of this machine.
//!
//! As NCCL's non-blocking communicators do, calls return while they are under way: they reach their
//! stream later, and `ncclCommGetAsyncError` tells when.

#![expect(
    unsafe_code,
    reason = "functions of C, whose pointers their callers answer for"
)]

mod calls;
mod messages;

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use self::calls::Call;
use self::messages::{Aborted, Messages};
use crate::handles::{Handle, Handles, lock};
use crate::machine::{self, say};
use crate::memory::{Address, device_of};
use crate::queue::Queue;

type Code = c_int;

const SUCCESS: Code = 0;
const SYSTEM_ERROR: Code = 2;
const INVALID_ARGUMENT: Code = 4;
const INVALID_USAGE: Code = 5;
const IN_PROGRESS: Code = 7;

/// The version that this library says it has, as NCCL writes it: 2.28.9.
const VERSION: c_int = 22_809;

/// The time between a call and its arrival in its stream.
const LAUNCH: Duration = Duration::from_micros(200);

/// The color of a rank that is in none of the communicators that a split makes.
const NO_COLOR: c_int = -1;

/// The longest sleep within a call, which may be aborted.
const LONGEST_NAP: Duration = Duration::from_millis(5);

/// Returns the time that a call takes which moves so many bytes between ranks.
fn link_time(bytes: usize) -> Duration {
    static LINK: OnceLock<(Duration, Option<u64>)> = OnceLock::new();
    let (latency, bytes_per_second) = *LINK.get_or_init(|| {
        (
            Duration::from_micros(machine::number("CUDA_STAND_IN_LINK_US").unwrap_or(0)),
            machine::number("CUDA_STAND_IN_LINK_BYTES_PER_SECOND"),
        )
    });
    latency
        + bytes_per_second.map_or(Duration::ZERO, |speed| {
            Duration::from_secs_f64(bytes as f64 / speed.max(1) as f64)
        })
}

/// A rank of a communicator.
struct Communicator {
    /// The name that all its ranks know.
    name: String,
    rank: usize,
    ranks: usize,
    device: &'static machine::Device,
    /// The number of splits so far.
    splits: AtomicU64,
    state: AtomicI32,
    is_aborted: AtomicBool,
    error: Mutex<Option<String>>,
    /// `None` until all ranks have joined.
    messages: Mutex<Option<Messages>>,
    /// Held while calls are on their way to their stream.
    launching: Mutex<()>,
}

impl Communicator {
    /// Makes a communicator that its ranks have yet to join.
    fn new(
        name: String,
        (rank, ranks): (usize, usize),
        device: &'static machine::Device,
    ) -> Communicator {
        Communicator {
            name,
            rank,
            ranks,
            device,
            splits: AtomicU64::new(0),
            state: AtomicI32::new(IN_PROGRESS),
            is_aborted: AtomicBool::new(false),
            error: Mutex::new(None),
            messages: Mutex::new(None),
            launching: Mutex::new(()),
        }
    }

    /// Joins the other ranks. `is_aborted` tells when nobody wants that any more.
    fn join(&self, is_aborted: &impl Fn() -> bool) -> Result<Result<(), Aborted>, String> {
        let directory = messages::directory(&self.name);
        let place = messages::place(self.device.number);
        let joined = Messages::join(directory, (self.rank, self.ranks), &place, is_aborted)?;
        Ok(joined.map(|messages| {
            *lock(&self.messages) = Some(messages);
            self.state.store(SUCCESS, Ordering::Release);
        }))
    }

    /// Makes the communicator of all ranks that have this color, in the order of their keys.
    fn split(
        &self,
        color: c_int,
        key: c_int,
    ) -> Result<Result<Option<Communicator>, Aborted>, String> {
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        let own = [color.to_ne_bytes(), key.to_ne_bytes()].concat();
        let exchanged = lock(&self.messages)
            .as_mut()
            .ok_or("the ranks have not joined")?
            .exchange("ncclCommSplit", &own, &|| self.is_aborted())?;
        let places = match exchanged {
            Ok(places) => places,
            Err(Aborted) => return Ok(Err(Aborted)),
        };
        if color == NO_COLOR {
            return Ok(Ok(None));
        }
        let own_color = color.to_ne_bytes();
        let mut members: Vec<(c_int, usize)> = places
            .iter()
            .enumerate()
            .filter(|(_, place)| place[..own_color.len()] == own_color)
            .filter_map(|(rank, place)| Some((c_int::from_ne_bytes(*place.last_chunk()?), rank)))
            .collect();
        members.sort_unstable();
        let rank = members.iter().position(|&(_, rank)| rank == self.rank);
        let made = Communicator::new(
            format!("{}-{number}-{color}", self.name),
            (rank.ok_or("a rank is not in its own color")?, members.len()),
            self.device,
        );
        Ok(made.join(&|| self.is_aborted())?.map(|()| Some(made)))
    }

    fn fail(&self, code: Code, error: String) {
        say(&format!(
            "NCCL, rank {} of {}: {error}",
            self.rank, self.ranks
        ));
        *lock(&self.error) = Some(error);
        self.state.store(code, Ordering::Release);
    }

    fn is_aborted(&self) -> bool {
        self.is_aborted.load(Ordering::Acquire)
    }

    /// Returns the code of a call that cannot begin now.
    fn refuse(&self) -> Option<Code> {
        match self.state.load(Ordering::Acquire) {
            SUCCESS => None,
            IN_PROGRESS => {
                *lock(&self.error) = Some("an earlier call is still under way".to_owned());
                Some(INVALID_USAGE)
            }
            code => Some(code),
        }
    }

    /// Takes the time that a call takes which moves so many bytes, unless it is aborted.
    fn take_time(&self, bytes: usize) {
        let end = Instant::now() + link_time(bytes);
        while !self.is_aborted() {
            let remaining = end.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return;
            }
            thread::sleep(remaining.min(LONGEST_NAP));
        }
    }

    /// Carries out calls on a stream's thread.
    fn run(&self, calls: &[Call]) -> Result<(), String> {
        let mut messages = lock(&self.messages);
        let Some(messages) = messages.as_mut() else {
            return Ok(());
        };
        let bytes = calls.iter().map(|call| call.moved_bytes(self.ranks)).sum();
        self.take_time(bytes);
        if self.is_aborted() {
            return Ok(());
        }
        match calls::carry_out(calls, messages, &|| self.is_aborted()) {
            Ok(Ok(()) | Err(Aborted)) => {}
            Err(error) => self.fail(INVALID_USAGE, error),
        }
        Ok(())
    }
}

static COMMUNICATORS: Handles<Arc<Communicator>> = Handles::new();

/// Calls of one communicator and one stream.
struct Launch {
    communicator: Arc<Communicator>,
    device: &'static machine::Device,
    stream: Arc<Queue>,
    calls: Vec<Call>,
}

impl Launch {
    /// Begins the calls. They reach the stream after this has returned.
    fn begin(self) -> Code {
        if let Some(code) = self.communicator.refuse() {
            return code;
        }
        self.communicator
            .state
            .store(IN_PROGRESS, Ordering::Release);
        in_background("launch", move || {
            thread::sleep(LAUNCH);
            let communicator = Arc::clone(&self.communicator);
            let launching = lock(&self.communicator.launching);
            if communicator.is_aborted() {
                return;
            }
            let calls = self.calls;
            self.device
                .push(&self.stream, Box::new(move || communicator.run(&calls)));
            self.communicator
                .state
                .compare_exchange(IN_PROGRESS, SUCCESS, Ordering::AcqRel, Ordering::Acquire)
                .ok();
            drop(launching);
        })
    }
}

thread_local! {
    /// How many groups the thread is in, and the calls in them.
    static GROUP: RefCell<(usize, Vec<Launch>)> = const { RefCell::new((0, Vec::new())) };
}

/// Begins a call, or notes it for the end of the thread's group.
fn begin(communicator: Handle, stream: Handle, addresses: &[Address], call: Call) -> Code {
    let Some(communicator) = COMMUNICATORS.get(communicator) else {
        return INVALID_ARGUMENT;
    };
    if addresses
        .iter()
        .any(|&address| device_of(address).is_none())
    {
        *lock(&communicator.error) = Some("an address is not a GPU's".to_owned());
        return INVALID_ARGUMENT;
    }
    let Ok((device, stream)) = machine::stream(stream) else {
        return INVALID_ARGUMENT;
    };
    let launch = Launch {
        communicator,
        device,
        stream,
        calls: vec![call],
    };
    GROUP.with_borrow_mut(|(depth, launches)| {
        if *depth == 0 {
            return launch.begin();
        }
        let together = launches.iter_mut().find(|other| {
            Arc::ptr_eq(&other.communicator, &launch.communicator)
                && Arc::ptr_eq(&other.stream, &launch.stream)
        });
        match together {
            Some(other) => other.calls.push(call),
            None => launches.push(launch),
        }
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> Code {
    if version.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: the caller's pointer.
    unsafe { version.write(VERSION) };
    SUCCESS
}

/// The bytes of an id.
const ID: usize = 128;

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetUniqueId(id: *mut [u8; ID]) -> Code {
    let time = SystemTime::UNIX_EPOCH
        .elapsed()
        .unwrap_or_default()
        .as_nanos();
    let name = format!(
        "{}-{time}-{}",
        std::process::id(),
        IDS.fetch_add(1, Ordering::Relaxed)
    );
    let mut bytes = [0; ID];
    bytes
        .iter_mut()
        .zip(name.bytes())
        .for_each(|(to, from)| *to = from);
    // SAFETY: the caller's pointer.
    unsafe { id.write(bytes) };
    SUCCESS
}

/// An id as C passes it: by value.
#[repr(C)]
struct Id([u8; ID]);

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitRankConfig(
    made: *mut Handle,
    ranks: c_int,
    id: Id,
    rank: c_int,
    _config: *const c_void,
) -> Code {
    let (Ok(ranks), Ok(rank)) = (usize::try_from(ranks), usize::try_from(rank)) else {
        return INVALID_ARGUMENT;
    };
    let Ok(device) = machine::current() else {
        return INVALID_USAGE;
    };
    let name =
        id.0.iter()
            .take_while(|&&byte| byte != 0)
            .map(|&byte| char::from(byte))
            .collect();
    let communicator = Arc::new(Communicator::new(name, (rank, ranks), device));
    // SAFETY: the caller's pointer.
    unsafe { made.write(COMMUNICATORS.add(Arc::clone(&communicator))) };
    in_background("join", move || {
        if let Err(error) = communicator.join(&|| communicator.is_aborted()) {
            communicator.fail(INVALID_USAGE, error);
        }
    })
}

/// Goes on with a call on a thread of its own. Returns the code of the call.
fn in_background(name: &str, work: impl FnOnce() + Send + 'static) -> Code {
    match thread::Builder::new().name(name.to_owned()).spawn(work) {
        Ok(_) => IN_PROGRESS,
        Err(_) => SYSTEM_ERROR,
    }
}

/// The place to which a new communicator is written before the call that makes it is over.
struct Made(*mut Handle);

// SAFETY: the caller keeps the place for the thread that writes to it.
unsafe impl Send for Made {}

impl Made {
    fn write(&self, handle: Handle) {
        // SAFETY: the caller's pointer.
        unsafe { self.0.write(handle) };
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommSplit(
    handle: Handle,
    color: c_int,
    key: c_int,
    made: *mut Handle,
    _config: *const c_void,
) -> Code {
    let Some(communicator) = COMMUNICATORS.get(handle) else {
        return INVALID_ARGUMENT;
    };
    if made.is_null() || color < NO_COLOR {
        return INVALID_ARGUMENT;
    }
    if let Some(code) = communicator.refuse() {
        return code;
    }
    let made = Made(made);
    made.write(std::ptr::null_mut());
    communicator.state.store(IN_PROGRESS, Ordering::Release);
    in_background("split", move || match communicator.split(color, key) {
        Ok(Ok(child)) => {
            let handle = child.map(|child| COMMUNICATORS.add(Arc::new(child)));
            made.write(handle.unwrap_or(std::ptr::null_mut()));
            SPLITS.fetch_add(1, Ordering::Relaxed);
            communicator.state.store(SUCCESS, Ordering::Release);
        }
        Ok(Err(Aborted)) => {}
        Err(error) => communicator.fail(INVALID_USAGE, error),
    })
}

/// The ids that this process has made, and the splits in which it took part.
static IDS: AtomicU64 = AtomicU64::new(0);
static SPLITS: AtomicU64 = AtomicU64::new(0);

/// Writes the numbers of ids and of splits so far: how communicators were made.
#[unsafe(no_mangle)]
unsafe extern "C" fn ncclStandInOrigins(counts: *mut [u64; 2]) -> Code {
    let both = [&IDS, &SPLITS].map(|count| count.load(Ordering::Relaxed));
    // SAFETY: the caller's pointer.
    unsafe { counts.write(both) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommGetAsyncError(communicator: Handle, state: *mut Code) -> Code {
    let Some(communicator) = COMMUNICATORS.get(communicator) else {
        return INVALID_ARGUMENT;
    };
    // SAFETY: the caller's pointer.
    unsafe { state.write(communicator.state.load(Ordering::Acquire)) };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(code: Code) -> *const c_char {
    let text = match code {
        SUCCESS => c"no error",
        SYSTEM_ERROR => c"unhandled system error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(communicator: Handle) -> *const c_char {
    let error = COMMUNICATORS
        .get(communicator)
        .and_then(|communicator| lock(&communicator.error).clone());
    // Errors are few, and the caller may keep the pointer.
    CString::new(error.unwrap_or_default())
        .unwrap_or_default()
        .into_raw()
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommFinalize(handle: Handle) -> Code {
    let Some(communicator) = COMMUNICATORS.get(handle) else {
        return INVALID_ARGUMENT;
    };
    if let Some(code) = communicator.refuse() {
        return code;
    }
    communicator.state.store(IN_PROGRESS, Ordering::Release);
    in_background("leave", move || {
        if let Some(Err(error)) = lock(&communicator.messages).as_ref().map(Messages::leave) {
            return communicator.fail(SYSTEM_ERROR, error);
        }
        while !communicator.is_aborted()
            && lock(&communicator.messages)
                .as_ref()
                .is_some_and(|messages| !messages.have_all_left())
        {
            thread::sleep(LAUNCH);
        }
        communicator.state.store(SUCCESS, Ordering::Release);
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDestroy(handle: Handle) -> Code {
    if COMMUNICATORS.remove(handle).is_some() {
        SUCCESS
    } else {
        INVALID_ARGUMENT
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(handle: Handle) -> Code {
    let Some(communicator) = COMMUNICATORS.remove(handle) else {
        return INVALID_ARGUMENT;
    };
    communicator.is_aborted.store(true, Ordering::Release);
    // Once this has returned, no call reaches its stream any more.
    drop(lock(&communicator.launching));
    if let Some(messages) = lock(&communicator.messages).as_ref() {
        messages.abort();
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> Code {
    GROUP.with_borrow_mut(|(depth, _)| *depth += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> Code {
    let launches = GROUP.with_borrow_mut(|(depth, launches)| {
        *depth = depth.checked_sub(1)?;
        Some(if *depth == 0 {
            std::mem::take(launches)
        } else {
            Vec::new()
        })
    });
    let Some(launches) = launches else {
        return INVALID_USAGE;
    };
    let codes: Vec<Code> = launches.into_iter().map(Launch::begin).collect();
    let error = codes
        .iter()
        .find(|&&code| code != SUCCESS && code != IN_PROGRESS);
    error.or(codes.first()).copied().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllGather(
    from: Address,
    to: Address,
    count: usize,
    dtype: c_int,
    communicator: Handle,
    stream: Handle,
) -> Code {
    begin(
        communicator,
        stream,
        &[from, to],
        Call::AllGather {
            from,
            to,
            count,
            dtype,
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn ncclReduceScatter(
    from: Address,
    to: Address,
    count: usize,
    dtype: c_int,
    op: c_int,
    communicator: Handle,
    stream: Handle,
) -> Code {
    if !calls::reduces(op, dtype) {
        return INVALID_ARGUMENT;
    }
    begin(
        communicator,
        stream,
        &[from, to],
        Call::ReduceScatter {
            from,
            to,
            count,
            dtype,
            op,
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllReduce(
    from: Address,
    to: Address,
    count: usize,
    dtype: c_int,
    op: c_int,
    communicator: Handle,
    stream: Handle,
) -> Code {
    if !calls::reduces(op, dtype) {
        return INVALID_ARGUMENT;
    }
    begin(
        communicator,
        stream,
        &[from, to],
        Call::AllReduce {
            from,
            to,
            count,
            dtype,
            op,
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn ncclBroadcast(
    from: Address,
    to: Address,
    count: usize,
    dtype: c_int,
    root: c_int,
    communicator: Handle,
    stream: Handle,
) -> Code {
    let Ok(root) = usize::try_from(root) else {
        return INVALID_ARGUMENT;
    };
    begin(
        communicator,
        stream,
        &[from, to],
        Call::Broadcast {
            from,
            to,
            count,
            dtype,
            root,
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn ncclSend(
    from: Address,
    count: usize,
    dtype: c_int,
    peer: c_int,
    communicator: Handle,
    stream: Handle,
) -> Code {
    let Ok(peer) = usize::try_from(peer) else {
        return INVALID_ARGUMENT;
    };
    begin(
        communicator,
        stream,
        &[from],
        Call::Send {
            from,
            count,
            dtype,
            peer,
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn ncclRecv(
    to: Address,
    count: usize,
    dtype: c_int,
    peer: c_int,
    communicator: Handle,
    stream: Handle,
) -> Code {
    let Ok(peer) = usize::try_from(peer) else {
        return INVALID_ARGUMENT;
    };
    begin(
        communicator,
        stream,
        &[to],
        Call::Receive {
            to,
            count,
            dtype,
            peer,
        },
    )
}
