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
use crate::formats::read::OpenOptions;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::storage::read_at::{ReadAt, Window};
use crate::torch::zip::{Deflated, Directory, Kept};

/// The ending of the names of records.
const RECORD_END: &str = ".npy";

/// Returns `true` if an archive is NumPy's: if all of its records are arrays, or if an array is at
/// its top. The records of torch's archives all lie below one directory.
pub(crate) fn is_archive(file: &dyn ReadAt) -> bool {
    Directory::read_rootless(file).is_ok_and(|archive| {
        let is_array = |name: &String| name.ends_with(RECORD_END);
        archive.records.keys().all(is_array)
            || archive
                .records
                .keys()
                .any(|name| is_array(name) && !name.contains('/'))
    })
}

/// Opens an archive of arrays, or one array.
pub(crate) fn open(location: &Location, options: OpenOptions) -> Result<Assembled, FileError> {
    let (parent, name) = location.split()?;
    let directory = CheckedDirectory::open_beside(&parent, name, options.verify)?;
    let mut assembler = Assembler::new(Format::Numpy, location.name(), directory);
    let file = assembler.directory().file(name)?;
    let error = |source| FileError::File {
        path: location.name().to_owned(),
        source,
    };
    let arrays = arrays(&*file, name).map_err(error)?;
    let name: Arc<str> = Arc::from(name);
    for (key, start, header) in arrays {
        let path = KeyPath(vec![PathPart::Key(key)]);
        let layout = header.layout();
        let piece = Piece {
            file: name.clone(),
            start,
            layout,
            elements: Elements::Plain,
        };
        assembler.add_tensor(&path, &name, header.dtype, &header.shape, vec![piece])?;
    }
    Ok(assembler.finish(None))
}

/// Finds the arrays of a file: key, start of the elements, header.
fn arrays(file: &dyn ReadAt, name: &str) -> Result<Vec<(String, Start, Header)>, FormatError> {
    let mut start = [0; START.len()];
    if file.len() >= start.len() as u64 {
        file.read_exact_at(0, &mut start)?;
    }
    if start == *START {
        let header = Header::read(file)?;
        let key = name.strip_suffix(RECORD_END).unwrap_or(name).to_owned();
        return Ok(vec![(key, Start::At(header.length), header)]);
    }
    let archive = Directory::read_rootless(file)?;
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
