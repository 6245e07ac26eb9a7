//! Plain values: the values of a state dict that are not tensors.

use serde::{Deserialize, Serialize};

use crate::dtype::DType;

/// A non-tensor value, with Python's distinctions where they matter to a checkpoint
/// (a tuple is not a list, a bool is not an int).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PlainValue {
    /// Python's `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer that fits 64 bits.
    Int(i64),
    /// An integer that does not fit 64 bits: its two's-complement bytes, little-endian, as in a
    /// pickle.
    BigInt(Vec<u8>),
    /// A float. `==` compares by value, so NaN differs from itself; [`PlainValue::same_bits`]
    /// compares bits.
    Float(f64),
    /// Text.
    Str(String),
    /// Raw bytes.
    Bytes(Vec<u8>),
    /// A list, `[…]`.
    List(Vec<PlainValue>),
    /// A tuple, `(…)`.
    Tuple(Vec<PlainValue>),
    /// A set, `{…}`, in the stored order.
    Set(Vec<PlainValue>),
    /// A dict, `{key: value}`, in insertion order. Keys may be any plain value.
    Dict(Vec<(PlainValue, PlainValue)>),
    /// A tensor inside another plain value, such as a tuple, where it has no key of its own.
    Tensor(PlainTensor),
    /// An object of one of the other types that checkpoints often hold, and the simpler value that
    /// describes it.
    Typed(PythonType, Box<PlainValue>),
}

macro_rules! python_types {
    ($($variant:ident, $name:literal, $doc:literal;)*) => {
        /// A type of Python whose objects a simpler value describes: see [`PlainValue::Typed`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        #[non_exhaustive]
        pub enum PythonType {
            $(#[doc = $doc] $variant,)*
        }

        impl PythonType {
            /// All types.
            pub const ALL: &'static [PythonType] = &[$(PythonType::$variant),*];

            /// Returns the name of the type in Python; that of a builtin has no module.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(PythonType::$variant => $name,)* }
            }
        }
    };
}

// The order is that of the serialized values: new types go to the end.
python_types! {
    DType, "torch.dtype", "`torch.dtype`, described by its name in text: `torch.bfloat16`.";
    QScheme, "torch.qscheme", "`torch.qscheme`, described by its name in text: `torch.per_tensor_affine`.";
    Device, "torch.device", "`torch.device`, described by text: `cuda:0`.";
    Size, "torch.Size", "`torch.Size`, described by a tuple.";
    FrozenSet, "frozenset", "`frozenset`, described by a set.";
    ByteArray, "bytearray", "`bytearray`, described by bytes.";
    PosixPath, "pathlib.PosixPath", "`pathlib.PosixPath`, described by text.";
    WindowsPath, "pathlib.WindowsPath", "`pathlib.WindowsPath`, described by text.";
    PurePosixPath, "pathlib.PurePosixPath", "`pathlib.PurePosixPath`, described by text.";
    PureWindowsPath, "pathlib.PureWindowsPath", "`pathlib.PureWindowsPath`, described by text.";
    NumpyArray, "numpy.ndarray", "`numpy.ndarray` of numbers, described by a tensor.";
    NumpyScalar, "numpy.generic", "A number of NumPy such as `numpy.float64`, described by a tensor without dimensions.";
    NumpyDType, "numpy.dtype", "`numpy.dtype` of numbers, described by its name in text: `<f4`.";
}

impl PythonType {
    /// Returns `true` if this value can describe an object of the type.
    #[must_use]
    pub fn fits(self, description: &PlainValue) -> bool {
        match (self, description) {
            (PythonType::Size, PlainValue::Tuple(sizes)) => {
                sizes.iter().all(|size| size.as_int().is_some())
            }
            (PythonType::FrozenSet, PlainValue::Set(_))
            | (PythonType::ByteArray, PlainValue::Bytes(_)) => true,
            (PythonType::NumpyArray, PlainValue::Tensor(_)) => true,
            (PythonType::NumpyScalar, PlainValue::Tensor(tensor)) => tensor.shape.is_empty(),
            (
                PythonType::Size
                | PythonType::FrozenSet
                | PythonType::ByteArray
                | PythonType::NumpyArray
                | PythonType::NumpyScalar,
                _,
            ) => false,
            (_, description) => description.as_str().is_some(),
        }
    }

