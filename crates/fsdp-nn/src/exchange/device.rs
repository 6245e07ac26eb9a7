//! Parameters and gradients on GPUs: what is done where they are, rather than on the host.
//!
//! The collectives here return `None` or `false`, and do nothing, if the process group cannot move
//! GPU memory.

use std::ops::Range;

use candle_core::{DType, Tensor};
use fsdp_comm::ProcessGroup;

use crate::error::Result;

#[cfg(feature = "nccl")]
pub(crate) use nccl::{all_gather, all_reduce, reduce_scatter};

#[cfg(not(feature = "nccl"))]
pub(crate) use host::{all_gather, all_reduce, reduce_scatter};

/// Writes (or adds) a gradient, row-major, to its place in the flat gradient.
pub(crate) fn copy_gradient(
    grad: &Tensor,
    flat: &Tensor,
    range: Range<usize>,
    accumulate: bool,
) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let grad = grad.detach().flatten_all()?;
    for piece in pieces(range.len()) {
        // candle adds into new memory, so one piece at a time.
        let mut new_elements = grad.narrow(0, piece.start, piece.len())?;
        if accumulate {
            new_elements =
                (flat.narrow(0, range.start + piece.start, piece.len())? + new_elements)?;
        }
        flat.slice_set(&new_elements.contiguous()?, 0, range.start + piece.start)?;
    }
    Ok(())
}

/// Cuts elements into ranges of bounded length, because candle's kernels count elements in 32 bits,
/// and each intermediate result takes memory.
fn pieces(numel: usize) -> impl Iterator<Item = Range<usize>> {
    const PIECE_LEN: usize = 1 << 24;
    (0..numel)
        .step_by(PIECE_LEN)
        .map(move |start| start..numel.min(start + PIECE_LEN))
}

/// Returns the sum of the squares of all elements or, with `is_infinity`, their largest absolute
/// value. Returns NaN if any element is NaN.
pub(crate) fn norm_part(flat: &Tensor, is_infinity: bool) -> Result<f64> {
    let mut squares = 0f64;
    let mut largest = 0f64;
    for piece in pieces(flat.elem_count()) {
        let piece = flat
            .narrow(0, piece.start, piece.len())?
            .to_dtype(DType::F64)?;
        // A kernel may ignore NaN when it looks for the largest value. A sum cannot, so it is
        // computed in both cases.
        squares += piece.sqr()?.sum_all()?.to_scalar::<f64>()?;
        if is_infinity {
            largest = largest.max(piece.abs()?.max_all()?.to_scalar::<f64>()?);
        }
    }
    Ok(if is_infinity && !squares.is_nan() {
        largest
    } else {
        squares
    })
}

/// Multiplies all elements. Those of half types are multiplied in `f32`, because a half type may
/// not hold the factor.
pub(crate) fn scale(flat: &Tensor, factor: f64) -> Result<()> {
    let dtype = match flat.dtype() {
        DType::F16 | DType::BF16 => DType::F32,
        dtype => dtype,
    };
    for piece in pieces(flat.elem_count()) {
        let scaled = (flat.narrow(0, piece.start, piece.len())?.to_dtype(dtype)? * factor)?;
        flat.slice_set(&scaled.to_dtype(flat.dtype())?, 0, piece.start)?;
    }
    Ok(())
}

#[cfg(not(feature = "nccl"))]
mod host {
    use super::{ProcessGroup, Result, Tensor};

    /// Returns `None`: without NCCL, GPU memory is gathered through the host.
    pub(crate) const fn all_gather(_: &ProcessGroup, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(None)
    }

    pub(crate) const fn reduce_scatter(_: &ProcessGroup, _: &Tensor, _: &Tensor) -> Result<bool> {
        Ok(false)
    }

    pub(crate) const fn all_reduce(_: &ProcessGroup, _: &Tensor) -> Result<bool> {
        Ok(false)
    }
}

#[cfg(feature = "nccl")]
mod nccl {
    use candle_core::cuda_backend::CudaDType;
    use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
    use fsdp_comm::device::{DeviceGroup, DeviceSlice, DeviceSliceMut};
    use fsdp_comm::{Element, ReduceOp};
    use fsdp_flat::storage::cuda::{with_device_slice, with_device_slice_mut};
    use fsdp_flat::storage::{Scalar, zeros_on};
    use fsdp_flat::with_float;

    use super::{ProcessGroup, Result, Tensor};

