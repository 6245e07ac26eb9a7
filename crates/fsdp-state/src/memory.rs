//! Memory of tensors: copies that share nothing, copies in place, and bytes that become tensors.

use candle_core::{Device, Tensor};
use fsdp_flat::storage::{TensorBuffer, owned_copy, share_storage, to_device, with_bytes, with_bytes_mut};
use fsdp_flat::{FlatError, LocalShard, RawTensor, ShardedTensor, copy_streamed};
use fsdp_layout::DType;

use crate::{StateError, StateValue};

/// The same values in memory of their own, on `device` or where they are.
pub(crate) fn own(tensor: &Tensor, device: Option<&Device>) -> Result<Tensor, StateError> {
    match device {
        Some(device) if !device.same_device(tensor.device()) => Ok(to_device(&tensor.detach(), device)?.detach()),
        _ => Ok(owned_copy(tensor)?),
    }
}

/// As [`own`], box by box.
pub(crate) fn own_sharded(tensor: &ShardedTensor, device: Option<&Device>) -> Result<ShardedTensor, StateError> {
    let shards = tensor
        .shards()
        .iter()
        .map(|shard| Ok(LocalShard { bounds: shard.bounds.clone(), tensor: own(&shard.tensor, device)? }))
        .collect::<Result<Vec<_>, StateError>>()?;
    Ok(ShardedTensor::new(tensor.dtype(), tensor.shape().to_vec(), shards)?)
}

/// As [`own`], for a value of any kind. Raw tensors and plain values cannot be changed, so they are shared.
pub(crate) fn own_leaf(value: &StateValue, device: Option<&Device>) -> Result<StateValue, StateError> {
    match value {
        StateValue::Tensor(tensor) => Ok(own(tensor, device)?.into()),
        StateValue::Sharded(tensor) => Ok(own_sharded(tensor, device)?.into()),
        other => Ok(other.clone()),
    }
}

/// Where a rank's part of a value lives; the CPU if it has none.
pub(crate) fn device_of(value: &StateValue) -> Device {
    match value {
        StateValue::Tensor(tensor) => tensor.device().clone(),
        StateValue::Sharded(tensor) => device_of_sharded(tensor),
        _ => Device::Cpu,
    }
}

/// Where a rank's boxes live; the CPU if it has none.
pub(crate) fn device_of_sharded(tensor: &ShardedTensor) -> Device {
    tensor.shards().first().map_or(Device::Cpu, |shard| shard.tensor.device().clone())
}

/// Copies the elements of `src` into the memory of `dst`, which must have its shape and dtype, and be contiguous.
pub(crate) fn copy_into(src: &Tensor, dst: &Tensor) -> Result<(), StateError> {
    let src = to_device(&src.detach(), dst.device())?;
    // Reading and changing one storage at a time would wait for itself forever.
    let src = if share_storage(&src, dst) { src.force_contiguous()? } else { src.contiguous()? };
    if !dst.is_contiguous() {
        return Err(FlatError::NotContiguous { shape: dst.dims().to_vec() }.into());
    }
    // candle has no CUDA kernels for these two: they go by way of the host.
    if !dst.device().is_cpu() && !matches!(dst.dtype(), candle_core::DType::I16 | candle_core::DType::I32) {
        return Ok(dst.flatten_all()?.slice_set(&src.flatten_all()?, 0, 0)?);
    }
    Ok(with_bytes(&src, |from| with_bytes_mut(dst, |to| copy_streamed(to, from)))??)
}

/// What a value's bytes become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ElementType {
    /// A candle tensor.
    Candle(candle_core::DType),
    /// A raw tensor.
    Raw(DType),
}

impl ElementType {
    /// That of a tensor value; `None` for values that are no tensor.
    pub(crate) fn of(value: &StateValue) -> Option<Self> {
        match value {
            StateValue::Tensor(tensor) => Some(ElementType::Candle(tensor.dtype())),
            StateValue::Sharded(tensor) => Some(ElementType::Candle(tensor.dtype())),
            StateValue::Raw(tensor) => Some(ElementType::Raw(tensor.dtype())),
            _ => None,
        }
    }
}

/// Host memory that is to become a tensor.
#[derive(Debug)]
pub(crate) enum Buffer {
    /// A candle tensor's.
    Tensor(TensorBuffer),
    /// A raw tensor's.
    Raw { dtype: DType, shape: Vec<usize>, bytes: Vec<u8> },
}

impl Buffer {
    pub(crate) fn zeros(element: ElementType, shape: &[usize]) -> Result<Self, StateError> {
        Ok(match element {
            ElementType::Candle(dtype) => Buffer::Tensor(TensorBuffer::zeros(shape, dtype)?),
            ElementType::Raw(dtype) => {
                let bytes = vec![0; shape.iter().product::<usize>() * dtype.size_in_bytes() as usize];
                Buffer::Raw { dtype, shape: shape.to_vec(), bytes }
            }
        })
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Buffer::Tensor(buffer) => buffer.bytes_mut(),
            Buffer::Raw { bytes, .. } => bytes,
        }
    }

    pub(crate) fn into_value(self, device: &Device) -> Result<StateValue, StateError> {
        Ok(match self {
            Buffer::Tensor(buffer) => buffer.into_tensor().to_device(device)?.into(),
            Buffer::Raw { dtype, shape, bytes } => RawTensor::new(dtype, shape, bytes)?.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_own_their_memory_and_only_that() {
        let flat = Tensor::arange(0f32, 100f32, &Device::Cpu).unwrap();
        let view = flat.narrow(0, 10, 4).unwrap().reshape((2, 2)).unwrap().t().unwrap();
        let copy = own(&view, None).unwrap();
        assert_eq!(copy.to_vec2::<f32>().unwrap(), [[10., 12.], [11., 13.]]);
        assert!(!share_storage(&copy, &flat));
        assert!(share_storage(&view, &flat));
        assert_eq!(with_bytes(&copy, <[u8]>::len).unwrap(), 16);
    }

    #[test]
    fn copies_in_place_reach_views_and_survive_shared_storage() {
        let flat = Tensor::arange(0f32, 8f32, &Device::Cpu).unwrap();
        let (low, high) = (flat.narrow(0, 0, 4).unwrap(), flat.narrow(0, 4, 4).unwrap());
        copy_into(&high, &low).unwrap();
        assert_eq!(flat.to_vec1::<f32>().unwrap(), [4., 5., 6., 7., 4., 5., 6., 7.]);
        copy_into(&flat, &flat).unwrap();
        let scalar = Tensor::new(2f32, &Device::Cpu).unwrap();
        copy_into(&Tensor::new(3f32, &Device::Cpu).unwrap(), &scalar).unwrap();
        assert_eq!(scalar.to_scalar::<f32>().unwrap(), 3.0);
    }
}
