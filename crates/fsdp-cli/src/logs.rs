//! The outputs of tracing: events on stderr, selected by `RUST_LOG` (by default the project's own
//! warnings), and spans in a trace file.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal as _, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result};
use tracing_chrome::{ChromeLayerBuilder, FlushGuard};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;
use tracing_subscriber::{EnvFilter, fmt, registry};

/// The crates of the project, whose spans a trace shows.
const TARGETS: [&str; 8] = [
    "fsdp_checkpoint",
    "fsdp_cli",
    "fsdp_comm",
    "fsdp_formats",
    "fsdp_flat",
    "fsdp_layout",
    "fsdp_nn",
    "fsdp_state",
];

/// Starts both. Returns the guard of the trace, `None` without one. The trace file is complete when
/// the guard is dropped, if `keep_trace` has been called before.
///
/// # Errors
/// The trace file cannot be created.
pub(crate) fn start(trace: Option<&Path>) -> Result<Option<FlushGuard>> {
    let is_asked_for = std::env::var_os(EnvFilter::DEFAULT_ENV).is_some();
    let filter = if is_asked_for {
        EnvFilter::from_default_env()
    } else {
        EnvFilter::new(TARGETS.map(|target| format!("{target}=warn")).join(","))
    };
    let is_coloured = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let stderr_layer = fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(is_coloured);
    // Times and modules help to debug a run, but only clutter a plain warning.
    let layer = if is_asked_for {
        stderr_layer.boxed()
    } else {
        stderr_layer.without_time().with_target(false).boxed()
    };
    let events = layer.with_filter(filter);
    let Some(path) = trace else {
        registry().with(events).init();
        return Ok(None);
    };
    let file =
        TraceFile::open(path).with_context(|| format!("failed to create `{}`", path.display()))?;
    let (spans, guard) = ChromeLayerBuilder::new()
        .writer(file)
        .include_args(true)
        .include_locations(false)
        .build();
    let own_targets =
        Targets::new().with_targets(TARGETS.map(|target| (target, LevelFilter::DEBUG)));
    registry()
        .with(events)
        .with(spans.with_filter(own_targets))
        .init();
    Ok(Some(guard))
}

/// `true` once the trace goes to its file.
static KEEPS_TRACE: AtomicBool = AtomicBool::new(false);

/// Lets the trace replace what its file holds. Until this is called the trace stays in memory, so
/// that a run which is refused changes nothing.
#[cfg(feature = "train")]
pub(crate) fn keep_trace() {
    KEEPS_TRACE.store(true, Ordering::Relaxed);
}

/// The file of a trace, which may hold the trace of another run.
struct TraceFile {
    file: File,
    path: PathBuf,
    /// `true` if there was no such file before.
    is_new: bool,
    /// The start of the trace; `None` once it is in the file.
    buffer: Option<Vec<u8>>,
}

impl TraceFile {
    /// Opens or creates the file. One that exists keeps its content until the run is known not to
    /// be refused.
    fn open(path: &Path) -> io::Result<Self> {
        let (file, is_new) = match OpenOptions::new().write(true).create_new(true).open(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                (OpenOptions::new().write(true).open(path)?, false)
            }
            created => (created?, true),
        };
        Ok(TraceFile {
            file,
            path: path.to_owned(),
            is_new,
            buffer: Some(Vec::new()),
        })
    }

    /// Replaces the earlier content of the file by the buffered start of the trace, if it is to be
    /// kept. Does nothing once that is done.
    fn write_buffered(&mut self) -> io::Result<()> {
        let keeps_trace = KEEPS_TRACE.load(Ordering::Relaxed);
        let Some(buffer) = self.buffer.take_if(|_| keeps_trace) else {
            return Ok(());
        };
        // A pipe or a device has no length.
        self.file.set_len(0).ok();
        self.file.write_all(&buffer)
    }
}

impl Write for TraceFile {
    /// Writes bytes to the file, or to the buffer until the trace is to be kept.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_buffered()?;
        match &mut self.buffer {
            Some(buffer) => buffer.write(bytes),
            None => self.file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.write_buffered()?;
        self.file.flush()
    }
}

impl Drop for TraceFile {
    fn drop(&mut self) {
        if self.buffer.is_some() && self.is_new {
            // A run that was refused leaves nothing.
            std::fs::remove_file(&self.path).ok();
        }
    }
}
