//! An open checkpoint of any format.

use std::collections::HashSet;
use std::ffi::OsString;

use fsdp_cli::{CommandError, exit_codes};
use fsdp_formats::checkpoint;
use fsdp_formats::metadata::{BytesEntry, Entry, encode};
use fsdp_formats::plan::{LoadPlanError, LoadRequest};
use fsdp_formats::reader::{Destination, OpenOptions, ReadOptions};
use fsdp_formats::{FileError, writer};
use fsdp_layout::TensorBox;
use globset::Glob;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::error::{run_detached, to_exception};
use crate::memory::{borrow, borrowed_bytes_mut, check_apart};
use crate::value::to_python;

/// An open checkpoint of any format.
#[pyclass(frozen)]
pub(crate) struct Checkpoint {
    opened: Box<dyn checkpoint::Checkpoint>,
}

/// A tensor in a list: name, dtype, shape.
type ListedTensor<'py> = (String, &'static str, Bound<'py, PyTuple>);

/// A box of a tensor, and the buffer that it goes to: name, offsets, sizes, buffer.
type WantedBox<'py> = (String, Vec<usize>, Vec<usize>, Bound<'py, PyAny>);

#[pymethods]
impl Checkpoint {
    /// Opens the checkpoint at a path or a URL.
    #[new]
    fn new(py: Python<'_>, path: OsString) -> PyResult<Self> {
        let opened = run_detached(py, || checkpoint::open(path, OpenOptions { verify: true }))?;
        Ok(Checkpoint { opened })
    }

    /// Lists the tensors, in the order of the checkpoint.
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Vec<ListedTensor<'py>>> {
        let tensors = self.opened.metadata().tensors();
        tensors
            .map(|(name, tensor)| {
                Ok((
                    name.to_owned(),
                    tensor.properties.dtype.torch_name(),
                    PyTuple::new(py, &tensor.shape)?,
                ))
            })
            .collect()
    }

    /// Lists the names of the values that are not tensors.
    fn values(&self) -> Vec<String> {
        self.opened
            .metadata()
            .values()
            .map(|(name, _)| name.to_owned())
            .collect()
    }

    /// Lists the keys of tensors and values that a glob matches, in the order of the checkpoint.
    ///
    /// # Errors
    /// A glob that is none.
    fn matching(&self, py: Python<'_>, glob: &str) -> PyResult<Vec<String>> {
        let matcher = Glob::new(glob)
            .map_err(|error| {
                let message = format!("`{glob}` is not a valid glob: {}", error.kind());
                to_exception(
                    py,
                    CommandError {
                        exit_code: exit_codes::USAGE,
                        message,
                        hint: Some("a glob may contain `*`, `?`, `[a-z]` and `{a,b}`"),
                    },
                )
            })?
            .compile_matcher();
        let keys = self.opened.metadata().entries.keys();
        Ok(keys.filter(|key| matcher.is_match(key)).cloned().collect())
    }

    /// Returns the metadata as a pickle of torch's `Metadata`. It is encoded from the parsed
    /// metadata, so no bytes of the file's own pickle reach Python.
    fn metadata<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &encode(self.opened.metadata()))
    }

    /// Checks that the stored files are large enough for the bytes that the metadata says are in
    /// them, for all tensors or for those with these keys. It is called before memory is allocated
    /// for the tensors, so that wrong metadata cannot ask for more than the files have.
    #[pyo3(signature = (keys))]
    fn check(&self, py: Python<'_>, keys: Option<HashSet<String>>) -> PyResult<()> {
        run_detached(py, || {
            self.opened
                .check_stored(&|name| keys.as_ref().is_none_or(|keys| keys.contains(name)))
        })
    }

    /// Returns a value that is not a tensor. `tensor` is a Python function that builds the tensors
    /// inside it from dtype, shape and bytes, and `typed` one that builds objects of other types
    /// from the type's name and a simpler value.
    fn value<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        tensor: &Bound<'py, PyAny>,
        typed: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let value = run_detached(py, || self.opened.read_value(name))?;
        to_python(&value, tensor, typed)
    }

    /// Returns a value as `torch.save` would write it. The bytes are encoded from the parsed value,
    /// so no bytes of the file's own pickle reach Python.
    fn item<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyBytes>> {
        let encoded = run_detached(py, || {
            let value = self.opened.read_value(name)?;
            writer::encode_value(&value).map_err(|source| FileError::Encode {
                fqn: name.to_owned(),
                source,
            })
        })?;
        Ok(PyBytes::new(py, &encoded))
    }

    /// Returns the bytes of a value as they are stored. They may be a pickle that runs code when
    /// torch loads it. A value that is not stored by itself is encoded as [`Self::item`] does.
    fn stored_item<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyBytes>> {
        let Some(Entry::Bytes(BytesEntry {
            stored: Some(stored),
            ..
        })) = self.opened.metadata().entries.get(name)
        else {
            return self.item(py, name);
        };
        let bytes = run_detached(py, || self.opened.read_item(name, stored))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Fills buffers with boxes of tensors, in the dtypes of the checkpoint. Several threads read.
    /// All requests are checked before the first byte is read.
    fn read(&self, py: Python<'_>, wanted: Vec<WantedBox<'_>>) -> PyResult<()> {
        let mut requests = Vec::with_capacity(wanted.len());
        let mut memory = Vec::with_capacity(wanted.len());
        for (name, offsets, lengths, buffer) in wanted {
            let Some(tensor) = self.opened.metadata().tensor(&name) else {
                return Err(to_exception(
                    py,
                    FileError::from(LoadPlanError::Missing { fqn: name }),
                ));
            };
            let bounds = TensorBox {
                offsets,
                sizes: lengths,
            };
            if !bounds.fits(&tensor.shape) {
                let error = LoadPlanError::OutOfBounds {
                    fqn: name,
                    bounds,
                    shape: tensor.shape.clone(),
                };
                return Err(to_exception(py, FileError::from(error)));
            }
            let dtype = tensor.properties.dtype;
            let box_bytes = bounds.numel() * dtype.size_in_bytes() as usize;
            memory.push(borrow(&buffer, box_bytes, true)?);
            requests.push(LoadRequest {
                fqn: name,
                dtype,
                shape: tensor.shape.clone(),
                boxes: vec![bounds],
            });
        }
        // Each buffer becomes a slice of its own, which no other may overlap.
        check_apart(&memory)?;
        let buffers = memory.iter_mut().map(borrowed_bytes_mut);
        let destinations: Vec<Destination<'_>> = requests
            .into_iter()
            .zip(buffers)
            .map(|(request, buffer)| Destination::new(request, vec![buffer]))
            .collect();
        run_detached(py, || {
            self.opened.read(destinations, ReadOptions::default())
        })?;
        Ok(())
    }
}
