// What all kernels share: element types, packed memory accesses, reductions, and wrappers of
// special instructions.
//
// Elements are f32, bf16 or f16. Arithmetic is done in f32, and rounded once when a result is
// stored. Results depend on the arguments and on the size of the grid only: there are no atomics,
// and every sum has a fixed order.
//
// Tensors begin at their pointers, at any address. Packs of 16 bytes are moved where pointers,
// widths and strides are multiples of them, otherwise single elements, which takes several times as
// long.
//
// nvcc compiles these files for GPUs, and any C++ compiler compiles them for the CPU, by means of
// `cpu.h`, for tests.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <type_traits>

// Defines a kernel, which the host finds by its name.
#define KERNEL(NAME, ...) extern "C" __global__ void NAME(__VA_ARGS__)

// Defines a kernel whose blocks have at most so many threads and, with a second number, of which so
// many blocks are to fit on a multiprocessor. The compiler gives it as many registers as that
// leaves.
#define BOUNDED_KERNEL(BOUNDS, NAME, ...) \
    extern "C" __global__ void __launch_bounds__ BOUNDS NAME(__VA_ARGS__)
#else
#include "cpu.h"
#endif

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__

using f32 = float;
using bf16 = __nv_bfloat16;
using f16 = __half;

// Calls a macro with the name of each element type, which is the last part of a kernel's name.
#define FOR_HALVES(MACRO) MACRO(bf16) MACRO(f16)
#define FOR_FLOATS(MACRO) MACRO(f32) FOR_HALVES(MACRO)

DEVICE float widen(float x) { return x; }
DEVICE float widen(bf16 x) { return __bfloat162float(x); }
DEVICE float widen(f16 x) { return __half2float(x); }

/// Returns the nearest value that T has.
template <class T> DEVICE T narrow(float x) {
    if constexpr (std::is_same_v<T, bf16>)
        return __float2bfloat16_rn(x);
    else if constexpr (std::is_same_v<T, f16>)
        return __float2half_rn(x);
    else
        return x;
}

#ifdef __CUDACC__

