// Softmax over the last dimension of `[rows, width]`.
//
// Launch: one-dimensional grids; blocks of 32 x 4 threads for narrow rows, or n x 1 for wide ones
// (`for_rows`). A row is read twice, the second time from a cache.
#include "common.cuh"

/// Computes `y = exp(x - largest) / sum(exp(x - largest))`. `y` may be `x`.
template <int N, class T> DEVICE void softmax_forward(const T* x, T* y, int64_t rows, int width) {
    for_rows(rows, [&](int64_t row) {
        const T* from = x + row * width;
        RowSum sum = row_sum_of_powers<N>(from, width);
        float largest = sum.largest, scale = 1 / sum.total;
        for_aligned_columns<N>(from, width, [&](int column, auto n) {
            auto values = load<n>(from + column);
#pragma unroll
            for (int i = 0; i < n; ++i) values[i] = exponential_for<T>(values[i] - largest) * scale;
            store<n>(y + row * width + column, values);
        });
    });
}

/// Computes `dx = y * (grad - sum(grad * y))` from the output `y`. `dx` may be `grad`.
template <int N, class T>
DEVICE void softmax_backward(const T* y, const T* grad, T* dx, int64_t rows, int width) {
    for_rows(rows, [&](int64_t row) {
        int64_t start = row * width;
        float along = 0;
        for_aligned_columns<N>(y + start, width, [&](int column, auto n) {
            auto weights = load<n>(y + start + column);
            auto grads = load<n>(grad + start + column);
#pragma unroll
            for (int i = 0; i < n; ++i) along += weights[i] * grads[i];
        });
        along = row_reduce(along, Sum());
        for_aligned_columns<N>(y + start, width, [&](int column, auto n) {
            auto weights = load<n>(y + start + column);
            auto grads = load<n>(grad + start + column);
#pragma unroll
            for (int i = 0; i < n; ++i) grads[i] = weights[i] * (grads[i] - along);
            store<n>(dx + start + column, grads);
        });
    });
}

#define SOFTMAX(T)                                                                            \
    KERNEL(softmax_forward_##T, const T* x, T* y, int64_t rows, int width) {                  \
        BY_PACKS(packs_align(x, y), softmax_forward, T, x, y, rows, width);                   \
    }                                                                                         \
    KERNEL(softmax_backward_##T, const T* y, const T* grad, T* dx, int64_t rows, int width) { \
        BY_PACKS(packs_align(y, grad, dx), softmax_backward, T, y, grad, dx, rows, width);    \
    }
FOR_FLOATS(SOFTMAX)
