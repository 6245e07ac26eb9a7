//! Uninitialized memory that several threads fill, each one part at a time.

use std::mem::MaybeUninit;

use rayon::iter::{IndexedParallelIterator as _, ParallelIterator as _};
use rayon::slice::ParallelSliceMut as _;

/// Computes `len` elements in parts of `part` elements, on the threads of the current rayon pool.
/// `f` gets the number of a part and its elements, which are all `start` at first. Returns the
/// elements, and the results of `f` in the order of the parts.
///
/// Each thread initializes a part just before it computes it, so the part is still in the cache.
/// `vec!` would initialize all elements on one thread first, and they would have to be fetched from
/// memory again.
#[expect(unsafe_code, reason = "a vector's memory is set by several threads")]
pub(crate) fn in_parts<T: Copy + Send + Sync, R: Send>(
    len: usize,
    part: usize,
    start: T,
    f: impl Fn(usize, &mut [T]) -> R + Sync,
) -> (Vec<T>, Vec<R>) {
    let mut output = Vec::with_capacity(len);
    let memory = &mut output.spare_capacity_mut()[..len];
    let results = memory
        .par_chunks_mut(part.max(1))
        .enumerate()
        .map(|(number, part)| {
            part.fill(MaybeUninit::new(start));
            // SAFETY: each element of the part has just been set.
            f(number, unsafe { part.assume_init_mut() })
        })
        .collect();
    // SAFETY: the parts are all of the first `len` elements, and each part has been set.
    unsafe { output.set_len(len) };
    (output, results)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_element_is_computed_once_from_its_start() {
        for (len, part) in [(0, 4), (1, 4), (4, 4), (1000, 7), (5, 0)] {
            let (elements, parts) = in_parts(len, part, 5, |number, elements: &mut [usize]| {
                let start = number * part.max(1);
                elements
                    .iter_mut()
                    .enumerate()
                    .for_each(|(index, element)| *element += start + index);
                elements.len()
            });
            assert_eq!(elements, (5..5 + len).collect::<Vec<_>>());
            assert_eq!(parts.iter().sum::<usize>(), len);
            assert_eq!(parts.len(), len.div_ceil(part.max(1)));
        }
    }
}