/// Rounds two numbers to a half type, and returns them as one register.
template <class T> DEVICE uint32_t pair_of(float low, float high) {
    uint32_t pair;
    if constexpr (std::is_same_v<T, bf16>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

#endif

// --- Packed accesses ---

/// A number of elements as a type, so that a lambda can be called for packs and for single
/// elements.
template <int N> struct Count {
    DEVICE_MEMBER constexpr operator int() const { return N; }
};

/// The number of elements in the 16 bytes that a thread reads or writes best at once.
template <class T> constexpr int PACK = 16 / sizeof(T);

/// Values of N consecutive elements.
template <int N> struct Values {
    float at[N];
    DEVICE_MEMBER float& operator[](int i) { return at[i]; }
    DEVICE_MEMBER const float& operator[](int i) const { return at[i]; }
};

// Packs are moved as vectors of words, because the compiler moves the elements of other types one
// by one.

/// Reads N consecutive elements; their address must be a multiple of their size together.
template <int N, class T> DEVICE Values<N> load(const T* from) {
    Values<N> values;
    if constexpr (N == 1) {
        values[0] = widen(*from);
    } else {
        static_assert(sizeof(T) * N == 16 || sizeof(T) * N == 8, "a vector of 4 or 2 words");
        std::conditional_t<sizeof(T) * N == 16, uint4, uint2> words;
        words = *reinterpret_cast<const decltype(words)*>(from);
        T elements[N];
        memcpy(elements, &words, sizeof(words));
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = widen(elements[i]);
    }
    return values;
}

/// Rounds and writes N consecutive elements; their address must be a multiple of their size
/// together.
template <int N, class T> DEVICE void store(T* to, const Values<N>& values) {
    if constexpr (N == 1) {
        *to = narrow<T>(values[0]);
    } else {
        constexpr int WORDS = sizeof(T) * N / 4;
        uint32_t words[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            if constexpr (sizeof(T) == 2)
                words[i] = pair_of<T>(values[2 * i], values[2 * i + 1]);
            else
                memcpy(&words[i], reinterpret_cast<const char*>(&values[0]) + 4 * i, 4);
        }
        // An assignment would be split into stores of single words in most loops.
        if constexpr (WORDS == 4)
            __stwb(reinterpret_cast<uint4*>(to), uint4{words[0], words[1], words[2], words[3]});
        else
            __stwb(reinterpret_cast<uint2*>(to), uint2{words[0], words[1]});
    }
}

/// Returns true if packs of N elements can be read at all these addresses.
template <int N, class... T> DEVICE bool fits(const T*... pointers) {
    return ((reinterpret_cast<uintptr_t>(pointers) % (sizeof(T) * N) == 0) && ...);
}

/// Returns true if all packs of rows of this width fit.
template <class T, class... P>
DEVICE bool packs_fit(int width, const T* pointer, const P*... pointers) {
    return width % PACK<T> == 0 && fits<PACK<T>>(pointer, pointers...);
}

// Calls a function template for packs of T where they fit, otherwise for single elements.
#define BY_PACKS(PACKS_FIT, FUNCTION, T, ...) \
    if (PACKS_FIT)                            \
        FUNCTION<PACK<T>>(__VA_ARGS__);       \
    else                                      \
        FUNCTION<1>(__VA_ARGS__)

/// Calls `f(start, Count<M>())` until all elements 0 to `count` are covered, N at a time where
/// packs fit. For kernels with one-dimensional grids and blocks; any grid covers all elements. With
/// UNROLL, a loop that only reads has several reads in flight.
template <int N, int UNROLL = 1, class F>
DEVICE void for_elements(int64_t count, bool packs_fit, F f) {
    int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    int64_t threads = int64_t(gridDim.x) * blockDim.x;
    int64_t packs = packs_fit ? count / N : 0;
#pragma unroll UNROLL
    for (int64_t pack = thread; pack < packs; pack += threads) f(pack * N, Count<N>());
    for (int64_t at = packs * N + thread; at < count; at += threads) f(at, Count<1>());
}

/// Computes `y[i] = f(x[i])`. `y` may be `x`.
template <class T, class F> DEVICE void map(const T* x, T* y, int64_t count, F f) {
    for_elements<PACK<T>>(count, fits<PACK<T>>(x, y), [&](int64_t at, auto n) {
        auto values = load<n>(x + at);
#pragma unroll
        for (int i = 0; i < n; ++i) values[i] = f(values[i]);
        store<n>(y + at, values);
    });
}

/// Computes `y[i] = f(a[i], b[i])`. `y` may be `a` or `b`.
template <class T, class F> DEVICE void map(const T* a, const T* b, T* y, int64_t count, F f) {
    for_elements<PACK<T>>(count, fits<PACK<T>>(a, b, y), [&](int64_t at, auto n) {
        auto left = load<n>(a + at);
        auto right = load<n>(b + at);
#pragma unroll
        for (int i = 0; i < n; ++i) left[i] = f(left[i], right[i]);
        store<n>(y + at, left);
    });
}

// --- Reductions ---

struct Sum {
    template <class R> DEVICE_MEMBER R operator()(R a, R b) const { return a + b; }
};

/// The larger number, or NaN if one of them is NaN.
struct Larger {
    template <class R> DEVICE_MEMBER R operator()(R a, R b) const {
        return a > b || isnan(a) ? a : b;
    }
};

/// The elements from one batch, head and position to the next, in a tensor `[batch, heads, time,
/// width]`.
struct Strides {
    int64_t batch, head, time;
};

/// Combines the values of all threads of a warp. All get the result.
template <class R, class Op> DEVICE R warp_reduce(R value, Op op) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value = op(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
}

/// Combines the values of the threads that share a row: a warp if `blockDim.x` is 32, otherwise the
/// whole block, of whole warps. All get the result.
template <class R, class Op> DEVICE R row_reduce(R value, Op op) {
    value = warp_reduce(value, op);
    if (blockDim.x > 32) {
        __shared__ R parts[32];
        // The parts of an earlier call may still be read.
        __syncthreads();
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
        __syncthreads();
        value = parts[0];
        for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) value = op(value, parts[warp]);
    }
    return value;
}

/// Calls `f(row)` for each row of this thread. A block has either `blockDim.y` rows of a warp each,
/// with `blockDim.x` 32, or one row, with `blockDim.y` 1. Any one-dimensional grid covers all rows.
template <class F> DEVICE void for_rows(int64_t rows, F f) {
    int64_t step = int64_t(gridDim.x) * blockDim.y;
    for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += step)
        f(row);
}

/// Calls `f(column)` for each pack of N columns of a row that this thread has.
template <int N, class F> DEVICE void for_columns(int width, F f) {
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) f(column);
}

/// Returns true if all these addresses are equally far from an address that packs fit at.
template <class T, class... P> DEVICE bool packs_align(const T* pointer, const P*... pointers) {
    return (((reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(pointers)) % 16 ==
             0) &&
            ...);
}

/// Calls `f(column, Count<M>())` for the columns of a row that this thread has: for single ones up
/// to the first place that packs of N fit at, then for packs, and for the single ones that are
/// left. Other rows that `f` reads and writes must align with this one.
template <int N, class T, class F> DEVICE void for_aligned_columns(const T* row, int width, F f) {
    int head = N == 1 ? 0 : min(width, int(-reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T)));
    int tail = head + (width - head) / N * N;
    for (int column = threadIdx.x; column < head; column += blockDim.x) f(column, Count<1>());
    for (int column = head + threadIdx.x * N; column < tail; column += blockDim.x * N)
        f(column, Count<N>());
    for (int column = tail + threadIdx.x; column < width; column += blockDim.x)
        f(column, Count<1>());
}

