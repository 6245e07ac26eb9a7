//! The memory behind tensors on NVIDIA GPUs: as bytes, to the host and back, released and filled.

use std::ffi::c_int;
use std::ops::Range;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr as _,
    DevicePtrMut as _, DeviceRepr, DriverError, result, sys,
};
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice};
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, DType, Device, Layout, Shape, Storage, Tensor,
};
use float8::F8E4M3;
use half::{bf16, f16};

use super::host::{Scalar, host_tensor, plain_bytes_mut, zeroed};
use super::lend::{
    StorageMut, contiguous_bytes, contiguous_range, is_released_storage, released_error,
    unsupported_error, with_storage_mut,
};
use super::pinned::cuda_error;
use super::staging::{self, DeviceBytes};
use crate::error::FlatError;

/// The streams in which the work of a process is queued on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Streams {
    /// One for all threads, in which work is done in the order in which they queue it.
    One,
    /// One for each thread, as candle's `Device::new_cuda` has them. Collectives of a thread
    /// overlap with the computation of another. Memory that one stream has freed goes to another
    /// only once the GPU has come to that, or the other waits for it anyway.
    PerThread,
}

/// Opens the GPU with this CUDA ordinal for training. candle's `Device::new_cuda` opens it too, and
/// then a step takes longer on the host:
///
/// - No events are made for memory, of which candle makes two for each tensor. It uses them only
///   where a program adds streams to candle's context. Streams that others add, such as NCCL's,
///   are ordered by events of their own.
/// - Memory that is freed stays with the process for later tensors. Otherwise CUDA gives it back to
///   the system at each wait of the host, and takes it anew. Other processes on the GPU cannot have
///   it meanwhile.
///
/// # Errors
/// CUDA's: there is no such GPU.
pub fn open(ordinal: usize, streams: Streams) -> Result<Device, FlatError> {
    let device = match streams {
        Streams::One => Device::new_cuda_with_stream(ordinal)?,
        Streams::PerThread => Device::new_cuda(ordinal)?,
    };
    if let Device::Cuda(cuda_device) = &device {
        // SAFETY: what candle does with this device's memory is in its one stream, or in that of a
        // thread, which candle orders with others in no way, tracked or not. Code of this project
        // that uses another stream makes it wait for that one, and that one for it.
        unsafe { cuda_device.disable_event_tracking() };
        set_up_pool(cuda_device.cuda_stream().context(), streams).map_err(cuda_error)?;
    }
    Ok(device)
}

/// Lets the GPU's pool keep all memory that is freed, if memory comes from a pool.
fn set_up_pool(context: &CudaContext, streams: Streams) -> Result<(), DriverError> {
    if !context.has_async_alloc() {
        return Ok(());
    }
    let mut threshold = u64::MAX;
    let mut is_allowed: c_int = 0;
    // SAFETY: the device is open. The first attribute is a number of 64 bits, the second one of C's
    // type `int`.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device())?;
        result::mem_pool::set_attribute(
            pool,
            sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            (&raw mut threshold).cast(),
        )?;
        if streams == Streams::PerThread {
            // Otherwise the pool takes memory that the computing stream will free much later, and
            // makes the stream of collectives wait until it has.
            result::mem_pool::set_attribute(
                pool,
                sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
                (&raw mut is_allowed).cast(),
            )?;
        }
    }
    Ok(())
}

macro_rules! slices {
    ($($type:ty => $variant:ident),*) => {
        /// Returns the elements as bytes; `None` for types that are not plain bytes.
        fn bytes_of(storage: &CudaStorage) -> Option<CudaView<'_, u8>> {
            match &storage.slice {
                // SAFETY: plain bytes, as many as there are.
                $(CudaStorageSlice::$variant(data) => unsafe { data.transmute(data.num_bytes()) },)*
                _ => None,
            }
        }

        /// Returns the elements as bytes that can be changed.
        fn bytes_of_mut(storage: &mut CudaStorage) -> Option<CudaViewMut<'_, u8>> {
            match &mut storage.slice {
                $(CudaStorageSlice::$variant(data) => {
                    let len = data.num_bytes();
                    // SAFETY: plain bytes, as many as there are, and any bytes are an element.
                    unsafe { data.transmute_mut(len) }
                })*
                _ => None,
            }
        }

        /// Makes memory for `numel` elements of `dtype`, to be written before it is read.
        fn uninitialized(device: &CudaDevice, dtype: DType, numel: usize) -> Result<CudaStorage, FlatError> {
            // The driver does not allocate zero bytes.
            let numel = numel.max(1);
            let slice = match dtype {
                // SAFETY: the callers fill it, or say that it has to be written before it is read.
                $(DType::$variant => CudaStorageSlice::$variant(unsafe { device.alloc::<$type>(numel) }?),)*
                dtype => return Err(FlatError::Candle(candle_core::Error::UnsupportedDTypeForOp(dtype, "GPU memory"))),
            };
            Ok(CudaStorage { slice, device: device.clone() })
        }
    };
}

