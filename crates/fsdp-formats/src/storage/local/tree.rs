//! The files below a directory, at any depth.

use std::path::Path;

use crate::error::FileError;
use crate::storage::backend::EntryKind;
use crate::storage::file_system::FileSystem;

/// The most levels of directories below a checkpoint.
const MAX_LEVELS: usize = 64;

/// Lists the paths of all regular files below a directory, sorted. Nothing is left out: an entry
/// that is neither a file nor a directory is an error, and so is a name that is not UTF-8.
pub(super) fn tree(files: &dyn FileSystem, root: &Path) -> Result<Vec<String>, FileError> {
    let mut found = Vec::new();
    // Directories that are not listed yet, relative to the root.
    let mut directories = vec![String::new()];
    while let Some(directory) = directories.pop() {
        // A file system can be made whose directories have no end.
        if directory.split('/').count() > MAX_LEVELS {
            return Err(refused(
                root,
                &directory,
                "it lies below too many directories",
            ));
        }
        let path = root.join(&directory);
        for (name, kind) in files
            .list(&path)
            .map_err(|error| FileError::io("list", &path, error))?
        {
            let Some(utf8) = name.to_str() else {
                return Err(refused(
                    root,
                    &below(&directory, &name.to_string_lossy()),
                    "its name is not UTF-8",
                ));
            };
            let relative = below(&directory, utf8);
            match kind {
                EntryKind::File => found.push(relative),
                EntryKind::Directory => directories.push(relative),
                EntryKind::Special => {
                    let reason = "it is a symbolic link, or no regular file; `cp -rL` makes a copy without links";
                    return Err(refused(root, &relative, reason));
                }
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the path of an entry of a directory, relative to the root.
fn below(directory: &str, name: &str) -> String {
    if directory.is_empty() {
        name.to_owned()
    } else {
        format!("{directory}/{name}")
    }
}

fn refused(root: &Path, path: &str, reason: &'static str) -> FileError {
    FileError::Path {
        root: root.to_owned(),
        path: path.to_owned(),
        reason,
    }
}
