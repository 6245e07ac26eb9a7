//! Large copies by non-temporal stores, which go around the processor's caches.
//!
//! A plain copy first reads the memory that it is about to overwrite, and throws out of the caches
//! what is in use. The system's `memcpy` avoids both only from a length on that it takes for the
//! size of the caches, which on virtual machines can be 192 MiB: no tensor is that large, though
//! all of them together are. Measured on 2 GiB in tensors of 1 to 50 MiB: 1.5 to 1.9 times as fast
//! by one thread, 2.1 times by two.

use std::collections::TryReserveError;

/// The length from which on it pays to go around the caches: about the size of one core's own
/// cache.
const MIN_NON_TEMPORAL_BYTES: usize = 1 << 20;

/// The number of bytes ahead at which memory is prefetched. The processor by itself does not
/// prefetch past the end of a page.
#[cfg(target_arch = "x86_64")]
const PREFETCH_DISTANCE_BYTES: usize = 1 << 10;

/// Copies like `copy_from_slice`. Large copies bypass the caches, which is faster if the
/// destination is not read soon.
///
/// # Panics
/// Slices of different lengths.
///
/// ```
/// let from: Vec<u8> = (0..3 << 20).map(|i| i as u8).collect();
/// let mut to = vec![0; from.len()];
/// fsdp_flat::non_temporal_copy(&mut to, &from);
/// assert_eq!(to, from);
/// ```
#[expect(
    unsafe_code,
    reason = "there is no safe way to a store that goes around the caches"
)]
pub fn non_temporal_copy(destination: &mut [u8], source: &[u8]) {
    if destination.len() < MIN_NON_TEMPORAL_BYTES {
        return destination.copy_from_slice(source);
    }
    assert_eq!(
        destination.len(),
        source.len(),
        "a copy between slices of different lengths"
    );
    // SAFETY: as many bytes can be written, and to nobody else's memory, since `destination` is
    // borrowed for change.
    unsafe { store(destination.as_mut_ptr(), source) };
}

/// Copies as `to_vec` does, for a copy that is not read soon.
///
/// # Errors
/// If the system has no memory for it.
#[expect(
    unsafe_code,
    reason = "as above; and zeroing first what is overwritten takes as long as the copy"
)]
pub(crate) fn non_temporal_to_vec<T: bytemuck::NoUninit>(
    source: &[T],
) -> Result<Vec<T>, TryReserveError> {
    let mut copy: Vec<T> = Vec::new();
    copy.try_reserve_exact(source.len())?;
    if size_of_val(source) < MIN_NON_TEMPORAL_BYTES {
        copy.extend_from_slice(source);
        return Ok(copy);
    }
    // SAFETY: the vector has room for all elements of `source`, and nobody else has it.
    unsafe { store(copy.as_mut_ptr().cast(), bytemuck::cast_slice(source)) };
    // SAFETY: their bytes, which are values of `T`, have just been written.
    unsafe { copy.set_len(source.len()) };
    Ok(copy)
}

/// Copies `source` to `destination` around the caches. The memory at `destination` need not be
/// initialized.
///
/// # Safety
/// `destination` must be valid for writes of `source.len()` bytes, which must not overlap `source`.
#[cfg(not(target_arch = "x86_64"))]
#[expect(unsafe_code, reason = "the memory may not have been written yet")]
unsafe fn store(destination: *mut u8, source: &[u8]) {
    // SAFETY: the caller's promise.
    unsafe { destination.copy_from_nonoverlapping(source.as_ptr(), source.len()) };
}

