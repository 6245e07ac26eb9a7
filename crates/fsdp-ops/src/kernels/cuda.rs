//! Launches on NVIDIA GPUs.

#![expect(
    unsafe_code,
    reason = "kernels take pointers, and write memory that is not set before"
)]

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use candle_core::backend::BackendDevice as _;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaModule, CudaSlice, CudaStream, DevicePtr as _, DevicePtrMut as _,
    DriverError, SyncOnDrop, result, sys,
};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::{CudaDevice, CudaStorage, DType, Error, Result, Shape};

use super::argument::{Argument, Value};
use super::kernel::{Grid, Kernel, Module};
use super::memory::{Memory, Operand, Output};
use crate::values::span;

// `IMAGES`: the name of each module, and what `build.rs` has compiled of it.
include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// The dynamic shared memory of a block that a kernel may have without asking for more.
const SHARED_BYTES: usize = 48 << 10;
/// The oldest GPUs that the kernels are compiled for, by their compute capability.
const CAPABILITY: (i32, i32) = (8, 0);

/// Everything that is loaded once and kept: for each GPU its modules and functions, and the shared
/// memory of its blocks. A context of CUDA lives as long as one of its modules.
#[derive(Default)]
struct Loaded {
    modules: HashMap<(usize, Module), Arc<CudaModule>>,
    functions: HashMap<(usize, Kernel), CudaFunction>,
    shared_bytes: HashMap<usize, usize>,
}

/// Returns what has been loaded.
fn loaded() -> MutexGuard<'static, Loaded> {
    static LOADED: LazyLock<Mutex<Loaded>> = LazyLock::new(Mutex::default);
    // Each entry is whole, so a panic of another thread leaves nothing half done.
    LOADED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the bytes of shared memory that a block may have on a GPU; 0 if the GPU is older than
/// the kernels, which is said once.
///
/// # Errors
/// CUDA's.
pub(super) fn shared_bytes(device: &CudaDevice) -> Result<usize> {
    let stream = device.cuda_stream();
    let context = stream.context();
    if let Some(&bytes) = loaded().shared_bytes.get(&context.ordinal()) {
        return Ok(bytes);
    }
    let capability = context.compute_capability().map_err(cuda_error)?;
    let bytes = if capability < CAPABILITY {
        tracing::warn!(
            gpu = context.ordinal(),
            "its compute capability {}.{} is below {}.{}: operations are composed of candle's, \
             which is many times slower",
            capability.0,
            capability.1,
            CAPABILITY.0,
            CAPABILITY.1,
        );
        0
    } else {
        let attribute =
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let bytes = context.attribute(attribute).map_err(cuda_error)?;
        usize::try_from(bytes).unwrap_or(0)
    };
    loaded().shared_bytes.insert(context.ordinal(), bytes);
    Ok(bytes)
}

/// Makes memory for `len` elements, which has to be written before it is read.
///
/// # Errors
/// CUDA's.
pub(super) fn allocate(device: &CudaDevice, dtype: DType, len: usize) -> Result<CudaStorage> {
    // CUDA does not allocate zero bytes.
    let shape = Shape::from(len.max(1));
    // SAFETY: any bytes are an element of the types that kernels have, and kernels write them all.
    unsafe { device.alloc_uninit(&shape, dtype) }
}

