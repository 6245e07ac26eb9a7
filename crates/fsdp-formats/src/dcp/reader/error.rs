//! The error of reading an item.

use crate::error::{FileError, FormatError};

/// An error of reading an item.
#[derive(Debug)]
pub(super) enum ReadError {
    /// An error inside the item, to be told with its key and place.
    Format(FormatError),
    /// An error that names all of that itself.
    File(FileError),
}

impl From<FormatError> for ReadError {
    fn from(error: FormatError) -> Self {
        ReadError::Format(error)
    }
}

impl From<FileError> for ReadError {
    fn from(error: FileError) -> Self {
        ReadError::File(error)
    }
}
