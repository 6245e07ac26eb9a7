// Update rules of optimizers: the formulas of `fsdp-nn/src/algorithm`, one launch for a step of
// many parameters. That of Adafactor is in `factored.cu`.
//
// The tensors of a piece are the parameter, its gradient, and its state. All have one type; half
// types are computed in f32 and rounded once a step. Gradients are multiplied first: by the factor
// of `clipping`, or by `factor` if `clipping` is null. If `clipping` says to skip the step, nothing
// is changed. `combine` is no update rule: the tensors of its pieces are a sum and its two summands.
//
// Launch: over pieces.
#include "pieces.cuh"

/// Returns a product that is rounded before it is added to something, as on the host.
DEVICE float product(float a, float b) { return __fmul_rn(a, b); }

/// The changes to a gradient before a step uses it: scaled, negated to maximize, and with the L2
/// penalty added.
struct Gradient {
    float factor, penalty;

    DEVICE_MEMBER Gradient(float factor, int maximize, double weight_decay)
        : factor(maximize ? -factor : factor), penalty(float(weight_decay)) {}

    DEVICE_MEMBER float operator()(float grad, float param) const {
        float scaled = product(grad, factor);
        return penalty == 0 ? scaled : fmaf(penalty, param, scaled);
    }
};

/// Computes torch's `lerp`: from the nearer of the two ends, so that the result is exact at both.
DEVICE float lerp(float start, float end, float weight) {
    return fabsf(weight) < 0.5f ? fmaf(weight, end - start, start)
                                : fmaf(weight - 1, end - start, end);
}

/// Adam, or AdamW: the parameter is multiplied by `keep`, 1 - lr * weight_decay, and `weight_decay`
/// is 0. The state is the averages of gradients and of their squares and, with amsgrad, the largest
/// averages of squares so far. `step_size` is lr / (1 - beta1^step), and `correction` is
/// sqrt(1 - beta2^step).
template <class T>
DEVICE void adam(const Pieces& pieces, float factor, int maximize, double weight_decay,
                 double keep, double beta1, double beta2, double eps, double step_size,
                 double correction) {
    Chunk chunk = chunk_of_block(pieces);
    T* params = pieces.tensor<T>(0, chunk.piece);
    const T* grads = pieces.tensor<T>(1, chunk.piece);
    T* averages = pieces.tensor<T>(2, chunk.piece);
    T* squares = pieces.tensor<T>(3, chunk.piece);
    T* largest = pieces.tensor<T>(4, chunk.piece);
    Gradient gradient(factor, maximize, weight_decay);
    const float kept = float(keep), first_weight = float(1 - beta1);
    const float second = float(beta2), second_weight = float(1 - beta2);
    const float epsilon = float(eps), descent = float(-step_size), root = float(correction);
    bool packs_fit = fits<PACK<T>>(params, grads, averages, squares, largest);
    for_chunk<PACK<T>>(chunk, packs_fit, [&](int64_t at, auto n) {
        auto p = load<n>(params + at);
        auto g = load<n>(grads + at);
        auto m = load<n>(averages + at);
        auto v = load<n>(squares + at);
        auto bound = v;
        if (largest) bound = load<n>(largest + at);
#pragma unroll
        for (int i = 0; i < n; ++i) {
            p[i] = product(p[i], kept);
            float grad = gradient(g[i], p[i]);
            m[i] = lerp(m[i], grad, first_weight);
            v[i] = fmaf(product(second_weight, grad), grad, product(v[i], second));
            bound[i] = largest ? Larger()(v[i], bound[i]) : v[i];
            float denominator = sqrtf(bound[i]) / root + epsilon;
            p[i] += product(descent, m[i]) / denominator;
        }
        store<n>(params + at, p);
        store<n>(averages + at, m);
        store<n>(squares + at, v);
        if (largest) store<n>(largest + at, bound);
    });
}

