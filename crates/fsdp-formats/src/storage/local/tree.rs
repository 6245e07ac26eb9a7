//! The files below a directory, at any depth.

use std::path::Path;

use crate::error::{FileError, IoOutcome as _};
use crate::storage::backend::EntryKind;
use crate::storage::file_system::FileSystem;

/// The most levels of directories below a checkpoint.
const MAX_LEVELS: usize = 64;

/// Returns the paths of all regular files below a directory, sorted. Nothing is left out: an entry
/// that is neither a file nor a directory is an error, and so is a name that is not UTF-8.
pub(super) fn list_files(files: &dyn FileSystem, root: &Path) -> Result<Vec<String>, FileError> {
    let refuse = |path, reason| FileError::Path {
        root: root.to_owned(),
        path,
        reason,
    };
    let mut found = Vec::new();
    // Directories that are not listed yet, relative to the root.
    let mut directories = vec![String::new()];
    while let Some(directory) = directories.pop() {
        // A file system can be made whose directories have no end.
        if directory.split('/').count() > MAX_LEVELS {
            return Err(refuse(directory, "it lies below too many directories"));
        }
        let path = root.join(&directory);
        for (name, kind) in files.list(&path).during("list", &path)? {
            let mut relative = name.to_string_lossy().into_owned();
            if !directory.is_empty() {
                relative = format!("{directory}/{relative}");
            }
            if name.to_str().is_none() {
                return Err(refuse(relative, "its name is not UTF-8"));
            }
            match kind {
                EntryKind::File => found.push(relative),
                EntryKind::Directory => directories.push(relative),
                EntryKind::Special => {
                    let reason = "it is a symbolic link, or no regular file; `cp -rL` makes a copy without links";
                    return Err(refuse(relative, reason));
                }
            }
        }
    }
    found.sort();
    Ok(found)
}
