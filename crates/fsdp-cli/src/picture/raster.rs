//! A tensor as a grid of cells, each with the file of the elements there.

use std::ops::Range;

use fsdp_layout::TensorBox;

/// The content of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cell {
    /// No box holds it.
    Nobody,
    /// The file at this position holds it.
    File(u32),
    /// Several boxes hold it.
    Several,
}

/// The most cells down a grid.
const MAX_ROWS: usize = 8;

/// A tensor as a grid of cells. If the tensor is cut along one dimension, that dimension runs
/// across. If it is cut along several, the first of them runs down and the second across, and the
/// grid shows the middle of the others.
#[derive(Debug)]
pub(super) struct Raster {
    pub(super) rows: usize,
    columns: usize,
    cells: Vec<Cell>,
    /// The dimensions that are shown: down and across, or only across.
    pub(super) dimensions: Vec<usize>,
}

/// The rows or the columns of a grid.
struct Axis {
    /// The dimension of the tensor that runs along it; `None` for a single row or column.
    dimension: Option<usize>,
    /// For each row or column, the index in the dimension that it stands for, in rising order.
    indices: Vec<usize>,
}

impl Axis {
    /// Returns an axis of `cells` cells, each for the element of the dimension in its middle.
    fn new(dimension: Option<usize>, shape: &[usize], cells: usize) -> Self {
        let length = dimension.map_or(1, |dimension| shape[dimension]);
        // Each cell stands for the element in its middle. In 128 bits no product is too large.
        let indices = (0..cells)
            .map(|cell| ((2 * cell + 1) as u128 * length as u128 / (2 * cells) as u128) as usize)
            .collect();
        Axis { dimension, indices }
    }

    /// Returns the cells whose elements a box holds.
    fn cell_range(&self, bounds: &TensorBox) -> Range<usize> {
        let Some(dimension) = self.dimension else {
            return 0..self.indices.len();
        };
        let Range { start, end } = index_range(bounds, dimension);
        let first_cell = self.indices.partition_point(|&index| index < start);
        first_cell..self.indices.partition_point(|&index| index < end)
    }
}

/// Returns the indices of a dimension that a box holds. The box may come from a damaged file.
fn index_range(bounds: &TensorBox, dimension: usize) -> Range<usize> {
    let start = bounds.offsets[dimension];
    start..start.saturating_add(bounds.sizes[dimension])
}

impl Raster {
    /// Draws the boxes of a tensor, each with the position of its file, in this many columns.
    /// Leaves out boxes that do not fit the shape.
    pub(super) fn new(shape: &[usize], mut boxes: Vec<(&TensorBox, u32)>, columns: usize) -> Self {
        // A box of another number of dimensions is damage, which `verify` tells.
        boxes.retain(|(bounds, _)| {
            bounds.offsets.len() == shape.len()
                && bounds.sizes.len() == shape.len()
                && !bounds.sizes.contains(&0)
        });
        let mut cut_dimensions = Vec::new();
        for (dimension, &length) in shape.iter().enumerate() {
            if boxes.iter().any(|(part, _)| part.sizes[dimension] < length) {
                cut_dimensions.push(dimension);
            }
        }
        // There are two directions only: of further dimensions, the middle is shown.
        let (row_dimension, column_dimension, hidden_dimensions) = match cut_dimensions.as_slice() {
            [] => (None, None, [].as_slice()),
            [across] => (None, Some(*across), [].as_slice()),
            [down, across, hidden @ ..] => (Some(*down), Some(*across), hidden),
        };
        let rows = row_dimension.map_or(1, |dimension| shape[dimension].min(MAX_ROWS));
        let row_axis = Axis::new(row_dimension, shape, rows);
        let column_axis = Axis::new(column_dimension, shape, columns);
        let mut cells = vec![Cell::Nobody; rows * columns];
        for (bounds, file) in boxes {
            let is_shown = hidden_dimensions
                .iter()
                .all(|&dimension| index_range(bounds, dimension).contains(&(shape[dimension] / 2)));
            if !is_shown {
                continue;
            }
            for row in row_axis.cell_range(bounds) {
                for cell in &mut cells[row * columns..][column_axis.cell_range(bounds)] {
                    *cell = match *cell {
                        Cell::Nobody => Cell::File(file),
                        Cell::File(holder) if holder == file => Cell::File(file),
                        Cell::File(_) | Cell::Several => Cell::Several,
                    };
                }
            }
        }
        let dimensions = [row_axis.dimension, column_axis.dimension]
            .into_iter()
            .flatten()
            .collect();
        Raster {
            rows,
            columns,
            cells,
            dimensions,
        }
    }

