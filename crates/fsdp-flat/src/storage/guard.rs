//! Guards over the elements of tensors: bytes and slices in the host's memory.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};

use candle_core::{CpuStorage, Storage, StorageRef, Tensor};

#[cfg(feature = "cuda")]
use super::cuda;
use super::host::{Scalar, bytes_of, plain_bytes, plain_bytes_mut};
use super::lend::{
    StorageMut, contiguous_bytes, is_released_storage, released_error, unsupported_error,
    with_storage_mut,
};
use crate::error::FlatError;

/// The bytes of a contiguous tensor, row-major, in the machine's byte order.
///
/// It holds the read lock of the tensor's storage, so writers wait. If the tensor is on a GPU, the
/// bytes are a copy on the host.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_flat::storage::HostBytes;
/// let tensor = Tensor::new(&[1u8, 2, 3, 4], &Device::Cpu)?.narrow(0, 1, 2)?;
/// assert_eq!(*HostBytes::read(&tensor)?, [2, 3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct HostBytes<'a> {
    source: Source<'a>,
    /// The tensor's bytes in the source.
    range: Range<usize>,
}

/// The place that bytes are read from.
enum Source<'a> {
    /// A locked storage in the host's memory.
    Lent(StorageRef<'a>),
    /// A copy on the host of bytes that lie on a GPU.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "all memory is the host's")
    )]
    Copied(CpuStorage),
}

impl<'a> HostBytes<'a> {
    /// Locks a tensor's storage for reading and returns a guard over its bytes. Bytes on a GPU are
    /// copied to the host.
    ///
    /// # Errors
    /// A tensor that is released, not contiguous, on a device that this build does not support, or
    /// of a dtype whose elements are not plain bytes; [`FlatError::OutOfMemory`] if there is no
    /// host memory for the copy from a GPU.
    pub fn read(tensor: &'a Tensor) -> Result<Self, FlatError> {
        let (storage, layout) = tensor.storage_and_layout();
        let range = contiguous_bytes(tensor, layout)?;
        match &*storage {
            Storage::Cpu(data) => {
                check_readable(tensor, data, &range)?;
                Ok(HostBytes {
                    source: Source::Lent(storage),
                    range,
                })
            }
            // The host cannot reach memory of a GPU, so the guard has a copy.
            #[cfg(feature = "cuda")]
            Storage::Cuda(data) => {
                let copy = cuda::copy_to_host(tensor, data, layout)?;
                Ok(HostBytes {
                    source: Source::Copied(copy),
                    range: 0..range.len(),
                })
            }
            _ => Err(FlatError::device(tensor)),
        }
    }
}

impl Deref for HostBytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let storage = match &self.source {
            Source::Lent(storage) => match &**storage {
                Storage::Cpu(data) => data,
                _ => unreachable!("only storages of the host are lent"),
            },
            Source::Copied(copy) => copy,
        };
        // `read` has checked that there are such bytes, and the lock has been held since then.
        &plain_bytes(storage)[self.range.clone()]
    }
}

impl std::fmt::Debug for HostBytes<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostBytes")
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

/// The bytes of a contiguous tensor, row-major, in the machine's byte order, to be changed in
/// place.
///
/// candle gives mutable access to a storage only during a call, so this guard takes the storage out
/// of the tensor and puts it back on drop. Until then, reading the tensor, or one that shares its
/// storage, fails like reading a released tensor. If the tensor is on a GPU, the bytes are a copy
/// on the host, which [`Self::finish`] or the drop writes back.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_flat::storage::HostBytesMut;
/// let tensor = Tensor::new(&[1u8, 2, 3, 4], &Device::Cpu)?;
/// let mut bytes = HostBytesMut::write(&tensor.narrow(0, 1, 2)?)?;
/// bytes.fill(7);
/// bytes.finish()?;
/// assert_eq!(tensor.to_vec1::<u8>()?, [1, 7, 7, 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct HostBytesMut {
    tensor: Tensor,
    /// The tensor's storage, or the copy of what is on a GPU; `None` once it is back there.
    host_storage: Option<CpuStorage>,
    /// The tensor's bytes in `host_storage`.
    range: Range<usize>,
}

/// The reason why the bytes of a guard for writing are there.
const HELD: &str = "the bytes are held until the guard ends";

