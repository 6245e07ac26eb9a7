//! A checkpoint that torch's ranks write together: each its own file, then one commit.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::OsString;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use fsdp_formats::checkpoint::check_replaceable;
use fsdp_formats::plan::{LocalPlan, SelectedItem, Selection};
use fsdp_formats::storage::{self, Durable};
use fsdp_formats::writer::{
    PayloadSource, RankItems, RankWritten, WriteOptions, decode_value, describe_item,
    finish_encoded, write_rank,
};
use fsdp_formats::{FileError, Location};
use fsdp_layout::boxes::checked_bytes;
use fsdp_layout::{DType, PlainValue, TensorBox};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::error::{run_detached, to_exception, wrong_argument};
use crate::memory::{borrow, borrowed_bytes};

/// A checkpoint that is being written. If the rank that prepared it drops it without a call of
/// [`Staging::finish`], all its files are removed.
#[pyclass(frozen)]
pub(crate) struct Staging {
    /// The staging directory; `None` after [`Staging::finish`] or [`Staging::discard`].
    staging: Mutex<Option<storage::Staging>>,
    name: String,
}

/// A tensor to write: name, dtype, shape of the whole, offsets and sizes of the box, and its bytes,
/// or a function that returns bytes of it: from a position on, and so many.
type TensorItem<'py> = (
    String,
    String,
    Vec<usize>,
    Vec<usize>,
    Vec<usize>,
    Bound<'py, PyAny>,
);

/// Where an item was written: its position in the list of items, its file, offset and length.
type ItemPlace = (u32, String, u64, u64);

/// A value that cannot be read without running its pickle: its name, and the reason.
type OpaqueItem = (String, String);

#[pymethods]
impl Staging {
    /// Prepares to write a checkpoint at a path or a URL. Only the coordinator calls this; the
    /// other ranks join. Removes what killed saves have left beside the path.
    ///
    /// # Errors
    /// Something is there that may not be replaced; the errors of the storage.
    #[staticmethod]
    fn prepare(py: Python<'_>, path: OsString, overwrite: bool) -> PyResult<Self> {
        let staging = run_detached(py, || {
            let target = Location::from(path);
            if overwrite {
                check_replaceable(&target)?;
            }
            // Remove the staging directories that killed saves have left beside the target.
            storage::clean_stale(target.clone())?;
            let staging = Durable::new().prepare(target, overwrite)?;
            // This is known before the ranks write, and would otherwise fail the commit.
            staging.check_replaces_directory()?;
            Ok::<_, FileError>(staging)
        })?;
        Ok(Staging::new(staging))
    }

    /// Joins the staging directory that the coordinator has made for the same path. `name` is that
    /// directory's name.
    #[staticmethod]
    fn join(py: Python<'_>, path: OsString, name: &str) -> PyResult<Self> {
        let staging = run_detached(py, || Durable::new().join(path, name))?;
        Ok(Staging::new(staging))
    }

    /// Returns the name by which other ranks join.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Writes the file of a rank, from the tensors' own memory, or from pieces that functions
    /// return, several of which are called at once. When this returns, the file is on the disk.
    /// Returns the place of each item in it, a report for [`Staging::finish`], and the
    /// values that cannot be read without running their pickles. Items are numbered in the order of
    /// `tensors`, and then of `values`.
    fn write_rank<'py>(
        &self,
        py: Python<'py>,
        rank: usize,
        tensors: Vec<TensorItem<'py>>,
        values: Vec<(String, PyBackedBytes)>,
    ) -> PyResult<(Vec<ItemPlace>, Bound<'py, PyBytes>, Vec<OpaqueItem>)> {
        let mut plan = LocalPlan::default();
        let mut items = PythonItems::default();
        for (fqn, dtype, shape, offsets, lengths, buffer) in tensors {
            let dtype = DType::from_torch_name(&dtype).ok_or_else(|| {
                wrong_argument(format!(
                    "`{fqn}` is of dtype {dtype}, which no checkpoint can hold"
                ))
            })?;
            let bounds = TensorBox {
                offsets,
                sizes: lengths,
            };
            if !bounds.fits(&shape) {
                return Err(wrong_argument(format!(
                    "box {bounds} of `{fqn}` does not lie in its shape {shape:?}"
                )));
            }
            // The sizes come from the caller, so their product may overflow.
            let box_bytes = checked_bytes(&bounds.sizes, dtype)
                .ok_or_else(|| wrong_argument(format!("box {bounds} of `{fqn}` is too large")))?;
            let memory = if buffer.is_callable() {
                TensorBytes::InPieces(buffer.unbind())
            } else {
                TensorBytes::Borrowed(borrow(&buffer, box_bytes, false)?)
            };
            plan.add_tensor(&fqn, None, dtype, shape, vec![bounds.clone()]);
            items.tensors.entry(fqn).or_default().push((bounds, memory));
        }
        let mut has_digests = true;
        let mut opaque_items = Vec::new();
        for (fqn, item) in values {
            plan.add_value(&fqn, None, item.len() as u64);
            // Read the value as a reader will, for its digest. If one value cannot even be
            // described, the checkpoint has no digests.
            let value = match decode_value(&item) {
                Ok(value) => Some(value),
                Err(error) => {
                    opaque_items.push((fqn.clone(), error.to_string()));
                    describe_item(&item).ok()
                }
            };
            has_digests &= value.is_some();
            items
                .values
                .insert(fqn, (item, value.unwrap_or(PlainValue::None)));
        }
        // Write every item: torch's planner has already decided which rank writes what.
        let selection = Selection {
            kept: (0..plan.items.len() as u32)
                .map(|item| SelectedItem {
                    item,
                    index: 0,
                    entry: item,
                    chunk: 0,
                })
                .collect(),
        };
        let options = WriteOptions {
            digests: has_digests,
            ..WriteOptions::default()
        };
        let rank_items = RankItems {
            rank,
            plan: &plan,
            selection: &selection,
            source: &items,
        };
        let outcome = py.detach(|| {
            self.lock()
                .as_ref()
                .map(|staging| write_rank(staging, &rank_items, &options, None))
        });
        let written = outcome
            .ok_or_else(finished_error)?
            .map_err(|error| to_exception(py, error))?;
        let mut places = Vec::with_capacity(written.items.len());
        for item in &written.items {
            let file = &written.files[item.file as usize];
            places.push((item.entry, file.name.clone(), item.offset, item.length));
        }
        let report = serde_json::to_vec(&written).map_err(|error| to_exception(py, error))?;
        Ok((places, PyBytes::new(py, &report), opaque_items))
    }

    /// Writes the hashes and the metadata, which torch has pickled, and commits the checkpoint in
    /// one step. `reports` are those of [`Staging::write_rank`] of all ranks. Only the coordinator
    /// calls this.
    fn finish(&self, py: Python<'_>, metadata: Vec<u8>, reports: Vec<Vec<u8>>) -> PyResult<()> {
        let parsed: Result<Vec<RankWritten>, _> = reports
            .iter()
            .map(|report| serde_json::from_slice(report))
            .collect();
        let written = parsed.map_err(|error| to_exception(py, error))?;
        // It is taken out, so that a checkpoint is committed once.
        let staging = self.lock().take().ok_or_else(finished_error)?;
        run_detached(py, || finish_encoded(staging, &metadata, &written))
    }

    /// Ends the save without a checkpoint. The rank that prepared it removes the files that were
    /// written.
    fn discard(&self, py: Python<'_>) {
        py.detach(|| drop(self.lock().take()));
    }
}

