//! NumPy's arrays, numbers and dtypes in pickles: read and written without running anything.
//!
//! An array is a call of `_reconstruct` whose state has the shape, the dtype and the bytes, or of
//! `_frombuffer` in protocol 5; a number is a call of `scalar`. All of them become values with
//! NumPy's types, whose elements are row-major and little-endian. Arrays of objects, structures,
//! texts and times, and those of subclasses, stay opaque.

use fsdp_layout::boxes::{checked_numel, row_major_strides};
use fsdp_layout::{DType, PlainTensor, PlainValue, PythonType};

use super::Result;
use crate::error::FormatError;
use crate::formats::byte_order::reverse_numbers;
use crate::limits::is_sane_shape;
use crate::numpy::{dtype_from_code, dtype_to_code};
use crate::pickle::{Node, NodeId, OpaqueNode, Pickle, write};

/// The modules of NumPy that have `_reconstruct` and `scalar`, by version.
const MULTIARRAY: [&str; 2] = ["numpy._core.multiarray", "numpy.core.multiarray"];
/// The modules of NumPy that have `_frombuffer`, by version.
const NUMERIC: [&str; 2] = ["numpy._core.numeric", "numpy.core.numeric"];

/// A value of NumPy in a pickle.
pub(super) enum NumpyRef<'p> {
    /// An array or a number.
    Elements(ElementsRef<'p>),
    /// A dtype: its name, such as `<f4`.
    DType(String),
}

/// An array or a number in a pickle.
pub(super) struct ElementsRef<'p> {
    /// [`PythonType::NumpyArray`] or [`PythonType::NumpyScalar`].
    python_type: PythonType,
    element_type: ElementType,
    shape: Vec<usize>,
    /// The distance between neighbours along each dimension, in elements.
    strides: Vec<usize>,
    data: &'p [u8],
}

/// NumPy's dtype of numbers.
#[derive(Clone, Copy)]
struct ElementType {
    dtype: DType,
    is_big_endian: bool,
}

impl<'p> NumpyRef<'p> {
    /// Returns the value that an object of an unknown class is, if it is one of NumPy that can be
    /// read; `None` for all others.
    pub(super) fn find(pickle: &'p Pickle<'_>, object: &OpaqueNode<'_>) -> Option<Self> {
        if !object.module.starts_with("numpy")
            || !object.items.is_empty()
            || !object.entries.is_empty()
        {
            return None;
        }
        let args = pickle.sequence(object.args).ok()?;
        let (module, name) = (object.module, object.name);
        let elements = if MULTIARRAY.contains(&module) && name == "_reconstruct" {
            find_reconstructed(pickle, args, object.state?)?
        } else if MULTIARRAY.contains(&module) && name == "scalar" {
            find_scalar(pickle, args)?
        } else if NUMERIC.contains(&module) && name == "_frombuffer" {
            find_from_buffer(pickle, args)?
        } else if (module, name) == ("numpy", "dtype") {
            let element_type = find_element_type(pickle, args, object.state)?;
            return Some(NumpyRef::DType(element_type.name()?));
        } else {
            return None;
        };
        let length = checked_numel(&elements.shape)
            .filter(|_| is_sane_shape(&elements.shape))?
            .checked_mul(elements.element_bytes())?;
        (length == elements.data.len()).then_some(NumpyRef::Elements(elements))
    }

    /// Returns about how many bytes of memory the value takes.
    pub(super) fn memory_bytes(&self) -> u64 {
        let bytes = match self {
            NumpyRef::Elements(elements) => {
                size_of::<PlainValue>() + size_of_val(&elements.shape[..]) + elements.data.len()
            }
            NumpyRef::DType(name) => size_of::<PlainValue>() + name.len(),
        };
        bytes as u64
    }

    /// Returns the value.
    pub(super) fn into_value(self) -> PlainValue {
        match self {
            NumpyRef::DType(name) => PlainValue::typed(PythonType::NumpyDType, name),
            NumpyRef::Elements(elements) => {
                let tensor = PlainTensor {
                    dtype: elements.element_type.dtype,
                    data: elements.row_major(),
                    shape: elements.shape,
                };
                PlainValue::Typed(elements.python_type, Box::new(PlainValue::Tensor(tensor)))
            }
        }
    }
}

