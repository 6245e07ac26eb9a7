//! The targets of tracing events: lines on stderr, as `RUST_LOG` asks for (by default warnings about checkpoints), and spans
//! in a trace file.

use std::fs::OpenOptions;
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
    let filter = match std::env::var_os(EnvFilter::DEFAULT_ENV) {
        Some(_) => EnvFilter::from_default_env(),
        // A checkpoint that could not be saved or removed behind the run's back.
        None => EnvFilter::new("fsdp_checkpoint=warn"),
    };
    let lines = fmt::layer().with_writer(std::io::stderr).with_filter(filter);
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