    /// Returns the type that is called `name` in Python; `None` for other types than the ones here.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|ty| ty.name() == name)
    }
}

/// A small tensor by value, row-major.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlainTensor {
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Vec<usize>,
    /// The bytes of its elements, little-endian.
    pub data: Vec<u8>,
}

impl PlainValue {
    /// Returns `true` if the values are equal, with floats compared by their bits: a NaN equals
    /// itself. The order of a set does not count, because Python's own differs from process to
    /// process.
    #[must_use]
    pub fn same_bits(&self, other: &PlainValue) -> bool {
        fn are_same(a: &[PlainValue], b: &[PlainValue]) -> bool {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.same_bits(b))
        }
        match (self, other) {
            (PlainValue::Float(a), PlainValue::Float(b)) => a.to_bits() == b.to_bits(),
            (PlainValue::List(a), PlainValue::List(b))
            | (PlainValue::Tuple(a), PlainValue::Tuple(b)) => are_same(a, b),
            (PlainValue::Set(a), PlainValue::Set(b)) => {
                // Mostly both are in the same order, and then none has to be made.
                are_same(a, b)
                    || a.len() == b.len()
                        && sort_items(a)
                            .iter()
                            .zip(sort_items(b))
                            .all(|(a, b)| a.same_bits(b))
            }
            (PlainValue::Dict(a), PlainValue::Dict(b)) => {
                a.len() == b.len()
                    && a.iter()
                        .zip(b)
                        .all(|((ka, va), (kb, vb))| ka.same_bits(kb) && va.same_bits(vb))
            }
            (PlainValue::Typed(a, x), PlainValue::Typed(b, y)) => a == b && x.same_bits(y),
            (a, b) => a == b,
        }
    }

    /// Makes an object of a type from the value that describes it.
    #[must_use]
    pub fn typed(ty: PythonType, description: impl Into<PlainValue>) -> Self {
        PlainValue::Typed(ty, Box::new(description.into()))
    }

    /// Returns the value that describes a [`PlainValue::Typed`], or any other value itself.
    #[must_use]
    pub fn untyped(&self) -> &PlainValue {
        match self {
            PlainValue::Typed(_, description) => description,
            value => value,
        }
    }

    /// Returns the name of the type in Python, for messages.
    #[must_use]
    pub const fn type_name(&self) -> &'static str {
        match self {
            PlainValue::None => "None",
            PlainValue::Bool(_) => "bool",
            PlainValue::Int(_) | PlainValue::BigInt(_) => "int",
            PlainValue::Float(_) => "float",
            PlainValue::Str(_) => "str",
            PlainValue::Bytes(_) => "bytes",
            PlainValue::List(_) => "list",
            PlainValue::Tuple(_) => "tuple",
            PlainValue::Set(_) => "set",
            PlainValue::Dict(_) => "dict",
            PlainValue::Tensor(_) => "Tensor",
            PlainValue::Typed(ty, _) => ty.name(),
        }
    }

    /// Makes the value of an unsigned integer: a [`PlainValue::Int`], or a [`PlainValue::BigInt`]
    /// if it does not fit in one.
    #[must_use]
    pub fn unsigned(integer: u64) -> Self {
        match i64::try_from(integer) {
            Ok(integer) => PlainValue::Int(integer),
            // With a zero byte on top it is not taken for a negative number.
            Err(_) => PlainValue::BigInt([&integer.to_le_bytes()[..], &[0]].concat()),
        }
    }

    /// Returns the integer; `None` for any other value, a bool or a [`PlainValue::BigInt`]
    /// included.
    #[must_use]
    pub const fn as_int(&self) -> Option<i64> {
        match self {
            PlainValue::Int(value) => Some(*value),
            _ => None,
        }
    }

    /// Returns the float, or an integer rounded to the nearest float; `None` for any other value.
    #[must_use]
    pub const fn as_float(&self) -> Option<f64> {
        match self {
            PlainValue::Float(value) => Some(*value),
            PlainValue::Int(value) => Some(*value as f64),
            _ => None,
        }
    }

    /// Returns the bool; `None` for any other value.
    #[must_use]
    pub const fn as_bool(&self) -> Option<bool> {
        match self {
            PlainValue::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// Returns the text; `None` for any other value.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        match self {
            PlainValue::Str(value) => Some(value),
            _ => None,
        }
    }
}

