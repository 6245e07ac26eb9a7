//! Memory of tensors: copies into new memory, copies in place, and tensors made from bytes.

use candle_core::{Device, Tensor};
use fsdp_flat::storage::{
    HostBytes, HostBytesMut, copy_to_gpu, owned_copy, share_storage, to_device,
};
use fsdp_flat::{FlatError, RawTensor, ShardedTensor, dtype, non_temporal_copy};
use fsdp_layout::boxes::checked_numel;
use fsdp_layout::{DType, PlainTensor, PlainValue};

use crate::error::StateError;
use crate::schema::Leaf;
use crate::state_dict::StateValue;

/// Copies a tensor into memory of its own, on `device`; on the tensor's own device if that is
/// `None`. The copy takes no part in backward passes.
fn copy_tensor(tensor: &Tensor, device: Option<&Device>) -> Result<Tensor, FlatError> {
    match device {
        Some(device) if !device.same_device(tensor.device()) => {
            Ok(to_device(&tensor.detach(), device)?.detach())
        }
        // A clone would share the storage, and see later changes of it.
        _ => owned_copy(tensor),
    }
}

/// Returns the device of a rank's part of a value; the CPU if it has none.
pub(crate) fn device_of(value: &StateValue) -> Device {
    value
        .candle_tensors()
        .first()
        .map_or(Device::Cpu, |tensor| tensor.device().clone())
}

/// Copies the elements of `source` into the memory of `target`, which must have its shape and
/// dtype, and be contiguous.
///
/// # Errors
/// [`FlatError::NotContiguous`]; released memory; candle's errors.
pub(crate) fn copy_into(source: &Tensor, target: &Tensor) -> Result<(), StateError> {
    if target.is_contiguous()
        && source.device().is_cpu()
        && copy_to_gpu(&source.detach().contiguous()?, target)?
    {
        return Ok(());
    }
    let on_device = to_device(&source.detach(), target.device())?;
    // If both share a storage, copy `source` first: this thread cannot hold the read lock and the
    // write lock of one storage.
    let contiguous = if share_storage(&on_device, target) {
        on_device.force_contiguous()?
    } else {
        on_device.contiguous()?
    };
    if !target.is_contiguous() {
        return Err(FlatError::NotContiguous {
            shape: target.dims().to_vec(),
        }
        .into());
    }
    // candle has no CUDA kernels for i16 and i32, so tensors of these dtypes are copied through the
    // host.
    if !target.device().is_cpu()
        && !matches!(
            target.dtype(),
            candle_core::DType::I16 | candle_core::DType::I32
        )
    {
        return Ok(target
            .flatten_all()?
            .slice_set(&contiguous.flatten_all()?, 0, 0)?);
    }
    let source_bytes = HostBytes::read(&contiguous)?;
    let mut target_bytes = HostBytesMut::write(target)?;
    non_temporal_copy(&mut target_bytes, &source_bytes);
    Ok(target_bytes.finish()?)
}

/// Copies each value of a list.
fn copy_values(
    values: &[StateValue],
    device: Option<&Device>,
) -> Result<Vec<StateValue>, StateError> {
    values.iter().map(|value| value.copy_to(device)).collect()
}

impl StateValue {
    /// Copies the value, as [`StateDict::copy`](crate::StateDict::copy) does. Raw tensors and plain
    /// values never change, so they are shared.
    ///
    /// # Errors
    /// A tensor whose memory is released; candle's errors.
    pub fn copy(&self) -> Result<Self, StateError> {
        self.copy_to(None)
    }

    /// Copies the value like [`Self::copy`], to a device if one is given.
    ///
    /// # Errors
    /// The errors of [`Self::copy`].
    pub fn copy_to(&self, device: Option<&Device>) -> Result<Self, StateError> {
        Ok(match self {
            StateValue::Tensor(tensor) => StateValue::Tensor(copy_tensor(tensor, device)?),
            StateValue::Sharded(tensor) => tensor.map(|part| copy_tensor(part, device))?.into(),
            StateValue::Raw(_) | StateValue::Plain(_) => self.clone(),
            StateValue::Dict(dict) => StateValue::Dict(dict.copy_to(device)?),
            StateValue::List(list) => StateValue::List(copy_values(list, device)?),
            StateValue::Tuple(list) => StateValue::Tuple(copy_values(list, device)?),
        })
    }

