//! Memory that Python lends for the duration of one call, to be read and filled by several threads:
//! contiguous buffers of bytes.

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::error::wrong_argument;

/// Borrows the memory of an object that has Python's buffer protocol, to be filled if
/// `is_filled`.
///
/// # Errors
/// An object without it, or whose elements are not bytes without gaps, or that is not `length`
/// bytes long, or that Python calls read-only and is to be filled.
pub(crate) fn borrow(
    object: &Bound<'_, PyAny>,
    needed_bytes: usize,
    is_filled: bool,
) -> PyResult<PyBuffer<u8>> {
    let buffer = PyBuffer::<u8>::get(object)?;
    if !buffer.is_c_contiguous() || buffer.item_size() != 1 {
        return Err(wrong_argument("a buffer must be of contiguous bytes"));
    }
    let buffer_bytes = buffer.len_bytes();
    if buffer_bytes != needed_bytes {
        return Err(wrong_argument(format!(
            "a buffer of {buffer_bytes} bytes, where {needed_bytes} are needed"
        )));
    }
    if is_filled && buffer.readonly() {
        return Err(wrong_argument("a buffer must be writable"));
    }
    Ok(buffer)
}

/// Returns the bytes of borrowed memory.
#[expect(
    unsafe_code,
    reason = "the buffer protocol hands out a pointer and a length"
)]
pub(crate) fn borrowed_bytes(buffer: &PyBuffer<u8>) -> &[u8] {
    assert!(buffer.is_c_contiguous(), "`borrow` has checked it");
    if buffer.len_bytes() == 0 {
        return &[];
    }
    // SAFETY: the exporter keeps the memory in place while `buffer` is held. It is `len_bytes`
    // long, as its exporter says, and contiguous. The Python side changes none of it during the
    // call.
    unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes()) }
}

/// Checks that no two buffers share memory, since several threads fill them at once.
///
/// # Errors
/// Buffers that overlap.
pub(crate) fn check_apart(buffers: &[PyBuffer<u8>]) -> PyResult<()> {
    let mut spans: Vec<(usize, usize)> = Vec::with_capacity(buffers.len());
    for buffer in buffers {
        let start = buffer.buf_ptr().addr();
        // An empty buffer may have any address.
        if buffer.len_bytes() > 0 {
            spans.push((start, start + buffer.len_bytes()));
        }
    }
    // Once they are sorted, only neighbours can overlap first.
    spans.sort_unstable();
    if spans.windows(2).any(|pair| pair[0].1 > pair[1].0) {
        return Err(wrong_argument("two buffers overlap in memory"));
    }
    Ok(())
}

/// Returns the bytes of borrowed memory, to be filled, after [`check_apart`].
#[expect(
    unsafe_code,
    reason = "the buffer protocol hands out a pointer and a length"
)]
pub(crate) fn borrowed_bytes_mut(buffer: &mut PyBuffer<u8>) -> &mut [u8] {
    let may_be_filled = buffer.is_c_contiguous() && !buffer.readonly();
    assert!(may_be_filled, "`borrow` has checked it");
    if buffer.len_bytes() == 0 {
        return &mut [];
    }
    // SAFETY: as in `borrowed_bytes`; `check_apart` was called, so no other slice is of the same
    // memory, and the Python side neither reads nor writes it during the call.
    unsafe { std::slice::from_raw_parts_mut(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes()) }
}
