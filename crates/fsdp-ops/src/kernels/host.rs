//! Launches on the CPU, of kernels that a C++ compiler has made from the same sources: for tests.
//!
//! `cargo xtask test` compiles them, and names their folder in a variable. Without it nothing runs
//! here.

#![expect(
    unsafe_code,
    reason = "functions of a library, which take and write memory by its address"
)]

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex};

use candle_core::{CpuStorage, DType, Result};
use libloading::Library;

use super::argument::{Argument, Value};
use super::kernel::{Grid, Kernel, Module};
use super::memory::{Memory, Operand, Output};
use crate::values::span;

/// The variable that names the folder of the libraries.
const FOLDER: &str = "FSDP_OPS_KERNELS";
/// The shared memory of a block of kernels on the newest GPUs.
pub(super) const SHARED_BYTES: usize = 227 << 10;
/// The elements behind those of a tensor, which no kernel may change.
const GUARD: usize = 64;

thread_local! {
    static IS_ON: Cell<bool> = const { Cell::new(false) };
}

/// Returns `true` if the calling thread runs operations on CPUs by kernels.
pub(crate) fn is_on() -> bool {
    IS_ON.get()
}

/// Runs operations on CPUs by kernels while `code` runs on this thread. Returns `None` where there
/// are none, after saying so.
pub(crate) fn with_kernels<R>(code: impl FnOnce() -> R) -> Option<R> {
    if folder().is_none() {
        eprintln!("skipped: {FOLDER} names no kernels; `cargo xtask test` makes them");
        return None;
    }
    IS_ON.set(true);
    let result = code();
    IS_ON.set(false);
    Some(result)
}

/// Returns the folder of the libraries.
fn folder() -> Option<PathBuf> {
    std::env::var_os(FOLDER).map(PathBuf::from)
}

/// Makes memory that holds no numbers, with more behind it.
pub(super) fn allocate(dtype: DType, len: usize) -> Result<CpuStorage> {
    let len = len + GUARD;
    Ok(match dtype {
        DType::F32 => CpuStorage::F32(vec![f32::NAN; len]),
        DType::BF16 => CpuStorage::BF16(vec![half::bf16::NAN; len]),
        DType::F16 => CpuStorage::F16(vec![half::f16::NAN; len]),
        DType::U32 => CpuStorage::U32(vec![u32::MAX; len]),
        DType::F64 => CpuStorage::F64(vec![f64::NAN; len]),
        dtype => candle_core::bail!("kernels write no {dtype:?}"),
    })
}

/// A kernel's function, which binds arguments.
type Bind =
    unsafe extern "C" fn(*mut *mut c_void, extern "C" fn(u64) -> *mut c_void) -> *mut c_void;
/// The function of a library that runs a kernel with its arguments.
type Launch = unsafe extern "C" fn(*mut c_void, *const u32, *const u32, usize);

/// Returns the address itself: kernels on the CPU use the host's memory.
extern "C" fn same(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Runs a kernel.
///
/// # Errors
/// Tensors that are larger than the kernel can count.
pub(super) fn launch(kernel: Kernel, grid: Grid, arguments: &[Argument<'_>]) -> Result<()> {
    static LIBRARIES: LazyLock<Mutex<HashMap<Module, Library>>> = LazyLock::new(Mutex::default);
    let mut libraries = LIBRARIES.lock().expect("no test panics while it holds it");
    let library = libraries.entry(kernel.0).or_insert_with(|| {
        let path = folder()
            .expect("kernels only run where there are some")
            .join(format!("{}.so", kernel.0.name()));
        // SAFETY: our own library, which does nothing when it is loaded.
        unsafe { Library::new(path) }.expect("xtask has compiled it")
    });
    let values = arguments
        .iter()
        .map(|argument| {
            let write = |output: &Output| address(&output.operand()?);
            Value::new(argument, |operand| address(operand), write)
        })
        .collect::<Result<Vec<_>>>()?;
    let mut pointers: Vec<_> = values.iter().map(Value::pointer).collect();
    let sizes = |sizes: [usize; 2]| sizes.map(|size| u32::try_from(size).expect("tests are small"));
    let ([blocks_x, blocks_y], [threads_x, threads_y]) = (sizes(grid.blocks), sizes(grid.threads));
    // SAFETY: the functions of `cpu.h`, with the arguments that the kernel has.
    unsafe {
        let bind: libloading::Symbol<'_, Bind> = library
            .get(kernel.name().as_bytes())
            .unwrap_or_else(|_| panic!("there is no kernel {}", kernel.name()));
        let body = bind(pointers.as_mut_ptr(), same);
        let launch: libloading::Symbol<'_, Launch> =
            library.get(b"launch_on_cpu").expect("cpu.h defines it");
        launch(
            body,
            [blocks_x, blocks_y, 1].as_ptr(),
            [threads_x, threads_y, 1].as_ptr(),
            grid.shared_bytes,
        );
    }
    for argument in arguments {
        if let Argument::Write(output) | Argument::WriteFrom(output, _) = argument {
            check_guard(output, kernel);
        }
    }
    Ok(())
}

/// Returns the address of a tensor's first element.
pub(super) fn address(operand: &Operand<'_>) -> Result<u64> {
    let Memory::Cpu(storage) = operand.memory else {
        candle_core::bail!("a tensor on another device");
    };
    let start = operand.layout.start_offset();
    let end = span(&operand.layout).end;
    macro_rules! address_in {
        ($values:expr) => {{
            assert!(end <= $values.len(), "a tensor is longer than its memory");
            $values[start..].as_ptr().expose_provenance() as u64
        }};
    }
    Ok(match storage {
        CpuStorage::F32(values) => address_in!(values),
        CpuStorage::BF16(values) => address_in!(values),
        CpuStorage::F16(values) => address_in!(values),
        CpuStorage::U32(values) => address_in!(values),
        CpuStorage::I64(values) => address_in!(values),
        CpuStorage::F64(values) => address_in!(values),
        storage => candle_core::bail!("kernels read no {storage:?}"),
    })
}

/// Fails if a kernel has written behind its output.
fn check_guard(output: &Output, kernel: Kernel) {
    let candle_core::Storage::Cpu(storage) = &output.storage else {
        return;
    };
    let is_whole = match storage {
        CpuStorage::F32(values) => values[output.len..].iter().all(|value| value.is_nan()),
        CpuStorage::BF16(values) => values[output.len..].iter().all(|value| value.is_nan()),
        CpuStorage::F16(values) => values[output.len..].iter().all(|value| value.is_nan()),
        _ => true,
    };
    assert!(is_whole, "{kernel:?} has written behind its output");
}