impl HostBytesMut {
    /// Takes a tensor's storage to change it.
    ///
    /// # Errors
    /// The same as [`HostBytes::read`]. A tensor whose storage another guard for writing holds
    /// counts as released.
    pub fn write(tensor: &Tensor) -> Result<Self, FlatError> {
        with_storage_mut(tensor, |storage, layout| {
            let range = contiguous_bytes(tensor, layout)?;
            let (host_storage, range) = match storage {
                StorageMut::Cpu(storage) => {
                    // Nothing may fail after the storage has been taken.
                    check_readable(tensor, storage, &range)?;
                    (std::mem::replace(storage, empty_storage()), range)
                }
                #[cfg(feature = "cuda")]
                StorageMut::Cuda(storage) => {
                    let copy = cuda::copy_to_host(tensor, storage, layout)?;
                    (copy, 0..range.len())
                }
            };
            Ok(HostBytesMut {
                tensor: tensor.clone(),
                host_storage: Some(host_storage),
                range,
            })
        })
    }

    /// Gives the elements back to the tensor; if it is on a GPU, they are copied there. Dropping
    /// the guard does the same, but cannot report an error.
    ///
    /// # Errors
    /// The errors of the copy.
    pub fn finish(mut self) -> Result<(), FlatError> {
        self.give_back()
    }

    /// Puts the bytes back into the tensor, unless that has been done.
    fn give_back(&mut self) -> Result<(), FlatError> {
        let Some(host_storage) = self.host_storage.take() else {
            return Ok(());
        };
        with_storage_mut(&self.tensor, |storage, _layout| match storage {
            StorageMut::Cpu(storage) => {
                *storage = host_storage;
                Ok(())
            }
            #[cfg(feature = "cuda")]
            StorageMut::Cuda(storage) => {
                let range = contiguous_bytes(&self.tensor, _layout)?;
                cuda::write(&self.tensor, storage, range, plain_bytes(&host_storage))
            }
        })
    }
}

impl Drop for HostBytesMut {
    fn drop(&mut self) {
        // Host memory can always be put back. If the copy to a GPU fails, the next use of the GPU
        // will fail too.
        let _ = self.give_back();
    }
}

impl Deref for HostBytesMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &plain_bytes(self.host_storage.as_ref().expect(HELD))[self.range.clone()]
    }
}

impl DerefMut for HostBytesMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut plain_bytes_mut(self.host_storage.as_mut().expect(HELD))[self.range.clone()]
    }
}

/// The elements of a contiguous tensor: [`HostBytes`] as values of its dtype.
#[derive(Debug)]
pub struct HostSlice<'a, T> {
    bytes: HostBytes<'a>,
    element: PhantomData<T>,
}

impl<'a, T: Scalar> HostSlice<'a, T> {
    /// Returns a guard over a tensor's elements, as [`HostBytes::read`] does over its bytes.
    ///
    /// # Errors
    /// The same as [`HostBytes::read`], and another dtype than `T`.
    pub fn read(tensor: &'a Tensor) -> Result<Self, FlatError> {
        check_dtype::<T>(tensor)?;
        Ok(HostSlice {
            bytes: HostBytes::read(tensor)?,
            element: PhantomData,
        })
    }
}

impl<T: Scalar> Deref for HostSlice<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // The cast panics unless the bytes are whole values, aligned. They come from a vector of
        // `T`, so they are.
        bytemuck::cast_slice(&self.bytes)
    }
}

/// The elements of a contiguous tensor, to be changed in place: [`HostBytesMut`] as values of its
/// dtype.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_flat::storage::HostSliceMut;
/// let tensor = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// HostSliceMut::<f32>::write(&tensor)?[1] = 7.0;
/// assert_eq!(tensor.to_vec1::<f32>()?, [1., 7.]);
/// assert!(HostSliceMut::<f64>::write(&tensor).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct HostSliceMut<T> {
    bytes: HostBytesMut,
    element: PhantomData<T>,
}

impl<T: Scalar> HostSliceMut<T> {
    /// Takes a tensor's storage to change it.
    ///
    /// # Errors
    /// The same as [`HostBytesMut::write`], and another dtype than `T`.
    pub fn write(tensor: &Tensor) -> Result<Self, FlatError> {
        check_dtype::<T>(tensor)?;
        Ok(HostSliceMut {
            bytes: HostBytesMut::write(tensor)?,
            element: PhantomData,
        })
    }

    /// Gives the elements back, as [`HostBytesMut::finish`] does.
    ///
    /// # Errors
    /// The errors of [`HostBytesMut::finish`].
    pub fn finish(self) -> Result<(), FlatError> {
        self.bytes.finish()
    }
}

impl<T: Scalar> Deref for HostSliceMut<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(&self.bytes)
    }
}

impl<T: Scalar> DerefMut for HostSliceMut<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.bytes)
    }
}

/// Checks that a tensor's elements are of type `T`.
fn check_dtype<T: Scalar>(tensor: &Tensor) -> Result<(), FlatError> {
    if tensor.dtype() == T::DTYPE {
        return Ok(());
    }
    Err(candle_core::Error::UnexpectedDType {
        msg: "elements of a tensor",
        expected: T::DTYPE,
        got: tensor.dtype(),
    }
    .into())
}

