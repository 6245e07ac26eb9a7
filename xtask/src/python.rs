//! Python environments, which are made below the target directory.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::files::remove_directory;
use crate::shell::run;

/// Makes a Python environment in `directory`, and returns its Python. An old one is kept unless a
/// fresh one is wanted.
pub(crate) fn environment(directory: &Path, fresh: bool) -> Result<PathBuf> {
    let python = directory.join("bin/python");
    if fresh {
        remove_directory(directory)?;
    }
    if !python.exists() {
        run(Command::new("python3").args(["-m", "venv"]).arg(directory))?;
    }
    Ok(python)
}

/// Installs packages that are not installed yet.
pub(crate) fn install(python: &Path, packages: &[&str]) -> Result<()> {
    run(Command::new(python)
        .args(["-m", "pip", "install", "--quiet"])
        .args(packages))
}

/// Installs a package from a file once more, without those that it needs: it may have changed under
/// the same version.
pub(crate) fn reinstall(python: &Path, file: &str) -> Result<()> {
    install(python, &["--force-reinstall", "--no-deps", file])
}
