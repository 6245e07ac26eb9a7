//! [`Memory`] that a target lends to a source, and the trait through which the source asks for it:
//! [`Lend`].

use candle_core::{Device, Tensor};
use fsdp_flat::storage::{self, StorageGuard, Upload, is_released};
use fsdp_flat::{FlatError, LocalShard, RawTensor, ShardedTensor};
use fsdp_layout::boxes::checked_bytes;
use fsdp_layout::{DType, TensorBox};

use crate::error::StateError;
use crate::state_dict::StateValue;

/// Memory for the boxes of one tensor that a rank wants.
#[derive(Debug)]
pub enum Memory {
    /// candle tensors, fresh or live, one for each box.
    Tensors(ShardedTensor),
    /// Fresh candle tensors that take no memory yet, one for each box.
    Unfilled(ShardedTensor),
    /// Contiguous candle tensors on a GPU, fresh or live, one for each box, for copies within the
    /// GPU's memory.
    OnGpu(ShardedTensor),
    /// Memory of the host for live tensors on a GPU, one for each box.
    Uploads(Vec<Upload>),
    /// The bytes of a whole tensor of a dtype that candle does not compute with, which is to become
    /// a [`RawTensor`].
    Raw {
        /// Its dtype.
        dtype: DType,
        /// Its shape.
        shape: Vec<usize>,
        /// Its elements.
        bytes: Vec<u8>,
    },
}

impl Memory {
    /// Returns fresh memory for boxes of a tensor of `dtype`, on the CPU. For a dtype that candle
    /// does not have it is memory for the whole tensor: such tensors are never cut.
    ///
    /// # Errors
    /// [`FlatError::OutOfMemory`]; boxes that do not fit the shape.
    pub fn fresh(dtype: DType, shape: &[usize], boxes: &[TensorBox]) -> Result<Self, StateError> {
        match fsdp_flat::dtype::to_candle(dtype) {
            Ok(dtype) => Ok(Memory::Tensors(ShardedTensor::zeros(dtype, shape, boxes)?)),
            Err(_) => Self::raw(dtype, shape),
        }
    }

    /// Returns fresh memory for a whole raw tensor.
    ///
    /// # Errors
    /// [`FlatError::OutOfMemory`].
    pub(crate) fn raw(dtype: DType, shape: &[usize]) -> Result<Self, StateError> {
        let bytes = checked_bytes(shape, dtype)
            .and_then(|bytes| storage::zeroed_vec(bytes).ok())
            .ok_or_else(|| FlatError::OutOfMemory {
                dtype: dtype.to_string(),
                shape: shape.to_vec(),
            })?;
        Ok(Memory::Raw {
            dtype,
            shape: shape.to_vec(),
            bytes,
        })
    }

    /// Returns the same memory, for the caller to fill: unfilled tensors become zeros.
    ///
    /// # Errors
    /// [`FlatError::OutOfMemory`].
    pub(crate) fn allocate(self) -> Result<Self, StateError> {
        let Memory::Unfilled(tensor) = self else {
            return Ok(self);
        };
        for shard in tensor.shards() {
            // A copy may have filled some of them already.
            if is_released(&shard.tensor) {
                storage::fill_with_zeros(&shard.tensor)?;
            }
        }
        Ok(Memory::Tensors(tensor))
    }

    /// Turns unfilled tensors into a copy of a value that has the same boxes, and returns `true`.
    /// Any other memory becomes memory for the caller to fill.
    ///
    /// This is faster than a copy into memory that was set to zero first.
    pub(crate) fn try_fill_with(&mut self, value: &StateValue) -> Result<bool, StateError> {
        let Memory::Unfilled(tensor) = self else {
            return Ok(false);
        };
        // A clone shares the unfilled storages, and leaves `self` free to be replaced.
        let tensor = tensor.clone();
        let is_filled = match value.to_sharded() {
            Some(value) => fill_with_copy(&tensor, &value)?,
            None => false,
        };
        // Boxes that were not copied, or not all of them, get memory here.
        *self = Memory::Unfilled(tensor).allocate()?;
        Ok(is_filled)
    }

