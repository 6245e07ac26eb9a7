//! Rotary position embeddings.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType as _};

use crate::composed;
use crate::element::{Element, tensor, widened, with_element};
use crate::real::Real;
use crate::rows::map_rows;
use crate::values::{Values, contiguous, elements};

/// Rotates the pairs of each vector of `x` `[batch, heads, time, width]` by the angles of its
/// position: element `i` with element `i + width / 2`. `cos` and `sin` are `[time, width / 2]`, or
/// `[batch, time, width / 2]`; they get no gradient.
///
/// # Errors
/// Other shapes or dtypes; an odd width.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotate(x, cos, sin, Pairs::Halves)
}

/// Rotates like [`rope()`], but pairs element `2 * i` with element `2 * i + 1`.
///
/// # Errors
/// The errors of [`rope()`].
pub fn rope_i(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotate(x, cos, sin, Pairs::Neighbours)
}

/// Checks the arguments, and rotates on the CPU with [`Rope`], or on other devices with candle's
/// operations.
fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor, pairs: Pairs) -> Result<Tensor> {
    let op = pairs.name();
    let (batch, heads, time, width) = x.dims4()?;
    for angles in [cos, sin] {
        let dims = angles.dims();
        if !width.is_multiple_of(2)
            || ![&[time, width / 2][..], &[batch, time, width / 2]].contains(&dims)
        {
            let (lhs, rhs) = (x.shape().clone(), angles.shape().clone());
            return Err(candle_core::Error::ShapeMismatchBinaryOp { lhs, rhs, op }.bt());
        }
        if angles.dtype() != x.dtype() {
            return Err(candle_core::Error::DTypeMismatchBinaryOp {
                lhs: x.dtype(),
                rhs: angles.dtype(),
                op,
            }
            .bt());
        }
    }
    if cos.dims() != sin.dims() {
        let (lhs, rhs) = (cos.shape().clone(), sin.shape().clone());
        return Err(candle_core::Error::ShapeMismatchBinaryOp { lhs, rhs, op }.bt());
    }
    // The angles get no gradient.
    let (cos, sin) = (cos.detach(), sin.detach());
    if !x.device().is_cpu() {
        return match pairs {
            Pairs::Halves => composed::rope(x, &cos, &sin),
            Pairs::Neighbours => composed::rope_i(x, &cos, &sin),
        };
    }
    let heads = (cos.rank() == 3).then_some(heads);
    let (cos, sin) = (cos.contiguous()?, sin.contiguous()?);
    x.contiguous()?.apply_op1(Rope {
        cos,
        sin,
        time,
        heads,
        pairs,
    })
}

/// The elements of a vector that are rotated together.
#[derive(Clone, Copy)]
enum Pairs {
    /// An element of the first half, with the one at the same position of the second half.
    Halves,
    /// An element with an even index, and the next one.
    Neighbours,
}

impl Pairs {
    const fn name(self) -> &'static str {
        match self {
            Pairs::Halves => "rope",
            Pairs::Neighbours => "rope-i",
        }
    }
}

struct Rope {
    cos: Tensor,
    sin: Tensor,
    time: usize,
    /// The number of heads of a batch, if each batch has angles of its own.
    heads: Option<usize>,
    pairs: Pairs,
}

impl Rope {
    /// Rotates vectors. With `back` it rotates them by the opposite angles, as the backward does to
    /// gradients.
    fn rotate<T: Element>(&self, x: &[T], back: bool) -> Result<Vec<T>> {
        let name = self.name();
        let cos = widened(Values::of(&self.cos, name)?.slice::<T>()?);
        let sin = widened(Values::of(&self.sin, name)?.slice::<T>()?);
        let half = self.cos.dims().last().copied().unwrap_or(0);
        let direction = T::Real::of(if back { -1.0 } else { 1.0 });
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
                match self.pairs {
                    Pairs::Halves => {
                        let (first, second) = x.split_at_mut(half);
                        for ((a, b), (&cos, &sin)) in first.iter_mut().zip(second).zip(angles) {
                            rotate_pair(a, b, cos, sin * direction);
                        }
                    }
                    Pairs::Neighbours => {
                        for (pair, (&cos, &sin)) in x.chunks_exact_mut(2).zip(angles) {
                            if let [a, b] = pair {
                                rotate_pair(a, b, cos, sin * direction);
                            }
                        }
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

impl CustomOp1 for Rope {
    fn name(&self) -> &'static str {
        self.pairs.name()
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage as _;
        let range = contiguous(layout, self.name())?;
        with_element!(x.dtype(), self.name(), T => {
            let y = self.rotate::<T>(elements(x, range, self.name())?, false)?;
            Ok((T::to_cpu_storage_owned(y), layout.shape().clone()))
        })
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        let grads = Values::of(&grad, self.name())?;
        with_element!(x.dtype(), self.name(), T => {
            tensor(self.rotate::<T>(grads.slice()?, true)?, x.dims()).map(Some)
        })
    }
}