// --- Columns ---
//
// A kernel over columns has blocks of 32 x 8 threads. A block has a tile of 32 packs of columns and
// every `gridDim.y`-th group of 8 rows, of which each thread has one pack of columns and every
// eighth row. Where it sums columns, the sums of each `blockIdx.y` go to a row of `partials`
// `[gridDim.y, width]`, and `finish_columns` adds those up.

constexpr int COLUMN_ROWS = 8;

/// Calls `f(column)` for each pack of N columns of this thread.
template <int N, class F> DEVICE void for_column_packs(int width, F f) {
    for (int column = (blockIdx.x * 32 + threadIdx.x) * N; column - int(threadIdx.x) * N < width;
         column += gridDim.x * 32 * N)
        f(column);
}

/// Calls `f(row)` for each row of this thread in a kernel over columns. With UNROLL, a loop that
/// only reads has several reads in flight.
template <int UNROLL = 1, class F> DEVICE void for_column_rows(int64_t rows, F f) {
    int64_t step = int64_t(gridDim.y) * COLUMN_ROWS;
#pragma unroll UNROLL
    for (int64_t row = int64_t(blockIdx.y) * COLUMN_ROWS + threadIdx.y; row < rows; row += step)
        f(row);
}

/// Adds up the sums of the threads of a block that have the same columns, and writes them to a row
/// of partials. All threads of the block must call this, also those whose `column` is not below
/// `width`.
template <int N, class T>
DEVICE void store_column_sums(const Values<N>& sums, int column, int width, T* partials) {
    __shared__ float parts[COLUMN_ROWS][32 * N];
    // The parts of an earlier call may still be read.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) parts[threadIdx.y][i * 32 + threadIdx.x] = sums[i];
    __syncthreads();
    if (threadIdx.y == 0 && column < width) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float total = parts[0][i * 32 + threadIdx.x];
#pragma unroll
            for (int y = 1; y < COLUMN_ROWS; ++y) total += parts[y][i * 32 + threadIdx.x];
            partials[int64_t(blockIdx.y) * width + column + i] = narrow<T>(total);
        }
    }
}

// --- Instructions ---

#ifdef __CUDACC__

// Declares a pointer to the dynamic shared memory of a block.
#define DYNAMIC_SHARED(NAME) extern __shared__ __align__(16) unsigned char NAME[]

/// Returns 2^x, with an error of a few units in the last place of f32.
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE uint32_t shared_address(const void* pointer) {
    return uint32_t(__cvta_generic_to_shared(pointer));
}

/// Starts to copy the first `bytes` of 16 bytes to shared memory; the others become zero.
DEVICE void copy_async(void* to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
}

/// Makes a group of the copies that were started since the last group.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most PENDING groups of this thread's copies are unfinished.
template <int PENDING> DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/// Loads four 8 x 8 matrices of half types from shared memory, one into each register. Thread i of
/// the warp gives the address of row i % 8 of matrix i / 8, and gets elements 2 * (i % 4) and the
/// next one of each matrix's row i / 4.
DEVICE void load_matrices(uint32_t (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/// Loads the same matrices transposed.
DEVICE void load_matrices_transposed(uint32_t (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/// Adds the product of two matrices of half types, 16 x 16 and 16 x 8, to a 16 x 8 matrix of f32.
template <class T>
DEVICE void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, bf16>)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

/// Returns e^x for a result that is rounded to T: for half types faster, with an error that grows
/// with the magnitude of x and is below 1e-5.
template <class T> DEVICE float exponential_for(float x) {
    if constexpr (sizeof(T) == 2)
        return exp2_approx(x * 1.4426950408889634f);
    else
        return expf(x);
}

/// The largest number of a row, and the sum of `e^(number - largest)`.
struct RowSum {
    float largest, total;
};

/// Computes these of a row, which is read once. All threads of the row get the result.
template <int N, class T> DEVICE RowSum row_sum_of_powers(const T* row, int width) {
    float largest = -INFINITY, total = 0;
    for_aligned_columns<N>(row, width, [&](int column, auto n) {
        auto values = load<n>(row + column);
        float before = largest;
#pragma unroll
        for (int i = 0; i < n; ++i) largest = Larger()(largest, values[i]);
        // Subtract the largest number, so that no power overflows, unless there are no others than
        // -infinity yet.
        float offset = largest == -INFINITY ? 0 : largest;
        total *= exponential_for<T>(before - offset);
#pragma unroll
        for (int i = 0; i < n; ++i) total += exponential_for<T>(values[i] - offset);
    });
    float of_row = row_reduce(largest, Larger());
    return {of_row, row_reduce(total * exponential_for<T>(largest - of_row), Sum())};
}
