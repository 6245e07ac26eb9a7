//! Element types that an optimizer computes in, and torch's element-wise operations on them.
//!
//! torch runs a step as a chain of whole-tensor operations. Each one widens its elements, computes,
//! and rounds the result back to the tensor's dtype. The methods of [`Element`] are those
//! operations for one element, with the same roundings, so that chaining them element by element
//! gives what torch's chain of tensors gives. Everything is inlined, because a loop with a call in
//! it is not vectorised.

use std::convert::identity;

use fsdp_layout::DType;
use half::{bf16, f16};

use super::half_bits;

mod sealed {
    /// A type that arithmetic is done in.
    pub trait Real:
        Copy
        + PartialOrd
        + std::ops::Add<Output = Self>
        + std::ops::Sub<Output = Self>
        + std::ops::Mul<Output = Self>
        + std::ops::Div<Output = Self>
    {
        /// Returns the nearest value to a scalar, which Python holds in double precision.
        fn from_scalar(value: f64) -> Self;
        /// Computes `self * factor + addend`, rounded once: torch's kernels use a fused
        /// multiply-add.
        fn fused(self, factor: Self, addend: Self) -> Self;
        /// Returns the square root, correctly rounded.
        fn root(self) -> Self;
    }
}
pub(super) use sealed::Real;

impl Real for f32 {
    #[inline(always)]
    fn from_scalar(value: f64) -> Self {
        value as f32
    }

    // The product of two f32 is exact in f64, which every target can vectorise; f32::mul_add is a
    // library call wherever the target does not promise the instruction. The sum is rounded to f64
    // first, which changes the result about once in 2^29 operations, by one unit in the last place,
    // and on every machine alike.
    #[inline(always)]
    fn fused(self, factor: Self, addend: Self) -> Self {
        (f64::from(self) * f64::from(factor) + f64::from(addend)) as f32
    }

    #[inline(always)]
    fn root(self) -> Self {
        self.sqrt()
    }
}

impl Real for f64 {
    #[inline(always)]
    fn from_scalar(value: f64) -> Self {
        value
    }

    #[inline(always)]
    fn fused(self, factor: Self, addend: Self) -> Self {
        self.mul_add(factor, addend)
    }

    #[inline(always)]
    fn root(self) -> Self {
        self.sqrt()
    }
}

/// An element type that [`Algorithm::update`](super::Algorithm::update) works on: `f32`, `f64`,
/// [`struct@bf16`] or [`struct@f16`]. The half types compute in `f32`. This trait is sealed.
pub trait Float: Copy + Send + Sync + 'static {
    /// The type that arithmetic is done in.
    #[doc(hidden)]
    type Real: Real;

    /// The dtype with this element type.
    const DTYPE: DType;

    /// `true` if the product of two elements needs no rounding.
    #[doc(hidden)]
    const EXACT_PRODUCT: bool;

    /// Returns the value, exactly.
    #[doc(hidden)]
    fn widen(self) -> Self::Real;

    /// Returns the nearest value that this type has, ties to even.
    #[doc(hidden)]
    fn round(value: Self::Real) -> Self::Real;

    /// Returns the element with a value that came out of [`round`](Float::round).
    #[doc(hidden)]
    fn narrow(value: Self::Real) -> Self;
}

macro_rules! float {
    ($($type:ty, $dtype:ident, computes in $real:ty, exact product: $exact:literal, $widen:expr, $round:expr, $narrow:expr;)*) => {
        $(impl Float for $type {
            type Real = $real;
            const DTYPE: DType = DType::$dtype;
            const EXACT_PRODUCT: bool = $exact;

            #[inline(always)]
            fn widen(self) -> $real {
                $widen(self)
            }

            #[inline(always)]
            fn round(value: $real) -> $real {
                $round(value)
            }

            #[inline(always)]
            fn narrow(value: $real) -> Self {
                $narrow(value)
            }
        })*
    };
}

float! {
    f32, F32, computes in f32, exact product: false, identity, identity, identity;
    f64, F64, computes in f64, exact product: false, identity, identity, identity;
    bf16, BF16, computes in f32, exact product: true, half_bits::widen_bf16, half_bits::round_bf16, half_bits::narrow_bf16;
    f16, F16, computes in f32, exact product: true, half_bits::widen_f16, half_bits::round_f16, half_bits::narrow_f16;
}

/// Returns a scalar in the type that arithmetic is done in.
pub(super) fn scalar<T: Float>(value: f64) -> T::Real {
    T::Real::from_scalar(value)
}

/// One element of a tensor of `T`, widened. Its methods are torch's operations, under torch's
/// names.
#[derive(Clone, Copy)]
pub(super) struct Element<T: Float>(T::Real);

impl<T: Float> Element<T> {
    /// Reads an element of a tensor.
    #[inline(always)]
    pub(super) fn load(element: T) -> Self {
        Self(element.widen())
    }

    /// Returns the element to be written to a tensor.
    #[inline(always)]
    pub(super) fn store(self) -> T {
        T::narrow(self.0)
    }

    /// Rounds the result of an operation to the element type, as torch does after each operation.
    #[inline(always)]
    fn round(value: T::Real) -> Self {
        Self(T::round(value))
    }

