//! Runs cargo and other programs, and reports progress on stderr.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// The package of the stand-in for NVIDIA's libraries. Its tests run before it is used.
pub(crate) const STAND_IN: &str = "cuda-stand-in";

/// The packages whose tests CI runs, as options of cargo.
pub(crate) const TESTED: &[&str] = &["--workspace", "--exclude", STAND_IN, "--locked"];

/// The packages that have programs only, as options of cargo. If they are named beside one library,
/// cargo gives the dependencies the features that they have in a build of the whole workspace, so
/// that fewer of them are built again.
pub(crate) const BESIDE_A_LIBRARY: &[&str] = &["--package", "xtask", "--package", "fsdp-examples"];

/// Runs a program. Returns an error if it fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let name = name(command);
    let status = command
        .status()
        .with_context(|| format!("failed to start `{name}`"))?;
    ensure!(status.success(), "`{name}` failed with {status}");
    Ok(())
}

/// Runs a program, and returns what it writes to stdout. Returns an error if it fails, with what it
/// has written to stderr, unless that was led elsewhere.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let name = name(command);
    let output = command
        .output()
        .with_context(|| format!("failed to start `{name}`"))?;
    ensure!(
        output.status.success(),
        "`{name}` failed with {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}

/// Returns a command as a person would type it, for messages.
fn name(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().map(|word| word.to_string_lossy()));
    words.join(" ")
}

/// Runs cargo in the workspace. Returns an error if it fails.
pub(crate) fn cargo(root: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Result<()> {
    say(&format!("xtask: cargo {}", arguments.join(" ")));
    run(Command::new(program())
        .current_dir(root)
        .args(arguments)
        .envs(environment.iter().copied()))
}

/// Runs cargo in the workspace, and returns what it writes to stdout.
pub(crate) fn cargo_output(root: &Path, arguments: &[&str]) -> Result<String> {
    output(Command::new(program()).current_dir(root).args(arguments))
}

/// Returns the path of the cargo that has started xtask, or `cargo` if xtask was started directly.
pub(crate) fn program() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Returns the directory that cargo builds in.
pub(crate) fn target(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

/// Writes a line to stderr.
#[expect(
    clippy::print_stderr,
    reason = "this is a command, and its progress is talk"
)]
pub(crate) fn say(line: &str) {
    eprintln!("{line}");
}

/// Writes what was asked for to stdout.
#[expect(clippy::print_stdout, reason = "it is what was asked for")]
pub(crate) fn show(text: &str) {
    println!("{text}");
}