    /// Returns the memory of a live value, to be filled where it is. A raw tensor cannot be
    /// changed, and gets fresh memory; a value that is not a tensor has none.
    ///
    /// # Errors
    /// [`FlatError::OutOfMemory`].
    pub fn live(value: &StateValue) -> Result<Self, StateError> {
        match (value.to_sharded(), value) {
            (Some(tensor), _) => Ok(Memory::Tensors(tensor)),
            (None, StateValue::Raw(tensor)) => Self::raw(tensor.dtype(), tensor.shape()),
            _ => Self::raw(DType::U8, &[0]),
        }
    }

    /// Returns the candle tensors that are filled on the host, one for each box; none for raw
    /// memory.
    #[must_use]
    pub fn tensors(&self) -> Vec<Tensor> {
        match self {
            Memory::Tensors(tensor) | Memory::Unfilled(tensor) => tensor
                .shards()
                .iter()
                .map(|shard| shard.tensor.clone())
                .collect(),
            Memory::Raw { .. } | Memory::OnGpu(_) | Memory::Uploads(_) => Vec::new(),
        }
    }

    /// Turns filled memory into a value on `device`: a whole tensor if `whole` is `true`, else a
    /// sharded one. Raw memory always becomes a raw tensor, which is on the CPU.
    ///
    /// # Errors
    /// [`FlatError::NotCovered`] if `whole` is `true` and the boxes are not all of the tensor;
    /// candle's errors.
    pub fn into_value(self, whole: bool, device: &Device) -> Result<StateValue, StateError> {
        Ok(match self {
            Memory::Raw {
                dtype,
                shape,
                bytes,
            } => RawTensor::new(dtype, shape, bytes)?.into(),
            Memory::Tensors(tensor) | Memory::Unfilled(tensor) | Memory::OnGpu(tensor) if whole => {
                storage::to_device(&tensor.to_whole()?, device)?.into()
            }
            Memory::Tensors(tensor) | Memory::Unfilled(tensor) | Memory::OnGpu(tensor) => {
                tensor.to_device(device)?.into()
            }
            Memory::Uploads(_) => {
                unreachable!("what was filled for a GPU goes back to the live tensors")
            }
        })
    }

    /// Returns `true` if a value has the same boxes in the same memory as this, so that filling it
    /// would change nothing.
    pub(crate) fn is_same_view(&self, value: &StateValue) -> bool {
        match (self, value.to_sharded()) {
            (Memory::Tensors(tensor) | Memory::OnGpu(tensor), Some(value)) => {
                tensor.is_same_view(&value)
            }
            _ => false,
        }
    }

    /// Returns the same memory for copies within a GPU's memory, if these are contiguous tensors of
    /// `dtype` on a GPU; else `None`.
    ///
    /// # Errors
    /// A dtype that no file holds.
    pub(crate) fn on_gpu(&self, dtype: DType) -> Result<Option<Self>, StateError> {
        Ok(self.gpu_tensors(dtype)?.cloned().map(Memory::OnGpu))
    }

    /// Returns the tensors, if they are contiguous, on a GPU, and of `dtype`.
    fn gpu_tensors(&self, dtype: DType) -> Result<Option<&ShardedTensor>, StateError> {
        let Memory::Tensors(tensor) = self else {
            return Ok(None);
        };
        let mut tensors = tensor.shards().iter().map(|shard| &shard.tensor);
        let is_on_gpu = tensors.all(|part| part.device().is_cuda() && part.is_contiguous());
        let is_filled = !tensor.shards().is_empty() && tensor.file_dtype()? == dtype;
        Ok((is_on_gpu && is_filled).then_some(tensor))
    }

