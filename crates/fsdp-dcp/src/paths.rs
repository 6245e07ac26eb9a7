//! Paths that a checkpoint's metadata names, which must stay inside its directory; and names in a directory.

use std::path::Path;

use crate::error::CheckpointError;

/// Longest path that a checkpoint may name.
const MAX_PATH: usize = 4096;

/// The parts of a relative path, if it is plain: no `..`, not absolute, no other system's separators.
pub(crate) fn check_relative(path: &str) -> Result<Vec<&str>, &'static str> {
    if path.is_empty() || path.len() > MAX_PATH {
        return Err("it is empty or too long");
    }
    if path.starts_with('/') {
        return Err("it is absolute");
    }
    if path.contains(['\\', '\0']) {
        return Err("it holds a character that no checkpoint's file has");
    }
    let parts: Vec<&str> = path.split('/').collect();
    match parts.iter().any(|part| matches!(*part, "" | "." | "..")) {
        true => Err("it has an empty, `.` or `..` part"),
        false => Ok(parts),
    }
}

/// The names of the entries of a directory, sorted; those that are not UTF-8 are left out.
pub(crate) fn names(path: &Path) -> Result<Vec<String>, CheckpointError> {
    let list = std::fs::read_dir(path).map_err(CheckpointError::io("list", path))?;
    let mut names = Vec::new();
    for entry in list {
        let entry = entry.map_err(CheckpointError::io("list", path))?;
        names.extend(entry.file_name().into_string().ok());
    }
    names.sort();
    Ok(names)
}
