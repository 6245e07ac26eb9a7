//! The threads that speak to object stores, and waiting for them.

use std::future::Future;
use std::io;
use std::sync::OnceLock;

use object_store::Error;
use tokio::runtime::{Builder, Handle, Runtime};

/// The number of threads that speak to object stores, whatever the number of checkpoints: they
/// mostly wait.
const THREADS: usize = 2;

/// Returns the runtime that object stores need.
fn runtime() -> io::Result<&'static Runtime> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let made = Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("fsdp-object")
        .enable_all()
        .build()?;
    Ok(RUNTIME.get_or_init(|| made))
}

/// Waits for a future, also where this thread belongs to another runtime, which must not block on
/// one.
pub(super) fn wait<T: Send>(
    future: impl Future<Output = Result<T, Error>> + Send,
) -> io::Result<T> {
    let runtime = runtime()?;
    let outcome = match Handle::try_current() {
        Err(_) => runtime.block_on(future),
        Ok(_) => std::thread::scope(|scope| {
            let waiter = scope.spawn(|| runtime.block_on(future));
            waiter
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        }),
    };
    outcome.map_err(io_error)
}

/// Starts a future on the runtime's own threads.
pub(super) fn spawn<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> io::Result<tokio::task::JoinHandle<T>> {
    Ok(runtime()?.spawn(future))
}

/// Turns an error to the one that a file system would give, where it has a word for it.
pub(super) fn io_error(error: Error) -> io::Error {
    let kind = match &error {
        Error::NotFound { .. } => io::ErrorKind::NotFound,
        Error::AlreadyExists { .. } => io::ErrorKind::AlreadyExists,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            io::ErrorKind::PermissionDenied
        }
        Error::NotSupported { .. } | Error::NotImplemented { .. } => io::ErrorKind::Unsupported,
        Error::InvalidPath { .. } | Error::UnknownConfigurationKey { .. } => {
            io::ErrorKind::InvalidInput
        }
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}