/// SGD. The state is the momentum, if there is one; `first` is not 0 if it has no values yet.
template <class T>
DEVICE void sgd(const Pieces& pieces, float factor, int maximize, double weight_decay, double lr,
                double momentum, double dampening, int nesterov, int first) {
    Chunk chunk = chunk_of_block(pieces);
    T* params = pieces.tensor<T>(0, chunk.piece);
    const T* grads = pieces.tensor<T>(1, chunk.piece);
    T* buffers = pieces.tensor<T>(2, chunk.piece);
    Gradient gradient(factor, maximize, weight_decay);
    const float descent = float(-lr), kept = float(momentum), undamped = float(1 - dampening);
    for_chunk<PACK<T>>(chunk, fits<PACK<T>>(params, grads, buffers), [&](int64_t at, auto n) {
        auto p = load<n>(params + at);
        auto g = load<n>(grads + at);
        Values<n> b = {};
        if (buffers && !first) b = load<n>(buffers + at);
#pragma unroll
        for (int i = 0; i < n; ++i) {
            float grad = gradient(g[i], p[i]);
            b[i] = !buffers || first ? grad : fmaf(undamped, grad, product(b[i], kept));
            float direction = buffers && nesterov ? fmaf(kept, b[i], grad) : b[i];
            p[i] = fmaf(descent, direction, p[i]);
        }
        store<n>(params + at, p);
        if (buffers) store<n>(buffers + at, b);
    });
}

/// Adagrad. The state is the sums of squares. `rate` is lr / (1 + (step - 1) * lr_decay).
template <class T>
DEVICE void adagrad(const Pieces& pieces, float factor, int maximize, double weight_decay,
                    double rate, double eps) {
    Chunk chunk = chunk_of_block(pieces);
    T* params = pieces.tensor<T>(0, chunk.piece);
    const T* grads = pieces.tensor<T>(1, chunk.piece);
    T* sums = pieces.tensor<T>(2, chunk.piece);
    Gradient gradient(factor, maximize, weight_decay);
    const float descent = float(-rate), epsilon = float(eps);
    for_chunk<PACK<T>>(chunk, fits<PACK<T>>(params, grads, sums), [&](int64_t at, auto n) {
        auto p = load<n>(params + at);
        auto g = load<n>(grads + at);
        auto s = load<n>(sums + at);
#pragma unroll
        for (int i = 0; i < n; ++i) {
            float grad = gradient(g[i], p[i]);
            s[i] = fmaf(grad, grad, s[i]);
            p[i] += product(descent, grad) / (sqrtf(s[i]) + epsilon);
        }
        store<n>(params + at, p);
        store<n>(sums + at, s);
    });
}

/// Schedule-free AdamW. The state is the iterates and the averages of squares. `correction` is
/// 1 - beta2^step, and `gradient_factor` what the parameter moves by for each normalized gradient.
template <class T>
DEVICE void schedule_free(const Pieces& pieces, float factor, double weight_decay, double beta2,
                          double correction, double eps, double iterate_weight,
                          double gradient_factor, double lr) {
    Chunk chunk = chunk_of_block(pieces);
    T* params = pieces.tensor<T>(0, chunk.piece);
    const T* grads = pieces.tensor<T>(1, chunk.piece);
    T* iterates = pieces.tensor<T>(2, chunk.piece);
    T* squares = pieces.tensor<T>(3, chunk.piece);
    const float by = factor, decay = float(weight_decay), second = float(beta2);
    const float second_weight = float(1 - beta2), bias = float(correction);
    const float epsilon = float(eps), weight = float(iterate_weight);
    const float ascent = float(gradient_factor), descent = float(-lr);
    bool packs_fit = fits<PACK<T>>(params, grads, iterates, squares);
    for_chunk<PACK<T>>(chunk, packs_fit, [&](int64_t at, auto n) {
        auto y = load<n>(params + at);
        auto g = load<n>(grads + at);
        auto z = load<n>(iterates + at);
        auto v = load<n>(squares + at);
#pragma unroll
        for (int i = 0; i < n; ++i) {
            float grad = product(g[i], by);
            v[i] = fmaf(product(second_weight, grad), grad, product(v[i], second));
            float normalized = grad / (sqrtf(v[i] / bias) + epsilon);
            if (decay != 0) normalized = fmaf(decay, y[i], normalized);
            y[i] = fmaf(ascent, normalized, lerp(y[i], z[i], weight));
            z[i] = fmaf(descent, normalized, z[i]);
        }
        store<n>(params + at, y);
        store<n>(iterates + at, z);
        store<n>(squares + at, v);
    });
}

