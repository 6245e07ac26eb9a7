//! Parameters and gradients on GPUs: what is done where they are, rather than on the host.
//!
//! The collectives here return `None` or `false`, and do nothing, if the process group cannot move
//! GPU memory. They return when they are queued on the GPU, and later work of the thread comes
//! behind them.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use fsdp_comm::ProcessGroup;
use fsdp_flat::storage::{Contents, release, renew, zeros_on};
use fsdp_layout::FlatLayout;
use fsdp_layout::flat::FlatEntry;
use fsdp_ops::step;

use crate::config::cast;
use crate::error::Result;

#[cfg(feature = "nccl")]
pub(crate) use nccl::{all_gather, all_reduce, all_to_all, reduce_scatter, synchronize};

#[cfg(not(feature = "nccl"))]
pub(crate) use host::{all_gather, all_reduce, all_to_all, reduce_scatter, synchronize};

/// Returns a gradient as a tensor of one dimension, whose elements lie one after the other.
fn contiguous(grad: &Tensor) -> Result<Tensor> {
    Ok(grad.detach().flatten_all()?.contiguous()?)
}

/// Returns a tensor of one dimension in a dtype, if one is given and the tensor holds floats;
/// others as they are. It may have more elements than candle's kernels can count, but no gradient.
pub(crate) fn cast_elements(tensor: Tensor, dtype: Option<DType>) -> Result<Tensor> {
    if let Some(dtype) = dtype
        && dtype != tensor.dtype()
        && step::can_write(tensor.device(), dtype, tensor.dtype())?
    {
        let elements = step::Part::Elements(contiguous(&tensor)?);
        return Ok(step::join(&[elements], dtype, tensor.device())?);
    }
    Ok(cast(tensor, dtype)?)
}

/// Puts the elements of an unsharded FlatParameter into the tensors of its parameters, which get
/// fresh memory. One launch does it if there is a kernel.
///
/// # Errors
/// CUDA's. The tensors are released then: what they hold is undefined.
pub(crate) fn fill<'t>(
    params: impl Iterator<Item = &'t Tensor> + Clone,
    layout: &FlatLayout,
    flat: &Tensor,
) -> Result<()> {
    let filled = try_fill(params.clone(), layout, flat);
    if filled.is_err() {
        for param in params {
            release(param)?;
        }
    }
    filled
}

/// Does what [`fill`] does, and leaves undefined what it has not filled.
///
/// # Errors
/// CUDA's.
fn try_fill<'t>(
    params: impl Iterator<Item = &'t Tensor>,
    layout: &FlatLayout,
    flat: &Tensor,
) -> Result<()> {
    let has_kernel = step::can_write(flat.device(), flat.dtype(), flat.dtype())?;
    let mut pairs = Vec::with_capacity(layout.fqns().len());
    for (index, param) in params.enumerate() {
        let range = layout.param_range(index);
        let elements = flat.narrow(0, range.start, range.len())?;
        if has_kernel && !range.is_empty() {
            renew(param)?;
            pairs.push((param.detach(), Some(elements)));
        } else {
            Contents::from_tensor(&elements)?.move_into(param)?;
        }
    }
    Ok(step::write(&pairs, false)?)
}

/// Puts gradients of any dtype into a new flat gradient, with zeros for padding and for parameters
/// that have none. One launch does it if there is a kernel.
pub(crate) fn flat_gradient(
    layout: &FlatLayout,
    mut grads: Vec<Option<Tensor>>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let mut has_kernels = step::has_kernels(device, dtype)?;
    for grad in grads.iter().flatten() {
        has_kernels &= step::can_write(device, dtype, grad.dtype())?;
    }
    let numel = layout.padded_unsharded_numel();
    if !has_kernels {
        let flat = zeros_on(&[numel], dtype, device)?;
        for (param, grad) in grads.iter().enumerate() {
            if let Some(grad) = grad {
                copy_gradient(grad, &flat, layout.param_range(param), false)?;
            }
        }
        return Ok(flat);
    }
    let mut parts = Vec::with_capacity(layout.entries().len() + 1);
    for (entry, &numel) in layout.entries().iter().zip(layout.numels_with_padding()) {
        let grad = match entry {
            FlatEntry::Param(param) => grads[*param].take(),
            FlatEntry::Padding => None,
        };
        parts.push(match grad {
            Some(grad) => step::Part::Elements(contiguous(&grad)?),
            None => step::Part::Zeros(numel),
        });
    }
    parts.push(step::Part::Zeros(numel - layout.unpadded_unsharded_numel()));
    Ok(step::join(&parts, dtype, device)?)
}

