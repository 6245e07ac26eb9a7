// Layer norm and root-mean-square norm over the last dimension of `[rows, width]`.
//
// The forward writes one mean (layer norm only) and one factor, `1 / sqrt(mean square + eps)`, for
// each row, which the others read. The backward is either `*_backward` for `dx` and `*_columns` for
// the gradients of weight and bias, or, where a row fits into the registers of its threads,
// `*_backward_at_once` for both, which reads everything once.
//
// Launch: `*_forward`, `*_backward` and `*_backward_at_once` like softmax (`for_rows`). The latter
// has at most 256 threads in a block, at least one thread of a row for each 4 packs of 16 bytes of
// it, or for each 4 columns if packs do not fit, and as many blocks as there are rows of partials.
// `*_columns` is launched as a kernel over columns. `finish_columns` of reduce.cu adds up the
// partials of both.
#include "common.cuh"

/// Tells layer norm, which subtracts means, from root-mean-square norm, for which all that has to
/// do with means and biases is ignored.
using Centered = std::true_type;
using Uncentered = std::false_type;

/// Computes `y = (x - mean) * factor * weight + bias` with `CENTER`, `y = x * factor * weight`
/// without.
template <int N, bool CENTER, class T>
DEVICE void norm_forward(std::bool_constant<CENTER>, const T* x, const T* weight, const T* bias,
                         T* y, float* means, float* factors, int64_t rows, int width, double eps) {
    for_rows(rows, [&](int64_t row) {
        const T* from = x + row * width;
        float mean = 0;
        if constexpr (CENTER) {
            for_columns<N>(width, [&](int column) {
                auto values = load<N>(from + column);
#pragma unroll
                for (int i = 0; i < N; ++i) mean += values[i];
            });
            mean = row_reduce(mean, Sum()) / width;
        }
        float squares = 0;
        for_columns<N>(width, [&](int column) {
            auto values = load<N>(from + column);
#pragma unroll
            for (int i = 0; i < N; ++i) squares += (values[i] - mean) * (values[i] - mean);
        });
        float factor = 1 / sqrtf(row_reduce(squares, Sum()) / width + float(eps));
        for_columns<N>(width, [&](int column) {
            auto values = load<N>(from + column);
            auto weights = load<N>(weight + column);
            Values<N> biases = {};
            if constexpr (CENTER) biases = load<N>(bias + column);
#pragma unroll
            for (int i = 0; i < N; ++i)
                values[i] = (values[i] - mean) * factor * weights[i] + biases[i];
            store<N>(y + row * width + column, values);
        });
        if (threadIdx.x == 0) {
            if constexpr (CENTER) means[row] = mean;
            factors[row] = factor;
        }
    });
}

/// Computes the gradient of `x`. The output does not change if all values of a row change together
/// (with `CENTER`), or if the row is scaled. So the gradient has no part in these two directions:
/// take away its mean, and its part along the row.
template <int N, bool CENTER, class T>
DEVICE void norm_backward(std::bool_constant<CENTER>, const T* x, const T* weight, const T* grad,
                          const float* means, const float* factors, T* dx, int64_t rows,
                          int width) {
    for_rows(rows, [&](int64_t row) {
        int64_t start = row * width;
        float mean = CENTER ? means[row] : 0, factor = factors[row];
        // Calls `f` with packs of the normalized row and of its gradient.
        auto for_packs = [&](auto f) {
            for_columns<N>(width, [&](int column) {
                auto values = load<N>(x + start + column);
                auto weights = load<N>(weight + column);
                auto grads = load<N>(grad + start + column);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    values[i] = (values[i] - mean) * factor;
                    grads[i] *= weights[i];
                }
                f(column, values, grads);
            });
        };
        float total = 0, along = 0;
        for_packs([&](int, const Values<N>& values, const Values<N>& grads) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if constexpr (CENTER) total += grads[i];
                along += grads[i] * values[i];
            }
        });
        if constexpr (CENTER) total = row_reduce(total, Sum()) / width;
        along = row_reduce(along, Sum()) / width;
        for_packs([&](int column, const Values<N>& values, const Values<N>& grads) {
            Values<N> result;
#pragma unroll
            for (int i = 0; i < N; ++i) result[i] = factor * (grads[i] - total - values[i] * along);
            store<N>(dx + start + column, result);
        });
    });
}

