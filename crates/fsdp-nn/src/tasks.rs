//! Element-wise work on long slices, shared by the threads of the rayon pool that the caller is in.
//!
//! Slices are cut into tasks of a fixed length, so that results do not depend on the number of
//! threads.

use std::cell::Cell;

use rayon::iter::{IndexedParallelIterator as _, IntoParallelIterator as _, ParallelIterator as _};
use rayon::slice::{ParallelSlice as _, ParallelSliceMut as _};

/// The number of elements of a task. With so many, handing a task to a thread costs little compared
/// with the task itself.
const TASK_LEN: usize = 32 << 10;

/// The partial sums of a task, so that the compiler can add several numbers at once.
const LANES: usize = 8;

thread_local! {
    /// `true` on a thread that shares no work.
    static IS_ALONE: Cell<bool> = const { Cell::new(false) };
}

/// Makes this thread do all of its work itself. It belongs to no rayon pool, so work that it shared
/// would run in rayon's global pool and take cores from the ranks' own pools.
pub(crate) fn stay_on_this_thread() {
    IS_ALONE.set(true);
}

/// Returns `true` if this thread does all of its work itself.
pub(crate) fn is_alone() -> bool {
    IS_ALONE.get() || rayon::current_num_threads() == 1
}

/// Returns `true` if `len` elements are shared by threads. For fewer, another thread would only
/// add its latency.
fn is_shared(len: usize) -> bool {
    len > TASK_LEN && !IS_ALONE.get()
}

/// Calls `f` with matching parts of two slices of equal length, in parallel if they are long. What
/// `f` does must not depend on where they are cut.
pub(crate) fn for_each_pair<T: Send, U: Sync>(
    target: &mut [T],
    source: &[U],
    f: impl Fn(&mut [T], &[U]) + Sync,
) {
    if !is_shared(target.len()) {
        return f(target, source);
    }
    target
        .par_chunks_mut(TASK_LEN)
        .zip(source.par_chunks(TASK_LEN))
        .for_each(|(target, source)| f(target, source));
}

/// Returns the sum of `term` of all `values`.
pub(crate) fn sum<T: Copy + Sync>(values: &[T], term: impl Fn(T) -> f64 + Sync) -> f64 {
    if !is_shared(values.len()) {
        return values
            .chunks(TASK_LEN)
            .fold(0.0, |sum, task| sum + sum_of_task(task, &term));
    }
    let sums: Vec<f64> = values
        .par_chunks(TASK_LEN)
        .map(|task| sum_of_task(task, &term))
        .collect();
    sums.into_iter().sum()
}

/// Returns the sum of `term` of the values of one task. It is added up in several lanes, which the
/// processor can do at the same time.
fn sum_of_task<T: Copy>(values: &[T], term: &impl Fn(T) -> f64) -> f64 {
    let mut lanes = [0f64; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (sum, &value) in lanes.iter_mut().zip(chunk) {
            *sum += term(value);
        }
    }
    // The lanes are independent sums, so that the loop can be vectorised. Their number is fixed,
    // and so is the result.
    let remainder_sum: f64 = chunks.remainder().iter().map(|&value| term(value)).sum();
    lanes.iter().sum::<f64>() + remainder_sum
}

/// One task of an update: a part of the parameter, of its gradient and of each of its states.
type UpdateTask<'a, T> = (&'a mut [T], &'a [T], Vec<&'a mut [T]>);

/// Calls `update` with each task of a parameter, its gradient and its states, all of equal length.
/// An error of any task is returned.
pub(crate) fn update<T: Send + Sync, E: Send>(
    param: &mut [T],
    grad: &[T],
    states: &mut [&mut [T]],
    update: impl Fn(&mut [T], &[T], &mut [&mut [T]]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    if !is_shared(param.len()) {
        return update(param, grad, states);
    }
    // Cut all slices at the same places, so that each task has what belongs together.
    let mut states: Vec<_> = states
        .iter_mut()
        .map(|state| state.chunks_mut(TASK_LEN))
        .collect();
    let tasks: Vec<UpdateTask<'_, T>> = param
        .chunks_mut(TASK_LEN)
        .zip(grad.chunks(TASK_LEN))
        .map(|(param, grad)| {
            (
                param,
                grad,
                states.iter_mut().filter_map(Iterator::next).collect(),
            )
        })
        .collect();
    tasks
        .into_par_iter()
        .try_for_each(|(param, grad, mut states)| update(param, grad, &mut states))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_of_short_and_long_slices_is_in_one_task() {
        for len in [0, 1, TASK_LEN, TASK_LEN + 1, 3 * TASK_LEN + 5] {
            let source: Vec<f64> = (0..len).map(|index| index as f64).collect();
            let mut target = vec![1f64; len];
            for_each_pair(&mut target, &source, |target, source| {
                target
                    .iter_mut()
                    .zip(source)
                    .for_each(|(target, source)| *target += source)
            });
            assert!(
                target
                    .iter()
                    .zip(&source)
                    .all(|(target, source)| *target == source + 1.0),
                "{len}"
            );
            assert_eq!(
                sum(&source, |value| value),
                (len * len.saturating_sub(1) / 2) as f64
            );

            let (mut first, mut second) = (vec![0f64; len], vec![0f64; len]);
            let updated = update(
                &mut target,
                &source,
                &mut [&mut first, &mut second],
                |target, source, states| {
                    let [first, second] = states else {
                        return Err("two states");
                    };
                    for (index, &source) in source.iter().enumerate() {
                        target[index] -= source;
                        first[index] += source;
                        second[index] += 2.0 * source;
                    }
                    Ok(())
                },
            );
            assert_eq!(updated, Ok(()));
            assert!(target.iter().all(|&target| target == 1.0), "{len}");
            assert_eq!(first, source);
            assert!(
                second
                    .iter()
                    .zip(&source)
                    .all(|(second, source)| *second == 2.0 * source)
            );
        }
    }

    #[test]
    fn a_thread_that_is_alone_does_all_itself_with_the_same_bits() {
        let values: Vec<f64> = (0..5 * TASK_LEN)
            .map(|index| (index as f64).sin())
            .collect();
        let shared_sum = sum(&values, |value| value);
        let thread = std::thread::spawn(move || {
            stay_on_this_thread();
            let thread_id = std::thread::current().id();
            let mut target = vec![0f64; values.len()];
            for_each_pair(&mut target, &values, |target, source| {
                assert_eq!(std::thread::current().id(), thread_id);
                target.copy_from_slice(source);
            });
            assert_eq!(target, values);
            sum(&values, |value| value)
        });
        assert_eq!(thread.join().unwrap().to_bits(), shared_sum.to_bits());
    }

    #[test]
    fn an_error_of_a_task_is_returned() {
        let (mut param, grad) = (vec![0f64; 4 * TASK_LEN], vec![0f64; 4 * TASK_LEN]);
        param[3 * TASK_LEN] = 1.0;
        let updated = update(&mut param, &grad, &mut [], |param, _, _| {
            if param[0] == 1.0 { Err(7) } else { Ok(()) }
        });
        assert_eq!(updated, Err(7));
    }
}
