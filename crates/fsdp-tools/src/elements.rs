//! Decodes the bytes of a tensor to numbers, for statistics and comparisons.

use fsdp_layout::DType;
use half::{bf16, f16};

/// Counts and sums over a tensor's elements.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Census {
    /// The number of elements.
    pub count: u64,
    /// Elements that are not a number.
    pub nan: u64,
    /// Elements that are infinite.
    pub infinite: u64,
    /// Elements that are zero.
    pub zero: u64,
    /// The smallest finite one, if there is one.
    pub min: Option<f64>,
    /// The largest finite one, if there is one.
    pub max: Option<f64>,
    /// The smallest and the largest, if the elements are integers of 64 bits, of which `f64` holds
    /// not all.
    pub integer_range: Option<(i128, i128)>,
    /// The sum of the finite ones.
    pub sum: f64,
    /// The first finite one, if there is one.
    pub first: Option<f64>,
    /// The sum of the differences of the finite ones from the first.
    pub sum_from_first: f64,
    /// The sum of the squares of these differences. Squares of the elements themselves would lose
    /// the deviation of elements that lie close together, far from zero.
    pub squares_from_first: f64,
}

impl Census {
    /// Adds the elements in these bytes. Complex ones are only counted: one is NaN if a part of it
    /// is, or else infinite if a part of it is.
    pub fn add(&mut self, dtype: DType, bytes: &[u8]) {
        if let Some(part_dtype) = parts_of_complex(dtype) {
            let mut parts = Vec::with_capacity(bytes.len() / part_dtype.size_in_bytes() as usize);
            for_each_number(part_dtype, bytes, &mut |value| parts.push(value));
            // The two parts of a number are next to each other.
            for element in parts.as_chunks::<2>().0 {
                self.count += 1;
                if element.iter().any(|part| part.is_nan()) {
                    self.nan += 1;
                } else if element.iter().any(|part| part.is_infinite()) {
                    self.infinite += 1;
                }
            }
            return;
        }
        let words = bytes.as_chunks::<8>().0.iter();
        match dtype {
            DType::I64 => words.for_each(|word| self.add_to_range(i64::from_le_bytes(*word))),
            DType::U64 => words.for_each(|word| self.add_to_range(u64::from_le_bytes(*word))),
            _ => {}
        }
        for_each_number(dtype, bytes, &mut |value| {
            self.count += 1;
            if value.is_nan() {
                self.nan += 1;
            } else if value.is_infinite() {
                self.infinite += 1;
            } else {
                self.zero += u64::from(value == 0.0);
                self.min = Some(self.min.map_or(value, |min| min.min(value)));
                self.max = Some(self.max.map_or(value, |max| max.max(value)));
                self.sum += value;
                // Sums of differences from one element keep the digits that sums of squares lose.
                let difference = value - *self.first.get_or_insert(value);
                self.sum_from_first += difference;
                self.squares_from_first += difference * difference;
            }
        });
    }

    /// Adds an integer to the range.
    fn add_to_range(&mut self, integer: impl Into<i128>) {
        let integer = integer.into();
        let (min, max) = self.integer_range.unwrap_or((integer, integer));
        self.integer_range = Some((min.min(integer), max.max(integer)));
    }

    /// Returns the mean of the finite elements.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.sum / (self.count - self.nan - self.infinite) as f64
    }

    /// Returns the standard deviation of the finite elements (of the whole population).
    #[must_use]
    pub fn std(&self) -> f64 {
        let count = (self.count - self.nan - self.infinite) as f64;
        let mean = self.sum_from_first / count;
        (self.squares_from_first / count - mean * mean)
            .max(0.0)
            .sqrt()
    }
}

/// Returns `true` if elements of this type are real numbers.
#[must_use]
pub fn is_real(dtype: DType) -> bool {
    for_each_number(dtype, &[], &mut |_| {})
}

/// Calls `f` with each element as a number. Returns `false`, and calls nothing, if elements of this
/// type are no real numbers.
pub fn for_each_number(dtype: DType, bytes: &[u8], f: &mut dyn FnMut(f64)) -> bool {
    /// Calls `f` with the number that `decode` makes of each `N` bytes.
    fn decode_each<const N: usize>(
        bytes: &[u8],
        f: &mut dyn FnMut(f64),
        decode: impl Fn([u8; N]) -> f64,
    ) {
        for element in bytes.as_chunks::<N>().0 {
            f(decode(*element));
        }
    }
    match dtype {
        DType::Bool | DType::U8 | DType::QUInt8 => decode_each(bytes, f, |[byte]| f64::from(byte)),
        DType::I8 | DType::QInt8 => {
            decode_each(bytes, f, |element| f64::from(i8::from_le_bytes(element)))
        }
        DType::U16 => decode_each(bytes, f, |element| f64::from(u16::from_le_bytes(element))),
        DType::I16 => decode_each(bytes, f, |element| f64::from(i16::from_le_bytes(element))),
        DType::U32 => decode_each(bytes, f, |element| f64::from(u32::from_le_bytes(element))),
        DType::I32 | DType::QInt32 => {
            decode_each(bytes, f, |element| f64::from(i32::from_le_bytes(element)))
        }
        DType::U64 => decode_each(bytes, f, |element| u64::from_le_bytes(element) as f64),
        DType::I64 => decode_each(bytes, f, |element| i64::from_le_bytes(element) as f64),
        DType::F16 => decode_each(bytes, f, |element| f16::from_le_bytes(element).to_f64()),
        DType::BF16 => decode_each(bytes, f, |element| bf16::from_le_bytes(element).to_f64()),
        DType::F32 => decode_each(bytes, f, |element| f64::from(f32::from_le_bytes(element))),
        DType::F64 => decode_each(bytes, f, f64::from_le_bytes),
        DType::F8E4M3Fn => decode_each(bytes, f, |[byte]| {
            decode_float8(byte, 4, 7, Special::NanOnly)
        }),
        DType::F8E5M2 => decode_each(bytes, f, |[byte]| decode_float8(byte, 5, 15, Special::Ieee)),
        DType::F8E4M3Fnuz => decode_each(bytes, f, |[byte]| {
            decode_float8(byte, 4, 8, Special::NegativeZeroIsNan)
        }),
        DType::F8E5M2Fnuz => decode_each(bytes, f, |[byte]| {
            decode_float8(byte, 5, 16, Special::NegativeZeroIsNan)
        }),
        DType::F8E8M0Fnu => decode_each(bytes, f, |[byte]| {
            if byte == 255 {
                f64::NAN
            } else {
                2f64.powi(i32::from(byte) - 127)
            }
        }),
        _ => return false,
    }
    true
}