/// Adds gradients of any dtype to their places in the flat gradient, by one launch if there is a
/// kernel. No place may be twice among them.
pub(crate) fn add_gradients(
    flat: &Tensor,
    layout: &FlatLayout,
    grads: &[(usize, Tensor)],
) -> Result<()> {
    let mut pairs = Vec::with_capacity(grads.len());
    for (param, grad) in grads {
        let range = layout.param_range(*param);
        if step::can_write(flat.device(), flat.dtype(), grad.dtype())? {
            let to = flat.narrow(0, range.start, range.len())?;
            pairs.push((to, Some(contiguous(grad)?)));
        } else {
            copy_gradient(grad, flat, range, true)?;
        }
    }
    Ok(step::write(&pairs, true)?)
}

/// Writes (or adds) a gradient of any dtype, row-major, to its place in the flat gradient.
pub(crate) fn copy_gradient(
    grad: &Tensor,
    flat: &Tensor,
    range: Range<usize>,
    accumulate: bool,
) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    if step::can_write(flat.device(), flat.dtype(), grad.dtype())? {
        let to = flat.narrow(0, range.start, range.len())?;
        return Ok(step::write(&[(to, Some(contiguous(grad)?))], accumulate)?);
    }
    let grad = cast(grad.detach().flatten_all()?, Some(flat.dtype()))?;
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

/// Returns the sum of the squares of all elements of gradients or, with `is_infinity`, their
/// largest absolute value; NaN if any element is NaN, and not finite if any is not. Returns the
/// values of scalars too, which may be on the CPU. The host waits for the GPU once.
pub(crate) fn norm_part(
    grads: &[Tensor],
    is_infinity: bool,
    scalars: &[Tensor],
) -> Result<(f64, Vec<f64>)> {
    let mut numbers = norm_numbers(grads, is_infinity)?;
    let pair_count = numbers.iter().map(Tensor::elem_count).sum::<usize>() / 2;
    let (host_scalars, device_scalars): (Vec<&Tensor>, Vec<&Tensor>) =
        scalars.iter().partition(|scalar| scalar.device().is_cpu());
    for scalar in device_scalars {
        numbers.push(scalar.detach().to_dtype(DType::F64)?.reshape(1)?);
    }
    let mut values = match numbers.as_slice() {
        [] => Vec::new(),
        numbers => Tensor::cat(numbers, 0)?.to_vec1::<f64>()?,
    };
    let mut scalars = values.split_off(2 * pair_count);
    for scalar in host_scalars {
        scalars.push(scalar.to_dtype(DType::F64)?.to_scalar::<f64>()?);
    }
    let (mut squares, mut largest) = (0f64, 0f64);
    for pair in values.chunks_exact(2) {
        squares += pair[0];
        largest = largest.max(pair[1]);
    }
    let part = if is_infinity && !squares.is_nan() {
        largest
    } else {
        squares
    };
    Ok((part, scalars))
}

/// Returns pairs of numbers on the GPU, of which the first is a sum of squares, and the second the
/// largest absolute value if `is_infinity` is set.
fn norm_numbers(grads: &[Tensor], is_infinity: bool) -> Result<Vec<Tensor>> {
    let mut numbers = Vec::new();
    let mut measured = Vec::new();
    for grad in grads.iter().filter(|grad| grad.elem_count() > 0) {
        if step::has_kernels(grad.device(), grad.dtype())? {
            measured.push(grad.clone());
            continue;
        }
        for piece in pieces(grad.elem_count()) {
            let piece = grad
                .narrow(0, piece.start, piece.len())?
                .to_dtype(DType::F64)?;
            let squares = sum(&piece.sqr()?)?;
            // A kernel may ignore NaN when it looks for the largest value. A sum cannot, so it is
            // computed in both cases.
            let largest = if is_infinity {
                piece.abs()?.max_all()?
            } else {
                squares.clone()
            };
            numbers.extend([squares.reshape(1)?, largest.reshape(1)?]);
        }
    }
    if !measured.is_empty() {
        numbers.push(step::statistics(&measured)?);
    }
    Ok(numbers)
}

/// Adds up all elements of a tensor of one dimension. candle adds up a long row with few threads,
/// so these are rows first.
pub(crate) fn sum(values: &Tensor) -> Result<Tensor> {
    const ROW_LEN: usize = 1 << 10;
    let numel = values.elem_count();
    let rows = numel / ROW_LEN;
    let mut sums = Vec::with_capacity(2);
    if rows > 0 {
        let whole_rows = values.narrow(0, 0, rows * ROW_LEN)?;
        sums.push(whole_rows.reshape((rows, ROW_LEN))?.sum(1)?);
    }
    sums.push(values.narrow(0, rows * ROW_LEN, numel - rows * ROW_LEN)?);
    sums.retain(|sums| sums.elem_count() > 0);
    Ok(Tensor::cat(&sums, 0)?.sum_all()?)
}

