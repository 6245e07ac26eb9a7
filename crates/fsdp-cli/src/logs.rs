//! The outputs of tracing: events on stderr, selected by `RUST_LOG` (by default the project's own warnings), and spans
//! in a trace file.

use std::fs::OpenOptions;
use std::io::IsTerminal as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use tracing_chrome::{ChromeLayerBuilder, FlushGuard};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;
use tracing_subscriber::{EnvFilter, fmt, registry};

/// The crates of the project, whose spans a trace shows.
const TARGETS: [&str; 8] =
    ["fsdp_checkpoint", "fsdp_cli", "fsdp_comm", "fsdp_dcp", "fsdp_flat", "fsdp_layout", "fsdp_nn", "fsdp_state"];

/// Starts both. The trace file is complete when the guard is dropped.
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
    let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(is_coloured);
    // Times and modules help to debug a run, but only clutter a plain warning.
    let lines = if is_asked_for { lines.boxed() } else { lines.without_time().with_target(false).boxed() };
    let lines = lines.with_filter(filter);
    let Some(path) = trace else {
        registry().with(lines).init();
        return Ok(None);
    };
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(path);
    let file = file.with_context(|| format!("failed to create `{}`", path.display()))?;
    let (layer, guard) = ChromeLayerBuilder::new().writer(file).include_args(true).include_locations(false).build();
    let ours = Targets::new().with_targets(TARGETS.map(|target| (target, LevelFilter::DEBUG)));
    registry().with(lines).with(layer.with_filter(ours)).init();
    Ok(Some(guard))
}
