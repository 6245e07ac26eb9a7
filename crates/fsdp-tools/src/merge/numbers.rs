//! Converts `f64` to elements of floating-point tensors, and fills boxes with computed values.

use fsdp_formats::FileError;
use fsdp_formats::internals::stream_boxes;
use fsdp_formats::reader::Slot;
use fsdp_layout::{DType, TensorBox};
use half::{bf16, f16};

use crate::convert::LostElements;

/// The number of bytes of a tensor that are computed at a time. As `f64` they take up to eight
/// times as much.
const PIECE_BYTES: u64 = 1 << 20;

/// Fills slots with the results of `compute`, which computes the row-major bytes of a box, a piece
/// at a time.
pub(super) fn fill_slots(
    slots: &mut [Slot<'_>],
    dtype: DType,
    mut compute: impl FnMut(&TensorBox, &mut [u8]) -> Result<(), FileError>,
) -> Result<(), FileError> {
    for slot in slots {
        let length = slot.bytes.len() as u64;
        for start in (0..length).step_by(PIECE_BYTES as usize) {
            let range = start..length.min(start + PIECE_BYTES);
            let mut position = start as usize;
            stream_boxes::<FileError>(&mut compute, dtype, &slot.bounds, range, &mut |bytes| {
                slot.bytes[position..position + bytes.len()].copy_from_slice(bytes);
                position += bytes.len();
                Ok(())
            })?;
        }
        slot.filled(0..slot.bytes.len());
    }
    Ok(())
}

/// Writes numbers to `bytes` as elements, each rounded once, to nearest. Returns how many finite
/// ones became infinite, and how many are NaN or infinite where the number `was_finite` before it
/// was changed. Zeros are not counted: a small sum may cancel to zero.
pub(super) fn write_numbers(
    dtype: DType,
    numbers: &[f64],
    was_finite: &[bool],
    bytes: &mut [u8],
) -> LostElements {
    let infinite = match dtype {
        DType::F64 => write_each(numbers, bytes, |number| (number.to_le_bytes(), number)),
        DType::F32 => write_each(numbers, bytes, |number| {
            let single = number as f32;
            (single.to_le_bytes(), single.into())
        }),
        DType::F16 => write_each(numbers, bytes, |number| {
            let half = f16::from_f32(round_to_odd(number));
            (half.to_le_bytes(), half.into())
        }),
        DType::BF16 => write_each(numbers, bytes, |number| {
            let half = bf16::from_f32(round_to_odd(number));
            (half.to_le_bytes(), half.into())
        }),
        _ => unreachable!("only tensors of the types of CASTABLE are computed"),
    };
    let spoiled = numbers
        .iter()
        .zip(was_finite)
        .filter(|(number, was_finite)| **was_finite && !number.is_finite())
        .count();
    LostElements {
        infinite,
        zero: 0,
        spoiled: spoiled as u64,
    }
}

/// Rounds a number to `f32` "to odd": if it lies between two values of `f32`, to the one whose last
/// bit is set. If the result is rounded again, to a type with at least two bits less, that gives
/// the same as rounding the number directly.
fn round_to_odd(number: f64) -> f32 {
    let near = number as f32;
    if f64::from(near) == number || !near.is_finite() {
        return near;
    }
    // The number lies between two floats that follow each other. `toward_zero` holds the bits of
    // the float that is nearer to zero. Read as an integer, they are one less than the bits of the
    // other float.
    let is_beyond = f64::from(near).abs() > number.abs();
    let toward_zero = near.to_bits() - u32::from(is_beyond);
    f32::from_bits(toward_zero | 1)
}

/// Writes numbers as elements, which `to_element` rounds and encodes; it also returns the rounded
/// number. Returns the number of finite ones that are infinite afterwards.
fn write_each<const N: usize>(
    numbers: &[f64],
    bytes: &mut [u8],
    to_element: impl Fn(f64) -> ([u8; N], f64),
) -> u64 {
    let mut infinite = 0;
    for (number, element) in numbers.iter().zip(bytes.as_chunks_mut::<N>().0) {
        let (encoded, rounded) = to_element(*number);
        *element = encoded;
        infinite += u64::from(number.is_finite() && rounded.is_infinite());
    }
    infinite
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded<const N: usize>(dtype: DType, number: f64) -> [u8; N] {
        let mut bytes = [0; N];
        write_numbers(dtype, &[number], &[true], &mut bytes);
        bytes
    }

    #[test]
    fn numbers_are_rounded_once() {
        // Just above and below the middle between 1 and the next number; f32 cannot tell them from
        // the middle.
        for (dtype, step) in [(DType::F16, 2f64.powi(-10)), (DType::BF16, 2f64.powi(-7))] {
            let (low, high) = (encoded::<2>(dtype, 1.0), encoded::<2>(dtype, 1.0 + step));
            let (middle, small_step) = (1.0 + step / 2.0, 2f64.powi(-40));
            assert_eq!(
                encoded::<2>(dtype, middle),
                low,
                "{dtype}: a tie goes to the even one"
            );
            assert_eq!(encoded::<2>(dtype, middle + small_step), high, "{dtype}");
            assert_eq!(encoded::<2>(dtype, middle - small_step), low, "{dtype}");
            assert_eq!(
                encoded::<2>(dtype, -middle - small_step),
                encoded(dtype, -1.0 - step),
                "{dtype}"
            );
            assert_eq!(encoded::<2>(dtype, 0.0), [0, 0], "{dtype}");
            assert_eq!(encoded::<2>(dtype, -1e-300), [0, 0x80], "{dtype}");
        }
        assert_eq!(encoded::<2>(DType::F16, 65519.999), f16::MAX.to_le_bytes());
        assert_eq!(
            encoded::<2>(DType::F16, 65520.0),
            f16::INFINITY.to_le_bytes()
        );
        assert_eq!(encoded::<2>(DType::BF16, f64::NAN)[1] & 0x7f, 0x7f);
    }
}