/// Checks that a storage holds the bytes `range` of a tensor, and that its elements are plain
/// bytes.
pub(crate) fn check_readable(
    tensor: &Tensor,
    storage: &CpuStorage,
    range: &Range<usize>,
) -> Result<(), FlatError> {
    if is_released_storage(tensor, storage) {
        return Err(released_error(tensor));
    }
    let bytes = bytes_of(storage).ok_or_else(|| unsupported_error(tensor))?;
    // A storage that is too short counts as released.
    if bytes.len() < range.end {
        return Err(released_error(tensor));
    }
    Ok(())
}

/// Returns an empty storage of the kind that marks a tensor as released.
pub(crate) const fn empty_storage() -> CpuStorage {
    CpuStorage::F4(Vec::new())
}

/// Replaces the storage of a tensor, and returns the old one.
pub(crate) fn exchange(tensor: &Tensor, storage: CpuStorage) -> Result<CpuStorage, FlatError> {
    with_storage_mut(tensor, |current, _| match current {
        StorageMut::Cpu(current) => Ok(std::mem::replace(current, storage)),
        #[cfg(feature = "cuda")]
        StorageMut::Cuda(_) => Err(FlatError::device(tensor)),
    })
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::storage::{is_released, release, zeros};

    #[test]
    fn views_are_changed_in_place_and_come_back_also_when_the_change_panics() {
        let flat = Tensor::zeros(6, DType::F64, &Device::Cpu).unwrap();
        let view = flat.narrow(0, 2, 3).unwrap();
        let mut slice = HostSliceMut::<f64>::write(&view).unwrap();
        slice.copy_from_slice(&[1., 2., 3.]);
        assert_eq!(slice.iter().sum::<f64>(), 6.0);
        slice.finish().unwrap();
        assert_eq!(flat.to_vec1::<f64>().unwrap(), [0., 0., 1., 2., 3., 0.]);
        assert_eq!(HostBytes::read(&view).unwrap().len(), 24);
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut slice = HostSliceMut::<f64>::write(&view).unwrap();
            slice[0] = 9.0;
            panic!("halfway");
        }));
        assert!(failed.is_err());
        assert_eq!(
            *HostSlice::<f64>::read(&flat).unwrap(),
            [0., 0., 9., 2., 3., 0.]
        );
    }

    #[test]
    fn a_storage_that_is_held_for_change_cannot_be_read_or_held_again() {
        let flat = Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap();
        let (low, high) = (flat.narrow(0, 0, 2).unwrap(), flat.narrow(0, 2, 2).unwrap());
        let held = HostBytesMut::write(&low).unwrap();
        assert!(is_released(&high));
        assert!(matches!(
            HostBytes::read(&high),
            Err(FlatError::Freed { .. })
        ));
        assert!(matches!(
            HostBytesMut::write(&high),
            Err(FlatError::Freed { .. })
        ));
        drop(held);
        let (one, two) = (
            HostBytes::read(&low).unwrap(),
            HostBytes::read(&high).unwrap(),
        );
        assert_eq!(*one, *two);
    }

    #[test]
    fn what_has_no_plain_bytes_in_a_row_is_refused_and_stays() {
        let whole = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        let transposed = whole.t().unwrap();
        assert!(matches!(
            HostBytes::read(&transposed),
            Err(FlatError::NotContiguous { .. })
        ));
        assert!(matches!(
            HostBytesMut::write(&transposed),
            Err(FlatError::NotContiguous { .. })
        ));
        assert!(matches!(
            HostSlice::<f64>::read(&whole),
            Err(FlatError::Candle(_))
        ));
        assert!(!is_released(&whole));
        release(&whole).unwrap();
        assert!(matches!(
            HostSlice::<f32>::read(&whole),
            Err(FlatError::Freed { .. })
        ));
        assert!(matches!(
            HostSliceMut::<f32>::write(&whole),
            Err(FlatError::Freed { .. })
        ));
    }

    #[test]
    fn tensors_without_elements_are_empty_slices() {
        for shape in [vec![0], vec![2, 0], vec![0, 2], vec![3, 0, 2]] {
            let tensor = zeros(&shape, DType::F64).unwrap();
            assert!(HostSlice::<f64>::read(&tensor).unwrap().is_empty());
            let mut slice = HostSliceMut::<f64>::write(&tensor).unwrap();
            assert!(
                slice.is_empty() && slice.iter_mut().next().is_none(),
                "{shape:?}"
            );
            slice.finish().unwrap();
            assert!(!is_released(&tensor));
        }
    }
}
