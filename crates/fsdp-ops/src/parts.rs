//! Uninitialized memory that several threads fill, each one chunk at a time.

use std::mem::MaybeUninit;

use rayon::iter::{IndexedParallelIterator as _, ParallelIterator as _};
use rayon::slice::ParallelSliceMut as _;

/// Computes `len` elements in chunks of `chunk_len` elements, on the threads of the current rayon
/// pool. `compute` gets the number of a chunk and its elements, which are all `initial` at first.
/// Returns the elements, and the results of `compute` in the order of the chunks.
///
/// Each thread initializes a chunk just before it computes it, so the chunk is still in the cache.
/// `vec!` would initialize all elements on one thread first, and they would have to be fetched from
/// memory again. For zeros of a primitive type `vec!` would only reserve memory; this is for half
/// types and other values.
#[expect(unsafe_code, reason = "a vector's memory is set by several threads")]
pub(crate) fn compute_in_chunks<T: Copy + Send + Sync, R: Send>(
    len: usize,
    chunk_len: usize,
    initial: T,
    compute: impl Fn(usize, &mut [T]) -> R + Sync,
) -> (Vec<T>, Vec<R>) {
    let mut output = Vec::with_capacity(len);
    let memory = &mut output.spare_capacity_mut()[..len];
    let results = memory
        .par_chunks_mut(chunk_len.max(1))
        .enumerate()
        .map(|(chunk_index, chunk)| {
            chunk.fill(MaybeUninit::new(initial));
            // SAFETY: each element of the chunk has just been set.
            compute(chunk_index, unsafe { chunk.assume_init_mut() })
        })
        .collect();
    // SAFETY: the chunks are all of the first `len` elements, and each chunk has been set.
    unsafe { output.set_len(len) };
    (output, results)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_element_is_computed_once_from_its_initial_value() {
        for (len, chunk_len) in [(0, 4), (1, 4), (4, 4), (1000, 7), (5, 0)] {
            let (elements, chunk_lens) =
                compute_in_chunks(len, chunk_len, 5, |number, elements: &mut [usize]| {
                    let start = number * chunk_len.max(1);
                    elements
                        .iter_mut()
                        .enumerate()
                        .for_each(|(index, element)| *element += start + index);
                    elements.len()
                });
            assert_eq!(elements, (5..5 + len).collect::<Vec<_>>());
            assert_eq!(chunk_lens.iter().sum::<usize>(), len);
            assert_eq!(chunk_lens.len(), len.div_ceil(chunk_len.max(1)));
        }
    }
}
