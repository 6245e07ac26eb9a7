//! Plain values as Python objects.

use fsdp_layout::PlainValue;
use pyo3::exceptions::PyNotImplementedError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyInt, PyList, PySet, PyTuple};

/// Returns a plain value as a Python object. `make_tensor` is a Python function that makes a tensor
/// from the name of its dtype, its shape and its bytes; `make_object` makes an object from the name
/// of its type and the value that describes it.
///
/// # Errors
/// `NotImplementedError` for a kind of value that has no counterpart; the errors of the two
/// functions.
pub(crate) fn to_python<'py>(
    value: &PlainValue,
    make_tensor: &Bound<'py, PyAny>,
    make_object: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = make_tensor.py();
    Ok(match value {
        PlainValue::None => py.None().into_bound(py),
        PlainValue::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
        PlainValue::Int(value) => value.into_pyobject(py)?.into_any(),
        PlainValue::BigInt(bytes) => {
            // Python's integers of any size are made from bytes by this method only.
            let options = PyDict::new(py);
            options.set_item("signed", true)?;
            let int = py.get_type::<PyInt>();
            int.call_method(
                "from_bytes",
                (PyBytes::new(py, bytes), "little"),
                Some(&options),
            )?
        }
        PlainValue::Float(value) => value.into_pyobject(py)?.into_any(),
        PlainValue::Str(value) => value.into_pyobject(py)?.into_any(),
        PlainValue::Bytes(value) => PyBytes::new(py, value).into_any(),
        PlainValue::List(items) => {
            PyList::new(py, items_to_python(items, make_tensor, make_object)?)?.into_any()
        }
        PlainValue::Tuple(items) => {
            PyTuple::new(py, items_to_python(items, make_tensor, make_object)?)?.into_any()
        }
        PlainValue::Set(items) => {
            PySet::new(py, items_to_python(items, make_tensor, make_object)?)?.into_any()
        }
        PlainValue::Dict(items) => {
            let dict = PyDict::new(py);
            for (key, value) in items {
                dict.set_item(
                    to_python(key, make_tensor, make_object)?,
                    to_python(value, make_tensor, make_object)?,
                )?;
            }
            dict.into_any()
        }
        PlainValue::Tensor(plain) => {
            // The caller knows which framework's tensors are wanted.
            let shape = PyTuple::new(py, &plain.shape)?;
            make_tensor.call1((
                plain.dtype.torch_name(),
                shape,
                PyBytes::new(py, &plain.data),
            ))?
        }
        PlainValue::Typed(value_type, description) => make_object.call1((
            value_type.name(),
            to_python(description, make_tensor, make_object)?,
        ))?,
        // A kind of value that this crate does not know yet.
        unknown => {
            let name = unknown.type_name();
            return Err(PyNotImplementedError::new_err(format!(
                "a value of type `{name}` has no counterpart in Python"
            )));
        }
    })
}

/// Returns each of several values as a Python object, like [`to_python`].
fn items_to_python<'py>(
    items: &[PlainValue],
    make_tensor: &Bound<'py, PyAny>,
    make_object: &Bound<'py, PyAny>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    items
        .iter()
        .map(|item| to_python(item, make_tensor, make_object))
        .collect()
}
