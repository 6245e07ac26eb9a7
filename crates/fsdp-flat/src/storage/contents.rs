//! Elements that are ready to be put into a tensor whose memory is released.

use candle_core::{CpuStorage, DType, Tensor};

use super::guard::HostSlice;
use super::host::{Scalar, bytes_of, copied_vec};
use super::lend::{StorageMut, contiguous_range, unsupported, with_storage_mut};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{FlatError, with_float};

/// Elements, row-major, that will become the storage of a tensor.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_flat::storage::{Contents, release};
/// let tensor = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// release(&tensor)?;
/// Contents::new(vec![3f32, 4.]).put(&tensor)?;
/// assert_eq!(tensor.to_vec1::<f32>()?, [3., 4.]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Contents(Elements);

#[derive(Debug)]
enum Elements {
    /// Memory of the host, which becomes that of a tensor there.
    Host(CpuStorage),
    /// A contiguous tensor on a GPU, whose elements are copied.
    #[cfg(feature = "cuda")]
    Device(Tensor),
}

impl Contents {
    /// Makes contents of these elements, without a copy.
    #[must_use]
    pub fn new<T: Scalar>(data: Vec<T>) -> Self {
        Contents(Elements::Host(T::to_cpu_storage_owned(data)))
    }

    /// Makes contents of the elements of a contiguous tensor. Elements in the host's memory are
    /// copied. Elements on a GPU stay there, and are copied by [`Self::put`].
    ///
    /// # Errors
    /// A tensor that is released, not contiguous, or of a dtype that is not a float;
    /// [`FlatError::OutOfMemory`].
    pub fn of(source: &Tensor) -> Result<Self, FlatError> {
        #[cfg(feature = "cuda")]
        if source.device().is_cuda() {
            return Ok(Contents(Elements::Device(source.clone())));
        }
        with_float!(source.dtype(), T => {
            Ok(Contents::new(copied_vec::<T>(&HostSlice::read(source)?)?))
        }, else Err(unsupported(source)))
    }

    fn dtype(&self) -> DType {
        use candle_core::backend::BackendStorage;
        match &self.0 {
            Elements::Host(data) => data.dtype(),
            #[cfg(feature = "cuda")]
            Elements::Device(source) => source.dtype(),
        }
    }

    fn elem_count(&self) -> usize {
        match &self.0 {
            Elements::Host(data) => {
                bytes_of(data).map_or(0, <[u8]>::len) / self.dtype().size_in_bytes().max(1)
            }
            #[cfg(feature = "cuda")]
            Elements::Device(source) => source.elem_count(),
        }
    }

    /// Replaces the storage of a tensor with these elements. All tensors that share the storage see
    /// the change. The tensor must cover its whole storage, or else the other elements of the
    /// storage are lost.
    ///
    /// # Errors
    /// The same as [`refill`].
    pub fn put(self, tensor: &Tensor) -> Result<(), FlatError> {
        if self.elem_count() != tensor.elem_count() || self.dtype() != tensor.dtype() {
            return Err(FlatError::ShapeMismatch {
                name: format!("storage of {:?}", tensor.dtype()),
                expected: tensor.dims().to_vec(),
                found: vec![self.elem_count()],
            });
        }
        with_storage_mut(tensor, |storage, layout| {
            // A tensor that begins in the middle of its storage does not cover the storage.
            if contiguous_range(tensor, layout)?.start > 0 {
                return Err(FlatError::NotContiguous {
                    shape: tensor.dims().to_vec(),
                });
            }
            match (storage, self.0) {
                (StorageMut::Cpu(storage), Elements::Host(data)) => {
                    *storage = data;
                    Ok(())
                }
                #[cfg(feature = "cuda")]
                (StorageMut::Cuda(storage), Elements::Host(data)) => {
                    let bytes = bytes_of(&data).ok_or_else(|| unsupported(tensor))?;
                    cuda::refill(storage, tensor.dtype(), tensor.elem_count(), bytes)
                }
                #[cfg(feature = "cuda")]
                (StorageMut::Cuda(storage), Elements::Device(source)) => {
                    cuda::refill_from(storage, &source)
                }
                #[cfg(feature = "cuda")]
                (StorageMut::Cpu(_), Elements::Device(_)) => Err(FlatError::device(tensor)),
            }
        })
    }
}

/// Replaces the storage of a tensor by these elements, row-major. All tensors that share the
/// storage see the change.
///
/// The tensor must cover its whole storage, or else the other elements of the storage are lost.
///
/// # Errors
/// Another number of elements or another dtype than the tensor's; a tensor that is not contiguous,
/// or that does not begin at the start of its storage; a device that this build does not support.
pub fn refill<T: Scalar>(tensor: &Tensor, data: Vec<T>) -> Result<(), FlatError> {
    Contents::new(data).put(tensor)
}
