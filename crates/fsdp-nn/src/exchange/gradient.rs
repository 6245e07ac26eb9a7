//! Copies candle's gradient tensors, whatever their memory layout, into the flat gradient.

use candle_core::Tensor;
use fsdp_flat::storage::{HostSlice, Scalar, reserved_vec};
use fsdp_layout::FlatLayout;
use fsdp_layout::flat::FlatEntry;

use crate::config::cast;
use crate::error::Result;
use crate::tasks;

/// Rows and columns that are transposed at a time, so that both sides stay in cache.
const TILE_LEN: usize = 32;

/// Writes (or adds) a gradient, row-major, to its place in the flat gradient.
pub(crate) fn copy_gradient<T: Scalar>(
    grad: &Tensor,
    target: &mut [T],
    accumulate: bool,
) -> Result<()> {
    // The gradient of `x.matmul(&weight.t())` arrives transposed: read it through the transpose,
    // which is contiguous.
    if !grad.is_contiguous()
        && let [rows, columns] = *grad.dims()
    {
        let transposed = grad.t()?;
        if transposed.is_contiguous() {
            transpose(
                &HostSlice::<T>::read(&transposed)?,
                target,
                rows,
                columns,
                accumulate,
            );
            return Ok(());
        }
    }
    let grad = grad.contiguous()?;
    let source = HostSlice::<T>::read(&grad)?;
    if accumulate {
        tasks::for_each_pair(target, &source, add_assign);
    } else {
        tasks::for_each_pair(target, &source, <[T]>::copy_from_slice);
    }
    Ok(())
}

/// Puts gradients of any dtype into a new flat gradient, with zeros for padding and for parameters
/// that have none. They are cast one at a time, and each is freed once it is copied.
///
/// Contiguous gradients are appended, so that no memory is filled with zeros first and then with
/// them.
pub(crate) fn flat_gradient<T: Scalar>(
    layout: &FlatLayout,
    mut grads: Vec<Option<Tensor>>,
) -> Result<Vec<T>> {
    let mut flat = reserved_vec::<T>(layout.padded_unsharded_numel())?;
    for (entry, numel) in layout.entries().iter().zip(layout.numels_with_padding()) {
        let start = flat.len();
        let grad = match entry {
            FlatEntry::Param(param) => grads[*param].take(),
            FlatEntry::Padding => None,
        };
        // Padding, and a parameter that got no gradient.
        let Some(grad) = grad else {
            flat.resize(start + numel, T::zeroed());
            continue;
        };
        let converted = cast(grad, Some(T::DTYPE))?;
        if converted.is_contiguous() {
            flat.extend_from_slice(&HostSlice::<T>::read(&converted)?);
        } else {
            flat.resize(start + numel, T::zeroed());
            copy_gradient(&converted, &mut flat[start..], false)?;
        }
    }
    flat.resize(layout.padded_unsharded_numel(), T::zeroed());
    Ok(flat)
}

/// Adds `source` to `target`, element by element. They have equal lengths.
pub(crate) fn add_assign<T: Scalar>(target: &mut [T], source: &[T]) {
    target
        .iter_mut()
        .zip(source)
        .for_each(|(target, source)| *target += *source);
}

/// Computes `to[row][column] = from[column][row]`, or `+=`.
fn transpose<T: Scalar>(
    source: &[T],
    target: &mut [T],
    rows: usize,
    columns: usize,
    accumulate: bool,
) {
    for row_tile in (0..rows).step_by(TILE_LEN) {
        for column_tile in (0..columns).step_by(TILE_LEN) {
            for row in row_tile..(row_tile + TILE_LEN).min(rows) {
                let target_row = &mut target[row * columns..(row + 1) * columns];
                for column in column_tile..(column_tile + TILE_LEN).min(columns) {
                    let value = source[column * rows + row];
                    if accumulate {
                        target_row[column] += value;
                    } else {
                        target_row[column] = value;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn gradients_of_any_layout_land_row_major() {
        let base = Tensor::arange(0f32, 70f32 * 33., &Device::Cpu).unwrap();
        let cases = [
            base.reshape((70, 33)).unwrap(),
            base.reshape((33, 70)).unwrap().t().unwrap(),
            base.reshape((70, 11, 3)).unwrap().transpose(0, 2).unwrap(),
            base.reshape((35, 66)).unwrap().narrow(1, 3, 33).unwrap(),
            base.narrow(0, 5, 1).unwrap().broadcast_as((4, 4)).unwrap(),
        ];
        for grad in cases {
            let expected = grad.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let mut to = vec![0f32; expected.len()];
            copy_gradient(&grad, &mut to, false).unwrap();
            assert_eq!(to, expected, "{:?}", grad.dims());
            copy_gradient(&grad, &mut to, true).unwrap();
            assert_eq!(to, expected.iter().map(|x| x + x).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_flat_gradient_has_zeros_for_padding_and_for_parameters_without_one() {
        let params = [("a", vec![3]), ("b", vec![2, 2]), ("c", vec![1])];
        let params = params
            .map(|(name, shape)| (name.to_owned(), shape))
            .to_vec();
        let layout = FlatLayout::new(params, 4, 3).unwrap();
        let a = Tensor::new(&[1f32, 2., 3.], &Device::Cpu).unwrap();
        let b = Tensor::new(&[[4f32, 5.], [6., 7.]], &Device::Cpu)
            .unwrap()
            .t()
            .unwrap();
        let flat = flat_gradient::<f32>(&layout, vec![Some(a), Some(b), None]).unwrap();
        assert_eq!(flat.len(), layout.padded_unsharded_numel());
        assert_eq!(flat[layout.param_range(0)], [1., 2., 3.]);
        assert_eq!(flat[layout.param_range(1)], [4., 6., 5., 7.]);
        assert_eq!(flat.iter().filter(|&&value| value != 0.).count(), 7);
    }
}
