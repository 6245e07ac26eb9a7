//! Comparisons of elements and values, bit for bit or within a tolerance.

use fsdp_layout::{DType, PlainValue};

use crate::elements::{for_each_number, parts_of_complex};

/// The differences between elements that are tolerated. If both limits are zero, elements must be
/// equal bit for bit.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Tolerance {
    /// Absolute difference allowed.
    pub absolute: f64,
    /// Additional difference allowed, relative to the element of the second checkpoint.
    pub relative: f64,
}

impl Tolerance {
    /// Returns `true` if two numbers differ by more than is allowed.
    ///
    /// A NaN differs infinitely from any number, and so does an infinity from anything but itself.
    fn is_exceeded(self, a: f64, b: f64) -> bool {
        if a.is_nan() || b.is_nan() {
            return a.is_nan() != b.is_nan();
        }
        // A tolerance relative to an infinity would allow everything.
        let is_finite = a.is_finite() && b.is_finite();
        let allowed = if is_finite {
            self.absolute + self.relative * b.abs()
        } else {
            0.0
        };
        // The difference of an infinity and itself is NaN, which is not more.
        (a - b).abs() > allowed
    }

    /// Returns `true` if two complex numbers differ by more than is allowed: as points of the
    /// plane, or, if they are not finite, in one of their parts.
    fn is_exceeded_by_complex(self, a: [f64; 2], b: [f64; 2]) -> bool {
        if [a, b].as_flattened().iter().all(|part| part.is_finite()) {
            return distance_of_complex(a, b) > self.absolute + self.relative * b[0].hypot(b[1]);
        }
        (0..2).any(|part| self.is_exceeded(a[part], b[part]))
    }

    /// Returns `true` if two values are equal, except for floats that differ by no more than is
    /// allowed.
    pub(super) fn allows(self, a: &PlainValue, b: &PlainValue) -> bool {
        match (a, b) {
            (PlainValue::Float(a), PlainValue::Float(b)) if self != Tolerance::default() => {
                !self.is_exceeded(*a, *b)
            }
            (PlainValue::List(a), PlainValue::List(b))
            | (PlainValue::Tuple(a), PlainValue::Tuple(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.allows(a, b))
            }
            (PlainValue::Tensor(a), PlainValue::Tensor(b))
                if a.dtype == b.dtype && a.shape == b.shape =>
            {
                let mut elements = ElementComparison::new(a.dtype, self);
                elements.compare(0, &a.data, &b.data);
                elements.count == 0
            }
            (PlainValue::Dict(a), PlainValue::Dict(b)) => {
                a.len() == b.len()
                    && a.iter()
                        .zip(b)
                        .all(|((ka, va), (kb, vb))| ka.same_bits(kb) && self.allows(va, vb))
            }
            (a, b) => a.same_bits(b),
        }
    }
}

/// A comparison of the elements that one tensor has in two checkpoints, piece by piece.
pub(super) struct ElementComparison {
    dtype: DType,
    tolerance: Tolerance,
    /// The number of elements that differ.
    pub(super) count: u64,
    /// The position of the first element that differs.
    pub(super) first: u64,
    /// The largest difference; `None` if the elements are not numbers.
    pub(super) max_abs: Option<f64>,
}

impl ElementComparison {
    pub(super) fn new(dtype: DType, tolerance: Tolerance) -> Self {
        ElementComparison {
            dtype,
            tolerance,
            count: 0,
            first: 0,
            max_abs: None,
        }
    }

    /// Compares pieces whose first byte is at this offset in the tensor, and counts the elements
    /// that differ.
    pub(super) fn compare(&mut self, offset_bytes: u64, first: &[u8], second: &[u8]) {
        /// The bytes of which the numbers are decoded at once, a multiple of the size of every
        /// element.
        const BLOCK_BYTES: usize = 16 << 10;
        let element_bytes = self.dtype.size_in_bytes() as usize;
        let part = parts_of_complex(self.dtype);
        let number = part.unwrap_or(self.dtype);
        let mut a = Vec::new();
        let mut b = Vec::new();
        for (block, (first, second)) in first
            .chunks(BLOCK_BYTES)
            .zip(second.chunks(BLOCK_BYTES))
            .enumerate()
        {
            // Mostly all bytes are equal; only otherwise elements are looked at.
            if first == second {
                continue;
            }
            a.clear();
            b.clear();
            let are_numbers = for_each_number(number, first, &mut |value| a.push(value))
                && for_each_number(number, second, &mut |value| b.push(value));
            // Some bytes of the block differ: look at its elements one by one.
            let start = (offset_bytes as usize + block * BLOCK_BYTES) / element_bytes;
            for (index, (bits_a, bits_b)) in first
                .chunks_exact(element_bytes)
                .zip(second.chunks_exact(element_bytes))
                .enumerate()
            {
                if bits_a == bits_b {
                    continue;
                }
                let position = (start + index) as u64;
                // Elements of other types only differ or not.
                if !are_numbers {
                    self.count_difference(position);
                    continue;
                }
                // The bits differ, so without a tolerance the elements do too.
                let is_strict = self.tolerance == Tolerance::default();
                let (is_exceeded, distance) = if part.is_some() {
                    let a = [a[2 * index], a[2 * index + 1]];
                    let b = [b[2 * index], b[2 * index + 1]];
                    let is_exceeded = self.tolerance.is_exceeded_by_complex(a, b);
                    (is_exceeded, distance_of_complex(a, b))
                } else if let Some(distance) = distance_of_integers(self.dtype, bits_a, bits_b) {
                    let allowed =
                        self.tolerance.absolute + self.tolerance.relative * b[index].abs();
                    (distance > allowed, distance)
                } else {
                    let is_exceeded = self.tolerance.is_exceeded(a[index], b[index]);
                    (is_exceeded, (a[index] - b[index]).abs())
                };
                if is_strict || is_exceeded {
                    self.count_distance(position, distance);
                }
            }
        }
    }

    /// Counts an element that differs by this much.
    fn count_distance(&mut self, position: u64, distance: f64) {
        self.count_difference(position);
        let max = self.max_abs.get_or_insert(0.0);
        // A NaN on one side only is the largest difference, and stays.
        *max = if max.is_nan() || distance.is_nan() {
            f64::NAN
        } else {
            max.max(distance)
        };
    }

    /// Counts an element that differs.
    fn count_difference(&mut self, position: u64) {
        if self.count == 0 {
            self.first = position;
        }
        self.count += 1;
    }
}

/// Returns how far two integers of 64 bits are apart, which floats of the two may not tell; `None`
/// for other types.
fn distance_of_integers(dtype: DType, a: &[u8], b: &[u8]) -> Option<f64> {
    let a = <[u8; 8]>::try_from(a).ok()?;
    let b = <[u8; 8]>::try_from(b).ok()?;
    match dtype {
        DType::I64 => Some(i64::from_le_bytes(a).abs_diff(i64::from_le_bytes(b)) as f64),
        DType::U64 => Some(u64::from_le_bytes(a).abs_diff(u64::from_le_bytes(b)) as f64),
        _ => None,
    }
}

/// Returns how far two complex numbers are apart.
fn distance_of_complex(a: [f64; 2], b: [f64; 2]) -> f64 {
    (a[0] - b[0]).hypot(a[1] - b[1])
}