    /// Returns a scalar rounded to the element type. torch rounds the scalars of `add` like this,
    /// but not those of its other operations, which take `T::Real` here.
    pub(super) fn from_scalar(value: f64) -> Self {
        Self::round(scalar::<T>(value))
    }

    /// Returns `true` if this is a zero.
    pub(super) fn is_zero(self) -> bool {
        self.0 == scalar::<T>(0.0)
    }

    /// Computes `self + other`.
    #[inline(always)]
    pub(super) fn add(self, other: Self) -> Self {
        Self::round(self.0 + other.0)
    }

    /// Computes `self.add(other, alpha=alpha)`.
    #[inline(always)]
    pub(super) fn add_scaled(self, other: Self, alpha: Self) -> Self {
        Self::round(if T::EXACT_PRODUCT {
            self.0 + alpha.0 * other.0
        } else {
            alpha.0.fused(other.0, self.0)
        })
    }

    /// Computes `self * factor`.
    #[inline(always)]
    pub(super) fn mul(self, factor: T::Real) -> Self {
        Self::round(self.0 * factor)
    }

    /// Computes `self / divisor`.
    #[inline(always)]
    pub(super) fn div(self, divisor: T::Real) -> Self {
        Self::round(self.0 / divisor)
    }

    /// Computes `self / other`.
    #[inline(always)]
    pub(super) fn div_by(self, other: Self) -> Self {
        Self::round(self.0 / other.0)
    }

    /// Computes `self.sqrt()`.
    #[inline(always)]
    pub(super) fn sqrt(self) -> Self {
        Self::round(self.0.root())
    }

    /// Computes `self.addcmul(a, b, value=value)`: self + value * a * b
    #[inline(always)]
    pub(super) fn addcmul(self, a: Self, b: Self, value: T::Real) -> Self {
        Self::round((value * a.0).fused(b.0, self.0))
    }

    /// Computes `self.addcdiv(a, b, value=value)`: self + value * a / b
    #[inline(always)]
    pub(super) fn addcdiv(self, a: Self, b: Self, value: T::Real) -> Self {
        Self::round(self.0 + value * a.0 / b.0)
    }

    /// Computes `torch.maximum(self, other)`: a NaN on either side wins.
    #[inline(always)]
    pub(super) fn maximum(self, other: Self) -> Self {
        // A number that is not comparable with itself is NaN.
        let other_is_nan = other.0.partial_cmp(&other.0).is_none();
        if other.0 > self.0 || other_is_nan {
            other
        } else {
            self
        }
    }

    /// Computes `self.lerp(end, weight)`.
    #[inline(always)]
    pub(super) fn lerp(self, end: Self, weight: Weight<T::Real>) -> Self {
        let base = if weight.is_from_start { self } else { end };
        Self::round(weight.factor.fused(end.0 - self.0, base.0))
    }
}

/// The weight of a `lerp`, prepared once for all elements. torch computes from the nearer of the
/// two ends, so that the result is exact at both.
#[derive(Clone, Copy)]
pub(super) struct Weight<R> {
    factor: R,
    is_from_start: bool,
}

impl<R: Real> Weight<R> {
    /// Prepares a weight. Below 0.5 results are computed from the start, otherwise from the end.
    pub(super) fn new(weight: f64) -> Self {
        // In the type of the elements, as torch compares.
        let is_from_start = R::from_scalar(weight.abs()) < R::from_scalar(0.5);
        let factor = R::from_scalar(weight);
        Self {
            factor: if is_from_start {
                factor
            } else {
                factor - R::from_scalar(1.0)
            },
            is_from_start,
        }
    }
}

/// Computes torch's `start.lerp_(end, weight)`. The slices must have equal lengths.
pub(crate) fn lerp<T: Float>(start: &mut [T], end: &[T], weight: f64) {
    let weight = Weight::new(weight);
    for (start, &end) in start.iter_mut().zip(end) {
        *start = Element::load(*start)
            .lerp(Element::load(end), weight)
            .store();
    }
}

/// Computes torch's `values.mul_(factor)`.
pub(crate) fn multiply<T: Float>(values: &mut [T], factor: f64) {
    let factor = scalar::<T>(factor);
    for value in values {
        *value = Element::load(*value).mul(factor).store();
    }
}

/// The changes that a step makes to a gradient before it uses it: negated to maximize, and with the
/// L2 penalty added.
#[derive(Clone, Copy)]
pub(super) struct GradientTransform<T: Float> {
    sign: T::Real,
    penalty: Option<Element<T>>,
}

impl<T: Float> GradientTransform<T> {
    /// Prepares the changes of a step with these options.
    pub(super) fn new(maximize: bool, weight_decay: f64) -> Self {
        let sign = scalar::<T>(if maximize { -1.0 } else { 1.0 });
        Self {
            sign,
            penalty: (weight_decay != 0.0).then(|| Element::from_scalar(weight_decay)),
        }
    }

    /// Returns the gradient that the step uses: negated to maximize, and with the weight decay
    /// added.
    #[inline(always)]
    pub(super) fn apply(&self, grad: T, param: Element<T>) -> Element<T> {
        // A product with 1 or -1 is exact, so that nothing needs rounding.
        let grad = Element(grad.widen() * self.sign);
        self.penalty
            .map_or(grad, |penalty| grad.add_scaled(param, penalty))
    }
}