    /// Returns the group's collectives on the memory of this tensor, if it has any.
    fn device_group<'g>(group: &'g ProcessGroup, tensor: &Tensor) -> Option<DeviceGroup<'g>> {
        group.device().filter(|_| tensor.device().is_cuda())
    }

    /// Returns all ranks' shards, one after the other.
    pub(crate) fn all_gather(group: &ProcessGroup, shard: &Tensor) -> Result<Option<Tensor>> {
        /// Gathers the shards of elements of type `T` into `whole`.
        fn all_gather_typed<T: Scalar + Element + CudaDType + DeviceRepr>(
            group: DeviceGroup<'_>,
            whole: &Tensor,
            shard: &Tensor,
        ) -> Result<()> {
            let pending = with_device_slice::<T, _>(shard, |input, input_stream| {
                with_device_slice_mut::<T, _>(whole, |output, output_stream| {
                    let mut output = DeviceSliceMut::new(output, output_stream);
                    group.all_gather_into(&mut output, &DeviceSlice::new(input, input_stream))
                })
            })???; // Errors of the borrow of the input, of that of the output, and of the collective.
            Ok(pending.wait()?)
        }
        let Some(device_group) = device_group(group, shard) else {
            return Ok(None);
        };
        let whole = zeros_on(
            &[shard.elem_count() * group.world_size()],
            shard.dtype(),
            shard.device(),
        )?;
        with_float!(shard.dtype(), T => all_gather_typed::<T>(device_group, &whole, shard)?);
        Ok(Some(whole))
    }

    /// Fills `reduced` with this rank's part of the mean of all ranks' `whole`. Returns `false` if
    /// the group cannot move GPU memory.
    pub(crate) fn reduce_scatter(
        group: &ProcessGroup,
        reduced: &Tensor,
        whole: &Tensor,
    ) -> Result<bool> {
        /// Reduces tensors of elements of type `T`.
        fn reduce_scatter_typed<T: Scalar + Element + CudaDType + DeviceRepr>(
            group: DeviceGroup<'_>,
            reduced: &Tensor,
            whole: &Tensor,
        ) -> Result<()> {
            let pending = with_device_slice::<T, _>(whole, |input, input_stream| {
                with_device_slice_mut::<T, _>(reduced, |output, output_stream| {
                    let mut output = DeviceSliceMut::new(output, output_stream);
                    group.reduce_scatter(
                        &mut output,
                        &DeviceSlice::new(input, input_stream),
                        ReduceOp::Avg,
                    )
                })
            })???; // Errors of the borrow of the input, of that of the output, and of the collective.
            Ok(pending.wait()?)
        }
        let Some(device_group) = device_group(group, whole) else {
            return Ok(false);
        };
        with_float!(whole.dtype(), T => reduce_scatter_typed::<T>(device_group, reduced, whole)?);
        Ok(true)
    }

    /// Replaces a tensor by the mean of all ranks' tensors.
    pub(crate) fn all_reduce(group: &ProcessGroup, buffer: &Tensor) -> Result<bool> {
        /// Reduces tensors of elements of type `T`.
        fn all_reduce_typed<T: Scalar + Element + CudaDType + DeviceRepr>(
            group: DeviceGroup<'_>,
            buffer: &Tensor,
        ) -> Result<()> {
            let pending = with_device_slice_mut::<T, _>(buffer, |buffer, stream| {
                group.all_reduce(&mut DeviceSliceMut::new(buffer, stream), ReduceOp::Avg)
            })??; // Errors of the borrow, and of the collective.
            Ok(pending.wait()?)
        }
        let Some(device_group) = device_group(group, buffer) else {
            return Ok(false);
        };
        with_float!(buffer.dtype(), T => all_reduce_typed::<T>(device_group, buffer)?);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn gradients_land_in_their_place_and_add_up() {
        let flat = Tensor::zeros(8, DType::F32, &Device::Cpu).unwrap();
        let grad = Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)
            .unwrap()
            .t()
            .unwrap();
        copy_gradient(&grad, &flat, 3..7, false).unwrap();
        assert_eq!(
            flat.to_vec1::<f32>().unwrap(),
            [0., 0., 0., 1., 3., 2., 4., 0.]
        );
        copy_gradient(&grad, &flat, 3..7, true).unwrap();
        assert_eq!(
            flat.to_vec1::<f32>().unwrap(),
            [0., 0., 0., 2., 6., 4., 8., 0.]
        );
        copy_gradient(
            &Tensor::zeros(0, DType::F32, &Device::Cpu).unwrap(),
            &flat,
            8..8,
            false,
        )
        .unwrap();
        scale(&flat, 0.5).unwrap();
        assert_eq!(norm_part(&flat, false).unwrap(), 30.0);
        assert_eq!(norm_part(&flat, true).unwrap(), 4.0);
    }

    #[test]
    fn half_types_are_multiplied_by_a_factor_that_they_do_not_hold() {
        let flat = Tensor::full(40_000f32, 3, &Device::Cpu)
            .unwrap()
            .to_dtype(DType::F16)
            .unwrap();
        scale(&flat, 1.25e-8).unwrap();
        assert_eq!(
            flat.to_vec1::<half::f16>().unwrap(),
            [half::f16::from_f32(5e-4); 3]
        );
    }
}