/// Returns the array of `_reconstruct(numpy.ndarray, (0,), b'b')` with the state `(1, shape, dtype,
/// is_fortran, bytes)`; `None` for all else.
fn find_reconstructed<'p>(
    pickle: &'p Pickle<'_>,
    args: &[NodeId],
    state: NodeId,
) -> Option<ElementsRef<'p>> {
    let [class, ..] = args else {
        return None;
    };
    let &[_version, shape, dtype, is_fortran, data] = pickle.sequence(state).ok()? else {
        return None;
    };
    if *pickle.node(*class) != Node::Foreign("numpy", "ndarray") {
        return None;
    }
    let shape = pickle.sizes(shape).ok()?;
    Some(ElementsRef {
        python_type: PythonType::NumpyArray,
        element_type: element_type_of(pickle, dtype)?,
        strides: strides_of(&shape, pickle.bool(is_fortran).ok()?),
        shape,
        data: bytes_of(pickle, data)?,
    })
}

/// Returns the number of `scalar(dtype, bytes)`; `None` for all else.
fn find_scalar<'p>(pickle: &'p Pickle<'_>, args: &[NodeId]) -> Option<ElementsRef<'p>> {
    let &[dtype, data] = args else {
        return None;
    };
    Some(ElementsRef {
        python_type: PythonType::NumpyScalar,
        element_type: element_type_of(pickle, dtype)?,
        shape: Vec::new(),
        strides: Vec::new(),
        data: bytes_of(pickle, data)?,
    })
}

/// Returns the array of `_frombuffer(bytes, dtype, shape, order)`; `None` for all else. With the
/// order `K` the dimensions are those of the bytes, and a fifth argument says in which order the
/// array has them.
fn find_from_buffer<'p>(pickle: &'p Pickle<'_>, args: &[NodeId]) -> Option<ElementsRef<'p>> {
    let (&[data, dtype, shape, order], axes) = args.split_first_chunk()?;
    let stored_shape = pickle.sizes(shape).ok()?;
    let stored_strides = strides_of(&stored_shape, pickle.str(order).ok()? == "F");
    let (shape, strides) = match (pickle.str(order).ok()?, axes) {
        ("C" | "F", _) => (stored_shape, stored_strides),
        ("K", &[axes]) => {
            let axes = pickle.sizes(axes).ok()?;
            let mut sorted_axes = axes.clone();
            sorted_axes.sort_unstable();
            if !sorted_axes.into_iter().eq(0..stored_shape.len()) {
                return None;
            }
            let transpose = |sizes: &[usize]| axes.iter().map(|&axis| sizes[axis]).collect();
            (transpose(&stored_shape), transpose(&stored_strides))
        }
        _ => return None,
    };
    Some(ElementsRef {
        python_type: PythonType::NumpyArray,
        element_type: element_type_of(pickle, dtype)?,
        shape,
        strides,
        data: bytes_of(pickle, data)?,
    })
}

/// Returns the strides of an array whose last dimension is innermost, or the first one.
fn strides_of(shape: &[usize], is_fortran: bool) -> Vec<usize> {
    if !is_fortran {
        return row_major_strides(shape);
    }
    let reversed: Vec<usize> = shape.iter().rev().copied().collect();
    row_major_strides(&reversed).into_iter().rev().collect()
}

/// Returns the dtype of numbers that a node is; `None` for all else.
fn element_type_of(pickle: &Pickle<'_>, id: NodeId) -> Option<ElementType> {
    match pickle.node(id) {
        Node::Opaque(object) if (object.module, object.name) == ("numpy", "dtype") => {
            find_element_type(pickle, pickle.sequence(object.args).ok()?, object.state)
        }
        _ => None,
    }
}

/// Returns the dtype of `dtype('f4', False, True)` with the state `(3, '<', None, None, None, -1,
/// -1, 0)`. Where NumPy has something else than `None` it is a dtype of structures or of arrays,
/// for which `None` is returned, as for all that are no numbers.
fn find_element_type(
    pickle: &Pickle<'_>,
    args: &[NodeId],
    state: Option<NodeId>,
) -> Option<ElementType> {
    let code = pickle.str(*args.first()?).ok()?;
    let dtype = dtype_from_code(code)?;
    let order = match state {
        None => "=",
        Some(state) => {
            let &[_version, order, ref parts @ ..] = pickle.sequence(state).ok()? else {
                return None;
            };
            let mut parts = parts.iter().take(3);
            if parts.any(|&part| *pickle.node(part) != Node::None) {
                return None;
            }
            pickle.str(order).ok()?
        }
    };
    Some(ElementType {
        dtype,
        is_big_endian: match order {
            "<" | "|" | "=" => false,
            ">" => true,
            _ => return None,
        },
    })
}

/// Returns the bytes of a node; `None` if it has none.
fn bytes_of<'p>(pickle: &'p Pickle<'_>, id: NodeId) -> Option<&'p [u8]> {
    match pickle.node(id) {
        Node::Bytes(bytes) | Node::ByteArray(bytes) => Some(bytes),
        _ => None,
    }
}

