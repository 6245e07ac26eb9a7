//! The project's own tasks: what CI runs, and people before they push. `cargo xtask ci` runs all checks.

mod interop;
mod tidy;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "The project's own tasks", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand, Clone, Copy)]
enum Task {
    /// All checks and all tests: what CI runs.
    Ci,
    /// Formatting, without changing anything.
    Fmt,
    /// The project's own rules: layers, file sizes, where `unsafe` may be.
    Tidy,
    /// clippy on everything, warnings denied.
    Clippy,
    /// The API documentation, warnings denied.
    Doc,
    /// The examples in documentation.
    Doctest,
    /// All other tests.
    Test,
    /// Both ways with the real PyTorch, which is installed for it: checkpoints, and losses after them.
    Interop,
    /// Sharded training on one rank against plain candle, paired in one run.
    Bench,
}

/// In this order: what is quick, or fails most often, comes first; the tests' summary stands last.
const CI: [Task; 6] = [Task::Fmt, Task::Tidy, Task::Clippy, Task::Doc, Task::Doctest, Task::Test];

fn main() -> Result<()> {
    let root = root()?;
    match Arguments::parse().task {
        Task::Ci => CI.into_iter().try_for_each(|task| run(task, &root)),
        task => run(task, &root),
    }
}

/// The workspace's directory: the parent of this package's.
fn root() -> Result<PathBuf> {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").context("run it as `cargo xtask`")?;
    Ok(Path::new(&package).parent().context("xtask is in a workspace")?.to_owned())
}

fn run(task: Task, root: &Path) -> Result<()> {
    let start = Instant::now();
    let name = match task {
        Task::Ci => "ci",
        Task::Fmt => "fmt",
        Task::Tidy => "tidy",
        Task::Clippy => "clippy",
        Task::Doc => "doc",
        Task::Doctest => "doctest",
        Task::Test => "test",
        Task::Interop => "interop",
        Task::Bench => "bench",
    };
    match task {
        Task::Ci => unreachable!("main runs its parts"),
        Task::Fmt => cargo(root, &["fmt", "--all", "--check"], &[])?,
        Task::Tidy => tidy::check(root)?,
        Task::Interop => interop::run(root)?,
        Task::Clippy => {
            cargo(root, &["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"], &[])?
        }
        Task::Doc => {
            let arguments = ["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"];
            cargo(root, &arguments, &[("RUSTDOCFLAGS", "-D warnings")])?;
        }
        Task::Doctest => cargo(root, &["test", "--workspace", "--doc", "--locked"], &[])?,
        Task::Test => test(root)?,
        Task::Bench => {
            cargo(root, &["run", "--release", "--package", "fsdp", "--example", "overhead", "--locked"], &[])?
        }
    }
    say(&format!("xtask: {name} passed in {:.0} s", start.elapsed().as_secs_f64()));
    Ok(())
}

/// On nextest where it is installed: it stops tests that hang. Otherwise on cargo's own runner.
fn test(root: &Path) -> Result<()> {
    let nextest = Command::new(program()).args(["nextest", "--version"]).output();
    if nextest.is_ok_and(|output| output.status.success()) {
        return cargo(root, &["nextest", "run", "--workspace", "--locked"], &[]);
    }
    say("xtask: cargo-nextest is not installed, so tests that hang are not stopped");
    cargo(root, &["test", "--workspace", "--lib", "--bins", "--tests", "--locked"], &[])
}

fn program() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

fn cargo(root: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Result<()> {
    say(&format!("xtask: cargo {}", arguments.join(" ")));
    let mut command = Command::new(program());
    command.current_dir(root).args(arguments).envs(environment.iter().copied());
    let status = command.status().context("failed to run cargo")?;
    ensure!(status.success(), "`cargo {}` failed with {status}", arguments.join(" "));
    Ok(())
}

#[expect(clippy::print_stderr, reason = "this is a command, and its progress is talk")]
fn say(line: &str) {
    eprintln!("{line}");
}
