//! A step of Adafactor.

use candle_core::{DType, Result, Tensor};

use crate::kernels::pieces::contiguous_address;
use crate::kernels::{Argument, Grid, Kernel, MOST_BLOCK_ROWS, Module, Runner, columns_parts};

/// The numbers of one step of Adafactor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factored {
    /// The rate of the step, relative to the size of the parameter: negative to maximize.
    pub rate: f64,
    /// The factor of the parameter: `1 - lr * weight_decay`.
    pub keep: f64,
    /// The weight of the new squares in the averages.
    pub weight: f64,
    /// The lower bound of the root of an average of squares, and of the mean of averages.
    pub eps: f64,
    /// The lower bound of the root mean square of the parameter.
    pub least_scale: f64,
    /// The largest root mean square of an update that is not scaled down.
    pub threshold: f64,
}

impl Factored {
    /// Returns a parameter and its averages after a step with a gradient. The averages are those of
    /// the rows and of the columns, for a parameter of two or more dimensions; otherwise those of
    /// the elements. All tensors are contiguous, of `f32`, and on a GPU that
    /// [`has_kernels`](super::has_kernels); they have elements.
    ///
    /// # Errors
    /// CUDA's; averages of other sizes; sizes that are larger than a kernel can count.
    pub fn step(
        &self,
        param: &Tensor,
        grad: &Tensor,
        averages: &[Tensor],
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let (matrices, height, width) = match param.dims() {
            [matrices @ .., height, width] => (matrices.iter().product(), *height, *width),
            shape => (1, 1, shape.iter().product()),
        };
        let step = Step {
            numbers: self,
            runner: Runner::on(param.device()),
            grad: address(grad, param.elem_count())?,
            matrices,
            height,
            width,
        };
        match averages {
            [rows, columns] => {
                let rows = step.rows(rows)?;
                let means = step.means(&rows)?;
                let columns = step.columns(columns)?;
                let estimate = step.estimate(&columns, Some((&rows, &means)))?;
                let stepped = step.param(param, estimate)?;
                Ok((stepped, vec![rows, columns]))
            }
            [elements] => {
                let elements = step.columns(elements)?;
                let stepped = step.param(param, step.estimate(&elements, None)?)?;
                Ok((stepped, vec![elements]))
            }
            _ => candle_core::bail!("Adafactor has one or two averages, not {}", averages.len()),
        }
    }
}

/// A step of a parameter that is so many matrices, one after the other. One of fewer than two
/// dimensions is a single row.
struct Step<'a> {
    numbers: &'a Factored,
    runner: Runner,
    grad: Argument<'static>,
    matrices: usize,
    height: usize,
    width: usize,
}

