//! Elements of floating-point tensors as `f64`, and back; and filling boxes with what is computed of them.

use fsdp_layout::{DType, TensorBox};
use half::{bf16, f16};

use crate::error::FileError;
use crate::formats::stream::stream_boxes;
use crate::payload::slot::Slot;

/// The bytes of a tensor that are computed at once: their numbers take up to eight times as much.
const PIECE: u64 = 1 << 20;

/// A function that computes the row-major bytes of a box.
pub(super) type Compute<'c> = dyn FnMut(&TensorBox, &mut [u8]) -> Result<(), FileError> + 'c;

/// Fills a slot with what `compute` gives, a piece at a time.
pub(super) fn fill(slot: &mut Slot<'_>, dtype: DType, compute: &mut Compute<'_>) -> Result<(), FileError> {
    let (bounds, length) = (slot.bounds.clone(), slot.bytes.len() as u64);
    for start in (0..length).step_by(PIECE as usize) {
        let mut at = start as usize;
        stream_boxes::<FileError>(compute, dtype, &bounds, start..length.min(start + PIECE), &mut |bytes| {
            slot.bytes[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
            Ok(())
        })?;
    }
    slot.filled(0..slot.bytes.len());
    Ok(())
}

/// Returns `true` for the types that can be computed with.
pub(super) const fn is_floating(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
}

/// Calls `each` with the elements, in order.
pub(super) fn for_each(dtype: DType, bytes: &[u8], each: &mut dyn FnMut(f64)) {
    match dtype {
        DType::F64 => bytes.as_chunks().0.iter().for_each(|b| each(f64::from_le_bytes(*b))),
        DType::F32 => bytes.as_chunks().0.iter().for_each(|b| each(f64::from(f32::from_le_bytes(*b)))),
        DType::F16 => bytes.as_chunks().0.iter().for_each(|b| each(f16::from_le_bytes(*b).to_f64())),
        DType::BF16 => bytes.as_chunks().0.iter().for_each(|b| each(bf16::from_le_bytes(*b).to_f64())),
        _ => {}
    }
}

/// Writes numbers as elements, each rounded once, to nearest.
pub(super) fn write(dtype: DType, numbers: &[f64], bytes: &mut [u8]) {
    match dtype {
        DType::F64 => put(numbers, bytes, f64::to_le_bytes),
        DType::F32 => put(numbers, bytes, |number| (number as f32).to_le_bytes()),
        DType::F16 => put(numbers, bytes, |number| f16::from_f64(number).to_le_bytes()),
        DType::BF16 => put(numbers, bytes, |number| bf16::from_f64(number).to_le_bytes()),
        _ => {}
    }
}

fn put<const N: usize>(numbers: &[f64], bytes: &mut [u8], of: impl Fn(f64) -> [u8; N]) {
    for (number, element) in numbers.iter().zip(bytes.as_chunks_mut::<N>().0) {
        *element = of(*number);
    }
}
