//! The memory of many tensors at once, to be filled in place.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::{CpuStorage, Storage, Tensor};

use super::guard::{check_readable, empty_storage, exchange};
use super::host::plain_bytes_mut;
use super::lend::contiguous_bytes;
use crate::error::FlatError;

/// The storages of some CPU tensors, taken out of them; given back on drop.
///
/// candle gives access to one storage at a time, and only during a call. So the storages are taken
/// out. Until they are put back, reading one of the tensors, or a tensor that shares a storage with
/// them, fails like reading a released tensor.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_flat::storage::StorageGuard;
/// let flat = Tensor::zeros(4, candle_core::DType::U8, &Device::Cpu)?;
/// let (first, last) = (flat.narrow(0, 0, 1)?, flat.narrow(0, 2, 2)?);
/// let mut taken = StorageGuard::take(&[&last, &first, &last])?;
/// let filled: Vec<bool> = taken
///     .bytes_mut()
///     .into_iter()
///     .zip([7, 8, 9])
///     .map(|(bytes, value)| bytes.map(|bytes| bytes.fill(value)).is_some())
///     .collect();
/// drop(taken);
/// // The third has the elements of the first.
/// assert_eq!(filled, [true, true, false]);
/// assert_eq!(flat.to_vec1::<u8>()?, [8, 0, 7, 7]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct StorageGuard {
    storages: Vec<Taken>,
    /// For each tensor that was asked for, `true` if it has no elements.
    is_empty: Vec<bool>,
}

/// A storage, and the bytes in it of the tensors that were asked for.
#[derive(Debug)]
struct Taken {
    /// One of the tensors that have this storage.
    owner: Tensor,
    storage: CpuStorage,
    /// In ascending order, without overlaps: the index of the tensor, and its bytes.
    ranges: Vec<(usize, Range<usize>)>,
}

impl StorageGuard {
    /// Takes the storages out of `tensors` until the guard is dropped. Meanwhile no tensor of
    /// the same storage can be read. A tensor on another device is not taken. Neither is a tensor
    /// that shares elements with an earlier one, since no two may be changed at once.
    ///
    /// # Errors
    /// A tensor that is released, not contiguous, or of a dtype whose elements are not plain bytes.
    /// Nothing is taken then.
    pub fn take(tensors: &[&Tensor]) -> Result<Self, FlatError> {
        // Step 1: look at all tensors, and record which bytes of which storage each needs. Nothing
        // is taken yet, so that an error changes nothing. Tensors may share a storage.
        let mut by_address: HashMap<usize, usize> = HashMap::new();
        let mut storages: Vec<Taken> = Vec::new();
        for (index, &tensor) in tensors.iter().enumerate() {
            let (storage, layout) = tensor.storage_and_layout();
            let Storage::Cpu(data) = &*storage else {
                continue;
            };
            let bytes = match tensor.elem_count() {
                0 => 0..0,
                _ => contiguous_bytes(tensor, layout)?,
            };
            check_readable(tensor, data, &bytes)?;
            if bytes.is_empty() {
                continue;
            }
            let storage_index = *by_address
                .entry(std::ptr::from_ref(data).addr())
                .or_insert_with(|| {
                    storages.push(Taken {
                        owner: tensor.clone(),
                        storage: empty_storage(),
                        ranges: Vec::new(),
                    });
                    storages.len() - 1
                });
            // Ranges of one storage are in ascending order, so only the one before can overlap. A
            // tensor that shares bytes with an earlier one is not taken.
            let ranges = &mut storages[storage_index].ranges;
            let insert_position = ranges.partition_point(|(_, other)| other.start < bytes.end);
            if insert_position == 0 || ranges[insert_position - 1].1.end <= bytes.start {
                ranges.insert(insert_position, (index, bytes));
            }
        }
        // Step 2: take the storages.
        let is_empty = tensors
            .iter()
            .map(|tensor| tensor.elem_count() == 0)
            .collect();
        let mut guard = StorageGuard {
            storages: Vec::with_capacity(storages.len()),
            is_empty,
        };
        for mut storage in storages {
            storage.storage = exchange(&storage.owner, empty_storage())?;
            guard.storages.push(storage);
        }
        Ok(guard)
    }

