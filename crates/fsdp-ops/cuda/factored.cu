// Adafactor, whose averages of squares are kept by row and by column: a step of one parameter.
//
// A parameter is matrices of `height` rows, one after the other. One of fewer than two dimensions
// is a single row: its averages are those by column, and `rows` is null. Everything is f32.
//
// Launch: over rows of `width` elements (`for_rows`), except where a kernel says otherwise.
#include "common.cuh"

/// Returns the larger of two numbers, or NaN if the first is NaN.
DEVICE float at_least(float value, float least) { return value < least ? least : value; }

/// Moves an average towards a value by a weight.
DEVICE float moved(float average, float value, float weight) {
    return fmaf(weight, value - average, average);
}

/// Moves the average of each row towards the mean of the squares of its gradient.
KERNEL(factored_rows, const float* grad, const float* before, float* after, int64_t rows,
       int width, double weight) {
    for_rows(rows, [&](int64_t row) {
        const float* from = grad + row * width;
        float squares = 0;
        for_columns<1>(width, [&](int column) {
            squares = fmaf(from[column], from[column], squares);
        });
        squares = row_reduce(squares, Sum());
        if (threadIdx.x == 0) after[row] = moved(before[row], squares / width, float(weight));
    });
}

/// Adds up the squares of each column of each matrix, in `parts` parts that are rows of partials.
///
/// Launch: as kernels over columns, with a row of blocks for each part of each matrix, or fewer.
KERNEL(factored_columns, const float* grad, float* partials, int64_t matrices, int64_t height,
       int width, int64_t parts) {
    for (int64_t index = blockIdx.y; index < matrices * parts; index += gridDim.y) {
        const float* matrix = grad + index / parts * height * width;
        for_column_packs<1>(width, [&](int column) {
            Values<1> squares = {};
            if (column < width) {
                int64_t first = index % parts * COLUMN_ROWS + threadIdx.y;
#pragma unroll 4
                for (int64_t row = first; row < height; row += parts * COLUMN_ROWS) {
                    float value = matrix[row * width + column];
                    squares[0] = fmaf(value, value, squares[0]);
                }
            }
            store_column_sums(squares, column, width, partials + (index - blockIdx.y) * width);
        });
    }
}

/// Moves the average of each column towards the mean of the squares of its gradient.
///
/// Launch: a thread for each column of each matrix, or fewer.
KERNEL(factored_finish_columns, const float* partials, const float* before, float* after,
       int64_t columns, int64_t height, int width, int64_t parts, double weight) {
    int64_t step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < columns; at += step) {
        const float* from = partials + at / width * parts * width + at % width;
        float squares = 0;
#pragma unroll 4
        for (int64_t part = 0; part < parts; ++part) squares += from[part * width];
        after[at] = moved(before[at], squares / height, float(weight));
    }
}

/// Computes the mean of the averages of the rows of each matrix, which is `least` at least.
///
/// Launch: over rows, of which each is the averages of a matrix.
KERNEL(factored_means, const float* rows, float* means, int64_t matrices, int height,
       double least) {
    for_rows(matrices, [&](int64_t matrix) {
        const float* from = rows + matrix * height;
        float total = 0;
        for_columns<1>(height, [&](int row) { total += from[row]; });
        total = row_reduce(total, Sum());
        if (threadIdx.x == 0) means[matrix] = at_least(total / height, float(least));
    });
}

/// Calls `f(column, direction)` for the elements of a row that this thread has. The direction is the
/// gradient divided by the root of the estimate of its average square.
template <class F>
DEVICE void for_directions(const float* grad, const float* rows, const float* columns,
                           const float* means, int64_t row, int64_t height, int width, float eps,
                           F f) {
    int64_t matrix = row / height;
    const float* grads = grad + row * width;
    const float* averages = columns + matrix * width;
    for_columns<1>(width, [&](int column) {
        float square = averages[column];
        if (rows) square = rows[row] * square / means[matrix];
        f(column, grads[column] / sqrtf(at_least(square, eps * eps)));
    });
}

/// The squares of a parameter and of the directions of its elements, added up.
struct Squares {
    double param, direction;
};

/// Adds up the squares of each row.
KERNEL(factored_measure, const float* param, const float* grad, const float* rows,
       const float* columns, const float* means, Squares* partials, int64_t row_count,
       int64_t height, int width, double eps) {
    for_rows(row_count, [&](int64_t row) {
        Squares squares = {};
        for_directions(grad, rows, columns, means, row, height, width, float(eps),
                       [&](int column, float direction) {
                           double value = param[row * width + column];
                           squares.param += value * value;
                           squares.direction += double(direction) * direction;
                       });
        squares = {row_reduce(squares.param, Sum()), row_reduce(squares.direction, Sum())};
        if (threadIdx.x == 0) partials[row] = squares;
    });
}

/// Computes what directions are multiplied by: `rate` times the root mean square of the parameter,
/// which is `least_scale` at least. Directions whose root mean square is larger than `threshold` are
/// scaled down to it.
///
/// Launch: one block of 256 threads.
KERNEL(factored_finish, const Squares* partials, float* factor, int64_t rows, int64_t numel,
       double rate, double least_scale, double threshold) {
    Squares total = {};
    for (int64_t row = threadIdx.x; row < rows; row += blockDim.x) {
        total.param += partials[row].param;
        total.direction += partials[row].direction;
    }
    total = {row_reduce(total.param, Sum()), row_reduce(total.direction, Sum())};
    if (threadIdx.x == 0) {
        double scale = sqrt(total.param / numel);
        double excess = sqrt(total.direction / numel) / threshold;
        double alpha = (scale < least_scale ? least_scale : scale) * rate;
        *factor = float(alpha / (excess < 1 ? 1 : excess));
    }
}

/// Steps the parameter: it is multiplied by `keep`, and moves against the directions.
KERNEL(factored_apply, const float* param, const float* grad, const float* rows,
       const float* columns, const float* means, const float* factor, float* stepped,
       int64_t row_count, int64_t height, int width, double eps, double keep) {
    const float descent = -*factor, kept = float(keep);
    for_rows(row_count, [&](int64_t row) {
        for_directions(grad, rows, columns, means, row, height, width, float(eps),
                       [&](int column, float direction) {
                           int64_t at = row * width + column;
                           stepped[at] = fmaf(descent, direction, __fmul_rn(param[at], kept));
                       });
    });
}