    /// Returns undefined memory on a GPU in the place of fresh tensors without memory, if this is
    /// such memory of `dtype` and `device` is a GPU; else `None`.
    ///
    /// # Errors
    /// CUDA's, when there is no memory.
    pub(crate) fn fresh_on_gpu(
        &self,
        dtype: DType,
        device: &Device,
    ) -> Result<Option<Self>, StateError> {
        #[cfg(feature = "cuda")]
        if let (Memory::Unfilled(tensor), Device::Cuda(device)) = (self, device)
            && tensor.file_dtype()? == dtype
        {
            let boxes = tensor.boxes();
            let fresh =
                ShardedTensor::undefined_on(device, tensor.dtype(), tensor.shape(), &boxes)?;
            return Ok(Some(Memory::OnGpu(fresh)));
        }
        let _ = (dtype, device);
        Ok(None)
    }

    /// Returns host memory from which these live tensors are filled without a further copy, if they
    /// are contiguous, on a GPU, and of `dtype`, the dtype of the values that come; else `None`.
    ///
    /// # Errors
    /// Tensors that are released; no memory; CUDA's.
    pub(crate) fn uploads(&self, dtype: DType) -> Result<Option<Self>, StateError> {
        let Some(tensor) = self.gpu_tensors(dtype)? else {
            return Ok(None);
        };
        let mut uploads = Vec::with_capacity(tensor.shards().len());
        for shard in tensor.shards() {
            uploads.push(Upload::begin(&shard.tensor)?);
        }
        Ok(Some(Memory::Uploads(uploads)))
    }

    /// Returns host memory of `dtype`, the dtype of the values that come, to be filled in place of
    /// these tensors. Returns `None` if they can be filled directly: if they are on the host and
    /// have that dtype, unless `is_in_use` is `true`.
    pub(crate) fn temporary(
        &self,
        dtype: DType,
        is_in_use: bool,
    ) -> Result<Option<ShardedTensor>, StateError> {
        let Memory::Tensors(tensor) = self else {
            return Ok(None);
        };
        let is_on_host = tensor
            .shards()
            .iter()
            .all(|shard| shard.tensor.device().is_cpu());
        let is_same_dtype = tensor.file_dtype()? == dtype;
        if is_on_host && is_same_dtype && !is_in_use {
            return Ok(None);
        }
        // candle can hold some dtypes that it cannot convert. If the dtypes are the same, no
        // conversion is needed.
        let temporary_dtype = if is_same_dtype {
            tensor.dtype()
        } else {
            fsdp_flat::dtype::to_candle(dtype)?
        };
        Ok(Some(ShardedTensor::zeros(
            temporary_dtype,
            tensor.shape(),
            &tensor.boxes(),
        )?))
    }

    /// Returns `true` if values of one dtype can be converted to another.
    #[must_use]
    pub fn converts(source_dtype: DType, target_dtype: candle_core::DType) -> bool {
        fn convert_one(
            source_dtype: DType,
            target_dtype: candle_core::DType,
        ) -> Result<Tensor, StateError> {
            Ok(
                storage::zeros(&[1], fsdp_flat::dtype::to_candle(source_dtype)?)?
                    .to_dtype(target_dtype)?,
            )
        }
        // candle has no list of its conversions, so one element is converted to find out.
        convert_one(source_dtype, target_dtype).is_ok()
    }

    /// Copies values to these tensors from memory that was filled in their place, and converts them
    /// to their dtype.
    ///
    /// # Errors
    /// candle's errors; tensors that are not contiguous.
    pub(crate) fn fill_from(&self, values: &ShardedTensor) -> Result<(), StateError> {
        let Memory::Tensors(tensor) = self else {
            unreachable!("other memory was not filled in the place of tensors");
        };
        for (LocalShard { tensor: source, .. }, LocalShard { tensor: target, .. }) in
            values.shards().iter().zip(tensor.shards())
        {
            crate::memory::copy_into(&source.to_dtype(target.dtype())?, target)?;
        }
        Ok(())
    }
}

