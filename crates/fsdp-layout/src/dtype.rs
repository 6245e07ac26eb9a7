//! Element types: all that checkpoint files hold, not only those that candle computes with.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! dtypes {
    ($($variant:ident, $bits:literal, $torch:literal, $safetensors:expr, $doc:literal;)*) => {
        /// The type of one tensor element, with torch's meaning.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[non_exhaustive]
        pub enum DType {
            $(#[doc = $doc] $variant,)*
        }

        impl DType {
            /// Every dtype, in a fixed order.
            pub const ALL: &'static [DType] = &[$(DType::$variant),*];

            /// Returns torch's name without the `torch.` in front, e.g. `bfloat16`. The 6-bit
            /// floats, which torch lacks, have the name that safetensors gives them, and `_bytes`.
            #[must_use]
            pub const fn torch_name(self) -> &'static str {
                match self { $(DType::$variant => $torch,)* }
            }

            /// Returns the name in a safetensors header, e.g. `BF16`; `None` if that format has
            /// none.
            #[must_use]
            pub const fn safetensors_name(self) -> Option<&'static str> {
                match self { $(DType::$variant => $safetensors,)* }
            }

            /// Returns the number of bits per element.
            #[must_use]
            pub const fn bits(self) -> u64 {
                match self { $(DType::$variant => $bits,)* }
            }
        }
    };
}

dtypes! {
    Bool, 8, "bool", Some("BOOL"), "One byte, 0 or 1.";
    U8, 8, "uint8", Some("U8"), "Unsigned 8-bit integer.";
    I8, 8, "int8", Some("I8"), "Signed 8-bit integer.";
    U16, 16, "uint16", Some("U16"), "Unsigned 16-bit integer.";
    I16, 16, "int16", Some("I16"), "Signed 16-bit integer.";
    U32, 32, "uint32", Some("U32"), "Unsigned 32-bit integer.";
    I32, 32, "int32", Some("I32"), "Signed 32-bit integer.";
    U64, 64, "uint64", Some("U64"), "Unsigned 64-bit integer.";
    I64, 64, "int64", Some("I64"), "Signed 64-bit integer.";
    F8E4M3Fn, 8, "float8_e4m3fn", Some("F8_E4M3"), "8-bit float: 4 exponent bits, 3 mantissa bits, no infinities.";
    F8E4M3Fnuz, 8, "float8_e4m3fnuz", Some("F8_E4M3FNUZ"), "Like `F8E4M3Fn`, with one zero and one NaN.";
    F8E5M2, 8, "float8_e5m2", Some("F8_E5M2"), "8-bit float: 5 exponent bits, 2 mantissa bits.";
    F8E5M2Fnuz, 8, "float8_e5m2fnuz", Some("F8_E5M2FNUZ"), "Like `F8E5M2`, with one zero and one NaN.";
    F8E8M0Fnu, 8, "float8_e8m0fnu", Some("F8_E8M0"), "8-bit power of two, a block scale.";
    F4E2M1FnX2, 8, "float4_e2m1fn_x2", Some("F4"), "Two 4-bit floats in one byte; one element here is the pair.";
    F6E2M3, 8, "F6_E2M3_bytes", Some("F6_E2M3"), "A byte of four 6-bit floats in three bytes: 2 exponent bits, 3 mantissa bits.";
    F6E3M2, 8, "F6_E3M2_bytes", Some("F6_E3M2"), "Like `F6E2M3`, with 3 exponent bits and 2 mantissa bits.";
    BF16, 16, "bfloat16", Some("BF16"), "Brain float: 8 exponent bits, 7 mantissa bits.";
    F16, 16, "float16", Some("F16"), "IEEE half precision.";
    F32, 32, "float32", Some("F32"), "IEEE single precision.";
    F64, 64, "float64", Some("F64"), "IEEE double precision.";
    Complex32, 32, "complex32", None, "Two `F16`: real, imaginary.";
    BComplex32, 32, "bcomplex32", None, "Two `BF16`: real, imaginary.";
    Complex64, 64, "complex64", Some("C64"), "Two `F32`: real, imaginary.";
    Complex128, 128, "complex128", None, "Two `F64`: real, imaginary.";
    QInt8, 8, "qint8", None, "Quantized signed 8-bit; scale and zero point lie outside the element.";
    QUInt8, 8, "quint8", None, "Quantized unsigned 8-bit.";
    QInt32, 32, "qint32", None, "Quantized signed 32-bit.";
}

/// How a dtype packs numbers of less than a byte into elements of one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// Numbers in a group.
    pub numbers: usize,
    /// Bytes of a group, which are its elements.
    pub bytes: usize,
}

impl DType {
    /// Returns how numbers of less than a byte are packed; `None` for other types. Shapes in
    /// safetensors count the numbers along the last dimension, those of torch the bytes.
    #[must_use]
    pub const fn packing(self) -> Option<Packing> {
        match self {
            DType::F4E2M1FnX2 => Some(Packing {
                numbers: 2,
                bytes: 1,
            }),
            DType::F6E2M3 | DType::F6E3M2 => Some(Packing {
                numbers: 4,
                bytes: 3,
            }),
            _ => None,
        }
    }

    /// Returns `true` if torch has this type.
    #[must_use]
    pub const fn is_in_torch(self) -> bool {
        !matches!(self, DType::F6E2M3 | DType::F6E3M2)
    }

    /// Returns the number of bytes per element.
    #[must_use]
    pub const fn size_in_bytes(self) -> u64 {
        self.bits() / 8
    }

    /// Returns `true` for quantized types, whose elements mean something only together with a scale
    /// and a zero point.
    #[must_use]
    pub const fn is_quantized(self) -> bool {
        matches!(self, DType::QInt8 | DType::QUInt8 | DType::QInt32)
    }

    /// Returns `true` for floating-point types of any width, but not for complex types.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(
            self,
            DType::F8E4M3Fn
                | DType::F8E4M3Fnuz
                | DType::F8E5M2
                | DType::F8E5M2Fnuz
                | DType::F8E8M0Fnu
                | DType::F4E2M1FnX2
                | DType::F6E2M3
                | DType::F6E3M2
                | DType::BF16
                | DType::F16
                | DType::F32
                | DType::F64
        )
    }

    /// Finds the dtype with this name ([`DType::torch_name`]).
    #[must_use]
    pub fn from_torch_name(name: &str) -> Option<DType> {
        Self::ALL
            .iter()
            .copied()
            .find(|dtype| dtype.torch_name() == name)
    }

    /// Finds the dtype with this safetensors name (`F32`).
    #[must_use]
    pub fn from_safetensors_name(name: &str) -> Option<DType> {
        Self::ALL
            .iter()
            .copied()
            .find(|dtype| dtype.safetensors_name() == Some(name))
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.torch_name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_dtype() {
        for &dtype in DType::ALL {
            assert_eq!(DType::from_torch_name(dtype.torch_name()), Some(dtype));
            if let Some(name) = dtype.safetensors_name() {
                assert_eq!(DType::from_safetensors_name(name), Some(dtype));
            }
            assert_eq!(dtype.bits() % 8, 0);
        }
        assert_eq!(DType::from_torch_name("torch.float32"), None);
    }
}
