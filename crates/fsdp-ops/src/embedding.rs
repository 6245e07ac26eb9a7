//! Rows of a table by index.

use candle_core::{DType, Result, Shape, Tensor};

use crate::element::Element;
use crate::indices::{Indices, check_integers};
use crate::kernels::{Argument, Grid, Kernel, Module, Operand, Output, Runner};
use crate::operation::{Operation, apply, is_computed_here};
use crate::parts::compute_in_chunks;
use crate::real::Real;
use crate::values::{Input, Values, contiguous_elements, tensor};

const NAME: &str = "embedding";

/// The number of sorted rows that a block adds up: `CHUNK` of `embedding.cu`.
const CHUNK: usize = 32;

/// Returns the row of `weight` `[count, width]` for each index of `ids`, which are integers of any
/// shape: torch's `embedding`. The result has one more dimension, of `width`. The gradient of a row
/// is the sum of those of its copies, which half types add up in f32.
///
/// # Errors
/// An index without a row; indices that are no integers; a weight of other than two dimensions. On
/// GPUs an index without a row is no error: it makes a row of NaN, because nobody waits for the GPU
/// here.
pub fn embedding(ids: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (count, width) = weight.dims2()?;
    check_integers(ids, NAME)?;
    let shape = Shape::from([ids.dims(), &[width]].concat());
    if !is_computed_here(weight)? {
        return with_candle_ops(ids, weight)?.reshape(shape);
    }
    let ids = Indices::new(ids, count, weight, |position, index| {
        format!("{NAME}: index {index} at position {position} is none of {count} rows")
    })?;
    apply(Embedding { ids, shape }, [&weight.contiguous()?])
}

/// Computes [`embedding()`] with candle's operations, as rows of one matrix.
pub(crate) fn with_candle_ops(ids: &Tensor, weight: &Tensor) -> Result<Tensor> {
    weight.index_select(&ids.flatten_all()?, 0)
}

struct Embedding {
    ids: Indices,
    /// The shape of the result.
    shape: Shape,
}

impl Operation<1> for Embedding {
    const NAME: &'static str = NAME;

    fn forward<T: Element>(&self, [weight]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let width = weight.1.dims()[1];
        let rows = contiguous_elements::<T>(weight, NAME)?;
        let ids = self.ids.checked();
        let zero = T::narrow(T::Real::ZERO);
        let (copies, _) = compute_in_chunks(ids.len() * width, width, zero, |position, copy| {
            copy.copy_from_slice(&rows[ids[position] * width..][..width]);
        });
        Ok((copies, self.shape.clone()))
    }

    fn backward<T: Element>(
        &self,
        [weight]: [&Tensor; 1],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; 1]> {
        let width = weight.dim(1)?;
        let grad = grad.contiguous()?;
        let grads = Values::<T>::read(&grad, NAME)?;
        let mut sums = vec![T::Real::ZERO; weight.elem_count()];
        // Rows of no width have no elements, so any width will do for them.
        for (&id, row) in self.ids.checked().iter().zip(grads.chunks(width.max(1))) {
            let of_id = sums[id * width..][..width].iter_mut();
            of_id
                .zip(row)
                .for_each(|(sum, &value)| *sum += value.widen());
        }
        Ok([tensor(T::from_reals(sums), weight.dims())?])
    }

    fn launch_forward(
        &self,
        runner: &Runner,
        [weight]: [Operand<'_>; 1],
    ) -> Result<(Output, Shape)> {
        let (table_rows, width) = weight.rows_and_width();
        let rows = self.ids.len();
        let y = runner.allocate(weight.dtype, rows * width)?;
        self.ids.with_operand(runner, NAME, |ids| {
            runner.launch(
                Kernel(Module::Embedding, "embedding_forward", Some(weight.dtype)),
                Grid::vectors(rows, width, weight.dtype),
                &[
                    Argument::Read(&weight),
                    Argument::Read(ids),
                    Argument::Write(&y),
                    Argument::Long(rows),
                    Argument::Int(table_rows),
                    Argument::Int(width),
                ],
            )
        })?;
        Ok((y, self.shape.clone()))
    }

    fn launch_backward(
        &self,
        runner: &Runner,
        [weight]: [Operand<'_>; 1],
        _: Operand<'_>,
        grad: Operand<'_>,
    ) -> Result<[Output; 1]> {
        let (table_rows, width) = weight.rows_and_width();
        let rows = self.ids.len();
        let dweight = runner.zeros(weight.dtype, weight.len())?;
        if grad.len() == 0 {
            return Ok([dweight]);
        }
        let sorted = runner.allocate(DType::U32, rows)?;
        let order = runner.allocate(DType::U32, rows)?;
        let scratch = runner.allocate(DType::U32, 2 * rows)?;
        self.ids.with_operand(runner, NAME, |ids| {
            runner.launch(
                Kernel(Module::Embedding, "embedding_sort", None),
                Grid::blocks(1, [1024, 1]),
                &[
                    Argument::Read(ids),
                    Argument::Write(&sorted),
                    Argument::Write(&order),
                    Argument::Write(&scratch),
                    Argument::Long(rows),
                    Argument::Int(table_rows),
                ],
            )
        })?;
        let chunks = rows.div_ceil(CHUNK);
        let partials = runner.allocate(DType::F32, 2 * chunks * width)?;
        let grid = Grid::chunks(chunks, width, weight.dtype);
        let sizes = [
            Argument::Long(rows),
            Argument::Int(table_rows),
            Argument::Int(width),
        ];
        let [sorted, order] = [&sorted.operand()?, &order.operand()?];
        let arguments_of_sums = [
            Argument::Read(&grad),
            Argument::Read(sorted),
            Argument::Read(order),
            Argument::Write(&dweight),
            Argument::Write(&partials),
        ];
        runner.launch(
            Kernel(Module::Embedding, "embedding_sums", Some(weight.dtype)),
            grid,
            &[&arguments_of_sums[..], &sizes].concat(),
        )?;
        let partials = partials.operand()?;
        let arguments = [
            Argument::Read(sorted),
            Argument::Read(&partials),
            Argument::Write(&dweight),
        ];
        runner.launch(
            Kernel(Module::Embedding, "embedding_finish", Some(weight.dtype)),
            grid,
            &[&arguments[..], &sizes].concat(),
        )?;
        Ok([dweight])
    }
}
