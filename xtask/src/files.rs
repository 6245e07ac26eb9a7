//! Reads, writes, lists and removes the files of tasks. None of them is a checkpoint.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// The directories without source files of this project.
const SKIPPED: [&str; 8] = [
    "target",
    ".git",
    "fixtures",
    "book",
    "runs",
    "seeds",
    "corpus",
    "artifacts",
];

pub(crate) fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("failed to read `{}`", path.display()))
}

#[expect(
    clippy::disallowed_methods,
    reason = "a file of a task is no checkpoint"
)]
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("failed to write `{}`", path.display()))
}

/// Reads a field of a file of `NAME: VALUE` lines; empty if there is none.
pub(crate) fn field(file: &str, name: &str) -> String {
    let text = fs::read_to_string(file).unwrap_or_default();
    for line in text.lines().filter(|line| line.starts_with(name)) {
        if let Some((_, value)) = line.split_once(':') {
            return value.trim().to_owned();
        }
    }
    String::new()
}

/// Removes a directory that only tasks write to, if it is there.
#[expect(
    clippy::disallowed_methods,
    reason = "the directory of a task holds nothing that has to last"
)]
pub(crate) fn remove_directory(path: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    fs::remove_dir_all(path).with_context(|| format!("failed to remove `{}`", path.display()))
}

/// Adds the paths of all files below a directory, without those in [`SKIPPED`].
pub(crate) fn collect(directory: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory)
        .with_context(|| format!("failed to list `{}`", directory.display()))?
    {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            files.push(entry.path());
        } else if !SKIPPED.iter().any(|skipped| entry.file_name() == *skipped) {
            collect(&entry.path(), files)?;
        }
    }
    Ok(())
}
