// What the attention kernels of all element types share.
#pragma once

#include "common.cuh"

/// The sizes and places of everything. A kernel reads the strides of the tensors that it is given.
struct Attention {
    Strides query, key, value, output, dquery, dkey, dvalue, doutput;
    /// Heads of queries, and how many of them share a head of keys and values.
    int heads, group;
    /// Numbers of queries and of keys.
    int rows, columns;
    /// Widths of a query or key, and of a value.
    int width, value_width;
    /// Not 0 if row i sees columns 0 to i only.
    int causal;
    /// Positive.
    float scale;
};

constexpr float LOG2_E = 1.4426950408889634f;

/// Returns true if all packs of rows with these strides fit.
template <class T> DEVICE bool strides_fit(const Strides& strides) {
    return strides.batch % PACK<T> == 0 && strides.head % PACK<T> == 0 &&
           strides.time % PACK<T> == 0;
}

/// A matrix in global memory: a head of a tensor.
template <class T> struct Matrix {
    T* at;
    int64_t stride;
    int rows, width;
    /// True if its rows can be moved in packs of 16 bytes.
    bool packs;
};

template <class T>
DEVICE Matrix<T> head_of(T* tensor, const Strides& strides, int64_t batch, int head, int rows,
                         int width) {
    bool packs = width % PACK<T> == 0 && strides_fit<T>(strides) &&
                 reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
    return {tensor + batch * strides.batch + head * strides.head, strides.time, rows, width, packs};
}

/// The place of a block: its head, and the first of its own rows.
struct Place {
    int64_t head_index;
    int64_t batch;
    int head, first;
};

DEVICE Place place_of(int rows, int rows_of_block, int heads, bool last_first) {
    int tiles = (rows + rows_of_block - 1) / rows_of_block;
    int tile = blockIdx.x % tiles;
    int64_t head_index = blockIdx.x / tiles;
    // Blocks with most work begin first.
    return {head_index, head_index / heads, int(head_index % heads),
            (last_first ? tiles - 1 - tile : tile) * rows_of_block};
}

/// Computes `delta = sum(output * doutput)` of each query: the part of a weight's gradient that is
/// the same for all weights of the row. Eight threads share a row.
template <int N, class T>
DEVICE void attention_delta(const T* output, const T* doutput, float* deltas, int64_t batches,
                            const Attention& sizes) {
    constexpr int SHARERS = 8, ROWS_OF_WARP = 32 / SHARERS;
    int64_t count = batches * sizes.heads * sizes.rows;
    int rows_of_block = blockDim.x * blockDim.y / SHARERS,
        thread = threadIdx.y * blockDim.x + threadIdx.x;
    int64_t of_warp = int64_t(blockIdx.x) * rows_of_block + thread / 32 * ROWS_OF_WARP;
    // The threads of a warp stay together.
    for (; of_warp < count; of_warp += int64_t(gridDim.x) * rows_of_block) {
        int64_t index = of_warp + thread % 32 / SHARERS;
        float sum = 0;
        if (index < count) {
            int64_t head_index = index / sizes.rows, row = index - head_index * sizes.rows;
            int64_t batch = head_index / sizes.heads, head = head_index - batch * sizes.heads;
            const T* a = output + batch * sizes.output.batch + head * sizes.output.head +
                         row * sizes.output.time;
            const T* b = doutput + batch * sizes.doutput.batch + head * sizes.doutput.head +
                         row * sizes.doutput.time;
            for (int column = thread % SHARERS * N; column < sizes.value_width;
                 column += SHARERS * N) {
                auto left = load<N>(a + column), right = load<N>(b + column);
#pragma unroll
                for (int i = 0; i < N; ++i) sum += left[i] * right[i];
            }
        }
#pragma unroll
        for (int distance = SHARERS / 2; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (index < count && thread % SHARERS == 0) deltas[index] = sum;
    }
}

#define ATTENTION_DELTA(T)                                                                         \
    KERNEL(attention_delta_##T, const T* output, const T* doutput, float* deltas, int64_t batches, \
           Attention sizes) {                                                                      \
        bool fit = packs_fit(sizes.value_width, output, doutput) &&                                \
                   strides_fit<T>(sizes.output) && strides_fit<T>(sizes.doutput);                  \
        BY_PACKS(fit, attention_delta, T, output, doutput, deltas, batches, sizes);                \
    }
