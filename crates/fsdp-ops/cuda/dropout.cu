// Dropout with the masks of `fsdp-ops/src/dropout.rs`: whether an element is dropped depends on a
// key, on the number of its row in the global batch, and on its place in the row. The same bits as
// on the CPU. The backward is the same kernel on gradients.
//
// Launch: one-dimensional grids and blocks (`for_elements`).
#include "common.cuh"

/// The step of SplitMix64.
constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15;

/// Returns a number whose bits all depend on all bits of `x`: the output function of SplitMix64.
DEVICE uint64_t mixed(uint64_t x) {
    x += GOLDEN;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/// Sets each element to 0 with probability `p`, and multiplies the others by `1 / (1 - p)`. `key`
/// is that of the masks (seed, step and place), and `first_row` the number of the first row in the
/// global batch. `y` may be `x`.
template <class T>
DEVICE void drop(const T* x, T* y, int64_t rows, int64_t width, double p, uint64_t key,
                 uint64_t first_row) {
    constexpr int N = PACK<T>;
    // An element is kept if the upper 32 of its random bits, as a number, are at least this.
    const uint64_t threshold = uint64_t(p * 4294967296.0);
    const float scale = p < 1 ? float(1 / (1 - p)) : 0;
    for_elements<N>(rows * width, width % N == 0 && fits<N>(x, y), [&](int64_t at, auto n) {
        int64_t row = at / width;
        uint64_t index = uint64_t(at - row * width);
        uint64_t of_row = mixed(key ^ mixed(first_row + uint64_t(row)));
        auto values = load<n>(x + at);
#pragma unroll
        for (int i = 0; i < n; ++i) {
            uint64_t bits = mixed(of_row + (index + i) * GOLDEN) >> 32;
            values[i] = bits >= threshold ? values[i] * scale : 0;
        }
        store<n>(y + at, values);
    });
}

#define DROPOUT(T)                                                                             \
    KERNEL(dropout_##T, const T* x, T* y, int64_t rows, int64_t width, double p, uint64_t key, \
           uint64_t first_row) {                                                               \
        drop(x, y, rows, width, p, key, first_row);                                            \
    }
FOR_FLOATS(DROPOUT)
