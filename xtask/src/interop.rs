//! `cargo xtask interop`: an environment with PyTorch, and the two-way tests against it.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::python::{environment, install, remove, succeed};
use crate::shell::{program, target};

/// The packages that the tests import.
const PACKAGES: [&str; 7] = [
    "torch>=2.6",
    "numpy",
    "safetensors",
    "transformers>=5",
    "peft",
    "model-signing>=1.1",
    "pyopenssl",
];

/// The variable that names a Python with these packages, so that they need not be installed.
const PYTHON_VARIABLE: &str = "FSDP_INTEROP_PYTHON";

/// Builds the command, and runs the tests of `tests/interop` with it.
pub(crate) fn run(root: &Path) -> Result<()> {
    let python = match std::env::var(PYTHON_VARIABLE) {
        Ok(python) => python.into(),
        Err(_) => {
            let python = environment(&root.join("target/interop-python"), false)?;
            // pip runs every time, because the list may be longer than when the environment was
            // made.
            install(&python, &PACKAGES)?;
            python
        }
    };
    run_in(
        root,
        Path::new("cargo"),
        &["build", "--release", "--package", "fsdp-cli", "--locked"].map(Path::new),
    )?;
    let target = target(root);
    let work = target.join("interop");
    if work.exists() {
        remove(&work)?;
    }
    std::fs::create_dir_all(&work)
        .with_context(|| format!("failed to create `{}`", work.display()))?;
    let scripts = root.join("tests/interop");
    let binary = target.join("release/fsdp");
    let fixtures = root.join("tests/fixtures");
    run_in(
        root,
        &python,
        &[
            &scripts.join("formats.py"),
            &binary,
            &fixtures,
            &work.join("formats"),
        ],
    )?;
    run_in(
        root,
        &python,
        &[
            &scripts.join("signing.py"),
            &binary,
            &fixtures,
            &work.join("signing"),
        ],
    )?;
    let data = root.join("crates/fsdp-cli/data/harbour.txt");
    run_in(
        root,
        &python,
        &[&scripts.join("interop.py"), &binary, &data, &work],
    )?;
    run_in(
        root,
        &python,
        &[
            &scripts.join("torchrun.py"),
            &binary,
            &data,
            &work.join("torchrun"),
        ],
    )?;
    pair(root, &python)
}

/// Runs the test of the examples that continue from each other's checkpoints, with its Python half.
fn pair(root: &Path, python: &Path) -> Result<()> {
    let test = [
        "test",
        "--package",
        "fsdp-examples",
        "--test",
        "run",
        "--locked",
        "both_halves",
    ];
    let status = Command::new(program())
        .args(test)
        .env(PYTHON_VARIABLE, python)
        .current_dir(root)
        .status();
    let status = status.context("failed to start cargo")?;
    ensure!(status.success(), "the pair of examples failed: {status}");
    Ok(())
}

/// Runs a program in the directory of the workspace. Returns an error if the program fails.
fn run_in(root: &Path, program: &Path, arguments: &[&Path]) -> Result<()> {
    succeed(Command::new(program).args(arguments).current_dir(root))
}