    /// Returns the bytes of each tensor that was asked for, row-major; `None` for a tensor that was
    /// not taken.
    pub fn bytes_mut(&mut self) -> Vec<Option<&mut [u8]>> {
        let mut bytes_by_tensor: Vec<Option<&mut [u8]>> = self
            .is_empty
            .iter()
            .map(|is_empty_tensor| is_empty_tensor.then(Default::default))
            .collect();
        for taken_storage in &mut self.storages {
            let mut remaining = plain_bytes_mut(&mut taken_storage.storage);
            let mut offset = 0;
            for (index, range) in &taken_storage.ranges {
                // `take` has checked that all ranges are in the storage, one after the other.
                let (_, from_start) =
                    std::mem::take(&mut remaining).split_at_mut(range.start - offset);
                let (bytes, tail) = from_start.split_at_mut(range.len());
                bytes_by_tensor[*index] = Some(bytes);
                remaining = tail;
                offset = range.end;
            }
        }
        bytes_by_tensor
    }
}

impl Drop for StorageGuard {
    fn drop(&mut self) {
        for taken in &mut self.storages {
            // Putting a storage back is the same operation as taking it, which has succeeded, so
            // this does too.
            let _ = exchange(
                &taken.owner,
                std::mem::replace(&mut taken.storage, empty_storage()),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::storage::{is_released, release};

    fn fill(taken: &mut StorageGuard) -> Vec<Option<usize>> {
        let slices = taken.bytes_mut().into_iter().enumerate();
        slices
            .map(|(index, bytes)| {
                bytes.map(|bytes| {
                    bytes.fill(index as u8 + 1);
                    bytes.len()
                })
            })
            .collect()
    }

    #[test]
    fn views_of_one_storage_and_storages_of_their_own_are_filled_where_they_are() {
        let flat = Tensor::zeros(10, DType::U8, &Device::Cpu).unwrap();
        let [end, overlapping, start] =
            [(6, 4), (3, 4), (1, 4)].map(|(at, len)| flat.narrow(0, at, len).unwrap());
        let own = Tensor::zeros((2, 2), DType::U32, &Device::Cpu).unwrap();
        let empty = Tensor::zeros((2, 0), DType::F32, &Device::Cpu).unwrap();
        let mut taken =
            StorageGuard::take(&[&end, &overlapping, &own, &empty, &start, &end]).unwrap();
        assert!([&flat, &end, &own].iter().all(|tensor| is_released(tensor)));
        assert!(flat.to_vec1::<u8>().is_err());
        assert_eq!(
            fill(&mut taken),
            [Some(4), None, Some(16), Some(0), Some(4), None]
        );
        drop(taken);
        assert_eq!(
            flat.to_vec1::<u8>().unwrap(),
            [0, 5, 5, 5, 5, 0, 1, 1, 1, 1]
        );
        assert_eq!(own.to_vec2::<u32>().unwrap(), [[0x0303_0303; 2]; 2]);
        assert_eq!(empty.to_vec2::<f32>().unwrap(), [[]; 2] as [[f32; 0]; 2]);
    }

    #[test]
    fn what_cannot_be_filled_is_refused_and_nothing_is_taken() {
        let whole = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        let transposed = whole.t().unwrap();
        let error = StorageGuard::take(&[&whole, &transposed]).unwrap_err();
        assert!(matches!(error, FlatError::NotContiguous { .. }), "{error}");
        assert!(!is_released(&whole));
        release(&whole).unwrap();
        let error = StorageGuard::take(&[&whole]).unwrap_err();
        assert!(matches!(error, FlatError::Freed { .. }), "{error}");
    }
}
