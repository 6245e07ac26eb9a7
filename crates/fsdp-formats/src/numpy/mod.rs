//! NumPy's files: `.npy`, one array, and `.npz`, a zip archive of several.
//!
//! The key of an array is the name of its record in a `.npz`, or of the file if that is a `.npy`,
//! without the ending `.npy`. Records may be compressed, as `savez_compressed` writes them. Arrays
//! of objects and of structures, and big-endian numbers are refused.

mod header;

use std::sync::Arc;

use fsdp_layout::{KeyPath, PathPart};

use self::header::Header;
pub(crate) use self::header::START;
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Assembled, Assembler, Elements, Piece, Start};
use crate::formats::checkpoint::Format;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::storage::read_at::{ReadAt, Window};
use crate::torch::zip::{Deflated, Directory, Kept};

/// The ending of the names of records.
const RECORD_END: &str = ".npy";

/// Returns `true` if an archive is NumPy's: if all of its records are arrays, or if an array is at
/// its top. The records of torch's archives all lie below one directory.
pub(crate) fn is_archive(archive: &Directory) -> bool {
    let is_array = |name: &String| name.ends_with(RECORD_END);
    let mut names = archive.records.keys();
    names.clone().all(is_array) || names.any(|name| is_array(name) && !name.contains('/'))
}

/// Opens a file that is one array.
pub(crate) fn open_array(
    location: &Location,
    directory: CheckedDirectory,
) -> Result<Assembled, FileError> {
    let (_, name) = location.split()?;
    let header = Header::read(&*directory.file(name)?)
        .map_err(|source| directory.file_error(name, source))?;
    let key = name.strip_suffix(RECORD_END).unwrap_or(name).to_owned();
    assemble(
        location,
        directory,
        vec![(key, Start::At(header.length), header)],
    )
}

/// Opens an archive of arrays, whose directory has been read without a root.
pub(crate) fn open_archive(
    location: &Location,
    directory: CheckedDirectory,
    archive: &Directory,
) -> Result<Assembled, FileError> {
    let (_, name) = location.split()?;
    let arrays = arrays(&*directory.file(name)?, archive)
        .map_err(|source| directory.file_error(name, source))?;
    assemble(location, directory, arrays)
}

/// Makes the checkpoint with these arrays: key, start of the elements, header.
fn assemble(
    location: &Location,
    directory: CheckedDirectory,
    arrays: Vec<(String, Start, Header)>,
) -> Result<Assembled, FileError> {
    let (_, name) = location.split()?;
    let file: Arc<str> = Arc::from(name);
    let mut assembler = Assembler::new(Format::Numpy, location.name(), directory);
    for (key, start, header) in arrays {
        let path = KeyPath(vec![PathPart::Key(key)]);
        let piece = Piece {
            file: file.clone(),
            start,
            layout: header.layout(),
            elements: Elements::Plain,
        };
        assembler.add_tensor(&path, &file, header.dtype, &header.shape, vec![piece])?;
    }
    Ok(assembler.finish(None))
}

/// Finds the arrays of an archive: key, start of the elements, header.
fn arrays(
    file: &dyn ReadAt,
    archive: &Directory,
) -> Result<Vec<(String, Start, Header)>, FormatError> {
    let kept = Kept::default();
    let mut arrays = Vec::with_capacity(archive.records.len());
    for (name, record) in &archive.records {
        if !name.ends_with(RECORD_END) {
            let what =
                format!("the record `{name}` of an archive of NumPy, which is not an array,");
            return Err(FormatError::Unsupported { what });
        }
        let data = archive.data_offset(file, name, record)?;
        let key = name.strip_suffix(RECORD_END).unwrap_or(name).to_owned();
        let (start, header) = if record.is_deflated {
            let record = Deflated::new(data, record, &kept);
            let header = Header::read(&record.of(file)).map_err(|error| error.of_key(&key))?;
            (Start::In(Arc::new(record), header.length), header)
        } else {
            let header = Header::read(&Window::new(file, data, record.length)?)
                .map_err(|error| error.of_key(&key))?;
            (Start::At(data + header.length), header)
        };
        arrays.push((key, start, header));
    }
    Ok(arrays)
}
