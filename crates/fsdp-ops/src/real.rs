//! The types that arithmetic is done in, and functions on them that compilers can vectorise.

use candle_core::WithDType;

/// The number of partial sums of a long sum: as many as a vector register holds, so that the sum is
/// vectorised. The number is the same on all machines, so that the result is the same too.
const LANES: usize = 16;

/// A type that arithmetic is done in: `f32` or `f64`.
pub(crate) trait Real: WithDType {
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Minus infinity.
    const LEAST: Self;

    /// Returns the nearest value.
    fn nearest(value: f64) -> Self;
    /// Returns the square root.
    fn root(self) -> Self;
    /// Returns e to the power of this number.
    fn exponential(self) -> Self;
    /// Returns the natural logarithm.
    fn logarithm(self) -> Self;
    /// Returns the value of the standard normal distribution function at this number, and its
    /// density there.
    fn normal_cdf_and_density(self) -> (Self, Self);
}

/// The coefficients of `erfc(t) * exp(t * t)` as a polynomial in `u = 1 / (1 + t * SCALE)` without
/// its constant term: a Chebyshev fit for 0 <= t <= 9.6, where `exp(-t * t)` runs out of f32. Its
/// relative error is below 1e-7.
const ERFC: [f32; 9] = [
    0.225_631_66,
    0.226_482_31,
    0.201_638_9,
    0.194_252_07,
    0.077_984_4,
    0.090_208_71,
    0.082_278_06,
    -0.139_601_7,
    0.041_125_62,
];
const ERFC_SCALE: f32 = 0.4;

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const LEAST: Self = f32::NEG_INFINITY;

    #[inline(always)]
    fn nearest(value: f64) -> Self {
        value as f32
    }

    #[inline(always)]
    fn root(self) -> Self {
        self.sqrt()
    }

    // The library's function is a call for each element, which is not vectorised.
    #[inline(always)]
    fn exponential(self) -> Self {
        /// ln 2 in two parts; products of the first with small integers are exact.
        const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
        /// The result for smaller numbers is 0, because `half` below would not be a normal number.
        const LEAST: f32 = -86.9;
        /// Adding it leaves a number's integer part in the lowest bits.
        const ROUND: f32 = 12_582_912.0;
        // Comparisons, unlike `max` and `min`, leave a NaN as it is.
        let not_too_small = if self < LEAST { LEAST } else { self };
        let x = if not_too_small > 88.7 {
            88.7
        } else {
            not_too_small
        };
        // e^x = 2^n * e^r with |r| <= ln 2 / 2, where eight terms of the series are as exact as f32
        // is.
        let shifted = x * std::f32::consts::LOG2_E + ROUND;
        let n = shifted - ROUND;
        let r = (x - n * LN_2[0]) - n * LN_2[1];
        let last_terms = 1.0 / 720.0 + r * (1.0 / 5040.0);
        let later_terms = 1.0 / 24.0 + r * (1.0 / 120.0 + r * last_terms);
        let series = 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * later_terms)));
        // 2^n = 2^(n - 1) * 2, because 2^127 is the largest power of two in f32, and n may be 128.
        // `shifted` has n in its lowest bits; the bits above them are shifted out.
        let half = f32::from_bits((shifted.to_bits().wrapping_add(126)) << 23);
        let scaled = series * half * 2.0;
        let power = if self < LEAST { 0.0 } else { scaled };
        if self > 88.7 { f32::INFINITY } else { power }
    }

    #[inline(always)]
    fn logarithm(self) -> Self {
        self.ln()
    }

    #[inline(always)]
    fn normal_cdf_and_density(self) -> (Self, Self) {
        let exp = (self * self * -0.5).exponential();
        let t = self.abs() * std::f32::consts::FRAC_1_SQRT_2;
        let u = 1.0 / (1.0 + t * ERFC_SCALE);
        let mut polynomial = ERFC[8];
        for &coefficient in ERFC[..8].iter().rev() {
            polynomial = polynomial * u + coefficient;
        }
        // Compute the smaller of the two tails, so that small values keep their digits.
        let tail = 0.5 * u * polynomial * exp;
        let density =
            exp * (0.5 * std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2);
        (if self > 0.0 { 1.0 - tail } else { tail }, density)
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const LEAST: Self = f64::NEG_INFINITY;

    #[inline(always)]
    fn nearest(value: f64) -> Self {
        value
    }

    #[inline(always)]
    fn root(self) -> Self {
        self.sqrt()
    }

    #[inline(always)]
    fn exponential(self) -> Self {
        self.exp()
    }

    #[inline(always)]
    fn logarithm(self) -> Self {
        self.ln()
    }

    #[inline(always)]
    fn normal_cdf_and_density(self) -> (Self, Self) {
        use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};
        let density = (self * self * -0.5).exp() * (0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2);
        (0.5 * libm::erfc(-self * FRAC_1_SQRT_2), density)
    }
}

