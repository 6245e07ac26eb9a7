//! Mean cross-entropy of scores and targets.

use std::sync::OnceLock;

use candle_core::{DType, Layout, Result, Shape, Tensor};

use crate::element::Element;
use crate::indices::{Indices, check_integers};
use crate::kernels::{Argument, Grid, Kernel, Module, Operand, Output, Runner};
use crate::operation::{Operation, apply, is_computed_here, mismatch_error};
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
/// are no floats. On GPUs a target that is no class is no error, because nobody waits for the GPU
/// here: it makes the result NaN, and the gradient of its row.
pub fn cross_entropy(scores: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let (rows, classes) = scores.dims2()?;
    if targets.dims() != [rows] {
        return mismatch_error(scores, targets, NAME);
    }
    if rows == 0 {
        candle_core::bail!("{NAME}: the mean of no rows");
    }
    check_integers(targets, NAME)?;
    if !is_computed_here(scores)? {
        return with_candle_ops(scores, targets);
    }
    // torch leaves out a row of target -100. Here every row counts, so it is refused like any other
    // number that is no class.
    let targets = Indices::new(targets, classes, scores, |row, target| {
        format!("{NAME}: target {target} of row {row} is none of {classes} classes")
    })?;
    let operation = CrossEntropy {
        targets,
        log_sums: OnceLock::new(),
    };
    apply(operation, [&scores.contiguous()?])
}

/// Computes [`cross_entropy()`] with candle's operations.
pub(crate) fn with_candle_ops(scores: &Tensor, targets: &Tensor) -> Result<Tensor> {
    // The largest score is taken off so that no exponential overflows. It changes no result.
    let shifted = scores.broadcast_sub(&scores.detach().max_keepdim(1)?)?;
    let log_sum = shifted.exp()?.sum_keepdim(1)?.log()?;
    (log_sum - shifted.gather(&targets.unsqueeze(1)?, 1)?)?.mean_all()
}

struct CrossEntropy {
    targets: Indices,
    /// The logarithm of the sum of each row's exponentials, for the kernels of the backward.
    log_sums: OnceLock<Tensor>,
}

impl Operation<1> for CrossEntropy {
    const NAME: &'static str = NAME;

    fn forward<T: Element>(&self, [scores]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let targets = self.targets.checked();
        // The mean of `log(sum(exp(scores))) - scores[target]` over all rows.
        let (_, totals) = reduce_rows(
            [contiguous_elements::<T>(scores, NAME)?],
            scores.1.dims()[1],
            1,
            #[inline(always)]
            |row, [scores], totals| {
                let target = scores[targets[row]];
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
        let mean = totals[0] / T::Real::nearest(targets.len() as f64);
        Ok((vec![T::narrow(mean)], Shape::from(())))
    }

    fn backward<T: Element>(
        &self,
        [scores]: [&Tensor; 1],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; 1]> {
        let targets = self.targets.checked();
        let rows = T::Real::nearest(targets.len() as f64);
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
                let target = targets[row];
                scores[target] -= T::Real::ONE;
                scores.iter_mut().for_each(|score| *score *= grad);
            },
        );
        Ok([tensor(dscores, scores.dims())?])
    }

    fn launch_forward(
        &self,
        runner: &Runner,
        [scores]: [Operand<'_>; 1],
    ) -> Result<(Output, Shape)> {
        let (rows, classes) = scores.rows_and_width();
        let dtype = scores.dtype;
        let losses = runner.allocate(DType::F32, rows)?;
        let log_sums = runner.allocate(DType::F32, rows)?;
        self.targets.with_operand(runner, NAME, |targets| {
            runner.launch(
                Kernel(Module::CrossEntropy, "cross_entropy_forward", Some(dtype)),
                Grid::rows(rows, classes, dtype),
                &[
                    Argument::Read(&scores),
                    Argument::Read(targets),
                    Argument::Write(&losses),
                    Argument::Write(&log_sums),
                    Argument::Long(rows),
                    Argument::Int(classes),
                ],
            )
        })?;
        let mean = runner.allocate(dtype, 1)?;
        runner.launch(
            Kernel(Module::CrossEntropy, "cross_entropy_mean", Some(dtype)),
            Grid::blocks(1, [1024, 1]),
            &[
                Argument::Read(&losses.operand()?),
                Argument::Write(&mean),
                Argument::Long(rows),
            ],
        )?;
        // Each operation runs once, so nothing has been set before.
        let _ = self.log_sums.set(runner.tensor(log_sums, rows)?);
        Ok((mean, Shape::from(())))
    }

    fn launch_backward(
        &self,
        runner: &Runner,
        [scores]: [Operand<'_>; 1],
        _: Operand<'_>,
        grad: Operand<'_>,
    ) -> Result<[Output; 1]> {
        let (rows, classes) = scores.rows_and_width();
        let dtype = scores.dtype;
        let log_sums = self
            .log_sums
            .get()
            .expect("the forward runs before the backward");
        let (storage, _) = log_sums.storage_and_layout();
        let log_sums = Operand::new(&storage, &Layout::contiguous(rows), NAME)?;
        let dscores = runner.allocate(dtype, scores.len())?;
        self.targets.with_operand(runner, NAME, |targets| {
            runner.launch(
                Kernel(Module::CrossEntropy, "cross_entropy_backward", Some(dtype)),
                Grid::rows(rows, classes, dtype),
                &[
                    Argument::Read(&scores),
                    Argument::Read(targets),
                    Argument::Read(&log_sums),
                    Argument::Read(&grad),
                    Argument::Write(&dscores),
                    Argument::Long(rows),
                    Argument::Int(classes),
                ],
            )
        })?;
        Ok([dscores])
    }
}
