//! `cargo xtask interop`: an environment with PyTorch, and the two-way tests against it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::shell::program;

/// The packages that the tests import.
const PACKAGES: [&str; 7] =
    ["torch>=2.6", "numpy", "safetensors", "transformers>=5", "peft", "model-signing>=1.1", "pyopenssl"];

/// The variable that names a Python with these packages, so that they need not be installed.
const PYTHON_VARIABLE: &str = "FSDP_INTEROP_PYTHON";

/// Builds the command, and runs the tests of `tests/interop` with it.
pub(crate) fn run(root: &Path) -> Result<()> {
    let python = match std::env::var(PYTHON_VARIABLE) {
        Ok(python) => python.into(),
        Err(_) => environment(root, &root.join("target/interop-python"))?,
    };
    run_in(root, Path::new("cargo"), &["build", "--release", "--package", "fsdp-cli", "--locked"].map(Path::new))?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let work = target.join("interop");
    if work.exists() {
        // Only this task writes there.
        run_in(root, Path::new("rm"), &[Path::new("-r"), &work])?;
    }
    std::fs::create_dir_all(&work).with_context(|| format!("failed to create `{}`", work.display()))?;
    let scripts = root.join("tests/interop");
    let binary = target.join("release/fsdp");
    let fixtures = root.join("tests/fixtures");
    run_in(root, &python, &[&scripts.join("formats.py"), &binary, &fixtures, &work.join("formats")])?;
    run_in(root, &python, &[&scripts.join("signing.py"), &binary, &fixtures, &work.join("signing")])?;
    let data = root.join("crates/fsdp-cli/data/harbour.txt");
    run_in(root, &python, &[&scripts.join("interop.py"), &binary, &data, &work])?;
    run_in(root, &python, &[&scripts.join("torchrun.py"), &binary, &data, &work.join("torchrun")])?;
    pair(root, &python)
}

/// Runs the test of the examples that go on from each other's checkpoints, with its Python half.
fn pair(root: &Path, python: &Path) -> Result<()> {
    let test = ["test", "--package", "fsdp-examples", "--test", "run", "--locked", "both_halves"];
    let status = Command::new(program()).args(test).env(PYTHON_VARIABLE, python).current_dir(root).status();
    let status = status.context("failed to start cargo")?;
    ensure!(status.success(), "the pair of examples failed: {status}");
    Ok(())
}

/// Makes a Python environment in `directory` if there is none, installs [`PACKAGES`] in it, and returns its Python.
fn environment(root: &Path, directory: &Path) -> Result<PathBuf> {
    let python = directory.join("bin/python");
    if !python.exists() {
        run_in(root, Path::new("python3"), &[Path::new("-m"), Path::new("venv"), directory])?;
    }
    // pip runs every time, because the list may be longer than when the environment was made.
    let mut arguments = ["-m", "pip", "install", "--quiet"].map(Path::new).to_vec();
    arguments.extend(PACKAGES.map(Path::new));
    run_in(root, &python, &arguments)?;
    Ok(python)
}

/// Runs a program in the directory of the workspace. Returns an error if the program fails.
fn run_in(root: &Path, program: &Path, arguments: &[&Path]) -> Result<()> {
    let status = Command::new(program).args(arguments).current_dir(root).status();
    let status = status.with_context(|| format!("failed to start `{}`", program.display()))?;
    ensure!(status.success(), "`{}` failed: {status}", program.display());
    Ok(())
}