impl ElementType {
    /// Returns NumPy's name of it, such as `<f4`; `None` if NumPy has none.
    fn name(self) -> Option<String> {
        let order = match self.is_big_endian {
            _ if self.dtype.size_in_bytes() == 1 => "|",
            true => ">",
            false => "<",
        };
        Some(format!("{order}{}", dtype_to_code(self.dtype)?))
    }
}

impl ElementsRef<'_> {
    /// Returns the bytes of an element.
    fn element_bytes(&self) -> usize {
        self.element_type.dtype.size_in_bytes() as usize
    }

    /// Returns the elements in row-major order, little-endian.
    fn row_major(&self) -> Vec<u8> {
        let element_bytes = self.element_bytes();
        let mut bytes = Vec::with_capacity(self.data.len());
        if self.strides == row_major_strides(&self.shape) {
            bytes.extend_from_slice(self.data);
        } else {
            let mut index = vec![0; self.shape.len()];
            while bytes.len() < self.data.len() {
                let positions = index.iter().zip(&self.strides);
                let position: usize = positions.map(|(place, stride)| place * stride).sum();
                let start = position * element_bytes;
                bytes.extend_from_slice(&self.data[start..start + element_bytes]);
                advance(&mut index, &self.shape);
            }
        }
        if self.element_type.is_big_endian {
            reverse_numbers(self.element_type.dtype, &mut bytes);
        }
        bytes
    }
}

/// Moves an index to the next element of an array in row-major order; from the last one to the
/// first.
fn advance(index: &mut [usize], shape: &[usize]) {
    for (place, &size) in index.iter_mut().zip(shape).rev() {
        *place += 1;
        if *place < size {
            return;
        }
        *place = 0;
    }
}

/// Appends the opcodes of NumPy's array, number or dtype that this value describes.
///
/// # Errors
/// A description of another type; a dtype that NumPy does not have.
pub(super) fn write_numpy(
    out: &mut Vec<u8>,
    python_type: PythonType,
    description: &PlainValue,
) -> Result<()> {
    match (python_type, description) {
        (PythonType::NumpyDType, PlainValue::Str(name)) => {
            let (order, code) = name.split_at_checked(1).unwrap_or_default();
            if dtype_from_code(code).is_none() || !matches!(order, "<" | ">" | "|") {
                return Err(FormatError::unsupported(format!("NumPy's dtype `{name}`")));
            }
            write_dtype(out, order, code);
        }
        (PythonType::NumpyArray | PythonType::NumpyScalar, PlainValue::Tensor(tensor)) => {
            let element_type = ElementType {
                dtype: tensor.dtype,
                is_big_endian: false,
            };
            let Some(name) = element_type.name() else {
                let what = format!("an array of NumPy of the dtype `{}`", tensor.dtype);
                return Err(FormatError::unsupported(what));
            };
            let (order, code) = name.split_at(1);
            if python_type == PythonType::NumpyScalar {
                write::global(out, MULTIARRAY[0], "scalar");
                write_dtype(out, order, code);
                write::bytes(out, &tensor.data);
                write::close_tuple(out, 2);
                out.push(write::REDUCE);
                return Ok(());
            }
            write::global(out, MULTIARRAY[0], "_reconstruct");
            write::global(out, "numpy", "ndarray");
            write::sizes(out, &[0]);
            write::bytes(out, b"b");
            write::close_tuple(out, 3);
            out.push(write::REDUCE);
            write::open_tuple(out, 5);
            write::int(out, 1);
            write::sizes(out, &tensor.shape);
            write_dtype(out, order, code);
            write::bool(out, false);
            write::bytes(out, &tensor.data);
            write::close_tuple(out, 5);
            out.push(write::BUILD);
        }
        (python_type, other) => {
            let found = format!("a value of type `{}`", other.type_name());
            return Err(FormatError::unexpected(python_type.name(), found));
        }
    }
    Ok(())
}

/// Appends the opcodes of NumPy's dtype with this order of bytes and this code.
fn write_dtype(out: &mut Vec<u8>, order: &str, code: &str) {
    write::global(out, "numpy", "dtype");
    write::text(out, code);
    write::bool(out, false);
    write::bool(out, true);
    write::close_tuple(out, 3);
    out.push(write::REDUCE);
    write::open_tuple(out, 8);
    write::int(out, 3);
    write::text(out, order);
    out.extend_from_slice(&[write::NONE; 3]);
    for number in [-1, -1, 0] {
        write::int(out, number);
    }
    write::close_tuple(out, 8);
    out.push(write::BUILD);
}