slices! { u8 => U8, u32 => U32, i16 => I16, i32 => I32, i64 => I64, bf16 => BF16, f16 => F16, f32 => F32, f64 => F64, F8E4M3 => F8E4M3, u8 => F8E8M0 }

/// Copies the elements of a contiguous tensor, which has this storage and layout, to the host.
pub(super) fn copy_to_host(
    tensor: &Tensor,
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<CpuStorage, FlatError> {
    let source = device_bytes(tensor, storage, layout)?;
    let mut copy = zeroed(tensor.dims(), tensor.dtype())?;
    let destination = plain_bytes_mut(&mut copy);
    let mut copied_bytes = 0;
    let ready = source.stream.record_event(None).map_err(cuda_error)?;
    staging::read(&source, &ready, 0..source.len, &mut |piece| {
        destination[copied_bytes..copied_bytes + piece.len()].copy_from_slice(piece);
        copied_bytes += piece.len();
        Ok::<(), FlatError>(())
    })?;
    Ok(copy)
}

/// Returns the memory of a contiguous tensor, which has this storage and layout.
///
/// # Errors
/// A tensor that is released or not contiguous, or of a dtype whose elements are not plain bytes.
fn device_bytes(
    tensor: &Tensor,
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<DeviceBytes, FlatError> {
    let range = contiguous_bytes(tensor, layout)?;
    if is_released_storage(tensor, storage) {
        return Err(released_error(tensor));
    }
    let bytes = bytes_of(storage).ok_or_else(|| unsupported_error(tensor))?;
    let view = bytes
        .try_slice(range)
        .ok_or_else(|| released_error(tensor))?;
    let stream = storage.device.cuda_stream();
    let (address, _recorded) = view.device_ptr(&stream);
    Ok(DeviceBytes {
        ordinal: stream.context().ordinal(),
        address,
        len: view.len(),
        stream: Arc::clone(&stream),
    })
}

/// Returns the memory of a contiguous tensor on a GPU. It stays where it is for as long as nobody
/// puts another storage in the place of the tensor's.
///
/// # Errors
/// The same as [`device_bytes`], and a tensor that is not on an NVIDIA GPU.
pub(super) fn place_of(tensor: &Tensor) -> Result<DeviceBytes, FlatError> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) => device_bytes(tensor, storage, layout),
        _ => Err(FlatError::device(tensor)),
    }
}

/// Runs `change` on the memory of a contiguous tensor on a GPU, whose storage is locked meanwhile.
///
/// # Errors
/// The errors of `change`; the same as [`place_of`].
pub(super) fn with_device_bytes_mut(
    tensor: &Tensor,
    change: impl FnOnce(&DeviceBytes) -> Result<(), FlatError>,
) -> Result<(), FlatError> {
    with_storage_mut(tensor, |storage, layout| {
        let StorageMut::Cuda(storage) = storage else {
            return Err(FlatError::device(tensor));
        };
        let range = contiguous_bytes(tensor, layout)?;
        if is_released_storage(tensor, storage) {
            return Err(released_error(tensor));
        }
        let stream = storage.device.cuda_stream();
        let mut bytes = bytes_of_mut(storage).ok_or_else(|| unsupported_error(tensor))?;
        let mut view = bytes
            .try_slice_mut(range)
            .ok_or_else(|| released_error(tensor))?;
        let len = view.len();
        // The change is recorded when this is dropped.
        let (address, _recorded) = view.device_ptr_mut(&stream);
        change(&DeviceBytes {
            ordinal: stream.context().ordinal(),
            address,
            len,
            stream: Arc::clone(&stream),
        })
    })
}

/// Reads tensors on GPUs, in any thread, as they are after the work that the thread that makes this
/// has given to the GPUs.
#[derive(Debug)]
pub struct GpuReader {
    /// The end of that work, for the stream of each device.
    ready: Vec<(Arc<CudaStream>, CudaEvent)>,
}

impl GpuReader {
    /// Makes a reader of these tensors, all of which are on GPUs; `None` if there are none.
    ///
    /// # Errors
    /// Tensors that are released or not contiguous; CUDA's.
    pub fn begin(tensors: &[Tensor]) -> Result<Option<Self>, FlatError> {
        let mut ready: Vec<(Arc<CudaStream>, CudaEvent)> = Vec::new();
        for tensor in tensors {
            let stream = place_of(tensor)?.stream;
            if !ready.iter().any(|(found, _)| *found == stream) {
                let event = stream.record_event(None).map_err(cuda_error)?;
                ready.push((stream, event));
            }
        }
        Ok((!ready.is_empty()).then_some(GpuReader { ready }))
    }