/// Multiplies all elements of gradients. Those of half types are multiplied in `f32`, because a
/// half type may not hold the factor.
pub(crate) fn scale(grads: &[Tensor], factor: f64) -> Result<()> {
    let mut scaled = Vec::new();
    for flat in grads {
        if step::has_kernels(flat.device(), flat.dtype())? {
            scaled.push(flat.clone());
            continue;
        }
        let dtype = match flat.dtype() {
            DType::F16 | DType::BF16 => DType::F32,
            dtype => dtype,
        };
        for piece in pieces(flat.elem_count()) {
            let scaled = (flat.narrow(0, piece.start, piece.len())?.to_dtype(dtype)? * factor)?;
            flat.slice_set(&scaled.to_dtype(flat.dtype())?, 0, piece.start)?;
        }
    }
    Ok(step::scale(&scaled, factor)?)
}

#[cfg(not(feature = "nccl"))]
mod host {
    use super::{ProcessGroup, Result, Tensor};

    /// Returns `None`: without NCCL, GPU memory is gathered through the host.
    pub(crate) const fn all_gather(_: &ProcessGroup, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(None)
    }

    pub(crate) const fn reduce_scatter(_: &ProcessGroup, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(None)
    }

    pub(crate) const fn all_reduce(_: &ProcessGroup, _: &Tensor) -> Result<bool> {
        Ok(false)
    }

    pub(crate) const fn all_to_all(
        _: &ProcessGroup,
        _: &Tensor,
        _: (&[usize], &[usize]),
    ) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// Does nothing: without NCCL, no collective is queued on a GPU.
    pub(crate) const fn synchronize(_: &ProcessGroup) -> Result<()> {
        Ok(())
    }
}

#[cfg(feature = "nccl")]
mod nccl {
    use candle_core::cuda_backend::CudaDType;
    use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
    use candle_core::{CudaDevice, Device};
    use fsdp_comm::device::{DeviceGroup, DeviceSlice, DeviceSliceMut};
    use fsdp_comm::{Element, ReduceOp};
    use fsdp_flat::storage::Scalar;
    use fsdp_flat::storage::cuda::{undefined, with_device_slice, with_device_slice_mut};
    use fsdp_flat::with_float;

    use super::{ProcessGroup, Result, Tensor};

