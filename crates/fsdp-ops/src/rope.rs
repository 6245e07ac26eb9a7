//! Rotary position embeddings.

use candle_core::{D, Error, Layout, Result, Tensor};

use crate::element::Element;
use crate::kernels::{
    self, Argument, Grid, Kernel, Module, Operand, Output, RotationSizes, Runner, Strides, to_int,
};
use crate::operation::{Unary, apply, is_computed_here, mismatch_error};
use crate::real::Real;
use crate::rows::map_rows;
use crate::values::Values;

/// Rotates the pairs of each vector of `x` `[batch, heads, time, width]` by the angles of its
/// position: element `i` with element `i + width / 2`. `cos` and `sin` are `[time, width / 2]`, or
/// `[batch, time, width / 2]`; they get no gradient.
///
/// # Errors
/// Other shapes or dtypes; an odd width.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotate::<false>(x, cos, sin)
}

/// Rotates like [`rope()`], but pairs element `2 * i` with element `2 * i + 1`.
///
/// # Errors
/// The errors of [`rope()`].
pub fn rope_i(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotate::<true>(x, cos, sin)
}

/// Checks the arguments, and rotates on the CPU with [`Rope`], or on other devices with candle's
/// operations.
fn rotate<const INTERLEAVED: bool>(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let op = Rope::<INTERLEAVED>::NAME;
    let (batch, heads, time, width) = x.dims4()?;
    let shared = [time, width / 2];
    let of_batch = [batch, time, width / 2];
    for angles in [cos, sin] {
        let fits = angles.dims() == shared || angles.dims() == of_batch;
        if !fits || !width.is_multiple_of(2) {
            return mismatch_error(x, angles, op);
        }
        if angles.dtype() != x.dtype() {
            return Err(Error::DTypeMismatchBinaryOp {
                lhs: x.dtype(),
                rhs: angles.dtype(),
                op,
            }
            .bt());
        }
    }
    if cos.dims() != sin.dims() {
        return mismatch_error(cos, sin, op);
    }
    // The angles get no gradient.
    let cos = cos.detach();
    let sin = sin.detach();
    if !is_computed_here(x)? {
        return with_candle_ops::<INTERLEAVED>(x, &cos, &sin);
    }
    let x = if kernels::run_on(x.device(), x.dtype())? {
        kernels::with_contiguous_rows(x)?
    } else {
        x.contiguous()?
    };
    let operation = Rope::<INTERLEAVED> {
        cos: cos.contiguous()?,
        sin: sin.contiguous()?,
        time,
        heads: (cos.rank() == 3).then_some(heads),
    };
    apply(operation, [&x])
}

/// Computes [`rope()`] or [`rope_i`] with candle's operations.
pub(crate) fn with_candle_ops<const INTERLEAVED: bool>(
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
) -> Result<Tensor> {
    let (batch, heads, time, width) = x.dims4()?;
    // [time, half] goes with all batches and heads, [batch, time, half] with all heads.
    let dims = match cos.rank() {
        3 => (batch, 1, time, width / 2),
        _ => (1, 1, time, width / 2),
    };
    let cos = cos.reshape(dims)?;
    let sin = sin.reshape(dims)?;
    // The two elements of a pair are apart in the last dimension, or in the one before it.
    let (pairs, dim) = if INTERLEAVED {
        (x.reshape((batch, heads, time, width / 2, 2))?, 4)
    } else {
        (x.reshape((batch, heads, time, 2, width / 2))?, 3)
    };
    let a = pairs.narrow(dim, 0, 1)?.squeeze(dim)?;
    let b = pairs.narrow(dim, 1, 1)?.squeeze(dim)?;
    let rotated_a = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let rotated_b = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
    Tensor::stack(&[rotated_a, rotated_b], dim)?.reshape((batch, heads, time, width))
}

/// Rotates pairs: if `INTERLEAVED`, an element with an even index and the next one, or else one of
/// the first half and the one at the same position of the second half.
struct Rope<const INTERLEAVED: bool> {
    cos: Tensor,
    sin: Tensor,
    time: usize,
    /// The number of heads of a batch, if each batch has angles of its own.
    heads: Option<usize>,
}

