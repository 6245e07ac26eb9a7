//! Numbers of big-endian machines.

use fsdp_layout::DType;

/// Reverses the bytes of each number in these elements. A complex number is two numbers, each with
/// its own order of bytes.
pub(crate) fn reverse_numbers(dtype: DType, elements: &mut [u8]) {
    let element_bytes = dtype.size_in_bytes() as usize;
    let number_bytes = match dtype {
        DType::Complex32 | DType::BComplex32 | DType::Complex64 | DType::Complex128 => {
            element_bytes / 2
        }
        _ => element_bytes,
    };
    for number in elements.chunks_exact_mut(number_bytes) {
        number.reverse();
    }
}