/// Returns the sum of `term(0)` to `term(len - 1)`. The order of additions depends on `len` only.
#[inline(always)]
pub(crate) fn sum<R: Real>(len: usize, term: impl Fn(usize) -> R) -> R {
    let mut lanes = [R::ZERO; LANES];
    // The terms that fill all lanes; the others are added at the end.
    let whole_len = len - len % LANES;
    for start in (0..whole_len).step_by(LANES) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += term(start + lane);
        }
    }
    let mut total = R::ZERO;
    for sum in lanes {
        total += sum;
    }
    for index in whole_len..len {
        total += term(index);
    }
    total
}

/// Returns the largest value: NaN if one of them is NaN, and minus infinity if there are none.
#[inline(always)]
pub(crate) fn largest<R: Real>(values: &[R]) -> R {
    let mut lanes = [R::LEAST; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (largest, &value) in lanes.iter_mut().zip(chunk) {
            *largest = larger(*largest, value);
        }
    }
    lanes
        .iter()
        .chain(chunks.remainder())
        .fold(R::LEAST, |largest, &value| larger(largest, value))
}

/// Returns the larger number, or NaN if one of them is NaN.
#[inline(always)]
fn larger<R: Real>(a: R, b: R) -> R {
    // Comparisons with NaN are false, so a NaN in `b` is returned too. Only NaN has no order to
    // itself.
    if a > b || a.partial_cmp(&a).is_none() {
        a
    } else {
        b
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_close(found: f32, expected: f64, at: f32) {
        let error =
            (f64::from(found) - expected).abs() / expected.abs().max(f64::from(f32::MIN_POSITIVE));
        assert!(error < 5e-7, "at {at}: {found} is not {expected}");
    }

    #[test]
    fn f32_functions_have_the_digits_of_f32() {
        for step in -86_900..=88_700 {
            let x = step as f32 / 1000.0;
            assert_close(x.exponential(), f64::from(x).exp(), x);
        }
        for step in -12_500..=12_500 {
            let x = step as f32 / 1000.0;
            let (value, density) = x.normal_cdf_and_density();
            let (exact, exact_density) = f64::from(x).normal_cdf_and_density();
            assert!(
                (f64::from(value) - exact).abs() < 2e-7,
                "at {x}: {value} is not {exact}"
            );
            // Both have the error of the exponent's square.
            let relative = f64::from(x * x).max(1.0) * 2e-7;
            assert!(
                (f64::from(value) / exact - 1.0).abs() < relative + 5e-7,
                "at {x}: {value} is not {exact}"
            );
            assert!(
                (f64::from(density) / exact_density - 1.0).abs() < relative,
                "at {x}: {density}"
            );
        }
    }

    #[test]
    fn values_out_of_range_and_no_numbers_come_out_as_they_should() {
        assert_eq!(f32::NEG_INFINITY.exponential(), 0.0);
        assert_eq!((-1e30f32).exponential(), 0.0);
        assert_eq!(f32::INFINITY.exponential(), f32::INFINITY);
        assert_eq!(89f32.exponential(), f32::INFINITY);
        assert_eq!(0f32.exponential(), 1.0);
        assert!(f32::NAN.exponential().is_nan());
        assert_eq!(f32::INFINITY.normal_cdf_and_density(), (1.0, 0.0));
        assert_eq!(f32::NEG_INFINITY.normal_cdf_and_density(), (0.0, 0.0));
        assert!(f32::NAN.normal_cdf_and_density().0.is_nan());
    }

    #[test]
    fn sums_and_maxima_see_each_value_once() {
        for len in [0, 1, 15, 16, 17, 100] {
            assert_eq!(
                sum(len, |index| index as f64),
                (len * len.saturating_sub(1) / 2) as f64
            );
            let values: Vec<f32> = (0..len).map(|index| index as f32).collect();
            assert_eq!(
                largest(&values),
                if len == 0 {
                    f32::NEG_INFINITY
                } else {
                    len as f32 - 1.0
                }
            );
        }
        for at in [0, 20, 33] {
            let mut values = [1f32; 34];
            values[at] = f32::NAN;
            assert!(largest(&values).is_nan(), "{at}");
        }
    }
}
