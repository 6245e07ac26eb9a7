//! Conversions between the half types and `f32` without branches or calls, so that a loop over them
//! is vectorised.
//!
//! The `half` crate's own choose an instruction at run time for each element, or branch on NaN. An
//! update rounds each element some ten times, and stores it once or twice; so rounding stays within
//! `f32`, and narrowing takes rounded values only.

use half::{bf16, f16};

/// Returns a bf16 as `f32`, exactly.
#[inline(always)]
pub(super) fn widen_bf16(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Rounds to the nearest value of bf16, ties to even.
#[inline(always)]
pub(super) fn round_bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    // Adding just under half of the last kept bit carries into it where the dropped ones are worth
    // more; the kept bit itself breaks a tie. A NaN, which could carry away its mantissa, is made
    // quiet instead.
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let quiet = bits | 1 << 22;
    f32::from_bits(if value.is_nan() { quiet } else { nearest } & 0xffff_0000)
}

/// Returns a value that [`round_bf16`] has rounded, as bf16.
#[inline(always)]
pub(super) fn narrow_bf16(value: f32) -> bf16 {
    bf16::from_bits((value.to_bits() >> 16) as u16)
}

/// The largest exponent and its place, in f32 and in f16.
const F32_INFINITY: u32 = 0xff << 23;
const F16_INFINITY: u32 = 0x1f << 10;
/// The least normal f16, 2^-14.
const F16_NORMAL: f32 = 1.0 / 16384.0;

/// Returns an f16 as `f32`, exactly.
#[inline(always)]
pub(super) fn widen_f16(value: f16) -> f32 {
    let bits = u32::from(value.to_bits());
    // With its exponent read as one of f32 the value is 2^112 times too small, also where it is
    // subnormal.
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((112 + 127) << 23);
    let exponent = if bits & F16_INFINITY == F16_INFINITY {
        F32_INFINITY
    } else {
        0
    };
    f32::from_bits(magnitude.to_bits() | exponent | (bits & 0x8000) << 16)
}

/// Rounds to the nearest value of f16, ties to even. Values from 65520 on, which is halfway between
/// the largest f16 and 2^16, become infinite.
#[inline(always)]
pub(super) fn round_f16(value: f32) -> f32 {
    let magnitude = value.abs();
    // Adding and subtracting a large power of two rounds away the low bits. `power` is chosen so
    // that the distance between neighbouring f32 values next to it is the distance between
    // neighbouring f16 values next to `value`.
    let exponent = f32::from_bits(magnitude.to_bits() & F32_INFINITY);
    let power = 8192.0
        * if exponent < F16_NORMAL {
            F16_NORMAL
        } else {
            exponent
        };
    let finite = (magnitude + power) - power;
    let rounded = if magnitude < 65520.0 {
        finite
    } else {
        magnitude * f32::INFINITY
    };
    rounded.copysign(value)
}

/// Returns a value that [`round_f16`] has rounded, as f16.
#[inline(always)]
pub(super) fn narrow_f16(value: f32) -> f16 {
    let magnitude = value.abs();
    // The exponent's bias changes from 127 to 15.
    let normal = magnitude.to_bits().wrapping_sub(112 << 23) >> 13;
    // Next to 1/2 an f32 counts in 2^-24, as a subnormal f16 does.
    let subnormal = (magnitude + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let finite = if magnitude < F16_NORMAL {
        subnormal
    } else {
        normal
    };
    let quiet = if value.is_nan() { 1 << 9 } else { 0 };
    let bits = if magnitude < 65536.0 {
        finite
    } else {
        F16_INFINITY | quiet
    };
    f16::from_bits(bits as u16 | (value.to_bits() >> 16 & 0x8000) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widening_is_exact_and_narrowing_leads_back() {
        for bits in 0..=u16::MAX {
            let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
            if b.is_nan() {
                assert!(widen_bf16(b).is_nan() && narrow_bf16(widen_bf16(b)).is_nan());
            } else {
                assert_eq!(
                    widen_bf16(b).to_bits(),
                    b.to_f32().to_bits(),
                    "bf16 {bits:#x}"
                );
                assert_eq!(narrow_bf16(widen_bf16(b)).to_bits(), bits);
            }
            if h.is_nan() {
                assert!(widen_f16(h).is_nan() && narrow_f16(widen_f16(h)).is_nan());
            } else {
                assert_eq!(
                    widen_f16(h).to_bits(),
                    h.to_f32().to_bits(),
                    "f16 {bits:#x}"
                );
                assert_eq!(narrow_f16(widen_f16(h)).to_bits(), bits);
            }
        }
    }

    /// Every sign, exponent and kept mantissa of both types, and below them what decides the
    /// rounding.
    #[test]
    fn rounding_is_that_of_the_half_crate() {
        let tails = [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff];
        for high in 0..1u32 << 19 {
            for tail in tails {
                let value = f32::from_bits(high << 13 | tail);
                let (b, h) = (round_bf16(value), round_f16(value));
                if value.is_nan() {
                    assert!(narrow_bf16(b).is_nan() && narrow_f16(h).is_nan());
                } else {
                    assert_eq!(
                        narrow_bf16(b).to_bits(),
                        bf16::from_f32_const(value).to_bits(),
                        "bf16 {value:e}"
                    );
                    assert_eq!(
                        narrow_f16(h).to_bits(),
                        f16::from_f32_const(value).to_bits(),
                        "f16 {value:e}"
                    );
                    assert_eq!(
                        (widen_bf16(narrow_bf16(b)), widen_f16(narrow_f16(h))),
                        (b, h)
                    );
                }
            }
        }
    }
}
