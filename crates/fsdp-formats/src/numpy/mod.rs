//! NumPy's files: `.npy`, one array, and `.npz`, a zip archive of several.
//!
//! The key of an array is the name of its record in a `.npz`, or of the file if that is a `.npy`,
//! without the ending `.npy`. Records may be compressed, as `savez_compressed` writes them. Arrays
//! of objects, structures, texts and times are opaque values in a `.npz`, and refused as a `.npy`.
//!
//! The directory of a `.npz` has a CRC-32 of each record. It is compared when the last bytes of a
//! compressed record are read, and once all bytes of a stored one were read.

mod header;

use std::ops::Range;
use std::sync::Arc;

use fsdp_layout::KeyPath;

use self::header::ArrayHeader;
pub(crate) use self::header::{MAGIC, dtype_from_code, dtype_to_code};
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Assembled, Assembler, Held, Piece, StorageStart};
use crate::formats::checkpoint::Format;
use crate::metadata::StorageInfo;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::storage::read_at::{ReadAt, Window};
use crate::zip::{Deflated, Directory, ReadStates, Stored};

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
    let array = Array::Numbers(StorageStart::Offset(header.length), header);
    assemble(location, directory, vec![(key, array)])
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

/// An array of a file.
enum Array {
    /// An array of numbers: the start of its elements, and its header.
    Numbers(StorageStart, ArrayHeader),
    /// An array of something else: what it is, and the range of its record.
    Opaque(String, Range<u64>),
}

/// Makes the checkpoint with these arrays, which come with their keys.
fn assemble(
    location: &Location,
    directory: CheckedDirectory,
    arrays: Vec<(String, Array)>,
) -> Result<Assembled, FileError> {
    let (_, name) = location.split()?;
    let file: Arc<str> = Arc::from(name);
    let mut assembler = Assembler::new(Format::Numpy, location.name(), directory);
    for (key, array) in arrays {
        let path = KeyPath::from_key(key);
        let (start, header) = match array {
            Array::Numbers(start, header) => (start, header),
            Array::Opaque(what, range) => {
                let stored = StorageInfo::new(&*file, range.start, range.end - range.start);
                assembler.add_value(&path, &file, Held::Stored(what, stored))?;
                continue;
            }
        };
        let piece = Piece {
            file: file.clone(),
            start,
            layout: header.layout(),
            elements: header.elements,
        };
        assembler.add_tensor(&path, &file, header.dtype, &header.shape, vec![piece])?;
    }
    Ok(assembler.finish(None))
}

/// Returns the arrays of an archive with their keys. A record that is not an array is an error.
fn find_arrays(
    file: &dyn ReadAt,
    archive: &Directory,
) -> Result<Vec<(String, Array)>, FormatError> {
    let states = ReadStates::default();
    let mut arrays = Vec::with_capacity(archive.records.len());
    for (name, record) in &archive.records {
        let Some(key) = name.strip_suffix(RECORD_EXTENSION) else {
            let what =
                format!("the record `{name}` of an archive of NumPy, which is not an array,");
            return Err(FormatError::unsupported(what));
        };
        let data_offset = archive.data_offset(file, name, record)?;
        let array = if record.is_deflated {
            let deflated = Deflated::new(data_offset, record, &states);
            let header = ArrayHeader::read(&deflated.reader(file));
            header.map(|header| {
                let start = StorageStart::Deflated(Arc::new(deflated), header.length);
                Array::Numbers(start, header)
            })
        } else {
            let stored = Stored::new(data_offset, record);
            let header = Window::new(&stored.reader(file), data_offset, record.length)
                .and_then(|array| ArrayHeader::read(&array));
            header.map(|header| {
                let start = StorageStart::Stored(Arc::new(stored), data_offset + header.length);
                Array::Numbers(start, header)
            })
        };
        let array = match array {
            Ok(array) => array,
            Err(FormatError::Unsupported { what }) => {
                Array::Opaque(what, data_offset..data_offset + record.stored_bytes)
            }
            Err(error) => return Err(error.of_key(key)),
        };
        arrays.push((key.to_owned(), array));
    }
    Ok(arrays)
}