/// Writes a sum of two tensors, each multiplied by a factor, to another one.
template <class T> DEVICE void combine(const Pieces& pieces, float x_factor, float y_factor) {
    Chunk chunk = chunk_of_block(pieces);
    T* sums = pieces.tensor<T>(0, chunk.piece);
    const T* x = pieces.tensor<T>(1, chunk.piece);
    const T* y = pieces.tensor<T>(2, chunk.piece);
    for_chunk<PACK<T>>(chunk, fits<PACK<T>>(sums, x, y), [&](int64_t at, auto n) {
        auto values = load<n>(x + at);
        auto others = load<n>(y + at);
#pragma unroll
        for (int i = 0; i < n; ++i)
            values[i] = fmaf(y_factor, others[i], product(values[i], x_factor));
        store<n>(sums + at, values);
    });
}

/// Returns true if a step changes nothing, because gradients are not finite.
DEVICE bool is_skipped(const Clipping* clipping) { return clipping && clipping->skip; }

/// Returns what gradients are multiplied by.
DEVICE float factor_of(const Clipping* clipping, double factor) {
    return clipping ? clipping->factor : float(factor);
}

#define OPTIMIZERS(T)                                                                          \
    KERNEL(combine_##T, IN_PLACE Pieces pieces, double x_factor, double y_factor) {            \
        combine<T>(pieces, float(x_factor), float(y_factor));                                  \
    }                                                                                          \
    KERNEL(adam_##T, IN_PLACE Pieces pieces, const Clipping* clipping, double factor,          \
           int maximize, double weight_decay, double keep, double beta1, double beta2,         \
           double eps, double step_size, double correction) {                                  \
        if (is_skipped(clipping)) return;                                                      \
        adam<T>(pieces, factor_of(clipping, factor), maximize, weight_decay, keep, beta1,      \
                beta2, eps, step_size, correction);                                            \
    }                                                                                          \
    KERNEL(sgd_##T, IN_PLACE Pieces pieces, const Clipping* clipping, double factor,           \
           int maximize, double weight_decay, double lr, double momentum, double dampening,    \
           int nesterov, int first) {                                                          \
        if (is_skipped(clipping)) return;                                                      \
        sgd<T>(pieces, factor_of(clipping, factor), maximize, weight_decay, lr, momentum,      \
               dampening, nesterov, first);                                                    \
    }                                                                                          \
    KERNEL(adagrad_##T, IN_PLACE Pieces pieces, const Clipping* clipping, double factor,       \
           int maximize, double weight_decay, double rate, double eps) {                       \
        if (is_skipped(clipping)) return;                                                      \
        adagrad<T>(pieces, factor_of(clipping, factor), maximize, weight_decay, rate, eps);    \
    }                                                                                          \
    KERNEL(schedule_free_##T, IN_PLACE Pieces pieces, const Clipping* clipping,                \
           double factor, double weight_decay, double beta2, double correction, double eps,    \
           double iterate_weight, double gradient_factor, double lr) {                         \
        if (is_skipped(clipping)) return;                                                      \
        schedule_free<T>(pieces, factor_of(clipping, factor), weight_decay, beta2, correction, \
                         eps, iterate_weight, gradient_factor, lr);                            \
    }
FOR_FLOATS(OPTIMIZERS)