    /// Passes the bytes `range` of a contiguous tensor to `sink`, in order and in pieces of pinned
    /// memory: while `sink` has one, the next one is on its way. Several threads may read at once.
    ///
    /// # Errors
    /// A tensor that is released, or not one of those that the reader was made for; a range that is
    /// not there; CUDA's; the errors of `sink`.
    pub fn read<E: From<FlatError>>(
        &self,
        tensor: &Tensor,
        range: Range<usize>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        // The lock of the storage is held, so that nobody releases it meanwhile.
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            return Err(FlatError::device(tensor).into());
        };
        let source = device_bytes(tensor, storage, layout)?;
        let ready = self.ready.iter().find(|(found, _)| *found == source.stream);
        let Some((_, ready)) = ready else {
            return Err(FlatError::device(tensor).into());
        };
        if range.start > range.end || range.end > source.len {
            return Err(released_error(tensor).into());
        }
        staging::read(&source, ready, range, sink)
    }
}

/// Copies a contiguous tensor to the host, and returns the copy.
pub(super) fn to_host(tensor: &Tensor) -> Result<Tensor, FlatError> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        return Err(FlatError::device(tensor));
    };
    let copy = copy_to_host(tensor, storage, layout)?;
    Ok(host_tensor(copy, tensor.dims()))
}

/// Copies bytes from the host to a range, in bytes, of the storage. Returns when the copy has
/// finished.
pub(super) fn write(
    tensor: &Tensor,
    storage: &mut CudaStorage,
    range: Range<usize>,
    source: &[u8],
) -> Result<(), FlatError> {
    if is_released_storage(tensor, storage) {
        return Err(released_error(tensor));
    }
    let stream = storage.device.cuda_stream();
    let mut bytes = bytes_of_mut(storage).ok_or_else(|| unsupported_error(tensor))?;
    let mut destination = bytes
        .try_slice_mut(range)
        .filter(|destination| destination.len() == source.len())
        .ok_or_else(|| released_error(tensor))?;
    if source.is_empty() {
        return Ok(());
    }
    // The caller may free `source` as soon as this returns, so the copy must have finished by then.
    stream
        .memcpy_htod(source, &mut destination)
        .and_then(|()| stream.synchronize())
        .map_err(cuda_error)
}

/// Gives the GPU a copy of pinned memory to a contiguous tensor, which has this storage and layout.
/// It may be under way when this returns: nothing may change `source` before the end of the work
/// that the stream has then.
pub(super) fn write_later(
    tensor: &Tensor,
    storage: &mut CudaStorage,
    layout: &Layout,
    source: &[u8],
) -> Result<(), FlatError> {
    if is_released_storage(tensor, storage) {
        return Err(released_error(tensor));
    }
    let range = contiguous_bytes(tensor, layout)?;
    let stream = storage.device.cuda_stream();
    let mut bytes = bytes_of_mut(storage).ok_or_else(|| unsupported_error(tensor))?;
    let mut destination = bytes
        .try_slice_mut(range)
        .filter(|destination| destination.len() == source.len())
        .ok_or_else(|| released_error(tensor))?;
    if source.is_empty() {
        return Ok(());
    }
    stream
        .memcpy_htod(source, &mut destination)
        .map_err(cuda_error)
}

/// Copies the bytes of a tensor of the host to a contiguous one on a GPU, of the same length.
/// Returns when the copy has finished.
pub(super) fn write_from_host(source: &[u8], target: &Tensor) -> Result<(), FlatError> {
    with_storage_mut(target, |storage, layout| {
        let StorageMut::Cuda(storage) = storage else {
            return Err(FlatError::device(target));
        };
        let range = contiguous_bytes(target, layout)?;
        write(target, storage, range, source)
    })
}

/// Gives the memory back to CUDA.
pub(super) fn release(storage: &mut CudaStorage) -> Result<(), FlatError> {
    // SAFETY: no op reads elements of this dummy type.
    storage.slice = CudaStorageSlice::F4(unsafe { storage.device.alloc::<u8>(1) }?);
    Ok(())
}

/// Makes memory of no elements, of a type that can be computed with.
///
/// # Errors
/// Dtypes whose elements are not plain bytes, and CUDA's.
pub fn empty(device: &CudaDevice, dtype: DType) -> Result<CudaStorage, FlatError> {
    uninitialized(device, dtype, 0)
}

