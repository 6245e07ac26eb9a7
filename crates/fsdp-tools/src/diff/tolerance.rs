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
    fn is_exceeded(self, first: f64, second: f64) -> bool {
        if first.is_nan() || second.is_nan() {
            return first.is_nan() != second.is_nan();
        }
        // A tolerance relative to an infinity would allow everything.
        let is_finite = first.is_finite() && second.is_finite();
        let allowed = if is_finite {
            self.absolute + self.relative * second.abs()
        } else {
            0.0
        };
        // The difference of an infinity and itself is NaN, which is not more.
        (first - second).abs() > allowed
    }

    /// Returns `true` if two complex numbers differ by more than is allowed: as points of the
    /// plane, or, if they are not finite, in one of their parts.
    fn is_exceeded_by_complex(self, first: [f64; 2], second: [f64; 2]) -> bool {
        if [first, second]
            .as_flattened()
            .iter()
            .all(|part| part.is_finite())
        {
            return distance_of_complex(first, second)
                > self.absolute + self.relative * second[0].hypot(second[1]);
        }
        (0..2).any(|part| self.is_exceeded(first[part], second[part]))
    }

    /// Returns `true` if two values are equal, except for floats that differ by no more than is
    /// allowed: floats themselves, and those in lists, tuples, tensors and dicts, whose keys must
    /// be in the same order.
    pub(super) fn allows(self, first: &PlainValue, second: &PlainValue) -> bool {
        match (first, second) {
            (PlainValue::Float(first), PlainValue::Float(second))
                if self != Tolerance::default() =>
            {
                !self.is_exceeded(*first, *second)
            }
            (PlainValue::List(first), PlainValue::List(second))
            | (PlainValue::Tuple(first), PlainValue::Tuple(second)) => {
                first.len() == second.len()
                    && first
                        .iter()
                        .zip(second)
                        .all(|(first, second)| self.allows(first, second))
            }
            (PlainValue::Tensor(first), PlainValue::Tensor(second))
                if first.dtype == second.dtype && first.shape == second.shape =>
            {
                let mut elements = ElementComparison::new(first.dtype, self);
                elements.compare(0, &first.data, &second.data);
                elements.count == 0
            }
            (PlainValue::Dict(first), PlainValue::Dict(second)) => {
                first.len() == second.len()
                    && first
                        .iter()
                        .zip(second)
                        .all(|((first_key, first), (second_key, second))| {
                            first_key.same_bits(second_key) && self.allows(first, second)
                        })
            }
            (first, second) => first.same_bits(second),
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
    pub(super) first_position: u64,
    /// The largest difference; `None` if the elements are not numbers.
    pub(super) max_abs: Option<f64>,
}

impl ElementComparison {
    /// Begins a comparison of elements of `dtype`, of which none differ so far.
    pub(super) fn new(dtype: DType, tolerance: Tolerance) -> Self {
        ElementComparison {
            dtype,
            tolerance,
            count: 0,
            first_position: 0,
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
        let part_dtype = parts_of_complex(self.dtype);
        let number_dtype = part_dtype.unwrap_or(self.dtype);
        let mut first_numbers = Vec::new();
        let mut second_numbers = Vec::new();
        for (block, (first, second)) in first
            .chunks(BLOCK_BYTES)
            .zip(second.chunks(BLOCK_BYTES))
            .enumerate()
        {
            // Mostly all bytes are equal; only otherwise elements are looked at.
            if first == second {
                continue;
            }
            first_numbers.clear();
            second_numbers.clear();
            let are_numbers =
                for_each_number(number_dtype, first, &mut |value| first_numbers.push(value))
                    && for_each_number(number_dtype, second, &mut |value| {
                        second_numbers.push(value)
                    });
            // Some bytes of the block differ: look at its elements one by one.
            let start = (offset_bytes as usize + block * BLOCK_BYTES) / element_bytes;
            for (index, (first_element, second_element)) in first
                .chunks_exact(element_bytes)
                .zip(second.chunks_exact(element_bytes))
                .enumerate()
            {
                if first_element == second_element {
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
                let (is_exceeded, distance) = if part_dtype.is_some() {
                    let first_complex = [first_numbers[2 * index], first_numbers[2 * index + 1]];
                    let second_complex = [second_numbers[2 * index], second_numbers[2 * index + 1]];
                    let is_exceeded = self
                        .tolerance
                        .is_exceeded_by_complex(first_complex, second_complex);
                    (
                        is_exceeded,
                        distance_of_complex(first_complex, second_complex),
                    )
                } else if let Some(distance) =
                    distance_of_integers(self.dtype, first_element, second_element)
                {
                    let allowed = self.tolerance.absolute
                        + self.tolerance.relative * second_numbers[index].abs();
                    (distance > allowed, distance)
                } else {
                    let is_exceeded = self
                        .tolerance
                        .is_exceeded(first_numbers[index], second_numbers[index]);
                    (
                        is_exceeded,
                        (first_numbers[index] - second_numbers[index]).abs(),
                    )
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
            self.first_position = position;
        }
        self.count += 1;
    }
}

/// Returns how far two integers of 64 bits are apart, which floats of the two may not tell; `None`
/// for other types.
fn distance_of_integers(dtype: DType, first: &[u8], second: &[u8]) -> Option<f64> {
    let first = <[u8; 8]>::try_from(first).ok()?;
    let second = <[u8; 8]>::try_from(second).ok()?;
    match dtype {
        DType::I64 => Some(i64::from_le_bytes(first).abs_diff(i64::from_le_bytes(second)) as f64),
        DType::U64 => Some(u64::from_le_bytes(first).abs_diff(u64::from_le_bytes(second)) as f64),
        _ => None,
    }
}

/// Returns how far two complex numbers are apart.
fn distance_of_complex(first: [f64; 2], second: [f64; 2]) -> f64 {
    (first[0] - second[0]).hypot(first[1] - second[1])
}
