//! Mean cross-entropy of scores and targets.

use candle_core::{DType, Result, Shape, Tensor};

use crate::element::Element;
use crate::operation::{OnCpu, Operation, mismatch_error, unsupported_error};
use crate::real::{Real, largest, sum};
use crate::rows::{map_rows, reduce_rows};
use crate::softmax::softmax_row;
use crate::values::{Input, Values, contiguous_elements, tensor};

const NAME: &str = "cross-entropy";

/// Computes the mean cross-entropy of scores `[rows, classes]` against the class of each row,
/// `[rows]` of u32 or i64: torch's `cross_entropy`. The result is a scalar.
///
/// # Errors
/// Other shapes; no rows; a target that is no class; targets that are no integers, and scores that
/// are no floats.
pub fn cross_entropy(scores: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let (rows, classes) = scores.dims2()?;
    if targets.dims() != [rows] {
        return mismatch_error(scores, targets, NAME);
    }
    if rows == 0 {
        candle_core::bail!("{NAME}: the mean of no rows");
    }
    // A float would be cut to an integer.
    if !targets.dtype().is_int() {
        return unsupported_error(targets.dtype(), NAME);
    }
    if !scores.device().is_cpu() {
        return with_candle_ops(scores, targets);
    }
    let targets = class_indices(targets, classes)?;
    scores
        .contiguous()?
        .apply_op1(OnCpu(CrossEntropy { targets }))
}

/// Computes [`cross_entropy()`] with candle's operations.
pub(crate) fn with_candle_ops(scores: &Tensor, targets: &Tensor) -> Result<Tensor> {
    // The largest score is taken off so that no exponential overflows. It changes no result.
    let shifted = scores.broadcast_sub(&scores.detach().max_keepdim(1)?)?;
    let log_sum = shifted.exp()?.sum_keepdim(1)?.log()?;
    (log_sum - shifted.gather(&targets.unsqueeze(1)?, 1)?)?.mean_all()
}

/// Returns the targets as indices of classes.
///
/// # Errors
/// A target that is not the index of a class.
fn class_indices(targets: &Tensor, classes: usize) -> Result<Vec<usize>> {
    let classes_of_rows = targets.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let mut indices = Vec::with_capacity(classes_of_rows.len());
    for (row, target) in classes_of_rows.into_iter().enumerate() {
        // torch leaves out a row of target -100. Here every row counts, so it is refused like any
        // other number that is no class.
        match usize::try_from(target) {
            Ok(index) if index < classes => indices.push(index),
            _ => candle_core::bail!(
                "{NAME}: target {target} of row {row} is none of {classes} classes"
            ),
        }
    }
    Ok(indices)
}

struct CrossEntropy {
    targets: Vec<usize>,
}

impl Operation<1> for CrossEntropy {
    const NAME: &'static str = NAME;

    fn forward<T: Element>(&self, [scores]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        // The mean of `log(sum(exp(scores))) - scores[target]` over all rows.
        let (_, totals) = reduce_rows(
            [contiguous_elements::<T>(scores, NAME)?],
            scores.1.dims()[1],
            1,
            #[inline(always)]
            |row, [scores], totals| {
                let target = scores[self.targets[row]];
                // Subtract the largest score, so that no power overflows.
                let highest = largest(scores);
                for score in scores.iter_mut() {
                    *score = (*score - highest).exponential();
                }
                // Add the maximum, which was subtracted from all scores, less the target's score.
                let log = sum(scores.len(), |index| scores[index]).logarithm();
                totals[0] += log + (highest - target);
            },
        );
        let mean = totals[0] / T::Real::nearest(self.targets.len() as f64);
        Ok((vec![T::narrow(mean)], Shape::from(())))
    }

    fn backward<T: Element>(
        &self,
        [scores]: [&Tensor; 1],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; 1]> {
        let rows = T::Real::nearest(self.targets.len() as f64);
        // The output is a scalar, so there is one gradient.
        let grad = Values::<T>::read(grad, NAME)?[0].widen() / rows;
        let values = Values::<T>::read(scores, NAME)?;
        let dscores = map_rows(
            [&values],
            scores.dim(1)?,
            #[inline(always)]
            |row, [scores]| {
                // The derivative by a score is its softmax, less 1 for the target, over the number
                // of rows.
                softmax_row(scores);
                let target = self.targets[row];
                scores[target] -= T::Real::ONE;
                scores.iter_mut().for_each(|score| *score *= grad);
            },
        );
        Ok([tensor(dscores, scores.dims())?])
    }
}
