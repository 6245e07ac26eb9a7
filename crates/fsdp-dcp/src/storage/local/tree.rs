//! The files below a directory, at any depth.

use std::path::Path;

use crate::error::FileError;

/// Levels of directories below a checkpoint.
const MAX_LEVELS: usize = 64;

/// Lists the paths of all regular files below a directory, sorted. Nothing is left out: an entry that is neither a file nor
/// a directory is an error, and so is a name that is not UTF-8.
pub(super) fn tree(root: &Path) -> Result<Vec<String>, FileError> {
    let mut files = Vec::new();
    // Directories that are not listed yet, relative to the root.
    let mut directories = vec![String::new()];
    while let Some(directory) = directories.pop() {
        let path = root.join(&directory);
        if directory.split('/').count() > MAX_LEVELS {
            return Err(refused(root, &directory, "it lies below too many directories"));
        }
        for entry in std::fs::read_dir(&path).map_err(FileError::io("list", &path))? {
            let entry = entry.map_err(FileError::io("list", &path))?;
            let name = entry.file_name();
            let relative =
                |name: &str| if directory.is_empty() { name.to_owned() } else { format!("{directory}/{name}") };
            let Some(utf8) = name.to_str() else {
                return Err(refused(root, &relative(&name.to_string_lossy()), "its name is not UTF-8"));
            };
            let kind = entry.file_type().map_err(FileError::io("inspect", entry.path()))?;
            let relative = relative(utf8);
            if kind.is_dir() {
                directories.push(relative);
            } else if kind.is_file() {
                files.push(relative);
            } else if kind.is_symlink() {
                return Err(refused(root, &relative, "it is a symbolic link; `cp -rL` makes a copy without links"));
            } else {
                return Err(refused(root, &relative, "it is no regular file"));
            }
        }
    }
    files.sort();
    Ok(files)
}

fn refused(root: &Path, path: &str, reason: &'static str) -> FileError {
    FileError::Path { root: root.to_owned(), path: path.to_owned(), reason }
}
