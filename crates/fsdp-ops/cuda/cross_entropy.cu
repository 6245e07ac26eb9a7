// Mean cross-entropy of scores `[rows, classes]` against the class of each row.
//
// A target that is no class gives a loss of NaN, and its row a gradient of NaN: nobody waits for an
// answer from the device, so it cannot be an error.
//
// Launch: like softmax (`for_rows`), then `cross_entropy_mean` with one block of n x 1 threads. The
// gradient of the mean is read from device memory, where the backward of a graph has it.
#include "common.cuh"

/// Returns the logarithm of the sum of the exponentials of a row.
template <int N, class T> DEVICE float log_sum_of(const T* scores, int classes) {
    auto sum = row_sum_of_powers<N>(scores, classes);
    return logf(sum.total) + sum.largest;
}

template <class T>
DEVICE float loss_of(const T* scores, uint32_t target, int classes, float log_sum) {
    return target < uint32_t(classes) ? log_sum - widen(scores[target]) : NAN;
}

/// Writes the gradient of a row of scores: the softmax, less 1 for the target, times `grad`. It is
/// NaN if the target is no class.
template <int N, class T>
DEVICE void store_gradient(const T* scores, uint32_t target, int classes, float log_sum, float grad,
                           T* dscores) {
    if (target >= uint32_t(classes)) grad = NAN;
    for_aligned_columns<N>(scores, classes, [&](int column, auto n) {
        auto values = load<n>(scores + column);
#pragma unroll
        for (int i = 0; i < n; ++i)
            values[i] =
                (exponential_for<T>(values[i] - log_sum) - float(column + i == int(target))) * grad;
        store<n>(dscores + column, values);
    });
}

template <int N, class T>
DEVICE void cross_entropy_forward(const T* scores, const uint32_t* targets, float* losses,
                                  float* log_sums, int64_t rows, int classes) {
    for_rows(rows, [&](int64_t row) {
        const T* from = scores + row * classes;
        float log_sum = log_sum_of<N>(from, classes);
        if (threadIdx.x == 0) {
            losses[row] = loss_of(from, targets[row], classes, log_sum);
            log_sums[row] = log_sum;
        }
    });
}

/// Computes the gradient of the scores. `dscores` may be `scores`.
template <int N, class T>
DEVICE void cross_entropy_backward(const T* scores, const uint32_t* targets, const float* log_sums,
                                   const T* grad, T* dscores, int64_t rows, int classes) {
    float of_row = widen(*grad) / float(rows);
    for_rows(rows, [&](int64_t row) {
        int64_t start = row * classes;
        store_gradient<N>(scores + start, targets[row], classes, log_sums[row], of_row,
                          dscores + start);
    });
}

/// Computes the mean of all losses, with one block.
template <class T> DEVICE void cross_entropy_mean(const float* losses, T* mean, int64_t rows) {
    double total = 0;
    for (int64_t row = threadIdx.x; row < rows; row += blockDim.x) total += losses[row];
    total = row_reduce(total, Sum());
    if (threadIdx.x == 0) *mean = narrow<T>(float(total / rows));
}

#define CROSS_ENTROPY(T)                                                                       \
    KERNEL(cross_entropy_forward_##T, const T* scores, const uint32_t* targets, float* losses, \
           float* log_sums, int64_t rows, int classes) {                                       \
        cross_entropy_forward<PACK<T>>(scores, targets, losses, log_sums, rows, classes);      \
    }                                                                                          \
    KERNEL(cross_entropy_backward_##T, const T* scores, const uint32_t* targets,               \
           const float* log_sums, const T* grad, T* dscores, int64_t rows, int classes) {      \
        BY_PACKS(packs_align(scores, dscores), cross_entropy_backward, T, scores, targets,     \
                 log_sums, grad, dscores, rows, classes);                                      \
    }                                                                                          \
    KERNEL(cross_entropy_mean_##T, const float* losses, T* mean, int64_t rows) {               \
        cross_entropy_mean(losses, mean, rows);                                                \
    }
FOR_FLOATS(CROSS_ENTROPY)
