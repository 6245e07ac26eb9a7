//! An open checkpoint of any format.

use std::collections::HashSet;
use std::ffi::OsString;

use fsdp_formats::checkpoint;
use fsdp_formats::metadata::{Entry, encode};
use fsdp_formats::plan::LoadRequest;
use fsdp_formats::reader::{Destination, OpenOptions, ReadOptions};
use fsdp_formats::{FileError, FormatError, writer};
use fsdp_layout::TensorBox;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::error::{exception, sizes};
use crate::memory::Memory;
use crate::value::to_python;

/// An open checkpoint of any format.
#[pyclass(frozen)]
pub(crate) struct Checkpoint {
    opened: Box<dyn checkpoint::Checkpoint>,
}

/// A tensor in a list: name, dtype, shape.
type Listed<'py> = (String, &'static str, Bound<'py, PyTuple>);

/// A box of a tensor, and the buffer that it goes to: name, offsets, sizes, buffer.
type Wanted<'py> = (String, Vec<usize>, Vec<usize>, Bound<'py, PyAny>);

#[pymethods]
impl Checkpoint {
    /// Opens the checkpoint at a path or a URL.
    #[new]
    fn new(py: Python<'_>, path: OsString) -> PyResult<Self> {
        let opened = py.detach(|| checkpoint::open(path, OpenOptions { verify: true }));
        opened
            .map(|opened| Checkpoint { opened })
            .map_err(|error| exception(py, error))
    }

    /// Lists the tensors, in the order of the checkpoint.
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Vec<Listed<'py>>> {
        let tensors = self.opened.metadata().tensors();
        tensors
            .map(|(name, tensor)| {
                Ok((
                    name.to_owned(),
                    tensor.properties.dtype.torch_name(),
                    sizes(py, &tensor.shape)?,
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
        let is_wanted = |name: &str| keys.as_ref().is_none_or(|keys| keys.contains(name));
        py.detach(|| self.opened.check_stored(&is_wanted))
            .map_err(|error| exception(py, error))
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
        let value = py
            .detach(|| self.opened.read_value(name))
            .map_err(|error| exception(py, error))?;
        to_python(py, &value, tensor, typed)
    }

    /// Returns a value as `torch.save` would write it. The bytes are encoded from the parsed value,
    /// so no bytes of the file's own pickle reach Python.
    fn item<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyBytes>> {
        let encoded = py.detach(|| {
            let value = self.opened.read_value(name)?;
            writer::encode_value(&value).map_err(|source| encode_error(name, source))
        });
        encoded
            .map(|bytes| PyBytes::new(py, &bytes))
            .map_err(|error| exception(py, error))
    }

    /// Returns the bytes of a value as they are stored. They may be a pickle that runs code when
    /// torch loads it. A value that is not stored by itself is encoded as [`Self::item`] does.
    fn stored_item<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyBytes>> {
        let Some(Entry::Bytes(entry)) = self.opened.metadata().entries.get(name) else {
            return self.item(py, name);
        };
        let Some(stored) = &entry.stored else {
            return self.item(py, name);
        };
        let bytes = py.detach(|| self.opened.read_item(name, stored));
        bytes
            .map(|bytes| PyBytes::new(py, &bytes))
            .map_err(|error| exception(py, error))
    }

    /// Fills buffers with boxes of tensors, in the dtypes of the checkpoint. Several threads read.
    /// All requests are checked before the first byte is read.
    fn read(&self, py: Python<'_>, wanted: Vec<Wanted<'_>>) -> PyResult<()> {
        let mut requests = Vec::with_capacity(wanted.len());
        let mut memory = Vec::with_capacity(wanted.len());
        for (name, offsets, lengths, buffer) in wanted {
            let found = self.opened.metadata().tensor(&name);
            let tensor = found.ok_or_else(|| exception(py, missing(&name)))?;
            let bounds = TensorBox {
                offsets,
                sizes: lengths,
            };
            if !bounds.fits(&tensor.shape) {
                let shape = tensor.shape.clone();
                let error = fsdp_formats::plan::LoadPlanError::OutOfBounds {
                    fqn: name,
                    bounds,
                    shape,
                };
                return Err(exception(py, FileError::from(error)));
            }
            let dtype = tensor.properties.dtype;
            let buffer = Memory::of(&buffer, bounds.numel() * dtype.size_in_bytes() as usize)?;
            buffer.check_writable()?;
            memory.push(buffer);
            requests.push(LoadRequest {
                fqn: name,
                dtype,
                shape: tensor.shape.clone(),
                boxes: vec![bounds],
            });
        }
        Memory::check_apart(&memory)?;
        let buffers = memory.iter_mut().map(Memory::bytes_mut);
        let destinations: Vec<Destination<'_>> = requests
            .into_iter()
            .zip(buffers)
            .map(|(request, buffer)| Destination::new(request, vec![buffer]))
            .collect();
        let read = py.detach(|| self.opened.read(destinations, ReadOptions::default()));
        read.map(drop).map_err(|error| exception(py, error))
    }
}

/// Returns the error for a tensor that the checkpoint does not have.
fn missing(name: &str) -> FileError {
    FileError::from(fsdp_formats::plan::LoadPlanError::Missing {
        fqn: name.to_owned(),
    })
}

/// Returns the error for a value that cannot be encoded.
fn encode_error(name: &str, source: FormatError) -> FileError {
    FileError::Encode {
        fqn: name.to_owned(),
        source,
    }
}
