//! Memory that threads fill part by part.

use std::mem::MaybeUninit;

use rayon::iter::{IndexedParallelIterator as _, ParallelIterator as _};
use rayon::slice::ParallelSliceMut as _;

/// Makes `len` elements, `part` at a time, on threads of the rayon pool that the caller is in. `f` gets the number of a part
/// and its elements, which are all `start`. Returns the elements, and the results of `f` in the order of the parts.
///
/// A thread sets the elements of a part just before it computes them, so they are still in its cache; `vec!` would set them
/// all on one thread first, and fetch them from memory again later.
#[expect(unsafe_code, reason = "a vector's memory is set by several threads")]
pub(crate) fn in_parts<T: Copy + Send + Sync, R: Send>(
    len: usize,
    part: usize,
    start: T,
    f: impl Fn(usize, &mut [T]) -> R + Sync,
) -> (Vec<T>, Vec<R>) {
    let mut output = Vec::with_capacity(len);
    let memory = &mut output.spare_capacity_mut()[..len];
    let fill = |(number, part): (usize, &mut [MaybeUninit<T>])| {
        part.fill(MaybeUninit::new(start));
        // SAFETY: each element of the part has just been set.
        f(number, unsafe { part.assume_init_mut() })
    };
    let results = memory.par_chunks_mut(part.max(1)).enumerate().map(fill).collect();
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
                elements.iter_mut().enumerate().for_each(|(index, element)| *element += start + index);
                elements.len()
            });
            assert_eq!(elements, (5..5 + len).collect::<Vec<_>>());
            assert_eq!(parts.iter().sum::<usize>(), len);
            assert_eq!(parts.len(), len.div_ceil(part.max(1)));
        }
    }
}
