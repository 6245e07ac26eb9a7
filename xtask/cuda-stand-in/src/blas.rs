//! cuBLAS: products of matrices.

#![expect(
    unsafe_code,
    reason = "functions of C, whose pointers their callers answer for"
)]

use std::ffi::{c_int, c_longlong, c_void};
use std::sync::Mutex;

use half::{bf16, f16};

use crate::counts::{Counted, count};
use crate::handles::{Handle, Handles, lock};
use crate::kernels::Element;
use crate::machine::{computes, elements, push, say};
use crate::memory::Address;
use crate::queue::Work;

type Code = c_int;

const SUCCESS: Code = 0;
const NOT_INITIALIZED: Code = 1;
const INVALID_VALUE: Code = 7;
const EXECUTION_FAILED: Code = 13;
const NOT_SUPPORTED: Code = 15;

/// NVIDIA's numbers of the types of elements.
const F32: c_int = 0;
const F64: c_int = 1;
const F16: c_int = 2;
const BF16: c_int = 14;

/// NVIDIA's number of the arithmetic in `f32` whose factors are rounded to TF32.
const FAST_TF32: c_int = 77;

/// The value of an operation that takes a matrix as it is.
const PLAIN: c_int = 0;

/// The stream of each handle, as a number.
static HANDLES: Handles<std::sync::Arc<Mutex<usize>>> = Handles::new();

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasCreate_v2(made: *mut Handle) -> Code {
    // SAFETY: the caller's pointer.
    unsafe { made.write(HANDLES.add(std::sync::Arc::new(Mutex::new(0)))) };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cublasDestroy_v2(handle: Handle) -> Code {
    if HANDLES.remove(handle).is_some() {
        SUCCESS
    } else {
        NOT_INITIALIZED
    }
}

#[unsafe(no_mangle)]
extern "C" fn cublasSetStream_v2(handle: Handle, stream: Handle) -> Code {
    let Some(of_handle) = HANDLES.get(handle) else {
        return NOT_INITIALIZED;
    };
    *lock(&of_handle) = stream.addr();
    SUCCESS
}

/// A matrix, or a batch of them: column after column.
#[derive(Debug, Clone, Copy)]
struct Matrix {
    address: Address,
    /// The distance of two columns, and of two matrices.
    strides: [usize; 2],
    is_transposed: bool,
}

impl Matrix {
    fn new(address: Address, strides: [usize; 2], operation: c_int) -> Matrix {
        Matrix {
            address,
            strides,
            is_transposed: operation != PLAIN,
        }
    }

    fn place(&self, batch: usize, row: usize, column: usize) -> usize {
        let (down, across) = if self.is_transposed {
            (column, row)
        } else {
            (row, column)
        };
        batch * self.strides[1] + across * self.strides[0] + down
    }
}

/// Products `c = alpha * a * b + beta * c` of a batch, with the rows and columns of `c` and the
/// columns of `a`.
#[derive(Debug, Clone, Copy)]
struct Product {
    a: Matrix,
    b: Matrix,
    c: Matrix,
    size: [usize; 3],
    batches: usize,
    alpha: f64,
    beta: f64,
}

/// Carries out products. Each element is rounded once.
fn multiply<T: Element>(product: &Product) -> Result<(), String> {
    let Product {
        a,
        b,
        c,
        size: [rows, columns, inner],
        batches,
        alpha,
        beta,
    } = *product;
    let left = elements::<T>(a.address)?;
    let right = elements::<T>(b.address)?;
    let to = elements::<T>(c.address)?;
    for batch in 0..batches {
        let left_rows: Vec<f64> = (0..rows * inner)
            .map(|k| left.get(a.place(batch, k / inner, k % inner)).to_f64())
            .collect();
        for column in 0..columns {
            let factors: Vec<f64> = (0..inner)
                .map(|k| right.get(b.place(batch, k, column)).to_f64())
                .collect();
            for row in 0..rows {
                let sum: f64 = left_rows[row * inner..][..inner]
                    .iter()
                    .zip(&factors)
                    .map(|(x, y)| x * y)
                    .sum();
                let place = c.place(batch, row, column);
                // The output's old value is not read if its factor is zero.
                let before = if beta == 0.0 {
                    0.0
                } else {
                    beta * to.get(place).to_f64()
                };
                to.set(place, T::from_f64(alpha * sum + before));
            }
        }
    }
    Ok(())
}

/// Begins products on the stream of a handle.
fn begin(handle: Handle, dtype: c_int, product: Product) -> Code {
    count(Counted::Kernels);
    let Some(stream) = HANDLES.get(handle) else {
        return NOT_INITIALIZED;
    };
    let work: Work = match dtype {
        F32 => Box::new(move || multiply::<f32>(&product)),
        F64 => Box::new(move || multiply::<f64>(&product)),
        F16 => Box::new(move || multiply::<f16>(&product)),
        BF16 => Box::new(move || multiply::<bf16>(&product)),
        _ => return NOT_SUPPORTED,
    };
    if !computes() {
        return SUCCESS;
    }
    let stream = std::ptr::without_provenance_mut(*lock(&stream));
    if push(stream, work).is_ok() {
        SUCCESS
    } else {
        EXECUTION_FAILED
    }
}

/// Returns the sizes of a call; `None` if one is negative.
fn sizes<const N: usize>(sizes: [i64; N]) -> Option<[usize; N]> {
    sizes
        .iter()
        .all(|&size| size >= 0)
        .then(|| sizes.map(|size| size as usize))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasGemmStridedBatchedEx(
    handle: Handle,
    a_operation: c_int,
    b_operation: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const c_void,
    a: Address,
    a_type: c_int,
    a_column: c_int,
    a_stride: c_longlong,
    b: Address,
    b_type: c_int,
    b_column: c_int,
    b_stride: c_longlong,
    beta: *const c_void,
    c: Address,
    c_type: c_int,
    c_column: c_int,
    c_stride: c_longlong,
    batches: c_int,
    compute_type: c_int,
    _algorithm: c_int,
) -> Code {
    if [a_type, b_type] != [c_type; 2] {
        return NOT_SUPPORTED;
    }
    let (Some(size), Some([batches]), Some(a_strides), Some(b_strides), Some(c_strides)) = (
        sizes([m, n, k].map(i64::from)),
        sizes([i64::from(batches)]),
        sizes([i64::from(a_column), a_stride]),
        sizes([i64::from(b_column), b_stride]),
        sizes([i64::from(c_column), c_stride]),
    ) else {
        return INVALID_VALUE;
    };
    // SAFETY: the factors have the type that is computed with.
    let factors = unsafe { factor(alpha, compute_type).zip(factor(beta, compute_type)) };
    let Some((alpha, beta)) = factors else {
        say(&format!("cuBLAS: compute type {compute_type} is not known"));
        return NOT_SUPPORTED;
    };
    let product = Product {
        a: Matrix::new(a, a_strides, a_operation),
        b: Matrix::new(b, b_strides, b_operation),
        c: Matrix::new(c, c_strides, PLAIN),
        size,
        batches,
        alpha,
        beta,
    };
    if compute_type == FAST_TF32 && c_type == F32 {
        count(Counted::Tf32Products);
    }
    begin(handle, c_type, product)
}

/// Returns a factor, which is of the type that is computed with.
///
/// # Safety
/// The pointer is to a value of that type.
unsafe fn factor(of: *const c_void, compute_type: c_int) -> Option<f64> {
    // SAFETY: the caller's promise.
    Some(match compute_type {
        64 => unsafe { of.cast::<f16>().read() }.to_f64(),
        68 | 74 | 75 | FAST_TF32 => f64::from(unsafe { of.cast::<f32>().read() }),
        70 => unsafe { of.cast::<f64>().read() },
        _ => return None,
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasDgemmStridedBatched(
    handle: Handle,
    a_operation: c_int,
    b_operation: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const f64,
    a: Address,
    a_column: c_int,
    a_stride: c_longlong,
    b: Address,
    b_column: c_int,
    b_stride: c_longlong,
    beta: *const f64,
    c: Address,
    c_column: c_int,
    c_stride: c_longlong,
    batches: c_int,
) -> Code {
    let alpha = alpha.cast();
    let beta = beta.cast();
    // SAFETY: the caller's pointers, of the type that is computed with.
    unsafe {
        cublasGemmStridedBatchedEx(
            handle,
            a_operation,
            b_operation,
            m,
            n,
            k,
            alpha,
            a,
            F64,
            a_column,
            a_stride,
            b,
            F64,
            b_column,
            b_stride,
            beta,
            c,
            F64,
            c_column,
            c_stride,
            batches,
            70,
            0,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::devices;

    #[test]
    fn products_are_those_of_columns_of_numbers() {
        let upload = |values: &[f32]| {
            let address = devices()[0].allocate(4 * values.len() as u64).unwrap();
            elements::<f32>(address).unwrap().fill_from(values).unwrap();
            address
        };
        let matrix = |address, column, is_transposed| Matrix {
            address,
            strides: [column, 4],
            is_transposed,
        };
        // [1 3; 2 4] * [5 7; 6 8], and with the first one transposed. The result's memory holds no
        // numbers before.
        for (is_transposed, expected) in [
            (false, [23.0, 34.0, 31.0, 46.0]),
            (true, [17.0, 39.0, 23.0, 53.0]),
        ] {
            let a = upload(&[1.0, 2.0, 3.0, 4.0]);
            let b = upload(&[5.0, 6.0, 7.0, 8.0]);
            let c = devices()[0].allocate(16).unwrap();
            let a = matrix(a, 2, is_transposed);
            let b = matrix(b, 2, false);
            let to = matrix(c, 2, false);
            let product = Product {
                a,
                b,
                c: to,
                size: [2, 2, 2],
                batches: 1,
                alpha: 1.0,
                beta: 0.0,
            };
            multiply::<f32>(&product).unwrap();
            assert_eq!(elements::<f32>(c).unwrap().to_vec(), expected);
        }
    }
}
