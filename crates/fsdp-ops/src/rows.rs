//! Rows of equal width, computed in parallel by kernels that the compiler vectorises.

use rayon::iter::ParallelIterator as _;
use rayon::slice::ParallelSlice as _;

use crate::element::Element;
use crate::parts::compute_in_chunks;
use crate::real::Real;

/// The number of elements that one task computes, about: enough to be worth a task, and few enough
/// to stay in cache.
const TASK_LEN: usize = 16 << 10;

/// The width of rows for operations to which rows mean nothing.
pub(crate) const ANY_WIDTH: usize = 4 << 10;

/// Returns the number of rows of a task, which depends on nothing but their width.
fn rows_of_task(width: usize) -> usize {
    (TASK_LEN / width.max(1)).max(1)
}

/// Runs a kernel with the widest vector instructions of this machine.
///
/// Only code that is inlined into the kernel has them. So kernels, and closures that they call, are
/// `#[inline(always)]`, and loop with `for`: the library's `for_each` around a long closure is a
/// function of its own, for any machine.
#[inline(always)]
pub(crate) fn vectorized<R>(kernel: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(kernel)
}

/// Computes an output of the same length as each of the inputs, row by row. The kernel gets the
/// number of a row and that row of each input, widened, and writes its result over the row of the
/// first input. The last row may be shorter.
pub(crate) fn map_rows<T: Element, const N: usize>(
    inputs: [&[T]; N],
    width: usize,
    kernel: impl Fn(usize, [&mut [T::Real]; N]) + Sync,
) -> Vec<T> {
    let (output, _) = reduce_rows(
        inputs,
        width,
        0,
        #[inline(always)]
        |row, values, _| kernel(row, values),
    );
    output
}

/// Computes an output like [`map_rows`], and returns it with sums over all rows: the kernel adds to
/// `sum_count` numbers that start at zero.
pub(crate) fn reduce_rows<T: Element, const N: usize>(
    inputs: [&[T]; N],
    width: usize,
    sum_count: usize,
    kernel: impl Fn(usize, [&mut [T::Real]; N], &mut [T::Real]) + Sync,
) -> (Vec<T>, Vec<T::Real>) {
    let zero = T::narrow(T::Real::ZERO);
    let zero_sum = T::Real::ZERO;
    // Rows of no width have no elements, so any width will do for them.
    let width = width.max(1);
    let rows_per_task = rows_of_task(width);
    let (output, sums_by_task) = compute_in_chunks(
        inputs[0].len(),
        width * rows_per_task,
        zero,
        |task, output| {
            // Each task sums for itself, and widens to memory of its own, which stays in the cache.
            let mut task_sums = vec![zero_sum; sum_count];
            let mut scratch: [Vec<T::Real>; N] =
                std::array::from_fn(|_| vec![zero_sum; width.min(output.len())]);
            vectorized(
                #[inline(always)]
                || {
                    for (index, output) in output.chunks_mut(width).enumerate() {
                        let row = task * rows_per_task + index;
                        let range = row * width..row * width + output.len();
                        // Widen the row of each input, let the kernel change them, and round the
                        // first of them to the output.
                        for (scratch, input) in scratch.iter_mut().zip(inputs) {
                            for (wide, value) in scratch.iter_mut().zip(&input[range.clone()]) {
                                *wide = value.widen();
                            }
                        }
                        kernel(
                            row,
                            scratch.each_mut().map(|values| &mut values[..output.len()]),
                            &mut task_sums,
                        );
                        for (value, &wide) in output.iter_mut().zip(&scratch[0]) {
                            *value = T::narrow(wide);
                        }
                    }
                },
            );
            task_sums
        },
    );
    (output, add_up_tasks(&sums_by_task, sum_count))
}

/// Returns the sum of all rows of `values`, element by element; a last row that is shorter does not
/// count.
pub(crate) fn sum_of_rows<T: Element>(values: &[T], width: usize) -> Vec<T::Real> {
    if width == 0 {
        return Vec::new();
    }
    let zero = T::Real::ZERO;
    let tasks = values.par_chunks(width * rows_of_task(width));
    let sums = tasks.map(|rows| {
        let mut task_sums = vec![zero; width];
        vectorized(
            #[inline(always)]
            || {
                for row in rows.chunks_exact(width) {
                    task_sums
                        .iter_mut()
                        .zip(row)
                        .for_each(|(sum, &value)| *sum += value.widen());
                }
            },
        );
        task_sums
    });
    let sums_by_task: Vec<Vec<T::Real>> = sums.collect();
    add_up_tasks(&sums_by_task, width)
}

/// Returns the sum of the partial results of all tasks, added in the order of the tasks, so that
/// the result does not depend on threads.
fn add_up_tasks<R: Real>(sums_by_task: &[Vec<R>], width: usize) -> Vec<R> {
    let mut total = vec![R::ZERO; width];
    for task_sums in sums_by_task {
        total
            .iter_mut()
            .zip(task_sums)
            .for_each(|(total, &task_sums)| *total += task_sums);
    }
    total
}