    /// Returns the group's collectives on the memory of this tensor, and the GPU that it is in.
    fn device_group<'t>(
        group: &'t ProcessGroup,
        tensor: &'t Tensor,
    ) -> Option<(DeviceGroup<'t>, &'t CudaDevice)> {
        match tensor.device() {
            Device::Cuda(device) => Some((group.device()?, device)),
            _ => None,
        }
    }

    /// Returns all ranks' shards, one after the other.
    pub(crate) fn all_gather(group: &ProcessGroup, shard: &Tensor) -> Result<Option<Tensor>> {
        /// Gathers the shards of elements of type `T` into `whole`.
        fn all_gather_typed<T: Scalar + Element + CudaDType + DeviceRepr>(
            group: DeviceGroup<'_>,
            whole: &Tensor,
            shard: &Tensor,
        ) -> Result<()> {
            with_device_slice::<T, _>(shard, |input, input_stream| {
                with_device_slice_mut::<T, _>(whole, |output, output_stream| {
                    let mut output = DeviceSliceMut::new(output, output_stream);
                    group.all_gather_into(&mut output, &DeviceSlice::new(input, input_stream))
                })
            })???; // Errors of the borrow of the input, of that of the output, and of the collective.
            Ok(())
        }
        let Some((device_group, device)) = device_group(group, shard) else {
            return Ok(None);
        };
        let numel = shard.elem_count() * group.world_size();
        let whole = undefined(device, shard.dtype(), numel)?;
        with_float!(shard.dtype(), T => all_gather_typed::<T>(device_group, &whole, shard)?);
        Ok(Some(whole))
    }

    /// Returns this rank's part of the mean of all ranks' `whole`, as long as a shard; `None` if
    /// the group cannot move GPU memory.
    pub(crate) fn reduce_scatter(group: &ProcessGroup, whole: &Tensor) -> Result<Option<Tensor>> {
        /// Reduces tensors of elements of type `T`.
        fn reduce_scatter_typed<T: Scalar + Element + CudaDType + DeviceRepr>(
            group: DeviceGroup<'_>,
            reduced: &Tensor,
            whole: &Tensor,
        ) -> Result<()> {
            with_device_slice::<T, _>(whole, |input, input_stream| {
                with_device_slice_mut::<T, _>(reduced, |output, output_stream| {
                    let mut output = DeviceSliceMut::new(output, output_stream);
                    group.reduce_scatter(
                        &mut output,
                        &DeviceSlice::new(input, input_stream),
                        ReduceOp::Avg,
                    )
                })
            })???; // Errors of the borrow of the input, of that of the output, and of the collective.
            Ok(())
        }
        let Some((device_group, device)) = device_group(group, whole) else {
            return Ok(None);
        };
        let numel = whole.elem_count() / group.world_size();
        let reduced = undefined(device, whole.dtype(), numel)?;
        with_float!(whole.dtype(), T => reduce_scatter_typed::<T>(device_group, &reduced, whole)?);
        Ok(Some(reduced))
    }

    /// Sends elements of a tensor of one dimension to each rank, one rank after the other, and
    /// returns the elements that all ranks have sent to this one, in the same order. `counts` has
    /// the number of elements that each rank is sent, and the number that each rank sends to this
    /// one. Returns `None` if the group cannot move GPU memory.
    pub(crate) fn all_to_all(
        group: &ProcessGroup,
        sent: &Tensor,
        counts: (&[usize], &[usize]),
    ) -> Result<Option<Tensor>> {
        /// Exchanges elements of type `T`.
        fn all_to_all_typed<T: Scalar + Element + CudaDType + DeviceRepr>(
            group: DeviceGroup<'_>,
            received: &Tensor,
            sent: &Tensor,
            (send_counts, receive_counts): (&[usize], &[usize]),
        ) -> Result<()> {
            with_device_slice::<T, _>(sent, |input, input_stream| {
                with_device_slice_mut::<T, _>(received, |output, output_stream| {
                    group.all_to_all_uneven(
                        &mut DeviceSliceMut::new(output, output_stream),
                        receive_counts,
                        &DeviceSlice::new(input, input_stream),
                        send_counts,
                    )
                })
            })???; // Errors of the borrow of the input, of that of the output, and of the collective.
            Ok(())
        }
        let Some((device_group, device)) = device_group(group, sent) else {
            return Ok(None);
        };
        let received = undefined(device, sent.dtype(), counts.1.iter().sum::<usize>())?;
        with_float!(sent.dtype(), T => all_to_all_typed::<T>(device_group, &received, sent, counts)?);
        Ok(Some(received))
    }

    /// Waits on the host until the GPU has done all collectives that are queued. The error says
    /// why one of them has failed.
    pub(crate) fn synchronize(group: &ProcessGroup) -> Result<()> {
        Ok(group
            .device()
            .map_or(Ok(()), |device| device.synchronize())?)
    }

    /// Replaces a tensor by the mean of all ranks' tensors.
    pub(crate) fn all_reduce(group: &ProcessGroup, buffer: &Tensor) -> Result<bool> {
        /// Reduces tensors of elements of type `T`.
        fn all_reduce_typed<T: Scalar + Element + CudaDType + DeviceRepr>(
            group: DeviceGroup<'_>,
            buffer: &Tensor,
        ) -> Result<()> {
            with_device_slice_mut::<T, _>(buffer, |buffer, stream| {
                group.all_reduce(&mut DeviceSliceMut::new(buffer, stream), ReduceOp::Avg)
            })??; // Errors of the borrow, and of the collective.
            Ok(())
        }
        let Some((device_group, _)) = device_group(group, buffer) else {
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
        let flat = [flat];
        scale(&flat, 0.5).unwrap();
        let loss = [Tensor::new(7f32, &Device::Cpu).unwrap()];
        assert_eq!(norm_part(&flat, false, &loss).unwrap(), (30.0, vec![7.0]));
        assert_eq!(norm_part(&flat, true, &[]).unwrap(), (4.0, vec![]));
        assert_eq!(norm_part(&[], true, &[]).unwrap(), (0.0, vec![]));
    }

    #[test]
    fn long_tensors_are_added_up_whole() {
        for numel in [1023, 1024, 1025, 5000] {
            let ones = Tensor::ones(numel, DType::F32, &Device::Cpu).unwrap();
            let (squares, _) = norm_part(&[ones], false, &[]).unwrap();
            assert_eq!(squares, numel as f64);
        }
    }

    #[test]
    fn half_types_are_multiplied_by_a_factor_that_they_do_not_hold() {
        let flat = Tensor::full(40_000f32, 3, &Device::Cpu)
            .unwrap()
            .to_dtype(DType::F16)
            .unwrap();
        scale(std::slice::from_ref(&flat), 1.25e-8).unwrap();
        assert_eq!(
            flat.to_vec1::<half::f16>().unwrap(),
            [half::f16::from_f32(5e-4); 3]
        );
    }
}
