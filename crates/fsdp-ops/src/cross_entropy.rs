//! Mean cross-entropy of scores and targets.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, WithDType as _};

use crate::composed;
use crate::element::{Element, tensor, unsupported, with_element};
use crate::real::{Real, largest, sum};
use crate::rows::{map_rows, reduce_rows};
use crate::softmax::softmax_row;
use crate::values::{Values, contiguous, elements};

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
        let (lhs, rhs) = (scores.shape().clone(), targets.shape().clone());
        return Err(candle_core::Error::ShapeMismatchBinaryOp { lhs, rhs, op: NAME }.bt());
    }
    if rows == 0 {
        candle_core::bail!("{NAME}: the mean of no rows");
    }
    // A float would be cut to an integer.
    if !targets.dtype().is_int() {
        return unsupported(targets.dtype(), NAME);
    }
    if !scores.device().is_cpu() {
        return composed::cross_entropy(scores, targets);
    }
    let targets = indices(targets, classes)?;
    scores.contiguous()?.apply_op1(CrossEntropy { targets })
}

/// Returns the targets as indices of classes.
///
/// # Errors
/// A target that is not the index of a class.
fn indices(targets: &Tensor, classes: usize) -> Result<Vec<usize>> {
    let targets = targets.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let mut indices = Vec::with_capacity(targets.len());
    for (row, target) in targets.into_iter().enumerate() {
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

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, scores: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage as _;
        let range = contiguous(layout, NAME)?;
        with_element!(scores.dtype(), NAME, T => {
            let mean = mean(elements::<T>(scores, range, NAME)?, &self.targets);
            Ok((T::to_cpu_storage_owned(vec![T::narrow(mean)]), Shape::from(())))
        })
    }

    fn bwd(&self, scores: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let width = scores.dim(1)?;
        let (values, grad) = (Values::of(scores, NAME)?, Values::of(grad, NAME)?);
        with_element!(scores.dtype(), NAME, T => {
            let grad = grad.slice::<T>()?[0].widen() / <T as Element>::Real::of(self.targets.len() as f64);
            let dscores = map_rows([values.slice::<T>()?], width, #[inline(always)] |row, [scores]| {
                // The derivative by a score is its softmax, less 1 for the target, over the number
                // of rows.
                softmax_row(scores);
                let target = self.targets[row];
                scores[target] -= <T as Element>::Real::ONE;
                scores.iter_mut().for_each(|score| *score *= grad);
            });
            tensor(dscores, scores.dims()).map(Some)
        })
    }
}

/// Returns the mean of `log(sum(exp(scores))) - scores[target]` over all rows.
fn mean<T: Element>(scores: &[T], targets: &[usize]) -> T::Real {
    let rows = targets.len();
    let width = scores.len() / rows;
    let (_, total) = reduce_rows(
        [scores],
        width,
        1,
        #[inline(always)]
        |row, [scores], total| {
            let target = scores[targets[row]];
            // Subtract the largest score, so that no power overflows.
            let highest = largest(scores);
            for score in scores.iter_mut() {
                *score = (*score - highest).exponential();
            }
            let log = sum(scores.len(), |index| scores[index]).logarithm();
            total[0] += log + (highest - target);
        },
    );
    total[0] / T::Real::of(rows as f64)
}
