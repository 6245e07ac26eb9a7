// Rotary position embeddings: the pairs of each vector of `[batch, heads, time, width]` are rotated
// by the angles of its position. The same numbers as on the CPU: no product is fused with a sum.
//
// `rope_*` pairs element i with element i + width / 2, `rope_i_*` element 2 * i with the next one.
// The backward is the same kernel with `back` not 0, which rotates by the opposite angles. `y` may
// be `x`.
//
// Launch: one-dimensional grids; blocks of n x m threads, of which n walk over a vector and m take
// one vector each.
#include "common.cuh"

/// Returns a product that is rounded, and not fused with a sum.
DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }

/// The sizes and places of the vectors; those of a head are contiguous.
struct Rotation {
    Strides x, y;
    int64_t batches;
    int heads, time;
    /// Half the width of a vector: the width of a row of `cos` and `sin`.
    int half;
    /// Not 0 if `cos` and `sin` are `[batch, time, half]`, otherwise they are `[time, half]`.
    int of_batch;
    int back;
};

/// The values of N pairs: loads and stores them by halves of a vector, or as neighbours.
template <bool HALVES, int N, class T> struct Pairs {
    Values<N> a, b;

    DEVICE_MEMBER Pairs(const T* x, int pair, int half) {
        if constexpr (HALVES) {
            a = load<N>(x + pair);
            b = load<N>(x + half + pair);
        } else if constexpr (N == 1) {
            a = load<1>(x + 2 * pair);
            b = load<1>(x + 2 * pair + 1);
        } else {
            auto both = load<2 * N>(x + 2 * pair);
#pragma unroll
            for (int i = 0; i < N; ++i) a[i] = both[2 * i], b[i] = both[2 * i + 1];
        }
    }

    DEVICE_MEMBER void store_to(T* y, int pair, int half) const {
        if constexpr (HALVES) {
            store<N>(y + pair, a);
            store<N>(y + half + pair, b);
        } else if constexpr (N == 1) {
            store<1>(y + 2 * pair, a);
            store<1>(y + 2 * pair + 1, b);
        } else {
            Values<2 * N> both;
#pragma unroll
            for (int i = 0; i < N; ++i) both[2 * i] = a[i], both[2 * i + 1] = b[i];
            store<2 * N>(y + 2 * pair, both);
        }
    }
};

template <bool HALVES, int N, class T>
DEVICE void rotate(const T* x, const T* cos, const T* sin, T* y, const Rotation& rotation) {
    float direction = rotation.back ? -1.0f : 1.0f;
    for_rows(rotation.batches * rotation.heads * rotation.time, [&](int64_t row) {
        int64_t head_index = row / rotation.time, time = row - head_index * rotation.time;
        int64_t batch = head_index / rotation.heads, head = head_index - batch * rotation.heads;
        const T* from =
            x + batch * rotation.x.batch + head * rotation.x.head + time * rotation.x.time;
        T* to = y + batch * rotation.y.batch + head * rotation.y.head + time * rotation.y.time;
        int64_t angle = ((rotation.of_batch ? batch * rotation.time : 0) + time) * rotation.half;
        for_columns<N>(rotation.half, [&](int pair) {
            Pairs<HALVES, N, T> pairs(from, pair, rotation.half);
            auto cosines = load<N>(cos + angle + pair);
            auto sines = load<N>(sin + angle + pair);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                float a = pairs.a[i], b = pairs.b[i], sine = sines[i] * direction;
                pairs.a[i] = rounded_product(a, cosines[i]) - rounded_product(b, sine);
                pairs.b[i] = rounded_product(a, sine) + rounded_product(b, cosines[i]);
            }
            pairs.store_to(to, pair, rotation.half);
        });
    });
}

template <bool HALVES, class T>
DEVICE void rope(const T* x, const T* cos, const T* sin, T* y, const Rotation& rotation) {
    // Neighbours are read in packs of twice as many elements as there are pairs.
    constexpr int N = HALVES ? PACK<T> : PACK<T> / 2, ELEMENTS = PACK<T>;
    bool strides_fit = true;
    for (const Strides* strides : {&rotation.x, &rotation.y})
        strides_fit = strides_fit && strides->batch % ELEMENTS == 0 &&
                      strides->head % ELEMENTS == 0 && strides->time % ELEMENTS == 0;
    if (strides_fit && rotation.half % N == 0 && fits<ELEMENTS>(x, y) && fits<N>(cos, sin))
        rotate<HALVES, N>(x, cos, sin, y, rotation);
    else
        rotate<HALVES, 1>(x, cos, sin, y, rotation);
}

#define ROPE(T)                                                                           \
    KERNEL(rope_##T, const T* x, const T* cos, const T* sin, T* y, Rotation rotation) {   \
        rope<true>(x, cos, sin, y, rotation);                                             \
    }                                                                                     \
    KERNEL(rope_i_##T, const T* x, const T* cos, const T* sin, T* y, Rotation rotation) { \
        rope<false>(x, cos, sin, y, rotation);                                            \
    }
FOR_FLOATS(ROPE)