/// Arguments of kernels: the averages of the rows, the averages of the columns, and for each matrix
/// the mean of the averages of its rows. Without averages of rows, the first and the last are null.
type Estimate = [Argument<'static>; 3];

impl Step<'_> {
    /// Makes a tensor of the shape of another one. Kernels have to write each element.
    fn like(&self, tensor: &Tensor) -> Result<Tensor> {
        let memory = self.runner.allocate(DType::F32, tensor.elem_count())?;
        self.runner.tensor(memory, tensor.shape())
    }

    /// Launches a kernel of this file.
    fn launch(&self, name: &'static str, grid: Grid, arguments: &[Argument<'_>]) -> Result<()> {
        let kernel = Kernel(Module::Factored, name, None);
        self.runner.launch(kernel, grid, arguments)
    }

    /// Returns the shape of launches over all rows.
    fn grid_of_rows(&self) -> Grid {
        Grid::rows(self.matrices * self.height, self.width, DType::F32)
    }

    /// Returns the averages of the rows after the step.
    fn rows(&self, before: &Tensor) -> Result<Tensor> {
        let rows = self.matrices * self.height;
        let after = self.like(before)?;
        let arguments = [
            self.grad,
            address(before, rows)?,
            address(&after, rows)?,
            Argument::Long(rows),
            Argument::Int(self.width),
            Argument::Double(self.numbers.weight),
        ];
        self.launch("factored_rows", self.grid_of_rows(), &arguments)?;
        Ok(after)
    }

    /// Returns the mean of the averages of the rows of each matrix.
    fn means(&self, rows: &Tensor) -> Result<Tensor> {
        let memory = self.runner.allocate(DType::F32, self.matrices)?;
        let means = self.runner.tensor(memory, self.matrices)?;
        let arguments = [
            address(rows, self.matrices * self.height)?,
            address(&means, self.matrices)?,
            Argument::Long(self.matrices),
            Argument::Int(self.height),
            Argument::Double(self.numbers.eps),
        ];
        let grid = Grid::rows(self.matrices, self.height, DType::F32);
        self.launch("factored_means", grid, &arguments)?;
        Ok(means)
    }

    /// Returns the averages of the columns after the step.
    fn columns(&self, before: &Tensor) -> Result<Tensor> {
        let columns = self.matrices * self.width;
        // Several matrices have enough blocks without parts.
        let parts = match self.matrices {
            1 => columns_parts(self.height, self.width, DType::F32),
            _ => 1,
        };
        let partials = self
            .runner
            .allocate(DType::F32, self.matrices * parts * self.width)?;
        let mut grid = Grid::columns(self.height, self.width, DType::F32);
        grid.blocks[1] = (self.matrices * parts).min(MOST_BLOCK_ROWS);
        let arguments = [
            self.grad,
            Argument::Write(&partials),
            Argument::Long(self.matrices),
            Argument::Long(self.height),
            Argument::Int(self.width),
            Argument::Long(parts),
        ];
        self.launch("factored_columns", grid, &arguments)?;
        let after = self.like(before)?;
        let arguments = [
            Argument::Read(&partials.operand()?),
            address(before, columns)?,
            address(&after, columns)?,
            Argument::Long(columns),
            Argument::Long(self.height),
            Argument::Int(self.width),
            Argument::Long(parts),
            Argument::Double(self.numbers.weight),
        ];
        let grid = Grid::elements(columns, DType::F32);
        self.launch("factored_finish_columns", grid, &arguments)?;
        Ok(after)
    }

    /// Returns the averages as arguments of kernels.
    fn estimate(&self, columns: &Tensor, rows: Option<(&Tensor, &Tensor)>) -> Result<Estimate> {
        let columns = address(columns, self.matrices * self.width)?;
        let Some((rows, means)) = rows else {
            return Ok([Argument::Word(0), columns, Argument::Word(0)]);
        };
        let rows = address(rows, self.matrices * self.height)?;
        Ok([rows, columns, address(means, self.matrices)?])
    }

    /// Returns the parameter after the step.
    fn param(&self, param: &Tensor, [rows, columns, means]: Estimate) -> Result<Tensor> {
        let Factored {
            rate,
            keep,
            eps,
            least_scale,
            threshold,
            ..
        } = *self.numbers;
        let row_count = self.matrices * self.height;
        let numel = row_count * self.width;
        // The squares of the parameter and of the directions, of each row.
        let partials = self.runner.allocate(DType::F64, 2 * row_count)?;
        let values = [address(param, numel)?, self.grad, rows, columns, means];
        let arguments = [
            Argument::Write(&partials),
            Argument::Long(row_count),
            Argument::Long(self.height),
            Argument::Int(self.width),
            Argument::Double(eps),
        ];
        let arguments = [&values[..], &arguments].concat();
        self.launch("factored_measure", self.grid_of_rows(), &arguments)?;
        let factor = self.runner.allocate(DType::F32, 1)?;
        let arguments = [
            Argument::Read(&partials.operand()?),
            Argument::Write(&factor),
            Argument::Long(row_count),
            Argument::Long(numel),
            Argument::Double(rate),
            Argument::Double(least_scale),
            Argument::Double(threshold),
        ];
        self.launch("factored_finish", Grid::blocks(1, [256, 1]), &arguments)?;
        let stepped = self.like(param)?;
        let factor = factor.operand()?;
        let arguments = [
            Argument::Read(&factor),
            address(&stepped, numel)?,
            Argument::Long(row_count),
            Argument::Long(self.height),
            Argument::Int(self.width),
            Argument::Double(eps),
            Argument::Double(keep),
        ];
        let arguments = [&values[..], &arguments].concat();
        self.launch("factored_apply", self.grid_of_rows(), &arguments)?;
        Ok(stepped)
    }
}

/// Returns the address of a tensor of so many elements as the argument of a kernel.
fn address(tensor: &Tensor, numel: usize) -> Result<Argument<'static>> {
    if tensor.dtype() != DType::F32 {
        candle_core::bail!("a step of Adafactor in {:?}", tensor.dtype());
    }
    Ok(Argument::Word(contiguous_address(tensor, numel)?))
}
