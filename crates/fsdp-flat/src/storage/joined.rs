//! Reads several views that are adjacent in one storage as a single one.

use candle_core::{Storage, Tensor};

use super::host::bytes_of;
use super::lend::{contiguous_range, is_released_storage};
use super::storage_id;

/// Runs `f` on the bytes of all `tensors` as one slice, without a copy.
///
/// The tensors must be contiguous views of one CPU storage, and each must begin where the one
/// before it ends, as the pieces of a FlatParameter do.
///
/// # Errors
/// `f` itself, which was not called: the tensors are not adjacent, or their storage has been
/// released.
pub fn with_joined_bytes<R, F: FnOnce(&[u8]) -> R>(tensors: &[&Tensor], f: F) -> Result<R, F> {
    let Some((first, rest)) = tensors.split_first() else {
        return Err(f);
    };
    // The storages are compared before one is locked. A thread that takes a read lock a second time
    // would deadlock with a writer that came in between.
    let id = storage_id(first);
    let Ok(mut range) = contiguous_range(first, first.layout()) else {
        return Err(f);
    };
    for tensor in rest {
        let next = contiguous_range(tensor, tensor.layout())
            .ok()
            .filter(|next| next.start == range.end);
        let Some(next) = next.filter(|_| storage_id(tensor) == id) else {
            return Err(f);
        };
        range.end = next.end;
    }
    let (storage, _) = first.storage_and_layout();
    let Storage::Cpu(data) = &*storage else {
        return Err(f);
    };
    if is_released_storage(first, data) {
        return Err(f);
    }
    let size = first.dtype().size_in_bytes();
    match bytes_of(data).and_then(|bytes| bytes.get(range.start * size..range.end * size)) {
        Some(bytes) => Ok(f(bytes)),
        None => Err(f),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::storage::HostBytesMut;
    use candle_core::{DType, Device};

    #[test]
    fn neighbours_are_read_as_one_and_others_are_not() {
        let flat = Tensor::arange(0u32, 10, &Device::Cpu).unwrap();
        let part = |start, len| flat.narrow(0, start, len).unwrap();
        let (a, b, c) = (part(1, 3), part(4, 2), part(7, 1));
        let joined = with_joined_bytes(&[&a, &b], <[u8]>::to_vec).ok().unwrap();
        let expected: Vec<u8> = (1u32..6).flat_map(u32::to_le_bytes).collect();
        assert_eq!(joined, expected);
        assert_eq!(with_joined_bytes(&[&a, &b, &c], <[u8]>::len).ok(), None);
        let other = Tensor::zeros(2, DType::U32, &Device::Cpu).unwrap();
        assert_eq!(with_joined_bytes(&[&a, &other], <[u8]>::len).ok(), None);
        assert_eq!(with_joined_bytes(&[], <[u8]>::len).ok(), None);
    }

    #[test]
    fn views_are_joined_beside_somebody_who_writes() {
        let flat = Tensor::arange(0u32, 20_000, &Device::Cpu).unwrap();
        let views: Vec<Tensor> = (0..20_000)
            .map(|at| flat.narrow(0, at, 1).unwrap())
            .collect();
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            thread::scope(|scope| {
                let writer =
                    scope.spawn(|| (0..2000).for_each(|_| drop(HostBytesMut::write(&flat))));
                let views: Vec<&Tensor> = views.iter().collect();
                while !writer.is_finished() {
                    // The storage may be lent to the writer just now.
                    let _ = with_joined_bytes(&views, <[u8]>::len);
                }
            });
            sender.send(())
        });
        receiver.recv_timeout(Duration::from_secs(60)).unwrap();
    }
}
