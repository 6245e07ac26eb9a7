//! Reads several views that are adjacent in one storage as a single one.

use std::ops::Range;

use candle_core::{Storage, Tensor};

use super::guard::check_readable;
use super::host::plain_bytes;
use super::lend::contiguous_bytes;
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
    let Some(range) = joined_range(tensors) else {
        return Err(f);
    };
    let (storage, _) = tensors[0].storage_and_layout();
    match &*storage {
        Storage::Cpu(data) if check_readable(tensors[0], data, &range).is_ok() => {
            Ok(f(&plain_bytes(data)[range]))
        }
        _ => Err(f),
    }
}

/// Returns the range of all tensors together in the storage that they share; `None` if there are no
/// tensors, one of them is not contiguous, or they do not share a storage or are not adjacent.
fn joined_range(tensors: &[&Tensor]) -> Option<Range<usize>> {
    let (first_tensor, other_tensors) = tensors.split_first()?;
    // The storages are compared here, before the caller locks one: a thread that takes a read lock
    // a second time would deadlock with a writer that came in between.
    let id = storage_id(first_tensor);
    let mut range = contiguous_bytes(first_tensor, first_tensor.layout()).ok()?;
    for tensor in other_tensors {
        let tensor_range = contiguous_bytes(tensor, tensor.layout()).ok()?;
        if tensor_range.start != range.end || storage_id(tensor) != id {
            return None;
        }
        range.end = tensor_range.end;
    }
    Some(range)
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