impl<const INTERLEAVED: bool> Unary for Rope<INTERLEAVED> {
    const NAME: &'static str = if INTERLEAVED { "rope-i" } else { "rope" };

    fn forward<T: Element>(&self, x: &[T]) -> Result<Vec<T>> {
        self.rotate(x, T::Real::ONE)
    }

    /// Rotates the gradients by the opposite angles.
    fn backward<T: Element>(&self, _: &Tensor, _: &Tensor, grads: &[T]) -> Result<Vec<T>> {
        self.rotate(grads, T::Real::nearest(-1.0))
    }

    fn launch_forward(&self, runner: &Runner, x: &Operand<'_>) -> Result<Output> {
        self.launch(runner, x, false)
    }

    const TAKES_STRIDED_GRADIENT: bool = true;

    fn launch_backward(
        &self,
        runner: &Runner,
        _: &Operand<'_>,
        _: &Operand<'_>,
        grad: &Operand<'_>,
    ) -> Result<Output> {
        self.launch(runner, grad, true)
    }
}

impl<const INTERLEAVED: bool> Rope<INTERLEAVED> {
    /// Launches the kernel that rotates vectors by the angles of their positions or, if `back`, by
    /// the opposite ones.
    fn launch(&self, runner: &Runner, x: &Operand<'_>, back: bool) -> Result<Output> {
        let (batches, heads, time, width) = x.layout.shape().dims4()?;
        let (cos_storage, cos_layout) = self.cos.storage_and_layout();
        let (sin_storage, sin_layout) = self.sin.storage_and_layout();
        let cos = Operand::new(&cos_storage, cos_layout, Self::NAME)?;
        let sin = Operand::new(&sin_storage, sin_layout, Self::NAME)?;
        let half = width / 2;
        let sizes = RotationSizes {
            x: Strides::of_layout(&x.layout)?,
            y: Strides::of_layout(&Layout::contiguous(x.layout.shape()))?,
            batches: batches as i64,
            heads: to_int(heads)?,
            time: to_int(time)?,
            half: to_int(half)?,
            of_batch: self.heads.is_some().into(),
            back: back.into(),
        };
        let y = runner.allocate(x.dtype, x.len())?;
        runner.launch(
            Kernel(
                Module::Rope,
                if INTERLEAVED { "rope_i" } else { "rope" },
                Some(x.dtype),
            ),
            Grid::vectors(batches * heads * time, half, x.dtype),
            &[
                Argument::Read(x),
                Argument::Read(&cos),
                Argument::Read(&sin),
                Argument::Write(&y),
                Argument::Rotation(sizes),
            ],
        )?;
        Ok(y)
    }

    /// Rotates vectors by the angles of their positions, times `direction`, which is 1 or -1.
    fn rotate<T: Element>(&self, x: &[T], direction: T::Real) -> Result<Vec<T>> {
        let cos_values = Values::<T>::read(&self.cos, Self::NAME)?;
        let sin_values = Values::<T>::read(&self.sin, Self::NAME)?;
        let cos = &*T::reals(&cos_values);
        let sin = &*T::reals(&sin_values);
        let half = self.cos.dim(D::Minus1)?;
        Ok(map_rows(
            [x],
            2 * half,
            #[inline(always)]
            |row, [x]| {
                // A row is a vector; rows are in the order of batch, head and time.
                let batch = self.heads.map_or(0, |heads| row / self.time / heads);
                let start = (batch * self.time + row % self.time) * half;
                let angles = cos[start..start + half]
                    .iter()
                    .zip(&sin[start..start + half]);
                if INTERLEAVED {
                    for (pair, (&cos, &sin)) in x.chunks_exact_mut(2).zip(angles) {
                        if let [a, b] = pair {
                            rotate_pair(a, b, cos, sin * direction);
                        }
                    }
                } else {
                    let (first_half, second_half) = x.split_at_mut(half);
                    for ((a, b), (&cos, &sin)) in first_half.iter_mut().zip(second_half).zip(angles)
                    {
                        rotate_pair(a, b, cos, sin * direction);
                    }
                }
            },
        ))
    }
}

/// Rotates a pair by the angle with this cosine and sine.
#[inline(always)]
fn rotate_pair<R: Real>(a: &mut R, b: &mut R, cos: R, sin: R) {
    (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
}
