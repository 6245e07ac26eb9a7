// GELU, and what adds a bias to each row.
//
// Launch: `gelu_*` with one-dimensional grids and blocks (`for_elements`); what has a bias, as a
// kernel over columns. `finish_columns` of columns.cu adds up the partials of
// `bias_gelu_erf_backward`, which are the gradient of the bias.
#include "common.cuh"

/// A function f and its derivative at a point. GELU is `x * f(x)`.
struct Slope {
    float value, slope;
};

/// The normal distribution function, and its density: exact GELU.
struct Erf {
    DEVICE_MEMBER Slope operator()(float x) const {
        float exp = expf(x * x * -0.5f);
        float t = fabsf(x) * 0.70710678f;
        // erfc(t) * exp(t * t) as a polynomial in u without constant term: a Chebyshev fit for 0 <=
        // t <= 9.6, where exp(-t * t) runs out of f32, with a relative error below 1e-7. The same
        // as on the CPU.
        float u = __fdividef(1.0f, fmaf(t, 0.4f, 1.0f));
        float polynomial = 0.04112562f;
        polynomial = fmaf(polynomial, u, -0.1396017f);
        polynomial = fmaf(polynomial, u, 0.08227806f);
        polynomial = fmaf(polynomial, u, 0.09020871f);
        polynomial = fmaf(polynomial, u, 0.0779844f);
        polynomial = fmaf(polynomial, u, 0.19425207f);
        polynomial = fmaf(polynomial, u, 0.2016389f);
        polynomial = fmaf(polynomial, u, 0.22648231f);
        polynomial = fmaf(polynomial, u, 0.22563166f);
        // The smaller of the two tails, so that small values keep their digits.
        float tail = 0.5f * u * polynomial * exp;
        return {x > 0.0f ? 1.0f - tail : tail, exp * 0.39894228f};
    }
};

/// `(1 + tanh(z)) / 2` for the polynomial z of GELU's approximation.
struct Tanh {
    DEVICE_MEMBER Slope operator()(float x) const {
        const float scale = 0.79788456080286535588f, cubic = 0.044715f;
        float square = x * x;
        float z = scale * x * (1 + cubic * square);
        float slope = scale * (1 + 3 * cubic * square);
        // (1 + tanh z) / 2 = 1 / (1 + e^-2z). In this form no two numbers that are almost equal are
        // subtracted.
        float exp = expf(-2 * z);
        float value = __fdividef(1.0f, 1 + exp);
        // For an x of large magnitude, e^-2z or the slope may overflow to infinity, and a product
        // with zero would be NaN. The derivative is 0 there.
        float rest = value > 0 ? value * exp * value : 0;
        return {value, rest > 0 ? 2 * rest * slope : 0};
    }
};

template <class F> struct Gelu {
    DEVICE_MEMBER float operator()(float x) const { return x * F()(x).value; }
};

template <class F> struct GeluBackward {
    DEVICE_MEMBER float operator()(float grad, float x) const {
        Slope f = F()(x);
        return grad * (f.value + x * f.slope);
    }
};

struct Identity {
    DEVICE_MEMBER float operator()(float x) const { return x; }
};

/// Computes `y = f(x + bias)`, with a bias for each column. `y` may be `x`.
template <int N, class T, class F>
DEVICE void bias_forward(const T* x, const T* bias, T* y, int64_t rows, int width, F f) {
    for_column_packs<N>(width, [&](int column) {
        if (column >= width) return;
        auto biases = load<N>(bias + column);
        for_column_rows(rows, [&](int64_t row) {
            auto values = load<N>(x + row * width + column);
#pragma unroll
            for (int i = 0; i < N; ++i) values[i] = f(values[i] + biases[i]);
            store<N>(y + row * width + column, values);
        });
    });
}

/// Computes `y = (x + bias) + residual`, with a bias for each column, and both sums rounded: the
/// bits of two operations. `y` may be `x`.
template <int N, class T>
DEVICE void bias_residual_add(const T* x, const T* bias, const T* residual, T* y, int64_t rows,
                              int width) {
    for_column_packs<N>(width, [&](int column) {
        if (column >= width) return;
        auto biases = load<N>(bias + column);
        for_column_rows(rows, [&](int64_t row) {
            auto values = load<N>(x + row * width + column);
            auto residuals = load<N>(residual + row * width + column);
#pragma unroll
            for (int i = 0; i < N; ++i)
                values[i] = widen(narrow<T>(values[i] + biases[i])) + residuals[i];
            store<N>(y + row * width + column, values);
        });
    });
}

/// Computes the gradient of `x` in `y = f(x + bias)`, and sums it over rows, into rows of partials,
/// for the gradient of the bias. `dx` may be `grad`.
template <int N, class T, class F>
DEVICE void bias_backward(const T* x, const T* bias, const T* grad, T* dx, float* partials,
                          int64_t rows, int width, F f) {
    for_column_packs<N>(width, [&](int column) {
        Values<N> sums = {};
        if (column < width) {
            auto biases = load<N>(bias + column);
            for_column_rows(rows, [&](int64_t row) {
                auto values = load<N>(x + row * width + column);
                auto grads = load<N>(grad + row * width + column);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    grads[i] = f(grads[i], values[i] + biases[i]);
                    sums[i] += grads[i];
                }
                store<N>(dx + row * width + column, grads);
            });
        }
        store_column_sums(sums, column, width, partials);
    });
}

#define GELU(T, NAME, FUNCTION)                                                    \
    KERNEL(NAME##_forward_##T, const T* x, T* y, int64_t count) {                  \
        map(x, y, count, Gelu<FUNCTION>());                                        \
    }                                                                              \
    KERNEL(NAME##_backward_##T, const T* x, const T* grad, T* dx, int64_t count) { \
        map(grad, x, dx, count, GeluBackward<FUNCTION>());                         \
    }

#define ELEMENTWISE(T)                                                                            \
    GELU(T, gelu_erf, Erf)                                                                        \
    GELU(T, gelu_tanh, Tanh)                                                                      \
    KERNEL(bias_gelu_erf_forward_##T, const T* x, const T* bias, T* y, int64_t rows, int width) { \
        BY_PACKS(packs_fit(width, x, bias, y), bias_forward, T, x, bias, y, rows, width,          \
                 Gelu<Erf>());                                                                    \
    }                                                                                             \
    KERNEL(bias_gelu_erf_backward_##T, const T* x, const T* bias, const T* grad, T* dx,           \
           float* partials, int64_t rows, int width) {                                            \
        BY_PACKS(packs_fit(width, x, bias, grad, dx), bias_backward, T, x, bias, grad, dx,        \
                 partials, rows, width, GeluBackward<Erf>());                                     \
    }                                                                                             \
    KERNEL(bias_add_##T, const T* x, const T* bias, T* y, int64_t rows, int width) {              \
        BY_PACKS(packs_fit(width, x, bias, y), bias_forward, T, x, bias, y, rows, width,          \
                 Identity());                                                                     \
    }                                                                                             \
    KERNEL(bias_residual_add_##T, const T* x, const T* bias, const T* residual, T* y,             \
           int64_t rows, int width) {                                                             \
        BY_PACKS(packs_fit(width, x, bias, residual, y), bias_residual_add, T, x, bias, residual, \
                 y, rows, width);                                                                 \
    }
FOR_FLOATS(ELEMENTWISE)
