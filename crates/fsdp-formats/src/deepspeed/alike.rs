//! Values that are the same in the files of all ranks: they tell a file of another save.

use std::borrow::Cow;
use std::collections::HashMap;

use fsdp_layout::{KeyPath, PlainValue};

use crate::error::FileError;
use crate::formats::assembled::Held;
use crate::storage::checked_directory::CheckedDirectory;
use crate::torch::flat::{FlatFile, Leaf};

/// Checks that files have the same values at the paths for which `is_alike` returns `true`. A value
/// that only some of the files have is compared between these.
///
/// # Errors
/// A value that is not the same in two files; a tensor of one element that cannot be read.
pub(super) fn check_alike(
    directory: &CheckedDirectory,
    files: &[FlatFile],
    is_alike: impl Fn(&KeyPath) -> bool,
) -> Result<(), FileError> {
    // Each value by its key, with the file in which it was found first.
    let mut first_values: HashMap<&str, (&FlatFile, Cow<'_, PlainValue>)> = HashMap::new();
    for file in files {
        for (key, (path, leaf)) in &file.found {
            if !is_alike(path) {
                continue;
            }
            let Some(value) = read_value(directory, file, key, leaf)? else {
                continue;
            };
            let Some((first_file, first_value)) = first_values.get(key.as_str()) else {
                first_values.insert(key, (file, value));
                continue;
            };
            if !first_value.same_bits(&value) {
                return Err(FileError::Differing {
                    fqn: key.clone(),
                    what: "is not the same in both".to_owned(),
                    first: first_file.name.to_string(),
                    second: file.name.to_string(),
                });
            }
        }
    }
    Ok(())
}

/// Returns a plain value, or a tensor of one element, with its element; `None` for anything else.
fn read_value<'f>(
    directory: &CheckedDirectory,
    file: &'f FlatFile,
    key: &str,
    leaf: &'f Leaf,
) -> Result<Option<Cow<'f, PlainValue>>, FileError> {
    match leaf {
        Leaf::Value(Held::Plain(value)) => Ok(Some(Cow::Borrowed(value))),
        Leaf::Tensor(tensor, None) if tensor.shape.iter().all(|&size| size == 1) => {
            let opened = directory.file(&file.name)?;
            let element = file
                .load(&*opened, tensor)
                .map_err(|source| file.error(source.of_key(key)))?;
            Ok(Some(Cow::Owned(PlainValue::Tensor(element))))
        }
        _ => Ok(None),
    }
}