impl Staging {
    /// Returns the checkpoint that is written in this staging directory.
    fn new(staging: storage::Staging) -> Self {
        let name = staging.name().to_owned();
        Staging {
            staging: Mutex::new(Some(staging)),
            name,
        }
    }

    /// Returns the staging directory. A call that panicked has not changed it.
    fn lock(&self) -> MutexGuard<'_, Option<storage::Staging>> {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the error for a call after [`Staging::finish`] or [`Staging::discard`].
fn finished_error() -> PyErr {
    wrong_argument("the checkpoint is finished, or was discarded")
}

/// The bytes of a box.
enum TensorBytes {
    Borrowed(PyBuffer<u8>),
    /// A function that returns them in pieces, because the host has no memory of them.
    InPieces(Py<PyAny>),
}

/// The bytes that such a function is asked for at a time: enough for the speed of the bus, and few
/// enough to be in the processor's cache when they are used.
const PIECE_BYTES: u64 = 4 << 20;

/// Passes bytes that a function of Python's returns to `sink`, piece after piece. Python goes on
/// with other things while the sink has one.
///
/// # Errors
/// The function's, and memory that is no such piece; the errors of `sink`.
fn pass_on_pieces(
    fqn: &str,
    read: &Py<PyAny>,
    range: Range<u64>,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), FileError>,
) -> Result<(), FileError> {
    for start in range.clone().step_by(PIECE_BYTES as usize) {
        let len = PIECE_BYTES.min(range.end - start);
        let piece = Python::attach(|py| {
            let piece = read.bind(py).call1((start, len))?;
            borrow(&piece, len as usize, false)
        });
        let piece = piece.map_err(|error| FileError::Payload {
            fqn: fqn.to_owned(),
            source: Box::new(error),
        })?;
        sink(borrowed_bytes(&piece))?;
    }
    Ok(())
}

/// The items that a rank writes. The tensors' bytes are in Python's memory.
#[derive(Default)]
struct PythonItems {
    tensors: HashMap<String, Vec<(TensorBox, TensorBytes)>>,
    /// The bytes of each value's item, and the value that a reader finds in them;
    /// [`PlainValue::None`] if they cannot be read.
    values: HashMap<String, (PyBackedBytes, PlainValue)>,
}

impl PayloadSource for PythonItems {
    /// Hands the bytes of a part of a box to `sink`, from the memory of its tensor.
    fn payload(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        let memory = self
            .tensors
            .get(fqn)
            .and_then(|boxes| boxes.iter().find(|(planned, _)| planned == bounds));
        match memory {
            Some((_, TensorBytes::InPieces(read))) => pass_on_pieces(fqn, read, range, sink),
            Some((_, TensorBytes::Borrowed(memory))) => {
                let part = borrowed_bytes(memory).get(range.start as usize..range.end as usize);
                sink(part.ok_or_else(|| FileError::not_stored(fqn))?)
            }
            None => Err(FileError::not_stored(fqn)),
        }
    }

    fn stored_item(&self, fqn: &str) -> Result<Option<Cow<'_, [u8]>>, FileError> {
        Ok(self.values.get(fqn).map(|(item, _)| Cow::Borrowed(&**item)))
    }

    fn value(&self, fqn: &str) -> Result<Cow<'_, PlainValue>, FileError> {
        let (_, value) = self
            .values
            .get(fqn)
            .ok_or_else(|| FileError::not_stored(fqn))?;
        Ok(Cow::Borrowed(value))
    }
}