/// Returns the items of a set in an order that depends only on what they are.
fn sort_items(items: &[PlainValue]) -> Vec<&PlainValue> {
    let mut items: Vec<&PlainValue> = items.iter().collect();
    items.sort_by_cached_key(|item| order_text(item));
    items
}

/// Returns a text by which items of sets are ordered. Items may be tuples and sets.
fn order_text(item: &PlainValue) -> String {
    match item {
        // Sets inside of the items have no order either, so their own items are ordered first.
        PlainValue::Set(items) => sort_items(items)
            .into_iter()
            .map(order_text)
            .collect::<Vec<_>>()
            .join(","),
        PlainValue::Tuple(items) => items.iter().map(order_text).collect::<Vec<_>>().join(","),
        PlainValue::Typed(ty, description) => format!("{ty:?} {}", order_text(description)),
        item => format!("{item:?}"),
    }
}

macro_rules! from {
    ($($type:ty => $variant:ident,)*) => {
        $(impl From<$type> for PlainValue {
            fn from(value: $type) -> Self {
                PlainValue::$variant(value.into())
            }
        })*
    };
}

from! {
    bool => Bool,
    i64 => Int,
    f64 => Float,
    &str => Str,
    String => Str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_equals_itself_by_bits_only() {
        let nan = PlainValue::List(vec![PlainValue::Float(f64::NAN)]);
        assert_ne!(nan, nan.clone());
        assert!(nan.same_bits(&nan.clone()));
        assert!(!PlainValue::Bool(true).same_bits(&PlainValue::Int(1)));
        assert!(!PlainValue::Float(0.0).same_bits(&PlainValue::Float(-0.0)));
    }

    #[test]
    fn an_unsigned_integer_stays_positive() {
        assert_eq!(PlainValue::unsigned(7), PlainValue::Int(7));
        let largest = [vec![0xff; 8], vec![0]].concat();
        assert_eq!(PlainValue::unsigned(u64::MAX), PlainValue::BigInt(largest));
    }

    #[test]
    fn sets_of_the_same_items_are_equal_in_any_order() {
        let frozen = |items: &[PlainValue]| {
            PlainValue::typed(PythonType::FrozenSet, PlainValue::Set(items.to_vec()))
        };
        let set = |items: &[PlainValue]| PlainValue::Set(items.to_vec());
        let first = set(&[
            "a".into(),
            f64::NAN.into(),
            frozen(&[1i64.into(), 2i64.into()]),
        ]);
        let second = set(&[
            frozen(&[2i64.into(), 1i64.into()]),
            "a".into(),
            f64::NAN.into(),
        ]);
        assert!(first.same_bits(&second));
        assert!(!set(&["a".into(), "b".into()]).same_bits(&set(&["a".into(), "c".into()])));
        assert!(!set(&["a".into()]).same_bits(&set(&["a".into(), "b".into()])));
        assert!(!set(&[1i64.into(), true.into()]).same_bits(&set(&[1i64.into(), 1i64.into()])));
    }
}
