//! Products of matrices, on threads of the rayon pool that the caller is in.
//!
//! candle's own product returns memory that one thread has set to zero first. This one writes each
//! element once.

use candle_core::{Layout, Result};
use gemm::{Parallelism, gemm};

use crate::parts::compute_in_chunks;
use crate::real::Real;

/// A matrix whose elements lie in a slice, at any distances.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, R> {
    values: &'a [R],
    dims: [usize; 2],
    strides: [usize; 2],
}

impl<'a, R: Real> Matrix<'a, R> {
    /// Returns the matrix whose rows fill the slice, one after the other.
    pub(crate) const fn row_major(values: &'a [R], dims: [usize; 2]) -> Self {
        Matrix {
            values,
            dims,
            strides: [dims[1], 1],
        }
    }

    /// Returns the matrix of a layout with two dimensions, whose first element is the first of the
    /// slice.
    ///
    /// # Errors
    /// Another number of dimensions.
    pub(crate) fn from_layout(values: &'a [R], layout: &Layout) -> Result<Self> {
        let (rows, columns) = layout.shape().dims2()?;
        let strides = layout.stride();
        Ok(Matrix {
            values,
            dims: [rows, columns],
            strides: [strides[0], strides[1]],
        })
    }

    /// Returns the matrix with rows and columns exchanged.
    pub(crate) const fn transposed(self) -> Self {
        Matrix {
            values: self.values,
            dims: [self.dims[1], self.dims[0]],
            strides: [self.strides[1], self.strides[0]],
        }
    }

    /// Returns `true` if the slice has all elements of the matrix.
    fn has_all_elements(&self) -> bool {
        let [rows, columns] = self.dims;
        // A matrix without elements needs none.
        if rows == 0 || columns == 0 {
            return true;
        }
        // Strides may be anything, so their products may overflow.
        let last_row = (rows - 1).checked_mul(self.strides[0]);
        let last_column = (columns - 1).checked_mul(self.strides[1]);
        let (Some(row), Some(column)) = (last_row, last_column) else {
            return false;
        };
        row.checked_add(column)
            .is_some_and(|last_index| last_index < self.values.len())
    }
}

/// Computes `lhs * rhs`, row-major, on `threads` threads, with `bias` added to each row.
///
/// # Errors
/// Sizes that do not go together.
#[expect(
    unsafe_code,
    reason = "gemm takes pointers, and the result's memory is not set twice"
)]
pub(crate) fn product<R: Real>(
    lhs: Matrix<'_, R>,
    rhs: Matrix<'_, R>,
    bias: Option<&[R]>,
    threads: usize,
) -> Result<Vec<R>> {
    let [rows, inner_len] = lhs.dims;
    let columns = rhs.dims[1];
    let sizes_fit = inner_len == rhs.dims[0] && bias.is_none_or(|bias| bias.len() == columns);
    let Some(output_len) = rows
        .checked_mul(columns)
        .filter(|_| sizes_fit && lhs.has_all_elements() && rhs.has_all_elements())
    else {
        candle_core::bail!(
            "a product of matrices {:?} and {:?} that do not go together",
            lhs.dims,
            rhs.dims
        );
    };
    // gemm need not be called for a sum over nothing, whose result is the bias.
    if inner_len == 0 || output_len == 0 {
        let row = bias.map_or_else(|| vec![R::ZERO; columns], <[R]>::to_vec);
        return Ok(row.iter().copied().cycle().take(output_len).collect());
    }
    let mut output = match bias {
        Some(bias) => {
            // gemm adds to what is there.
            let (rows_of_bias, _) =
                compute_in_chunks(output_len, ROWS_OF_TASK * columns, R::ZERO, |_, rows| {
                    rows.chunks_mut(columns)
                        .for_each(|row| row.copy_from_slice(bias));
                });
            rows_of_bias
        }
        None => Vec::with_capacity(output_len),
    };
    let parallelism = if threads > 1 {
        Parallelism::Rayon(threads)
    } else {
        Parallelism::None
    };
    // SAFETY: each matrix has all its elements in its slice, as `has_all_elements` says, and the
    // output has memory for `output_len`, which is `rows * columns`, elements. gemm reads the
    // output only where a bias has filled it, and writes each of its elements, so that all are set
    // afterwards.
    unsafe {
        gemm(
            rows,
            columns,
            inner_len,
            output.as_mut_ptr(),
            1,
            columns as isize,
            bias.is_some(),
            lhs.values.as_ptr(),
            lhs.strides[1] as isize,
            lhs.strides[0] as isize,
            rhs.values.as_ptr(),
            rhs.strides[1] as isize,
            rhs.strides[0] as isize,
            R::ONE,
            R::ONE,
            false,
            false,
            false,
            parallelism,
        );
        output.set_len(output_len);
    }
    Ok(output)
}

