//! Reads several views that are adjacent in one storage as a single one.

use candle_core::{Storage, Tensor};

use super::host::bytes_of;
use super::lend::{contiguous_range, is_released_storage, released};
use crate::FlatError;

/// Runs `f` on the bytes of all `tensors` as one slice, without a copy.
///
/// The tensors must be contiguous views of one CPU storage, and each must begin where the one before it ends, as the
/// pieces of a FlatParameter do. If not, this returns `None` and does not call `f`.
///
/// # Errors
/// A storage that has been released.
pub fn with_joined_bytes<R>(tensors: &[&Tensor], f: impl FnOnce(&[u8]) -> R) -> Result<Option<R>, FlatError> {
    let Some((first, rest)) = tensors.split_first() else { return Ok(None) };
    let (storage, layout) = first.storage_and_layout();
    let Storage::Cpu(data) = &*storage else { return Ok(None) };
    let Ok(mut range) = contiguous_range(first, layout) else { return Ok(None) };
    for tensor in rest {
        // Each storage is behind one lock, so views of one storage find it at the same address. If this is another
        // storage, its lock is held only for the comparison.
        let is_next = {
            let (other, layout) = tensor.storage_and_layout();
            let next = contiguous_range(tensor, layout).ok().filter(|next| next.start == range.end);
            std::ptr::eq(&raw const *other, &raw const *storage).then_some(next).flatten()
        };
        let Some(next) = is_next else { return Ok(None) };
        range.end = next.end;
    }
    if is_released_storage(first, data) {
        return Err(released(first));
    }
    let size = first.dtype().size_in_bytes();
    let bytes = bytes_of(data).and_then(|bytes| bytes.get(range.start * size..range.end * size));
    Ok(bytes.map(f))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn neighbours_are_read_as_one_and_others_are_not() {
        let flat = Tensor::arange(0u32, 10, &Device::Cpu).unwrap();
        let part = |start, len| flat.narrow(0, start, len).unwrap();
        let (a, b, c) = (part(1, 3), part(4, 2), part(7, 1));
        let joined = with_joined_bytes(&[&a, &b], <[u8]>::to_vec).unwrap().unwrap();
        let expected: Vec<u8> = (1u32..6).flat_map(u32::to_le_bytes).collect();
        assert_eq!(joined, expected);
        assert_eq!(with_joined_bytes(&[&a, &b, &c], <[u8]>::len).unwrap(), None);
        let other = Tensor::zeros(2, DType::U32, &Device::Cpu).unwrap();
        assert_eq!(with_joined_bytes(&[&a, &other], <[u8]>::len).unwrap(), None);
        assert_eq!(with_joined_bytes(&[], <[u8]>::len).unwrap(), None);
    }
}
