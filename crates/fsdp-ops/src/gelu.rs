//! GELU: the exact function, and its approximation with tanh.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType as _};

use crate::element::{tensor, with_element};
use crate::real::Real;
use crate::rows::{ANY_WIDTH, map_rows};
use crate::values::{Values, contiguous, elements};

const ERF: &str = "gelu-erf";

/// Computes `x * Φ(x)` with the normal distribution function Φ: torch's `gelu`.
///
/// # Errors
/// A dtype that is not a float.
pub fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    apply(x, Gelu::Erf, Tensor::gelu_erf)
}

/// Computes GELU with the approximation of Φ by tanh: torch's `gelu(approximate="tanh")`.
///
/// # Errors
/// A dtype that is not a float.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    apply(x, Gelu::Tanh, Tensor::gelu)
}

/// Runs `op` on the CPU. On other devices it calls `composed`, the same function made of candle's
/// operations.
fn apply(x: &Tensor, op: Gelu, composed: fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    if x.device().is_cpu() {
        x.contiguous()?.apply_op1(op)
    } else {
        composed(x)
    }
}

#[derive(Clone, Copy)]
enum Gelu {
    Erf,
    Tanh,
}

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        match self {
            Gelu::Erf => ERF,
            Gelu::Tanh => "gelu",
        }
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage as _;
        let range = contiguous(layout, self.name())?;
        with_element!(x.dtype(), self.name(), T => {
            let x = [elements::<T>(x, range, self.name())?];
            let y = match self {
                Gelu::Erf => map_rows(x, ANY_WIDTH, #[inline(always)] |_, [x]| multiply_by(x, Real::normal)),
                Gelu::Tanh => map_rows(x, ANY_WIDTH, #[inline(always)] |_, [x]| multiply_by(x, by_tanh)),
            };
            Ok((T::to_cpu_storage_owned(y), layout.shape().clone()))
        })
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        let (values, grads) = (Values::of(x, self.name())?, Values::of(&grad, self.name())?);
        with_element!(x.dtype(), self.name(), T => {
            let inputs = [grads.slice::<T>()?, values.slice::<T>()?];
            // The derivative of x * f(x).
            let dx = match self {
                Gelu::Erf => map_rows(inputs, ANY_WIDTH, #[inline(always)] |_, [grad, x]| {
                    multiply_by_derivative(grad, x, Real::normal);
                }),
                Gelu::Tanh => map_rows(inputs, ANY_WIDTH, #[inline(always)] |_, [grad, x]| {
                    multiply_by_derivative(grad, x, by_tanh);
                }),
            };
            tensor(dx, x.dims()).map(Some)
        })
    }
}

/// Computes [`gelu_erf`] of all elements of a storage.
pub(crate) fn gelu_erf_of(x: &CpuStorage) -> Result<CpuStorage> {
    use candle_core::backend::BackendStorage as _;
    with_element!(x.dtype(), ERF, T => {
        let x = x.as_slice::<T>()?;
        let y = map_rows([x], ANY_WIDTH, #[inline(always)] |_, [x]| multiply_by(x, Real::normal));
        Ok(T::to_cpu_storage_owned(y))
    })
}

/// Returns the gradient of the input of [`gelu_erf`] from the gradient of its output. `x` has all
/// elements of the input.
pub(crate) fn gelu_erf_backward(x: &CpuStorage, grad: &Tensor) -> Result<Tensor> {
    let grads = Values::of(grad, ERF)?;
    with_element!(grad.dtype(), ERF, T => {
        let inputs = [grads.slice::<T>()?, elements::<T>(x, 0..grad.elem_count(), ERF)?];
        let dx = map_rows(inputs, ANY_WIDTH, #[inline(always)] |_, [grad, x]| {
            multiply_by_derivative(grad, x, Real::normal);
        });
        tensor(dx, grad.dims())
    })
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
    let scale = R::of(0.5 * std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::SQRT_2);
    let cubic = R::of(0.044715);
    let square = x * x;
    let z = scale * x * (R::ONE + cubic * square);
    let slope = scale * (R::ONE + R::of(3.0) * cubic * square);
    // (1 + tanh z) / 2 = 1 / (1 + e^-2z). In this form no two numbers that are almost equal are
    // subtracted.
    let exp = (R::of(-2.0) * z).exponential();
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
            R::of(2.0) * rest * slope
        } else {
            R::ZERO
        },
    )
}
