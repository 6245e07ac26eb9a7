//! GELU: the exact function, and its approximation with tanh.

use candle_core::{Result, Tensor};

use crate::element::Element;
use crate::kernels::{Argument, Grid, Kernel, Module, Operand, Output, Runner};
use crate::operation::{Unary, apply, is_computed_here};
use crate::real::Real;
use crate::rows::{ANY_WIDTH, map_rows};
use crate::values::Values;

/// Computes `x * Φ(x)` with the normal distribution function Φ: torch's `gelu`.
///
/// # Errors
/// A dtype that is not a float.
pub fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    if !is_computed_here(x)? {
        return x.gelu_erf();
    }
    apply(Gelu::<false>, [&x.contiguous()?])
}

/// Computes GELU with the approximation of Φ by tanh: torch's `gelu(approximate="tanh")`.
///
/// # Errors
/// A dtype that is not a float.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    if !is_computed_here(x)? {
        return x.gelu();
    }
    apply(Gelu::<true>, [&x.contiguous()?])
}

/// GELU by tanh, or the exact one.
struct Gelu<const TANH: bool>;

impl<const TANH: bool> Unary for Gelu<TANH> {
    const NAME: &'static str = if TANH { "gelu" } else { "gelu-erf" };

    fn forward<T: Element>(&self, x: &[T]) -> Result<Vec<T>> {
        Ok(if TANH {
            map_rows(
                [x],
                ANY_WIDTH,
                #[inline(always)]
                |_, [x]| multiply_by(x, by_tanh),
            )
        } else {
            erf_forward(x)
        })
    }

    fn backward<T: Element>(&self, x: &Tensor, _: &Tensor, grads: &[T]) -> Result<Vec<T>> {
        let values = Values::<T>::read(x, Self::NAME)?;
        Ok(if TANH {
            map_rows(
                [grads, &values],
                ANY_WIDTH,
                #[inline(always)]
                |_, [grad, x]| multiply_by_derivative(grad, x, by_tanh),
            )
        } else {
            erf_backward(grads, &values)
        })
    }

    fn launch_forward(&self, runner: &Runner, x: &Operand<'_>) -> Result<Output> {
        let kernel = if TANH {
            "gelu_tanh_forward"
        } else {
            "gelu_erf_forward"
        };
        let y = runner.allocate(x.dtype, x.len())?;
        runner.launch(
            Kernel(Module::Elementwise, kernel, Some(x.dtype)),
            Grid::elements(x.len(), x.dtype),
            &[
                Argument::Read(x),
                Argument::Write(&y),
                Argument::Long(x.len()),
            ],
        )?;
        Ok(y)
    }

    fn launch_backward(
        &self,
        runner: &Runner,
        x: &Operand<'_>,
        _: &Operand<'_>,
        grad: &Operand<'_>,
    ) -> Result<Output> {
        let kernel = if TANH {
            "gelu_tanh_backward"
        } else {
            "gelu_erf_backward"
        };
        let dx = runner.allocate(x.dtype, x.len())?;
        runner.launch(
            Kernel(Module::Elementwise, kernel, Some(x.dtype)),
            Grid::elements(x.len(), x.dtype),
            &[
                Argument::Read(x),
                Argument::Read(grad),
                Argument::Write(&dx),
                Argument::Long(x.len()),
            ],
        )?;
        Ok(dx)
    }
}

/// Computes [`gelu_erf`] of all elements.
pub(crate) fn erf_forward<T: Element>(x: &[T]) -> Vec<T> {
    map_rows(
        [x],
        ANY_WIDTH,
        #[inline(always)]
        |_, [x]| multiply_by(x, Real::normal_cdf_and_density),
    )
}

/// Computes the gradient of the input of [`gelu_erf`] from that of its output.
pub(crate) fn erf_backward<T: Element>(grads: &[T], x: &[T]) -> Vec<T> {
    map_rows(
        [grads, x],
        ANY_WIDTH,
        #[inline(always)]
        |_, [grad, x]| multiply_by_derivative(grad, x, Real::normal_cdf_and_density),
    )
}

/// Replaces each `x` by `x * f(x)`. `f` returns its value and its derivative.
#[inline(always)]
fn multiply_by<R: Real>(x: &mut [R], f: impl Fn(R) -> (R, R)) {
    for x in x {
        *x *= f(*x).0;
    }
}

/// Multiplies each gradient by the derivative of `x * f(x)`. `f` returns its value and its
/// derivative.
#[inline(always)]
fn multiply_by_derivative<R: Real>(grads: &mut [R], x: &[R], f: impl Fn(R) -> (R, R)) {
    for (grad, &x) in grads.iter_mut().zip(x) {
        let (value, slope) = f(x);
        *grad *= value + x * slope;
    }
}

/// Returns `(1 + tanh(z)) / 2` for the polynomial `z` of GELU's approximation, and its derivative
/// by x.
#[inline(always)]
fn by_tanh<R: Real>(x: R) -> (R, R) {
    let scale = R::nearest(0.5 * std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::SQRT_2);
    let cubic = R::nearest(0.044715);
    let square = x * x;
    let z = scale * x * (R::ONE + cubic * square);
    let slope = scale * (R::ONE + R::nearest(3.0) * cubic * square);
    // (1 + tanh z) / 2 = 1 / (1 + e^-2z). In this form no two numbers that are almost equal are
    // subtracted.
    let exp = (R::nearest(-2.0) * z).exponential();
    let value = R::ONE / (R::ONE + exp);
    // For an x of large magnitude, e^-2z or the slope may overflow to infinity, and a product with
    // zero would be NaN. The derivative is 0 there.
    let rest = if value > R::ZERO {
        value * exp * value
    } else {
        R::ZERO
    };
    (
        value,
        if rest > R::ZERO {
            R::nearest(2.0) * rest * slope
        } else {
            R::ZERO
        },
    )
}