/// Sums the gradients of weight and, with `CENTER`, bias over rows, into rows of partials.
template <int N, bool CENTER, class T>
DEVICE void norm_columns(std::bool_constant<CENTER>, const T* x, const T* grad, const float* means,
                         const float* factors, float* dweight, float* dbias, int64_t rows,
                         int width) {
    for_column_packs<N>(width, [&](int column) {
        Values<N> of_weight = {}, of_bias = {};
        if (column < width) {
            for_column_rows<4>(rows, [&](int64_t row) {
                auto values = load<N>(x + row * width + column);
                auto grads = load<N>(grad + row * width + column);
                float mean = CENTER ? means[row] : 0, factor = factors[row];
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    of_weight[i] += grads[i] * ((values[i] - mean) * factor);
                    if constexpr (CENTER) of_bias[i] += grads[i];
                }
            });
        }
        store_column_sums(of_weight, column, width, dweight);
        if constexpr (CENTER) store_column_sums(of_bias, column, width, dbias);
    });
}

/// The number of packs of a row that a thread has in registers.
constexpr int KEPT = 4;

/// Calls `f(k, column)` for each of the KEPT packs of this thread that is there.
template <int N, class F> DEVICE void for_kept(int width, F f) {
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        int column = (threadIdx.x + k * blockDim.x) * N;
        if (column < width) f(k, column);
    }
}

/// Adds up the sums of the rows of a block, from warp to warp, and writes them to a row of
/// partials.
template <int N> DEVICE void store_kept_sums(Values<N> (&sums)[KEPT], int width, float* partials) {
    __shared__ float parts[KEPT * N * 32];
    for (unsigned y = 0; y + 1 < blockDim.y; ++y) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < KEPT * N; ++i)
            if (threadIdx.y == y) parts[i * 32 + threadIdx.x] = sums[i / N][i % N];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < KEPT * N; ++i)
            if (threadIdx.y == y + 1) sums[i / N][i % N] += parts[i * 32 + threadIdx.x];
    }
    if (threadIdx.y + 1 == blockDim.y)
        for_kept<N>(width, [&](int k, int column) {
#pragma unroll
            for (int i = 0; i < N; ++i)
                partials[int64_t(blockIdx.x) * width + column + i] = sums[k][i];
        });
}

/// Does what `norm_backward` and `norm_columns` do.
template <int N, bool CENTER, class T>
DEVICE void norm_backward_at_once(std::bool_constant<CENTER>, const T* x, const T* weight,
                                  const T* grad, const float* means, const float* factors, T* dx,
                                  float* dweight, float* dbias, int64_t rows, int width) {
    Values<N> of_weight[KEPT] = {}, of_bias[KEPT] = {};
    for_rows(rows, [&](int64_t row) {
        int64_t start = row * width;
        float mean = CENTER ? means[row] : 0, factor = factors[row], total = 0, along = 0;
        Values<N> values[KEPT], grads[KEPT];
        for_kept<N>(width, [&](int k, int column) {
            values[k] = load<N>(x + start + column);
            grads[k] = load<N>(grad + start + column);
        });
        for_kept<N>(width, [&](int k, int column) {
            auto weights = load<N>(weight + column);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                values[k][i] = (values[k][i] - mean) * factor;
                of_weight[k][i] += grads[k][i] * values[k][i];
                if constexpr (CENTER) of_bias[k][i] += grads[k][i];
                grads[k][i] *= weights[i];
                if constexpr (CENTER) total += grads[k][i];
                along += grads[k][i] * values[k][i];
            }
        });
        if constexpr (CENTER) total = row_reduce(total, Sum()) / width;
        along = row_reduce(along, Sum()) / width;
        for_kept<N>(width, [&](int k, int column) {
            Values<N> result;
#pragma unroll
            for (int i = 0; i < N; ++i)
                result[i] = factor * (grads[k][i] - total - values[k][i] * along);
            store<N>(dx + start + column, result);
        });
    });
    store_kept_sums(of_weight, width, dweight);
    if constexpr (CENTER) store_kept_sums(of_bias, width, dbias);
}

