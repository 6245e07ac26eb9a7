//! Values of NumPy in a format that does not keep them: torch loads no file with them unless it is
//! told to trust their classes.

use fsdp_layout::{DType, PlainTensor, PlainValue, PythonType};

use crate::elements::for_each_number;

/// Returns a value in which arrays of NumPy are tensors, its numbers are Python's, and its dtypes
/// are text.
pub(super) fn without_numpy(value: PlainValue) -> PlainValue {
    match value {
        PlainValue::List(items) => PlainValue::List(all_without_numpy(items)),
        PlainValue::Tuple(items) => PlainValue::Tuple(all_without_numpy(items)),
        PlainValue::Set(items) => PlainValue::Set(all_without_numpy(items)),
        PlainValue::Dict(items) => PlainValue::Dict(
            items
                .into_iter()
                .map(|(key, value)| (without_numpy(key), without_numpy(value)))
                .collect(),
        ),
        PlainValue::Typed(PythonType::NumpyArray | PythonType::NumpyDType, described) => *described,
        PlainValue::Typed(PythonType::NumpyScalar, described) => match *described {
            PlainValue::Tensor(tensor) => {
                python_number(&tensor).unwrap_or(PlainValue::Tensor(tensor))
            }
            other => other,
        },
        PlainValue::Typed(python_type, described) => {
            PlainValue::typed(python_type, without_numpy(*described))
        }
        other => other,
    }
}

/// Returns each of several values without those of NumPy.
fn all_without_numpy(items: Vec<PlainValue>) -> Vec<PlainValue> {
    items.into_iter().map(without_numpy).collect()
}

/// Returns `true` if a value is one of NumPy, or holds one.
pub(super) fn holds_numpy(value: &PlainValue) -> bool {
    match value {
        PlainValue::List(items) | PlainValue::Tuple(items) | PlainValue::Set(items) => {
            items.iter().any(holds_numpy)
        }
        PlainValue::Dict(items) => items
            .iter()
            .any(|(key, value)| holds_numpy(key) || holds_numpy(value)),
        PlainValue::Typed(
            PythonType::NumpyArray | PythonType::NumpyScalar | PythonType::NumpyDType,
            _,
        ) => true,
        PlainValue::Typed(_, described) => holds_numpy(described),
        _ => false,
    }
}

/// Returns the number of Python that is equal to the only element of a tensor; `None` for complex
/// numbers, which plain values do not have.
fn python_number(tensor: &PlainTensor) -> Option<PlainValue> {
    match tensor.dtype {
        DType::Bool => Some(PlainValue::Bool(tensor.data != [0])),
        DType::F16 | DType::F32 | DType::F64 => {
            let mut number = None;
            for_each_number(tensor.dtype, &tensor.data, &mut |value| {
                number = Some(value)
            });
            number.map(PlainValue::Float)
        }
        DType::U8 | DType::U16 | DType::U32 | DType::U64 => Some(integer(&tensor.data, false)),
        DType::I8 | DType::I16 | DType::I32 | DType::I64 => Some(integer(&tensor.data, true)),
        _ => None,
    }
}

/// Returns the integer of these bytes, of which there are eight at most.
fn integer(bytes: &[u8], is_signed: bool) -> PlainValue {
    let is_high = bytes.last().is_some_and(|&byte| byte >= 0x80);
    let fill = if is_signed && is_high { 0xff } else { 0 };
    let mut extended = [fill; 8];
    extended[..bytes.len()].copy_from_slice(bytes);
    let number = i64::from_le_bytes(extended);
    if is_signed {
        return PlainValue::Int(number);
    }
    PlainValue::unsigned(number.cast_unsigned())
}
