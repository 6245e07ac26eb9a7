//! Files of any kind with hashes: what Python writes in one stream, and reads in checked pieces.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::sync::Arc;

use fsdp_formats::Location;
use fsdp_formats::internals::{FileIntegrity, Integrity};
use fsdp_formats::storage::{self, CheckedDirectory, Links, ReadAt as _};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{run_detached, to_exception, wrong_argument};
use crate::memory::{borrow, borrowed_bytes, borrowed_bytes_mut};

/// The bytes that get a segment of their own: how long the file becomes is not known while it is
/// written. Its blocks are of 256 KiB.
const SEGMENT_BYTES: usize = 32 << 20;

/// The hashes of a file that is being written.
#[pyclass]
#[derive(Default)]
pub(crate) struct FileHasher {
    hashes: FileIntegrity,
    /// The bytes after the last whole segment.
    pending: Vec<u8>,
}

#[pymethods]
impl FileHasher {
    #[new]
    fn new() -> Self {
        FileHasher::default()
    }

    /// Takes the next bytes of the file.
    fn update(&mut self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        let memory = borrow(buffer, buffer.len()?, false)?;
        py.detach(|| self.add(borrowed_bytes(&memory)));
        Ok(())
    }

    /// Returns the integrity file of the file that had these bytes, under this name.
    fn finish<'py>(&mut self, py: Python<'py>, name: String) -> PyResult<Bound<'py, PyBytes>> {
        let FileHasher {
            mut hashes,
            pending,
        } = std::mem::take(self);
        hashes.push_bytes(&pending);
        encode(py, BTreeMap::from([(name, hashes)]))
    }
}

impl FileHasher {
    /// Hashes the whole segments of what has come so far, and keeps the rest.
    fn add(&mut self, mut bytes: &[u8]) {
        if !self.pending.is_empty() {
            let missing = SEGMENT_BYTES - self.pending.len();
            let (start, rest) = bytes.split_at(missing.min(bytes.len()));
            self.pending.extend_from_slice(start);
            bytes = rest;
            if self.pending.len() < SEGMENT_BYTES {
                return;
            }
            self.hashes.push_bytes(&self.pending);
            self.pending.clear();
        }
        let segments = bytes.chunks_exact(SEGMENT_BYTES);
        self.pending.extend_from_slice(segments.remainder());
        for segment in segments {
            self.hashes.push_bytes(segment);
        }
    }
}

/// Returns the integrity file of several files. Each of `parts` is a path, and the integrity file
/// of the one file that is there.
///
/// # Errors
/// A part that is damaged, or that is not of one file.
#[pyfunction]
pub(crate) fn join_integrity(
    py: Python<'_>,
    parts: Vec<(String, Vec<u8>)>,
) -> PyResult<Bound<'_, PyBytes>> {
    let mut files = BTreeMap::new();
    for (path, part) in parts {
        let integrity = Integrity::decode(&part).map_err(|error| {
            let message = format!("the hashes of `{path}` cannot be read: {error}");
            wrong_argument(message)
        })?;
        let Some((_, hashes)) = integrity.files.into_iter().next() else {
            return Err(wrong_argument(format!("`{path}` has no hashes")));
        };
        files.insert(path, hashes);
    }
    encode(py, files)
}

/// Encodes an integrity file.
fn encode(py: Python<'_>, files: BTreeMap<String, FileIntegrity>) -> PyResult<Bound<'_, PyBytes>> {
    let integrity = Integrity {
        files,
        ..Integrity::default()
    };
    let encoded = integrity
        .encode()
        .map_err(|error| to_exception(py, error))?;
    Ok(PyBytes::new(py, &encoded))
}

/// A directory whose files are checked when they are read, if hashes of them are there.
#[pyclass(frozen)]
pub(crate) struct HashedFiles {
    directory: Arc<CheckedDirectory>,
}

#[pymethods]
impl HashedFiles {
    /// Opens a directory: by its integrity file, or by the one that lies beside the file `beside`.
    #[new]
    #[pyo3(signature = (directory, beside))]
    fn new(py: Python<'_>, directory: OsString, beside: Option<String>) -> PyResult<Self> {
        let opened = run_detached(py, || {
            let location = Location::from(directory);
            match beside {
                Some(name) => CheckedDirectory::open_beside(&location, &name, true),
                None => CheckedDirectory::open(&location, true, Links::Follow),
            }
        })?;
        Ok(HashedFiles {
            directory: Arc::new(opened),
        })
    }

    /// Opens a file below the directory. One that the integrity file does not list is not checked.
    ///
    /// # Errors
    /// It is not there, or of another length than that in the integrity file.
    fn file(&self, py: Python<'_>, name: String) -> PyResult<HashedFile> {
        let directory = self.directory.clone();
        run_detached(py, || {
            let file = directory.extra_file(&name)?;
            // The parts themselves are not needed: they are made of a file of the right length.
            match file.parts() {
                Ok(_) => Ok(HashedFile {
                    directory,
                    file,
                    name,
                }),
                Err(error) => Err(directory.file_error(&name, error)),
            }
        })
    }
}

/// An open file that is checked when it is read.
#[pyclass(frozen)]
pub(crate) struct HashedFile {
    directory: Arc<CheckedDirectory>,
    file: storage::CheckedFile,
    name: String,
}

#[pymethods]
impl HashedFile {
    /// Returns its length in bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.file.len()
    }

    /// Returns the bytes from `offset` on.
    ///
    /// # Errors
    /// A block whose hash differs; a position after the end.
    fn read_from<'py>(&self, py: Python<'py>, offset: u64) -> PyResult<Bound<'py, PyBytes>> {
        let rest = self.file.len().saturating_sub(offset);
        PyBytes::new_with(py, rest as usize, |bytes| self.fill(py, offset, bytes))
    }

    /// Fills a buffer with the bytes from `offset` on.
    ///
    /// # Errors
    /// A block whose hash differs; the end of the file.
    fn read_into(&self, py: Python<'_>, offset: u64, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut memory = borrow(buffer, buffer.len()?, true)?;
        self.fill(py, offset, borrowed_bytes_mut(&mut memory))
    }
}

impl HashedFile {
    /// Fills `bytes` with those from `offset` on.
    fn fill(&self, py: Python<'_>, offset: u64, bytes: &mut [u8]) -> PyResult<()> {
        run_detached(py, || {
            let outcome = self.file.read_exact_at(offset, bytes);
            outcome.map_err(|error| self.directory.file_error(&self.name, error))
        })
    }
}