/// Copies `source` to `destination` around the caches. The memory at `destination` need not be
/// initialized.
///
/// # Safety
/// `destination` must be valid for writes of `source.len()` bytes, which must not overlap `source`.
#[cfg(target_arch = "x86_64")]
#[expect(
    unsafe_code,
    reason = "there is no safe way to a store that goes around the caches"
)]
unsafe fn store(destination: *mut u8, source: &[u8]) {
    use std::arch::x86_64::{__m128i, _MM_HINT_NTA, _mm_prefetch, _mm_sfence, _mm_stream_si128};

    /// The bytes that a cache holds as one.
    type Line = [__m128i; 4];

    let (head, aligned) = source.split_at(
        destination
            .align_offset(align_of::<__m128i>())
            .min(source.len()),
    );
    let mut lines = aligned.chunks_exact(size_of::<Line>());
    // SAFETY: the caller's promise: these are the first bytes.
    unsafe { destination.copy_from_nonoverlapping(head.as_ptr(), head.len()) };
    let mut offset = head.len();
    for line in &mut lines {
        // SAFETY: every x86-64 processor has it, and it reads nothing: any address will do.
        unsafe {
            _mm_prefetch::<_MM_HINT_NTA>(line.as_ptr().wrapping_add(PREFETCH_DISTANCE_BYTES).cast())
        };
        let line: Line = bytemuck::pod_read_unaligned(line);
        for value in line {
            // SAFETY: the caller's promise: 16 more bytes of `source` are left, so as many can be
            // written. They are aligned, as `head` ends where they are. Every x86-64 processor has
            // the instruction, and the fence below comes before anybody can look at the memory.
            unsafe { _mm_stream_si128(destination.add(offset).cast(), value) };
            offset += size_of::<__m128i>();
        }
    }
    // SAFETY: every x86-64 processor has it.
    unsafe { _mm_sfence() };
    let tail = lines.remainder();
    // SAFETY: the caller's promise: these are the last bytes.
    unsafe {
        destination
            .add(offset)
            .copy_from_nonoverlapping(tail.as_ptr(), tail.len())
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_whatever_the_alignment_and_nothing_else_is_touched() {
        let source: Vec<u8> = (0..MIN_NON_TEMPORAL_BYTES + 100)
            .map(|i| (i * 31 % 251) as u8)
            .collect();
        for (start, offset, extra) in [
            (0, 0, 0),
            (1, 0, 0),
            (0, 3, 1),
            (5, 7, 17),
            (16, 15, 33),
            (3, 64, 2),
        ] {
            for length in [MIN_NON_TEMPORAL_BYTES - 1, MIN_NON_TEMPORAL_BYTES + extra] {
                let from = &source[offset..offset + length];
                let mut target = vec![255; start + length + 9];
                non_temporal_copy(&mut target[start..start + length], from);
                assert!(
                    target[start..start + length] == *from,
                    "{start} {offset} {length}"
                );
                assert!(
                    target[..start]
                        .iter()
                        .chain(&target[start + length..])
                        .all(|byte| *byte == 255)
                );
            }
        }
        non_temporal_copy(&mut [], &[]);
    }

    #[test]
    fn copies_in_fresh_memory_are_equal_whatever_the_length_and_the_type() {
        for length in [
            0,
            1,
            1000,
            MIN_NON_TEMPORAL_BYTES / 8 - 1,
            MIN_NON_TEMPORAL_BYTES / 8,
            MIN_NON_TEMPORAL_BYTES / 8 + 5,
            MIN_NON_TEMPORAL_BYTES + 3,
        ] {
            let source: Vec<f64> = (0..length).map(|i| i as f64 * 0.5).collect();
            assert!(non_temporal_to_vec(&source).unwrap() == source, "{length}");
            let bytes: Vec<u8> = (0..length).map(|i| (i * 31 % 251) as u8).collect();
            assert!(
                non_temporal_to_vec(&bytes[length.min(1)..]).unwrap() == bytes[length.min(1)..],
                "{length}"
            );
        }
    }

    #[test]
    #[should_panic(expected = "different lengths")]
    fn different_lengths_are_refused() {
        non_temporal_copy(
            &mut vec![0; MIN_NON_TEMPORAL_BYTES],
            &vec![0; MIN_NON_TEMPORAL_BYTES + 1],
        );
    }
}