#define NORM(T)                                                                                    \
    KERNEL(layer_norm_forward_##T, const T* x, const T* weight, const T* bias, T* y, float* means, \
           float* factors, int64_t rows, int width, double eps) {                                  \
        BY_PACKS(packs_fit(width, x, weight, bias, y), norm_forward, T, Centered(), x, weight,     \
                 bias, y, means, factors, rows, width, eps);                                       \
    }                                                                                              \
    KERNEL(layer_norm_backward_##T, const T* x, const T* weight, const T* grad,                    \
           const float* means, const float* factors, T* dx, int64_t rows, int width) {             \
        BY_PACKS(packs_fit(width, x, weight, grad, dx), norm_backward, T, Centered(), x, weight,   \
                 grad, means, factors, dx, rows, width);                                           \
    }                                                                                              \
    BOUNDED_KERNEL((256), rms_norm_backward_at_once_##T, const T* x, const T* weight,              \
                   const T* grad, const float* factors, T* dx, float* dweight, int64_t rows,       \
                   int width) {                                                                    \
        BY_PACKS(packs_fit(width, x, weight, grad, dx), norm_backward_at_once, T, Uncentered(), x, \
                 weight, grad, factors, factors, dx, dweight, dweight, rows, width);               \
    }                                                                                              \
    KERNEL(layer_norm_columns_##T, const T* x, const T* grad, const float* means,                  \
           const float* factors, float* dweight, float* dbias, int64_t rows, int width) {          \
        BY_PACKS(packs_fit(width, x, grad), norm_columns, T, Centered(), x, grad, means, factors,  \
                 dweight, dbias, rows, width);                                                     \
    }                                                                                              \
    KERNEL(rms_norm_forward_##T, const T* x, const T* weight, T* y, float* factors, int64_t rows,  \
           int width, double eps) {                                                                \
        BY_PACKS(packs_fit(width, x, weight, y), norm_forward, T, Uncentered(), x, weight, weight, \
                 y, factors, factors, rows, width, eps);                                           \
    }                                                                                              \
    KERNEL(rms_norm_backward_##T, const T* x, const T* weight, const T* grad,                      \
           const float* factors, T* dx, int64_t rows, int width) {                                 \
        BY_PACKS(packs_fit(width, x, weight, grad, dx), norm_backward, T, Uncentered(), x, weight, \
                 grad, factors, factors, dx, rows, width);                                         \
    }                                                                                              \
    KERNEL(rms_norm_columns_##T, const T* x, const T* grad, const float* factors, float* dweight,  \
           int64_t rows, int width) {                                                              \
        BY_PACKS(packs_fit(width, x, grad), norm_columns, T, Uncentered(), x, grad, factors,       \
                 factors, dweight, dweight, rows, width);                                          \
    }
FOR_FLOATS(NORM)

// For half types the two kernels of layer norm are faster.
BOUNDED_KERNEL((256), layer_norm_backward_at_once_f32, const float* x, const float* weight,
               const float* grad, const float* means, const float* factors, float* dx,
               float* dweight, float* dbias, int64_t rows, int width) {
    BY_PACKS(packs_fit(width, x, weight, grad, dx), norm_backward_at_once, f32, Centered(), x,
             weight, grad, means, factors, dx, dweight, dbias, rows, width);
}
