//! Elements that are ready to be put into a tensor whose memory is released.

use candle_core::backend::BackendStorage as _;
use candle_core::{CpuStorage, Tensor};

#[cfg(feature = "cuda")]
use super::cuda;
use super::guard::HostSlice;
use super::host::{Scalar, plain_bytes, reserved_vec};
use super::lend::{StorageMut, contiguous_range, unsupported_error, with_storage_mut};
use crate::dtype::with_float;
use crate::error::FlatError;

/// Elements, row-major, that will become the storage of a tensor.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_flat::storage::{Contents, release};
/// let tensor = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// release(&tensor)?;
/// Contents::new(vec![3f32, 4.]).move_into(&tensor)?;
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
    /// Makes contents of the elements `data`, without a copy.
    #[must_use]
    pub fn new<T: Scalar>(data: Vec<T>) -> Self {
        Contents(Elements::Host(T::to_cpu_storage_owned(data)))
    }

    /// Makes contents of the elements of a contiguous tensor. Elements in the host's memory are
    /// copied. Elements on a GPU stay there, unchecked, and are copied by [`Self::move_into`],
    /// which has the errors then.
    ///
    /// # Errors
    /// A tensor that is released, not contiguous, or of a dtype that is not a float;
    /// [`FlatError::OutOfMemory`].
    pub fn from_tensor(source: &Tensor) -> Result<Self, FlatError> {
        #[cfg(feature = "cuda")]
        if source.device().is_cuda() {
            return Ok(Contents(Elements::Device(source.clone())));
        }
        with_float!(source.dtype(), T => {
            let elements = HostSlice::<T>::read(source)?;
            let mut data = reserved_vec(elements.len())?;
            data.extend_from_slice(&elements);
            Ok(Contents::new::<T>(data))
        }, else Err(unsupported_error(source)))
    }

    /// Replaces the storage of `tensor` with these contents. All tensors that share the storage see
    /// the change. The tensor must cover its whole storage, or else the other elements of the
    /// storage are lost.
    ///
    /// # Errors
    /// Another number of elements or another dtype than the tensor's; a tensor that is not
    /// contiguous, or that does not begin at the start of its storage; a device that this build
    /// does not support.
    pub fn move_into(self, tensor: &Tensor) -> Result<(), FlatError> {
        let (dtype, numel) = match &self.0 {
            Elements::Host(data) => {
                let dtype = data.dtype();
                (dtype, plain_bytes(data).len() / dtype.size_in_bytes())
            }
            #[cfg(feature = "cuda")]
            Elements::Device(source) => (source.dtype(), source.elem_count()),
        };
        if numel != tensor.elem_count() || dtype != tensor.dtype() {
            let name = format!("storage of {:?}", tensor.dtype());
            return Err(FlatError::shape(name, tensor.dims(), &[numel]));
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
                (StorageMut::Cuda(storage), Elements::Host(data)) => cuda::refill(
                    storage,
                    tensor.dtype(),
                    tensor.elem_count(),
                    plain_bytes(&data),
                ),
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
