//! `fsdp diff --heatmap`: where in a tensor two checkpoints differ, and by how much.

use anyhow::Result;
use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::metadata::TensorEntry;
use fsdp_layout::boxes::boxes_of_flat_range;
use fsdp_tools::elements::{for_each_number, is_real};

/// The cells down: along the first dimension.
const ROWS: usize = 8;
/// The cells across: along the last dimension.
const COLUMNS: usize = 64;
/// The elements that are read at once.
const PIECE_ELEMENTS: usize = 1 << 20;

/// The explanation of the characters in a heat map.
pub(crate) const LEGEND: &str = "\
heat maps: down along the first dimension, across along the last; the largest difference of a cell beside the largest of the \
tensor: █ more than a tenth, ▓ a hundredth, ▒ a thousandth, ░ less, · none, ! NaN or infinite";

/// The largest differences in the cells of a tensor.
struct Heat {
    columns: usize,
    /// NaN where a difference is not a number.
    cells: Vec<f64>,
}

/// Returns the lines of the heat map of a tensor. There are none if a checkpoint lacks the tensor,
/// if the shapes or dtypes differ, or if the elements are not real numbers.
///
/// # Errors
/// A checkpoint cannot be read.
pub(crate) fn heatmap_lines(
    first: &dyn Checkpoint,
    second: &dyn Checkpoint,
    name: &str,
) -> Result<Vec<String>> {
    let Some(entry) = first.metadata().tensor(name) else {
        return Ok(Vec::new());
    };
    let Some(second_entry) = second.metadata().tensor(name) else {
        return Ok(Vec::new());
    };
    let dtype = entry.properties.dtype;
    if !is_real(dtype)
        || entry.shape != second_entry.shape
        || dtype != second_entry.properties.dtype
    {
        return Ok(Vec::new());
    }
    Ok(Heat::read(first, second, name, entry)?.lines())
}

impl Heat {
    /// Reads a tensor of two checkpoints, a piece at a time, and returns the largest differences.
    fn read(
        first: &dyn Checkpoint,
        second: &dyn Checkpoint,
        name: &str,
        entry: &TensorEntry,
    ) -> Result<Self, FileError> {
        let shape = &entry.shape;
        let numel: usize = shape.iter().product();
        // `width` is the size of the last dimension, and `height` that of the first. A tensor of
        // one dimension is one row.
        let width = shape.last().map_or(1, |&size| size.max(1));
        let height = if shape.len() > 1 { shape[0].max(1) } else { 1 };
        let row_elements = (numel / height).max(1);
        let rows = height.min(ROWS);
        let columns = width.min(COLUMNS);
        let mut heat = Heat {
            columns,
            cells: vec![0.0; rows * columns],
        };
        let mut position = 0;
        // Tensors may be larger than memory.
        while position < numel {
            let end = numel.min(position + PIECE_ELEMENTS);
            let first_values = read_elements(first, name, entry, position..end)?;
            let second_values = read_elements(second, name, entry, position..end)?;
            for (offset, (a, b)) in first_values.iter().zip(&second_values).enumerate() {
                let index = position + offset;
                let row = index / row_elements * rows / height;
                let column = index % width * columns / width;
                heat.record_max(row, column, difference_between(*a, *b));
            }
            position = end;
        }
        Ok(heat)
    }

    /// Raises the cell at `row` and `column` to `difference`, if that is larger than what it has.
    fn record_max(&mut self, row: usize, column: usize, difference: f64) {
        let cell = &mut self.cells[row * self.columns + column];
        // NaN stays once it is there: no number is larger.
        if difference.is_nan() || difference > *cell {
            *cell = difference;
        }
    }

    /// Returns a line of characters for each row of cells.
    fn lines(&self) -> Vec<String> {
        let largest = self
            .cells
            .iter()
            .copied()
            .filter(|difference| difference.is_finite())
            .fold(0.0, f64::max);
        let rows = self.cells.chunks(self.columns);
        rows.map(|row| {
            row.iter()
                .map(|&difference| character_of(difference, largest))
                .collect()
        })
        .collect()
    }
}

/// Returns the character of a cell whose largest difference is `difference`, where `largest` is the
/// largest finite one of the tensor. [`LEGEND`] explains the characters.
fn character_of(difference: f64, largest: f64) -> char {
    match difference {
        difference if !difference.is_finite() => '!',
        0.0 => '·',
        difference if difference > largest / 10.0 => '█',
        difference if difference > largest / 100.0 => '▓',
        difference if difference > largest / 1000.0 => '▒',
        _ => '░',
    }
}

/// Returns how far two numbers are apart: 0 for two NaN or equal infinities.
fn difference_between(a: f64, b: f64) -> f64 {
    if a == b || (a.is_nan() && b.is_nan()) {
        0.0
    } else {
        (a - b).abs()
    }
}

/// Reads a range of a tensor's elements, in row-major order, as numbers.
fn read_elements(
    source: &dyn Checkpoint,
    name: &str,
    entry: &TensorEntry,
    range: std::ops::Range<usize>,
) -> Result<Vec<f64>, FileError> {
    let dtype = entry.properties.dtype;
    let element_bytes = dtype.size_in_bytes() as usize;
    let mut numbers = Vec::with_capacity(range.len());
    for bounds in boxes_of_flat_range(&entry.shape, range) {
        let mut bytes = vec![0; bounds.numel() * element_bytes];
        source.read_box(name, &bounds, &mut bytes)?;
        for_each_number(dtype, &bytes, &mut |number| numbers.push(number));
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_show_the_largest_difference_in_them() {
        let mut heat = Heat {
            columns: 4,
            cells: vec![0.0; 8],
        };
        for (row, column, difference) in [
            (0, 0, 5.0),
            (0, 1, 0.2),
            (0, 1, 0.1),
            (0, 2, 0.01),
            (1, 0, 1e-9),
            (1, 3, f64::NAN),
            (1, 3, 9.0),
        ] {
            heat.record_max(row, column, difference);
        }
        assert_eq!(heat.lines(), ["█▓▒·", "░··!"]);
    }

    #[test]
    fn nan_and_infinities_differ_from_other_values_but_not_from_themselves() {
        assert_eq!(difference_between(f64::NAN, f64::NAN), 0.0);
        assert_eq!(difference_between(f64::INFINITY, f64::INFINITY), 0.0);
        assert!(difference_between(f64::NAN, 1.0).is_nan());
        assert!(difference_between(f64::INFINITY, f64::NEG_INFINITY).is_infinite());
    }
}