    /// Returns the cells of a row.
    pub(super) fn row(&self, row: usize) -> &[Cell] {
        &self.cells[row * self.columns..][..self.columns]
    }

    /// Returns the runs of equal neighbouring cells in a row: the range of columns of each run, and
    /// its cell.
    pub(super) fn runs(&self, row: usize) -> impl Iterator<Item = (Range<usize>, Cell)> {
        let mut start = 0;
        self.row(row).chunk_by(|a, b| a == b).map(move |run| {
            let range = start..start + run.len();
            start = range.end;
            (range, run[0])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Draws boxes, given by their offsets and sizes; the first is held by 0, the next by 1.
    fn picture(shape: &[usize], boxes: &[(&[usize], &[usize])]) -> Vec<String> {
        let boxes: Vec<TensorBox> = boxes
            .iter()
            .map(|(offsets, sizes)| TensorBox::new(offsets.to_vec(), sizes.to_vec()))
            .collect();
        let held = boxes
            .iter()
            .enumerate()
            .map(|(file, bounds)| (bounds, file as u32));
        let raster = Raster::new(shape, held.collect(), 8);
        let show = |cell: &Cell| match cell {
            Cell::Nobody => '.',
            Cell::File(file) => char::from_digit(*file, 36).unwrap(),
            Cell::Several => '+',
        };
        (0..raster.rows)
            .map(|row| raster.row(row).iter().map(show).collect())
            .collect()
    }

    #[test]
    fn a_strip_runs_along_the_dimension_that_is_cut() {
        assert_eq!(
            picture(&[4, 6], &[(&[0, 0], &[3, 6]), (&[3, 0], &[1, 6])]),
            ["00000011"]
        );
        assert_eq!(
            picture(&[4, 6], &[(&[0, 0], &[4, 3]), (&[0, 3], &[4, 3])]),
            ["00001111"]
        );
        assert_eq!(picture(&[], &[(&[], &[])]), ["00000000"]);
    }

    #[test]
    fn parts_of_rows_are_seen_as_such() {
        // A flat range that ends in the middle of the second row, and the rest.
        let boxes: [(&[usize], &[usize]); 4] = [
            (&[0, 0], &[1, 8]),
            (&[1, 0], &[1, 4]),
            (&[1, 4], &[1, 4]),
            (&[2, 0], &[2, 8]),
        ];
        assert_eq!(
            picture(&[4, 8], &boxes),
            ["00000000", "11112222", "33333333", "33333333"]
        );
    }

    #[test]
    fn holes_copies_and_damage_are_shown() {
        assert_eq!(
            picture(
                &[8],
                &[(&[0], &[3]), (&[2], &[2]), (&[9], &[9]), (&[1, 1], &[1, 1])]
            ),
            ["00+1...."]
        );
    }

    #[test]
    fn the_middle_of_further_dimensions_is_shown() {
        let boxes: [(&[usize], &[usize]); 2] = [(&[0, 0, 0], &[1, 1, 1]), (&[0, 0, 1], &[1, 1, 1])];
        assert_eq!(picture(&[2, 2, 2], &boxes), ["1111....", "........"]);
    }
}