/// Launches a kernel in the device's stream.
///
/// # Errors
/// CUDA's; tensors that are shorter than their layouts, or larger than the kernel can count.
pub(super) fn launch(
    device: &CudaDevice,
    kernel: Kernel,
    grid: Grid,
    arguments: &[Argument<'_>],
) -> Result<()> {
    let stream = device.cuda_stream();
    stream.context().bind_to_thread().map_err(cuda_error)?;
    let function = function(&stream, kernel, grid.shared_bytes)?;
    // If memory is also used by other streams, these wait for it now, and let others know when they
    // are dropped.
    let mut uses = Vec::with_capacity(arguments.len());
    let mut values = Vec::with_capacity(arguments.len());
    for argument in arguments {
        values.push(Value::new(
            argument,
            |operand| {
                let (address, used) = address(operand, &stream)?;
                uses.push(used);
                Ok(address)
            },
            |output| fresh_address(output, &stream),
        )?);
    }
    let mut pointers: Vec<_> = values.iter().map(Value::pointer).collect();
    let size = |sizes: [usize; 2]| -> Result<(u32, u32, u32)> {
        Ok((count(sizes[0])?, count(sizes[1])?, 1))
    };
    // SAFETY: the operation that launches gives the arguments that the kernel has, of which
    // `Value` has the types; the addresses are of memory with as many elements as the layouts say,
    // and the stream frees it only after the kernel.
    unsafe {
        result::launch_kernel(
            function.cu_function(),
            size(grid.blocks)?,
            size(grid.threads)?,
            count(grid.shared_bytes)?,
            stream.cu_stream(),
            &mut pointers,
        )
    }
    .map_err(cuda_error)
}

/// Lets other streams wait for what kernels have written to fresh memory.
///
/// # Errors
/// Types that kernels do not write.
pub(super) fn finish(storage: &mut CudaStorage) -> Result<()> {
    let stream = storage.device.cuda_stream();
    match &mut storage.slice {
        CudaStorageSlice::F32(slice) => drop(slice.device_ptr_mut(&stream)),
        CudaStorageSlice::BF16(slice) => drop(slice.device_ptr_mut(&stream)),
        CudaStorageSlice::F16(slice) => drop(slice.device_ptr_mut(&stream)),
        CudaStorageSlice::U32(slice) => drop(slice.device_ptr_mut(&stream)),
        CudaStorageSlice::F64(slice) => drop(slice.device_ptr_mut(&stream)),
        _ => return unknown_type_error(),
    }
    Ok(())
}

/// Returns the address of the first element of a tensor that has this storage.
///
/// # Errors
/// Those of [`address`].
pub(super) fn first_address(storage: &CudaStorage, operand: &Operand<'_>) -> Result<u64> {
    Ok(address(operand, &storage.device.cuda_stream())?.0)
}

/// Checks that the memory of a tensor is that of a stream.
///
/// # Errors
/// A tensor of another GPU, or of another stream of the same one: kernels of the one could read it
/// before those of the other have written it, or after its memory has been freed.
fn check_stream(storage: &CudaStorage, stream: &CudaStream) -> Result<()> {
    if *storage.device.cuda_stream() == *stream {
        return Ok(());
    }
    candle_core::bail!(
        "the tensors of an operation are on different GPUs, or in different streams of one: make \
         all of them on clones of one `Device`"
    )
}

/// Checks that the memory of two tensors is that of one stream.
///
/// # Errors
/// Tensors of different GPUs, or of different streams of one.
pub(crate) fn check_same_stream(first: &CudaStorage, second: &CudaStorage) -> Result<()> {
    check_stream(second, &first.device.cuda_stream())
}

/// Returns the address of a tensor's first element, and what ends its use.
///
/// # Errors
/// A tensor of another GPU or stream; one that is longer than its memory, or of a type that kernels
/// do not read.
fn address<'a>(operand: &Operand<'a>, stream: &'a CudaStream) -> Result<(u64, SyncOnDrop<'a>)> {
    #[cfg(not(test))]
    let Memory::Cuda(storage) = operand.memory;
    #[cfg(test)]
    let Memory::Cuda(storage) = operand.memory else {
        return unknown_type_error();
    };
    check_stream(storage, stream)?;
    let last = span(&operand.layout).end;
    let start = operand.layout.start_offset();
    match &storage.slice {
        CudaStorageSlice::F32(slice) => address_in(slice, start, last, stream),
        CudaStorageSlice::BF16(slice) => address_in(slice, start, last, stream),
        CudaStorageSlice::F16(slice) => address_in(slice, start, last, stream),
        CudaStorageSlice::U32(slice) => address_in(slice, start, last, stream),
        CudaStorageSlice::I64(slice) => address_in(slice, start, last, stream),
        CudaStorageSlice::F64(slice) => address_in(slice, start, last, stream),
        _ => unknown_type_error(),
    }
}

/// Returns the address of an element, and what ends the use of the memory.
///
/// # Errors
/// Memory with fewer elements than `end`.
fn address_in<'a, T>(
    slice: &'a CudaSlice<T>,
    start: usize,
    end: usize,
    stream: &'a CudaStream,
) -> Result<(u64, SyncOnDrop<'a>)> {
    if end > slice.len() {
        candle_core::bail!("a tensor's memory is shorter than the tensor");
    }
    let (first, used) = slice.device_ptr(stream);
    Ok((first + (start * size_of::<T>()) as u64, used))
}

/// Returns the address of fresh memory, which nobody else uses yet.
///
/// # Errors
/// Types that kernels do not write.
fn fresh_address(output: &Output, stream: &CudaStream) -> Result<u64> {
    let operand = output.operand()?;
    // Its use ends with `finish`.
    Ok(address(&operand, stream)?.0)
}

/// Returns a kernel's function, which is looked up once for each GPU. `shared_bytes` is always the
/// same for a kernel.
///
/// # Errors
/// CUDA's.
fn function(stream: &CudaStream, kernel: Kernel, shared_bytes: usize) -> Result<CudaFunction> {
    let context = stream.context();
    let ordinal = context.ordinal();
    let mut loaded = loaded();
    if let Some(function) = loaded.functions.get(&(ordinal, kernel)) {
        return Ok(function.clone());
    }
    let module = match loaded.modules.get(&(ordinal, kernel.0)) {
        Some(module) => Arc::clone(module),
        None => {
            let image = IMAGES
                .iter()
                .find(|(name, _)| *name == kernel.0.name())
                .map(|(_, image)| image.to_vec());
            let image = image.expect("build.rs compiles each file of kernels");
            let module = context
                .load_module(Ptx::from_binary(image))
                .map_err(cuda_error)?;
            loaded
                .modules
                .insert((ordinal, kernel.0), Arc::clone(&module));
            module
        }
    };
    let function = module.load_function(&kernel.name()).map_err(cuda_error)?;
    if shared_bytes > SHARED_BYTES {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = super::argument::to_int(shared_bytes)?;
        function
            .set_attribute(attribute, bytes)
            .map_err(cuda_error)?;
    }
    loaded.functions.insert((ordinal, kernel), function.clone());
    Ok(function)
}

/// Returns a size of a launch in the type that CUDA has for it.
///
/// # Errors
/// A number that is too large.
fn count(number: usize) -> Result<u32> {
    super::argument::to_int(number).map(i32::unsigned_abs)
}

/// Returns candle's error for one of the driver's.
fn cuda_error(error: DriverError) -> Error {
    Error::wrap(error)
}

/// Returns the error of memory that no kernel reads or writes.
fn unknown_type_error<T>() -> Result<T> {
    candle_core::bail!("kernels have no such type: the memory has been released, or is another's")
}