/// Fills tensors that are unfilled so far with a copy of a value of the same boxes. Returns `false`
/// if they do not have the same boxes, or cannot be copied like this. Some of them may have been
/// copied then.
fn fill_with_copy(target: &ShardedTensor, source: &ShardedTensor) -> Result<bool, StateError> {
    if target.shards().len() != source.shards().len() {
        return Ok(false);
    }
    for (target, source) in target.shards().iter().zip(source.shards()) {
        if target.bounds != source.bounds
            || !storage::fill_with_copy(&target.tensor, &source.tensor)?
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns the bytes of each box of some memories; `None` where there is no memory. `guard` has
/// taken their candle tensors, in the same order.
///
/// # Errors
/// [`StateError::SharedMemory`] for memory that shares elements with an earlier one. [`Lend`] lends
/// no such memory.
pub fn lent_bytes<'a>(
    memories: impl IntoIterator<Item = Option<&'a mut Memory>>,
    guard: &'a mut StorageGuard,
) -> Result<Vec<Option<Vec<&'a mut [u8]>>>, StateError> {
    let mut slices = guard.bytes_mut().into_iter();
    let mut lent = Vec::new();
    for memory in memories {
        lent.push(match memory {
            Some(Memory::Raw { bytes, .. }) => Some(vec![bytes.as_mut_slice()]),
            Some(Memory::Uploads(uploads)) => {
                Some(uploads.iter_mut().map(Upload::bytes_mut).collect())
            }
            // The host has no bytes of it.
            Some(Memory::OnGpu(_)) => None,
            Some(Memory::Tensors(tensor) | Memory::Unfilled(tensor)) => {
                // The guard has `None` for a tensor whose elements it has lent already.
                let boxes: Option<Vec<&mut [u8]>> =
                    slices.by_ref().take(tensor.shards().len()).collect();
                Some(boxes.ok_or_else(|| StateError::SharedMemory {
                    shape: tensor.shape().to_vec(),
                })?)
            }
            None => None,
        });
    }
    Ok(lent)
}

/// The bytes of memory that are filled together on the host.
pub(crate) const WINDOW_BYTES: usize = 512 << 20;

/// The bytes of memory that are filled together for a GPU. While they go there, as many are filled.
pub(crate) const GPU_WINDOW_BYTES: usize = 128 << 20;

/// Lends memory for wanted tensors, by their positions in a plan, and takes it back filled.
///
/// A source gets memory of its own dtype, on the CPU unless it asks for some on a GPU. Casts, and
/// copies to devices, are done when the memory is given back.
pub trait Lend {
    /// Returns the most bytes of memory that a source should ask for before it gives some back,
    /// unless one tensor has more.
    fn window_bytes(&self) -> usize {
        WINDOW_BYTES
    }

    /// Returns memory for the wanted boxes of one tensor, with a tensor for each box. Live tensors
    /// are not locked.
    ///
    /// Returns `None` if this memory has been lent before, for another name of the same tensor. The
    /// values of the first name count. Memory that shares only some elements with memory that was
    /// lent before is other memory, whose values are copied when it is given back.
    ///
    /// # Errors
    /// An error of this rank only: no memory for it.
    fn lend(&mut self, wanted_index: usize) -> Result<Option<Memory>, StateError>;

    /// Returns the same as [`Self::lend`], except that fresh tensors may be unfilled. It is for
    /// sources that have a copy to put there.
    ///
    /// # Errors
    /// The same as [`Self::lend`].
    fn lend_unfilled(&mut self, wanted_index: usize) -> Result<Option<Memory>, StateError> {
        self.lend(wanted_index)
    }

    /// Returns the same as [`Self::lend`], except that memory which is for a GPU in the end is on
    /// the GPU. It is for sources that have the values there.
    ///
    /// # Errors
    /// The same as [`Self::lend`].
    fn lend_on_gpu(&mut self, wanted_index: usize) -> Result<Option<Memory>, StateError> {
        self.lend(wanted_index)
    }

    /// Takes the memory back, now that it holds the values.
    ///
    /// # Errors
    /// An error of this rank only.
    fn filled(&mut self, wanted_index: usize, memory: Memory) -> Result<(), StateError>;
}
