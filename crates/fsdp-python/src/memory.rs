//! Memory that Python lends for the duration of one call, to be read and filled by several threads.

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::error::wrong_argument;

/// A contiguous buffer of bytes of a Python object.
pub(crate) struct Memory {
    buffer: PyBuffer<u8>,
}

impl Memory {
    /// Borrows the memory of an object that has Python's buffer protocol.
    ///
    /// # Errors
    /// An object without it, or whose elements are not bytes without gaps, or that is not `length`
    /// bytes long.
    pub(crate) fn from_object(object: &Bound<'_, PyAny>, length: usize) -> PyResult<Self> {
        let buffer = PyBuffer::<u8>::get(object)?;
        if !buffer.is_c_contiguous() || buffer.item_size() != 1 {
            return Err(wrong_argument("a buffer must be of contiguous bytes"));
        }
        if buffer.len_bytes() != length {
            let found = buffer.len_bytes();
            return Err(wrong_argument(format!(
                "a buffer of {found} bytes, where {length} are needed"
            )));
        }
        Ok(Memory { buffer })
    }

    /// Checks that the memory may be written.
    ///
    /// # Errors
    /// A buffer that Python calls read-only.
    pub(crate) fn check_writable(&self) -> PyResult<()> {
        if self.buffer.readonly() {
            Err(wrong_argument("a buffer must be writable"))
        } else {
            Ok(())
        }
    }

    /// Returns the bytes.
    #[expect(
        unsafe_code,
        reason = "the buffer protocol hands out a pointer and a length"
    )]
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.buffer.len_bytes() == 0 {
            return &[];
        }
        // SAFETY: the exporter keeps the memory in place while `buffer` is held. It is `len_bytes`
        // long, as its exporter says, and contiguous, as `from_object` has checked. The Python side
        // changes none of it during the call.
        unsafe {
            std::slice::from_raw_parts(self.buffer.buf_ptr().cast::<u8>(), self.buffer.len_bytes())
        }
    }

    /// Checks that no two buffers share memory, since several threads fill them at once.
    ///
    /// # Errors
    /// Buffers that overlap.
    pub(crate) fn check_apart(buffers: &[Memory]) -> PyResult<()> {
        let mut spans: Vec<(usize, usize)> = Vec::with_capacity(buffers.len());
        for Memory { buffer } in buffers {
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

    /// Returns the bytes, to be filled.
    #[expect(
        unsafe_code,
        reason = "the buffer protocol hands out a pointer and a length"
    )]
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        if self.buffer.len_bytes() == 0 {
            return &mut [];
        }
        // SAFETY: as in `bytes`; `check_writable` and `check_apart` were called, so no other slice
        // is of the same memory, and the Python side neither reads nor writes it during the call.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.buffer.buf_ptr().cast::<u8>(),
                self.buffer.len_bytes(),
            )
        }
    }
}
