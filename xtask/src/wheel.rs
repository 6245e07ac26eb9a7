//! `cargo xtask wheel`: builds the Python wheel, installs it in a fresh environment, and runs its
//! tests there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use clap::Args;

use crate::files::{remove_directory, write};
use crate::python::{environment, install};
use crate::shell::{output, run, say, target};

/// The package that builds wheels.
const MATURIN: &str = "maturin>=1.9,<2";

/// The packages that the tests import, besides torch.
const PACKAGES: [&str; 2] = ["numpy", "pytest"];

/// torch, and the packages that the samples of the book import.
const WITH_TORCH: [&str; 7] = [
    "torch>=2.6",
    "transformers>=5",
    "peft",
    "pandas",
    "matplotlib",
    "tensorboard",
    "wandb",
];

/// The variable that names a Python with torch, so that it need not be installed.
const PYTHON_VARIABLE: &str = "FSDP_INTEROP_PYTHON";

/// Options of `cargo xtask wheel`.
#[derive(Args)]
pub(crate) struct WheelArguments {
    /// Build with the dev profile, which is quicker
    #[arg(long)]
    dev: bool,
    /// Only build
    #[arg(long)]
    no_test: bool,
}

/// Builds the wheel in `target/wheels`, and tests it.
pub(crate) fn build(root: &Path, arguments: &WheelArguments) -> Result<()> {
    let target = target(root);
    let tools = environment(&target.join("wheel-tools"), false)?;
    install(&tools, &[MATURIN])?;
    let wheels = target.join("wheels");
    remove_directory(&wheels)?;
    let package = root.join("crates/fsdp-python");
    let mut build = Command::new(&tools);
    build
        .args(["-m", "maturin", "build", "--locked", "--out"])
        .arg(&wheels)
        .current_dir(&package);
    if !arguments.dev {
        build.arg("--release");
    }
    run(&mut build)?;
    let wheel = fs::read_dir(&wheels)?
        .next()
        .context("maturin built no wheel")??
        .path();
    say(&format!(
        "xtask: {} is {} KiB",
        wheel.display(),
        wheel.metadata()?.len() / 1024
    ));
    if arguments.no_test {
        return Ok(());
    }
    // A fresh environment, so that what the wheel needs and does not name is missed.
    let python = environment(&target.join("wheel-python"), true)?;
    install(
        &python,
        &[&[&*wheel.to_string_lossy()], &PACKAGES[..]].concat(),
    )?;
    let mut tests = Command::new(&python);
    tests
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider"])
        .arg(package.join("tests"));
    // First without torch: the tests that need it are skipped, and everything else has to work.
    run(&mut tests)?;
    match std::env::var_os(PYTHON_VARIABLE) {
        Some(with_torch) => borrow(Path::new(&with_torch), &python)?,
        None => install(&python, &WITH_TORCH)?,
    }
    run(&mut tests)
}

/// Lets `python` import the packages that another Python has.
fn borrow(from: &Path, python: &Path) -> Result<()> {
    let file = PathBuf::from(site_packages(python)?).join("borrowed.pth");
    write(&file, &format!("{}\n", site_packages(from)?))
}

/// Returns the directory in which a Python keeps its packages.
fn site_packages(python: &Path) -> Result<String> {
    let code = "import sysconfig; print(sysconfig.get_paths()['purelib'])";
    Ok(output(Command::new(python).args(["-c", code]))?
        .trim()
        .to_owned())
}
