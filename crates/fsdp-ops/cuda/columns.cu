// Sums over columns: the gradients of biases.
//
// Launch: as kernels over columns, `finish_columns` with `gridDim.y` 1. It adds up the rows of
// partials that other kernels write, in f32, and rounds the result to the type in its name.
#include "common.cuh"

/// Sums columns of a matrix of `From`, into rows of partials or, with one row of blocks, into the
/// result.
template <int N, class From, class To>
DEVICE void sum_columns(const From* x, To* sums, int64_t rows, int width) {
    for_column_packs<N>(width, [&](int column) {
        Values<N> of_thread = {};
        if (column < width) {
            for_column_rows<4>(rows, [&](int64_t row) {
                auto values = load<N>(x + row * width + column);
#pragma unroll
                for (int i = 0; i < N; ++i) of_thread[i] += values[i];
            });
        }
        store_column_sums(of_thread, column, width, sums);
    });
}

#define COLUMN_SUMS(T)                                                                    \
    KERNEL(column_sums_##T, const T* x, float* partials, int64_t rows, int width) {       \
        BY_PACKS(packs_fit(width, x), sum_columns, T, x, partials, rows, width);          \
    }                                                                                     \
    KERNEL(finish_columns_##T, const float* partials, T* sums, int64_t rows, int width) { \
        sum_columns<1>(partials, sums, rows, width);                                      \
    }
FOR_FLOATS(COLUMN_SUMS)
