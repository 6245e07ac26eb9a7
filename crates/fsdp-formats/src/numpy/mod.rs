//! NumPy's files: `.npy`, one array, and `.npz`, a zip archive of several.
//!
//! The key of an array is the name of its record in a `.npz`, or of the file if that is a `.npy`,
//! without the ending `.npy`. Records may be compressed, as `savez_compressed` writes them. Arrays
//! of objects and of structures, and big-endian numbers are refused.

mod header;

use std::sync::Arc;

use fsdp_layout::KeyPath;

use self::header::ArrayHeader;
pub(crate) use self::header::{MAGIC, dtype_from_code, dtype_to_code};
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Assembled, Assembler, Elements, Piece, StorageStart};
use crate::formats::checkpoint::Format;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::storage::read_at::{ReadAt, Window};
use crate::zip::{Deflated, Directory, ReadStates};

/// The ending of the names of records.
const RECORD_EXTENSION: &str = ".npy";

/// Returns `true` if an archive is NumPy's: if all of its records are arrays, or if an array is at
/// its top. The records of torch's archives all lie below one directory.
pub(crate) fn is_archive(archive: &Directory) -> bool {
    let names = archive.records.keys();
    let mut arrays = names
        .clone()
        .filter(|name| name.ends_with(RECORD_EXTENSION));
    arrays.clone().count() == names.len() || arrays.any(|name| !name.contains('/'))
}

/// Opens a file that is one array.
pub(crate) fn open_array(
    location: &Location,
    directory: CheckedDirectory,
) -> Result<Assembled, FileError> {
    let (_, name) = location.split()?;
    let header = ArrayHeader::read(&*directory.file(name)?)
        .map_err(|source| directory.file_error(name, source))?;
    let key = name
        .strip_suffix(RECORD_EXTENSION)
        .unwrap_or(name)
        .to_owned();
    assemble(
        location,
        directory,
        vec![(key, StorageStart::Offset(header.length), header)],
    )
}

/// Opens an archive of arrays, whose directory has been read without a root.
pub(crate) fn open_archive(
    location: &Location,
    directory: CheckedDirectory,
    archive: &Directory,
) -> Result<Assembled, FileError> {
    let (_, name) = location.split()?;
    let arrays = find_arrays(&*directory.file(name)?, archive)
        .map_err(|source| directory.file_error(name, source))?;
    assemble(location, directory, arrays)
}

/// Makes the checkpoint with these arrays: key, start of the elements, header.
fn assemble(
    location: &Location,
    directory: CheckedDirectory,
    arrays: Vec<(String, StorageStart, ArrayHeader)>,
) -> Result<Assembled, FileError> {
    let (_, name) = location.split()?;
    let file: Arc<str> = Arc::from(name);
    let mut assembler = Assembler::new(Format::Numpy, location.name(), directory);
    for (key, start, header) in arrays {
        let path = KeyPath::from_key(key);
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

/// Returns the arrays of an archive: key, start of the elements, header. A record that is not an
/// array is an error.
fn find_arrays(
    file: &dyn ReadAt,
    archive: &Directory,
) -> Result<Vec<(String, StorageStart, ArrayHeader)>, FormatError> {
    let states = ReadStates::default();
    let mut arrays = Vec::with_capacity(archive.records.len());
    for (name, record) in &archive.records {
        let Some(key) = name.strip_suffix(RECORD_EXTENSION) else {
            let what =
                format!("the record `{name}` of an archive of NumPy, which is not an array,");
            return Err(FormatError::unsupported(what));
        };
        let data_offset = archive.data_offset(file, name, record)?;
        let deflated = Deflated::new(data_offset, record, &states);
        let header = if record.is_deflated {
            ArrayHeader::read(&deflated.reader(file))
        } else {
            Window::new(file, data_offset, record.length)
                .and_then(|array| ArrayHeader::read(&array))
        }
        .map_err(|error| error.of_key(key))?;
        let start = if record.is_deflated {
            StorageStart::Deflated(Arc::new(deflated), header.length)
        } else {
            StorageStart::Offset(data_offset + header.length)
        };
        arrays.push((key.to_owned(), start, header));
    }
    Ok(arrays)
}
