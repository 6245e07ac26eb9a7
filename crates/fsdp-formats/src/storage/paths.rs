//! Paths that a checkpoint names, which must stay inside its directory.

use std::path::Path;

use crate::error::FileError;

/// Longest path that a checkpoint may name.
const MAX_PATH: usize = 4096;

/// Returns the parts of a relative path below `root`, if it is plain: no `..`, not absolute, no
/// other system's separators.
pub(crate) fn relative_parts<'p>(root: &Path, path: &'p str) -> Result<Vec<&'p str>, FileError> {
    check_relative(path).map_err(|reason| FileError::Path {
        root: root.to_owned(),
        path: path.to_owned(),
        reason,
    })
}

/// Returns the parts of a relative path, or the reason why it is not plain.
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
    if parts.iter().any(|part| matches!(*part, "" | "." | "..")) {
        return Err("it has an empty, `.` or `..` part");
    }
    Ok(parts)
}
