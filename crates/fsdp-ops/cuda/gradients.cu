// What is done to whole gradients: they are joined and added up, measured and scaled.
//
// Launch: over pieces; `finish_statistics` with one block of 256 threads.
#include "pieces.cuh"

/// Writes the elements of the second tensor to the first, or adds them; zeros if there is no second
/// one.
template <class To, class From> DEVICE void write(const Pieces& pieces, int add) {
    constexpr int N = sizeof(To) > sizeof(From) ? PACK<To> : PACK<From>;
    Chunk chunk = chunk_of_block(pieces);
    To* to = pieces.tensor<To>(0, chunk.piece);
    const From* from = pieces.tensor<From>(1, chunk.piece);
    for_chunk<N>(chunk, fits<N>(to, from), [&](int64_t at, auto n) {
        Values<n> results = {};
        if (from) results = load<n>(from + at);
        if (add) {
            auto before = load<n>(to + at);
#pragma unroll
            for (int i = 0; i < n; ++i) results[i] += before[i];
        }
        store<n>(to + at, results);
    });
}

#define WRITE(TO, FROM) \
    KERNEL(write_##TO##_##FROM, IN_PLACE Pieces pieces, int add) { write<TO, FROM>(pieces, add); }
WRITE(f32, f32)
WRITE(f32, bf16)
WRITE(f32, f16)
WRITE(bf16, bf16)
WRITE(bf16, f32)
WRITE(f16, f16)
WRITE(f16, f32)

/// What one reading of gradients tells: the sum of their squares, and their largest magnitude,
/// which is NaN if any of them is.
struct Statistics {
    double squares, largest;
};

DEVICE Statistics combined(const Statistics& a, const Statistics& b) {
    return {a.squares + b.squares, Larger()(a.largest, b.largest)};
}

/// Combines the statistics of all threads of a block.
DEVICE Statistics of_block(const Statistics& own) {
    return {row_reduce(own.squares, Sum()), row_reduce(own.largest, Larger())};
}

/// Writes the statistics of what each block has read. Sums are f64 from the first addition on.
template <class T> DEVICE void statistics(const Pieces& pieces, Statistics* partials) {
    Chunk chunk = chunk_of_block(pieces);
    const T* x = pieces.tensor<T>(0, chunk.piece);
    double squares = 0;
    float largest = 0;
    for_chunk<PACK<T>, 4>(chunk, fits<PACK<T>>(x), [&](int64_t at, auto n) {
        auto values = load<n>(x + at);
#pragma unroll
        for (int i = 0; i < n; ++i) {
            double value = values[i];
            squares += value * value;
            largest = Larger()(largest, fabsf(values[i]));
        }
    });
    Statistics result = of_block({squares, double(largest)});
    if (threadIdx.x == 0) partials[blockIdx.x] = result;
}

/// Multiplies all elements by a factor.
template <class T> DEVICE void scale(const Pieces& pieces, float factor) {
    Chunk chunk = chunk_of_block(pieces);
    T* x = pieces.tensor<T>(0, chunk.piece);
    for_chunk<PACK<T>>(chunk, fits<PACK<T>>(x), [&](int64_t at, auto n) {
        auto values = load<n>(x + at);
#pragma unroll
        for (int i = 0; i < n; ++i) values[i] *= factor;
        store<n>(x + at, values);
    });
}

#define GRADIENTS(T)                                              \
    KERNEL(statistics_##T, IN_PLACE Pieces pieces, Statistics* partials) { \
        statistics<T>(pieces, partials);                          \
    }                                                             \
    KERNEL(scale_##T, IN_PLACE Pieces pieces, double factor) { scale<T>(pieces, float(factor)); }
FOR_FLOATS(GRADIENTS)

/// Combines the statistics of all blocks.
KERNEL(finish_statistics, const Statistics* partials, int64_t parts, Statistics* total) {
    Statistics own = {};
    for (int64_t part = threadIdx.x; part < parts; part += blockDim.x)
        own = combined(own, partials[part]);
    own = of_block(own);
    if (threadIdx.x == 0) *total = own;
}

/// Decides what a step does with gradients of these statistics: their norm, without the loss scale
/// that `unscale` removes, is clipped to `max_norm`. The norm is the square root of the sum of
/// squares or, with `by_largest`, the largest magnitude.
KERNEL(clip, const Statistics* total, Clipping* clipping, int by_largest, double max_norm,
       double unscale) {
    // A sum of squares is not finite if a gradient is not; a NaN may be lost in a magnitude.
    double norm = by_largest && !isnan(total->squares) ? total->largest : sqrt(total->squares);
    norm *= unscale;
    double factor = max_norm / (norm + 1e-6);
    clipping->norm = norm;
    clipping->factor = float((factor < 1 ? factor : 1) * unscale);
    clipping->skip = !isfinite(total->squares);
}
