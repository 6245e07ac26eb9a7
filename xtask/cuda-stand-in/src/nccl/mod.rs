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
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime};

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

/// A rank of a communicator.
struct Communicator {
    rank: usize,
    ranks: usize,
    state: AtomicI32,
    is_aborted: AtomicBool,
    error: Mutex<Option<String>>,
    /// `None` until all ranks have joined.
    messages: Mutex<Option<Messages>>,
}

impl Communicator {
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

    /// Carries out calls on a stream's thread.
    fn run(&self, calls: &[Call]) -> Result<(), String> {
        let mut messages = lock(&self.messages);
        let Some(messages) = messages.as_mut() else {
            return Ok(());
        };
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
        let launcher = thread::Builder::new()
            .name("launch".to_owned())
            .spawn(move || {
                thread::sleep(LAUNCH);
                let communicator = Arc::clone(&self.communicator);
                let calls = self.calls;
                self.device
                    .push(&self.stream, Box::new(move || communicator.run(&calls)));
                self.communicator
                    .state
                    .compare_exchange(IN_PROGRESS, SUCCESS, Ordering::AcqRel, Ordering::Acquire)
                    .ok();
            });
        if launcher.is_ok() {
            IN_PROGRESS
        } else {
            SYSTEM_ERROR
        }
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
    static MADE: AtomicU64 = AtomicU64::new(0);
    let time = SystemTime::UNIX_EPOCH
        .elapsed()
        .unwrap_or_default()
        .as_nanos();
    let name = format!(
        "{}-{time}-{}",
        std::process::id(),
        MADE.fetch_add(1, Ordering::Relaxed)
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
    let communicator = Arc::new(Communicator {
        rank,
        ranks,
        state: AtomicI32::new(IN_PROGRESS),
        is_aborted: AtomicBool::new(false),
        error: Mutex::new(None),
        messages: Mutex::new(None),
    });
    let name: String =
        id.0.iter()
            .take_while(|&&byte| byte != 0)
            .map(|&byte| char::from(byte))
            .collect();
    // SAFETY: the caller's pointer.
    unsafe { made.write(COMMUNICATORS.add(Arc::clone(&communicator))) };
    let joiner = thread::Builder::new()
        .name("join".to_owned())
        .spawn(move || {
            let directory = messages::directory(&name);
            let place = messages::place(device.number);
            match Messages::join(directory, (rank, ranks), &place, || {
                communicator.is_aborted()
            }) {
                Ok(Ok(messages)) => {
                    *lock(&communicator.messages) = Some(messages);
                    communicator.state.store(SUCCESS, Ordering::Release);
                }
                Ok(Err(Aborted)) => {}
                Err(error) => communicator.fail(INVALID_USAGE, error),
            }
        });
    if joiner.is_ok() {
        IN_PROGRESS
    } else {
        SYSTEM_ERROR
    }
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
    let leaver = thread::Builder::new()
        .name("leave".to_owned())
        .spawn(move || {
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
        });
    if leaver.is_ok() {
        IN_PROGRESS
    } else {
        SYSTEM_ERROR
    }
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
