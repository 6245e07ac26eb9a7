//! `cargo xtask fuzz`: every fuzz target for a bounded time, from its seeds.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::shell::{output, program, run};

/// The time, in seconds, after which one input counts as a hang.
const HANG: u64 = 10;
/// The memory, in MiB, that one target may use, including the sanitizer's own.
const MEMORY: u64 = 2048;

/// Runs each fuzz target for this many seconds.
pub(crate) fn fuzz(root: &Path, seconds: u64) -> Result<()> {
    output(cargo(root).args(["fuzz", "--version"]))
        .context("cargo-fuzz is needed: `cargo install cargo-fuzz --locked`")?;
    for target in targets(root)? {
        // The fuzzer writes new inputs to the first directory, and only reads the seeds.
        let corpus = root.join("fuzz/corpus").join(&target);
        std::fs::create_dir_all(&corpus)
            .with_context(|| format!("failed to create `{}`", corpus.display()))?;
        let mut command = cargo(root);
        command
            .args(["fuzz", "run", "--fuzz-dir", "fuzz", &target])
            .arg(&corpus);
        command.arg(root.join("fuzz/seeds").join(&target)).arg("--");
        command.args([
            format!("-max_total_time={seconds}"),
            format!("-timeout={HANG}"),
            format!("-rss_limit_mb={MEMORY}"),
        ]);
        run(&mut command).with_context(|| {
            format!("`{target}` failed; its input is in `fuzz/artifacts/{target}`")
        })?;
    }
    Ok(())
}

/// Returns a command for cargo on the current toolchain. The variable lets a stable compiler accept
/// the sanitizer's options.
fn cargo(root: &Path) -> Command {
    let mut command = Command::new(program());
    command.current_dir(root).env("RUSTC_BOOTSTRAP", "1");
    command
}

/// Returns the names of the fuzz targets, sorted. Each Rust file in `fuzz/fuzz_targets` is one.
fn targets(root: &Path) -> Result<Vec<String>> {
    let directory = root.join("fuzz/fuzz_targets");
    let list = std::fs::read_dir(&directory)
        .with_context(|| format!("failed to list `{}`", directory.display()))?;
    let mut names = Vec::new();
    for entry in list {
        let name = entry?.file_name();
        if let Some(target) = name.to_string_lossy().strip_suffix(".rs") {
            names.push(target.to_owned());
        }
    }
    names.sort();
    Ok(names)
}