    /// Returns a plain value, or a whole tensor of exactly one element, as a plain value; `None`
    /// for all other tensors and for containers.
    ///
    /// # Errors
    /// A tensor whose memory is released.
    pub fn to_plain(&self) -> Result<Option<PlainValue>, StateError> {
        let is_small = match self {
            StateValue::Plain(_) => true,
            StateValue::Tensor(tensor) => tensor.elem_count() == 1,
            StateValue::Raw(tensor) => checked_numel(tensor.shape()) == Some(1),
            StateValue::Sharded(_)
            | StateValue::Dict(_)
            | StateValue::List(_)
            | StateValue::Tuple(_) => false,
        };
        // The size is checked first, because this copies the elements to the host.
        if is_small { self.to_object() } else { Ok(None) }
    }

    /// Returns a copy of a value and of everything in it, tensors included, as one plain value.
    /// Formats store a list in this form if its elements do not get entries of their own. `None` if
    /// a sharded tensor is in it.
    ///
    /// # Errors
    /// A tensor whose memory is released, or of a dtype that no file holds.
    pub fn to_object(&self) -> Result<Option<PlainValue>, StateError> {
        Ok(match self {
            StateValue::Plain(value) => Some(value.clone()),
            StateValue::List(values) => to_objects(values)?.map(PlainValue::List),
            StateValue::Tuple(values) => to_objects(values)?.map(PlainValue::Tuple),
            StateValue::Dict(dict) => {
                let keys = dict.keys().map(|key| PlainValue::Str(key.to_owned()));
                let values = dict
                    .iter()
                    .map(|(_, value)| value.to_object())
                    .collect::<Result<Option<Vec<_>>, _>>()?;
                values.map(|values| PlainValue::Dict(keys.zip(values).collect()))
            }
            StateValue::Tensor(tensor) => {
                let host = to_device(&tensor.detach(), &Device::Cpu)?.contiguous()?;
                let data = HostBytes::read(&host)?.to_vec();
                Some(make_plain_tensor(
                    dtype::file_dtype(tensor.dtype())?,
                    tensor.dims(),
                    data,
                ))
            }
            StateValue::Raw(tensor) => Some(make_plain_tensor(
                tensor.dtype(),
                tensor.shape(),
                tensor.bytes().to_vec(),
            )),
            StateValue::Sharded(_) => None,
        })
    }
}

/// Returns the elements of a list or a tuple by value; `None` if a sharded tensor is among them.
fn to_objects(values: &[StateValue]) -> Result<Option<Vec<PlainValue>>, StateError> {
    values.iter().map(StateValue::to_object).collect()
}

/// Returns a tensor as a plain value.
fn make_plain_tensor(dtype: DType, shape: &[usize], data: Vec<u8>) -> PlainValue {
    PlainValue::Tensor(PlainTensor {
        dtype,
        shape: shape.to_vec(),
        data,
    })
}

/// Converts a result of [`StateValue::to_plain`] back to a value of the kind that `leaf` describes:
/// a tensor on the CPU, or a plain value. The leaf is needed because a plain value may itself be a
/// small tensor.
pub(crate) fn scalar_to_value(leaf: &Leaf, value: PlainValue) -> Result<StateValue, StateError> {
    let (Leaf::Whole { .. }, PlainValue::Tensor(PlainTensor { dtype, shape, data })) =
        (leaf, &value)
    else {
        return Ok(value.into());
    };
    // candle may lack the dtype. Such a tensor stays as its bytes.
    Ok(match dtype::to_candle(*dtype) {
        Ok(dtype) => Tensor::from_raw_buffer(data, dtype, shape, &Device::Cpu)?.into(),
        Err(_) => RawTensor::new(*dtype, shape.clone(), data.clone())?.into(),
    })
}

impl Leaf {
    /// Returns a value of this kind on a rank that has no elements of it: the small value, if there
    /// is one, or a sharded tensor without boxes.
    ///
    /// # Errors
    /// A dtype that candle does not have.
    pub fn without_elements(&self, small: Option<PlainValue>) -> Result<StateValue, StateError> {
        match (self.tensor(), small) {
            (_, Some(small)) => scalar_to_value(self, small),
            (Some((dtype, shape)), None) => {
                Ok(
                    ShardedTensor::new(dtype::to_candle(dtype)?, shape.to_vec(), Vec::new())?
                        .into(),
                )
            }
            (None, None) => Ok(PlainValue::None.into()),
        }
    }
}

/// Makes room for more items at the end of a buffer. Their number may come from another rank or a
/// file, so a lack of memory is an error and does not end the process.
pub(crate) fn try_reserve<T>(buffer: &mut Vec<T>, items: usize) -> Result<(), StateError> {
    if buffer.try_reserve(items).is_err() {
        let bytes = items.saturating_mul(size_of::<T>());
        return Err(FlatError::OutOfMemory {
            dtype: DType::U8.to_string(),
            shape: vec![bytes],
        }
        .into());
    }
    Ok(())
}