/// The rows that one task fills with the bias.
const ROWS_OF_TASK: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    /// A product by its definition.
    fn by_definition(lhs: Matrix<'_, f64>, rhs: Matrix<'_, f64>, bias: &[f64]) -> Vec<f64> {
        let at = |matrix: &Matrix<'_, f64>, row: usize, column: usize| {
            matrix.values[row * matrix.strides[0] + column * matrix.strides[1]]
        };
        let ([rows, inner], columns) = (lhs.dims, rhs.dims[1]);
        let element = |row, column| {
            bias[column]
                + (0..inner)
                    .map(|index| at(&lhs, row, index) * at(&rhs, index, column))
                    .sum::<f64>()
        };
        (0..rows)
            .flat_map(|row| (0..columns).map(move |column| (row, column)))
            .map(|(r, c)| element(r, c))
            .collect()
    }

    #[test]
    fn products_of_any_layout_are_those_of_the_definition_on_any_number_of_threads() {
        let values: Vec<f64> = (0..70 * 90)
            .map(|index| f64::from(index % 17) - 8.0)
            .collect();
        for (rows, inner, columns) in [
            (1, 1, 1),
            (3, 5, 7),
            (70, 33, 65),
            (64, 0, 3),
            (0, 4, 2),
            (5, 2, 0),
        ] {
            let lhs = Matrix::row_major(&values[..rows * inner], [rows, inner]);
            let rhs = Matrix {
                values: &values[7..],
                dims: [inner, columns],
                strides: [1, inner],
            };
            let bias: Vec<f64> = (0..columns).map(|column| column as f64).collect();
            for threads in [1, 2, 3] {
                let found = product(lhs, rhs, Some(&bias), threads).unwrap();
                assert_eq!(
                    found,
                    by_definition(lhs, rhs, &bias),
                    "{rows} {inner} {columns} {threads}"
                );
                let found = product(lhs, rhs, None, threads).unwrap();
                assert_eq!(
                    found,
                    by_definition(lhs, rhs, &vec![0.0; columns]),
                    "{rows} {inner} {columns} {threads}"
                );
            }
        }
    }

    #[test]
    fn matrices_beyond_their_slices_and_sizes_that_differ_are_refused() {
        let values = [1f32; 12];
        let matrix = |rows, columns| Matrix {
            values: &values,
            dims: [rows, columns],
            strides: [columns, 1],
        };
        assert!(product(matrix(3, 4), matrix(4, 3), None, 1).is_ok());
        assert!(product(matrix(3, 4), matrix(3, 4), None, 1).is_err());
        assert!(product(matrix(4, 4), matrix(4, 3), None, 1).is_err());
        assert!(product(matrix(3, 4), matrix(4, 4), None, 1).is_err());
        assert!(product(matrix(3, 4), matrix(4, 3), Some(&values), 1).is_err());
        let far = Matrix {
            values: &values,
            dims: [2, 2],
            strides: [usize::MAX, 1],
        };
        assert!(product(far, matrix(2, 2), None, 1).is_err());
    }
}