/// Returns the type of the two parts of a complex number; `None` for other types.
pub(crate) fn parts_of_complex(dtype: DType) -> Option<DType> {
    match dtype {
        DType::Complex32 => Some(DType::F16),
        DType::BComplex32 => Some(DType::BF16),
        DType::Complex64 => Some(DType::F32),
        DType::Complex128 => Some(DType::F64),
        _ => None,
    }
}

/// The meaning of the special codes of an 8-bit float.
enum Special {
    /// The largest exponent: infinities and NaN.
    Ieee,
    /// All ones: NaN; there is no infinity.
    NanOnly,
    /// The code of minus zero: NaN; there is no infinity.
    NegativeZeroIsNan,
}

/// Returns the value of a float of 8 bits, of which `exponent_bits` are the exponent. `special`
/// says which bits stand for infinity and NaN.
fn decode_float8(bits: u8, exponent_bits: u32, bias: i32, special: Special) -> f64 {
    let mantissa_bits = 7 - exponent_bits;
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let largest = (1 << exponent_bits) - 1;
    let exponent = i32::from(bits >> mantissa_bits) & largest;
    let mantissa = f64::from(bits & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    // The codes that are no numbers.
    match special {
        Special::Ieee if exponent == largest && mantissa == 0.0 => return sign * f64::INFINITY,
        Special::Ieee if exponent == largest => return f64::NAN,
        Special::NanOnly if bits & 0x7f == 0x7f => return f64::NAN,
        Special::NegativeZeroIsNan if bits == 0x80 => return f64::NAN,
        _ => {}
    }
    // The smallest exponent is that of subnormal numbers, which have no leading one.
    match exponent {
        0 => sign * mantissa * 2f64.powi(1 - bias),
        _ => sign * (1.0 + mantissa) * 2f64.powi(exponent - bias),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(dtype: DType, bytes: &[u8]) -> Vec<f64> {
        let mut values = Vec::new();
        assert!(for_each_number(dtype, bytes, &mut |value| values.push(value)));
        values
    }

    #[test]
    fn eight_bit_floats_mean_what_torch_says() {
        // Codes and values as torch gives them: 1, the largest, the smallest subnormal, minus one.
        assert_eq!(
            values(DType::F8E4M3Fn, &[0x38, 0x7e, 0x01, 0xb8]),
            [1.0, 448.0, 2f64.powi(-9), -1.0]
        );
        assert_eq!(
            values(DType::F8E5M2, &[0x3c, 0x7b, 0x01, 0xbc, 0x7c]),
            [1.0, 57344.0, 2f64.powi(-16), -1.0, f64::INFINITY]
        );
        assert_eq!(
            values(DType::F8E4M3Fnuz, &[0x40, 0x7f, 0x01]),
            [1.0, 240.0, 2f64.powi(-10)]
        );
        assert_eq!(values(DType::F8E5M2Fnuz, &[0x40, 0x7f]), [1.0, 57344.0]);
        assert_eq!(values(DType::F8E8M0Fnu, &[127, 128]), [1.0, 2.0]);
        for (dtype, nan) in [
            (DType::F8E4M3Fn, 0xff),
            (DType::F8E5M2, 0x7d),
            (DType::F8E4M3Fnuz, 0x80),
            (DType::F8E8M0Fnu, 255),
        ] {
            assert!(values(dtype, &[nan])[0].is_nan(), "{dtype}");
        }
    }

    #[test]
    fn a_census_counts() {
        let mut census = Census::default();
        let bytes: Vec<u8> = [1.0f32, 3.0, 0.0, f32::NAN, f32::NEG_INFINITY]
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        census.add(DType::F32, &bytes);
        assert_eq!(
            (census.count, census.nan, census.infinite, census.zero),
            (5, 1, 1, 1)
        );
        assert_eq!(
            (census.min, census.max, census.sum),
            (Some(0.0), Some(3.0), 4.0)
        );
        assert!((census.mean() - 4.0 / 3.0).abs() < 1e-12);
        assert!(!is_real(DType::Complex64));
        // Close together, far from zero.
        let mut census = Census::default();
        let bytes: Vec<u8> = [1e9f64, 1e9 + 1.0]
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        census.add(DType::F64, &bytes);
        assert_eq!((census.mean(), census.std()), (1e9 + 0.5, 0.5));
    }
}