/// Makes a tensor whose elements are undefined: write them before you read them.
///
/// # Errors
/// Dtypes whose elements are not plain bytes, and CUDA's.
pub fn undefined(
    device: &CudaDevice,
    dtype: DType,
    shape: impl Into<Shape>,
) -> Result<Tensor, FlatError> {
    let shape = shape.into();
    let storage = Storage::Cuda(uninitialized(device, dtype, shape.elem_count())?);
    Ok(Tensor::from_storage(
        storage,
        shape,
        BackpropOp::none(),
        false,
    ))
}

/// Puts fresh memory in the place of a storage's, with the elements of host memory.
pub(super) fn refill(
    storage: &mut CudaStorage,
    dtype: DType,
    numel: usize,
    source: &[u8],
) -> Result<(), FlatError> {
    replace(storage, dtype, numel, |stream, destination| {
        // The caller may free `source` as soon as this returns.
        stream.memcpy_htod(source, destination)?;
        stream.synchronize()
    })
}

/// Puts fresh memory in the place of a storage's, with the elements of `source`, which is
/// contiguous and of the same device.
pub(super) fn refill_from(storage: &mut CudaStorage, source: &Tensor) -> Result<(), FlatError> {
    let (source_storage, layout) = source.storage_and_layout();
    let range = contiguous_bytes(source, layout)?;
    let Storage::Cuda(source_storage) = &*source_storage else {
        return Err(FlatError::device(source));
    };
    let bytes = bytes_of(source_storage).ok_or_else(|| unsupported_error(source))?;
    let source_view = bytes
        .try_slice(range)
        .ok_or_else(|| released_error(source))?;
    replace(
        storage,
        source.dtype(),
        source.elem_count(),
        |stream, destination| stream.memcpy_dtod(&source_view, destination),
    )
}

/// Puts fresh memory for `numel` elements, which are undefined, in the place of a storage's.
pub(super) fn renew(
    storage: &mut CudaStorage,
    dtype: DType,
    numel: usize,
) -> Result<(), FlatError> {
    *storage = uninitialized(&storage.device, dtype, numel)?;
    Ok(())
}

/// Puts fresh memory for `numel` elements in the place of a storage's. `copy` fills it, unless
/// there is nothing to fill.
fn replace(
    storage: &mut CudaStorage,
    dtype: DType,
    numel: usize,
    copy: impl FnOnce(&Arc<CudaStream>, &mut CudaViewMut<'_, u8>) -> Result<(), DriverError>,
) -> Result<(), FlatError> {
    let mut fresh = uninitialized(&storage.device, dtype, numel)?;
    let stream = fresh.device.cuda_stream();
    if let Some(mut bytes) = bytes_of_mut(&mut fresh).filter(|_| numel > 0) {
        copy(&stream, &mut bytes).map_err(cuda_error)?;
    }
    *storage = fresh;
    Ok(())
}

/// Runs `f` on the elements of a contiguous tensor in GPU memory, with the stream that they were
/// written in.
///
/// # Errors
/// A tensor that is released, not contiguous, of another dtype, or not on an NVIDIA GPU.
pub fn with_device_slice<T: Scalar + CudaDType, R>(
    tensor: &Tensor,
    f: impl FnOnce(&CudaView<'_, T>, &CudaStream) -> R,
) -> Result<R, FlatError> {
    let (storage, layout) = tensor.storage_and_layout();
    let range = contiguous_range(tensor, layout)?;
    let Storage::Cuda(storage) = &*storage else {
        return Err(FlatError::device(tensor));
    };
    if is_released_storage(tensor, storage) {
        return Err(released_error(tensor));
    }
    let slice: &CudaSlice<T> = storage.as_cuda_slice()?;
    let view = slice
        .try_slice(range)
        .ok_or_else(|| released_error(tensor))?;
    Ok(f(&view, &storage.device.cuda_stream()))
}

/// Runs `f` as [`with_device_slice`] does, but it may change the elements. The storage's write lock
/// is held meanwhile.
///
/// # Errors
/// The same as [`with_device_slice`].
pub fn with_device_slice_mut<T: Scalar + CudaDType + DeviceRepr, R>(
    tensor: &Tensor,
    f: impl FnOnce(&mut CudaViewMut<'_, T>, &CudaStream) -> R,
) -> Result<R, FlatError> {
    with_storage_mut(tensor, |storage, layout| {
        let range = contiguous_range(tensor, layout)?;
        let StorageMut::Cuda(storage) = storage else {
            return Err(FlatError::device(tensor));
        };
        if is_released_storage(tensor, storage) {
            return Err(released_error(tensor));
        }
        let stream = storage.device.cuda_stream();
        let slice: &mut CudaSlice<T> = storage.as_cuda_slice_mut()?;
        let mut view = slice
            .try_slice_mut(range)
            .ok_or_else(|| released_error(tensor))?;
        Ok(f(&mut view, &stream))
    })
}
