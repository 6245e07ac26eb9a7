//! Python environments, which are made below the target directory.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// Makes a Python environment in `directory`, and returns its Python. An old one is kept unless a
/// fresh one is wanted.
pub(crate) fn environment(directory: &Path, fresh: bool) -> Result<PathBuf> {
    let python = directory.join("bin/python");
    if fresh && directory.exists() {
        remove(directory)?;
    }
    if !python.exists() {
        succeed(Command::new("python3").args(["-m", "venv"]).arg(directory))?;
    }
    Ok(python)
}

/// Installs packages that are not installed yet.
pub(crate) fn install(python: &Path, packages: &[&str]) -> Result<()> {
    succeed(
        Command::new(python)
            .args(["-m", "pip", "install", "--quiet"])
            .args(packages),
    )
}

/// Removes a directory that only these tasks write to.
pub(crate) fn remove(directory: &Path) -> Result<()> {
    succeed(Command::new("rm").arg("-r").arg(directory))
}

/// Runs a program. Returns an error if it fails.
pub(crate) fn succeed(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command
        .status()
        .with_context(|| format!("failed to start `{program}`"))?;
    ensure!(status.success(), "`{program}` failed with {status}");
    Ok(())
}
