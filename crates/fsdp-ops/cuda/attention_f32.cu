// Flash attention for f32, with the arguments and the order of work of attention.cu, but without
// tensor cores: these would round the operands.
//
// A block has 256 threads, 16 x 16. It owns 64 rows of one side, and walks over tiles of the other
// side. A thread has rows y, y + 16, y + 32 and y + 48 of its block, and of a tile every sixteenth
// row, from x on. Weights go through shared memory, but not from one warp to another.
//
// Launch: `ceil(own rows / 64) * heads * batch` blocks of 256 threads, where heads are those of the
// own side. Dynamic shared memory, in bytes, with `tile` 64 for WIDTH 64 and 32 for WIDTH 128
// (raise the function's limit first):
//
//   forward           4 * ((64 + 2 * tile) * (WIDTH + 4) + 64 * (tile + 4))
//   both backwards    4 * ((128 + 2 * tile) * (WIDTH + 4) + 64 * (tile + 4) + 2 * tile)
#include "attention.cuh"

namespace f32_attention {

constexpr int SIDE = 16, THREADS = SIDE * SIDE;
/// Own rows of a thread and of a block.
constexpr int OWN = 4, ROWS = SIDE * OWN;
/// Rows of a tile of the other side.
template <int WIDTH> constexpr int TILE = WIDTH == 64 ? 64 : 32;
/// Numbers from one row of a tile to the next: rows that are read at once are in different banks.
template <int WIDTH> constexpr int PITCH = WIDTH + 4;

DEVICE int thread_y() { return threadIdx.x / SIDE; }
DEVICE int thread_x() { return threadIdx.x % SIDE; }

/// A thread's part of a matrix: M rows and N columns.
template <int M, int N> struct Block {
    float at[M][N] = {};
};

/// Weights of own rows for the rows of a tile.
template <int WIDTH> using Weights = Block<OWN, TILE<WIDTH> / SIDE>;
/// Sums for own rows. Of each 64 columns a thread has four, from 4 * x on.
template <int WIDTH> using Sums = Block<OWN, WIDTH / SIDE>;

/// Starts to copy COUNT rows to a tile. What is outside of the matrix becomes zero.
template <int COUNT, int WIDTH>
DEVICE void copy_rows(float* tile, const Matrix<const float>& from, int first) {
    constexpr int PACKS = WIDTH / 4;
    for (int i = threadIdx.x; i < COUNT * PACKS; i += THREADS) {
        int row = i / PACKS, column = i % PACKS * 4;
        float* to = &tile[row * PITCH<WIDTH> + column];
        const float* source = from.at + (first + row) * from.stride + column;
        bool inside = first + row < from.rows;
        if (from.packs) {
            inside = inside && column < from.width;
            copy_async(to, inside ? source : from.at, inside ? 16 : 0);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) to[j] = inside && column + j < from.width ? source[j] : 0;
        }
    }
}

/// Waits until all tiles that this block loads are there.
DEVICE void finish_loads() {
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
}

/// Adds `own * tile^T`: the products of own rows with rows of a tile.
template <int WIDTH>
DEVICE void add_row_products(Weights<WIDTH>& weights, const float* own, const float* tile) {
    own += thread_y() * PITCH<WIDTH>;
    tile += thread_x() * PITCH<WIDTH>;
    constexpr int N = TILE<WIDTH> / SIDE;
#pragma unroll 4
    for (int k = 0; k < WIDTH; k += 4) {
        Values<4> right[N];
#pragma unroll
        for (int n = 0; n < N; ++n) right[n] = load<4>(tile + n * SIDE * PITCH<WIDTH> + k);
#pragma unroll
        for (int m = 0; m < OWN; ++m) {
            auto left = load<4>(own + m * SIDE * PITCH<WIDTH> + k);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int n = 0; n < N; ++n)
                    weights.at[m][n] = fmaf(left[j], right[n][j], weights.at[m][n]);
        }
    }
}

/// Adds `weights * tile`. `shared` is room for all weights of the block.
template <int WIDTH>
DEVICE void add_product(Sums<WIDTH>& sums, const Weights<WIDTH>& weights, const float* tile,
                        float* shared) {
    constexpr int N = TILE<WIDTH> / SIDE, SHARED_PITCH = TILE<WIDTH> + 4;
    shared += thread_y() * SHARED_PITCH;
    tile += thread_x() * 4;
    // Rows of weights are written and read by one half of a warp, which may still read the last
    // ones.
    __syncwarp();
#pragma unroll
    for (int m = 0; m < OWN; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
            shared[m * SIDE * SHARED_PITCH + n * SIDE + thread_x()] = weights.at[m][n];
    __syncwarp();
#pragma unroll 2
    for (int k = 0; k < TILE<WIDTH>; k += 4) {
        Values<4> left[OWN];
#pragma unroll
        for (int m = 0; m < OWN; ++m) left[m] = load<4>(shared + m * SIDE * SHARED_PITCH + k);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int part = 0; part < WIDTH / 64; ++part) {
                auto right = load<4>(tile + (k + j) * PITCH<WIDTH> + 64 * part);
#pragma unroll
                for (int m = 0; m < OWN; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        sums.at[m][4 * part + i] =
                            fmaf(left[m][j], right[i], sums.at[m][4 * part + i]);
            }
    }
}

/// Writes sums, times a factor for each row, to rows `first` and following of a matrix.
template <int WIDTH>
DEVICE void store_rows(const Matrix<float>& to, int first, const Sums<WIDTH>& sums,
                       const float (&factors)[OWN]) {
#pragma unroll
    for (int m = 0; m < OWN; ++m) {
        int row = first + thread_y() + m * SIDE;
        if (row >= to.rows) continue;
#pragma unroll
        for (int part = 0; part < WIDTH / 64; ++part) {
            int column = 64 * part + 4 * thread_x();
            float* target = to.at + row * to.stride + column;
            Values<4> values;
#pragma unroll
            for (int i = 0; i < 4; ++i) values[i] = sums.at[m][4 * part + i] * factors[m];
            if (to.packs && column < to.width)
                store<4>(target, values);
            else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (column + i < to.width) target[i] = values[i];
            }
        }
    }
}

template <int WIDTH>
DEVICE void forward(const float* query, const float* key, const float* value, float* output,
                    float* log_sums, const Attention& sizes, float* shared) {
    constexpr int N = TILE<WIDTH> / SIDE;
    Place place = place_of(sizes.rows, ROWS, sizes.heads, sizes.causal);
    int key_head = place.head / sizes.group;
    auto queries = head_of(query, sizes.query, place.batch, place.head, sizes.rows, sizes.width);
    auto keys = head_of(key, sizes.key, place.batch, key_head, sizes.columns, sizes.width);
    auto values =
        head_of(value, sizes.value, place.batch, key_head, sizes.columns, sizes.value_width);
    float* query_tile = shared;
    float* key_tile = query_tile + ROWS * PITCH<WIDTH>;
    float* value_tile = key_tile + TILE<WIDTH> * PITCH<WIDTH>;
    float* shared_weights = value_tile + TILE<WIDTH> * PITCH<WIDTH>;

    int first = place.first, seen = sizes.causal ? min(sizes.columns, first + ROWS) : sizes.columns;
    float factor = sizes.scale * LOG2_E;
    Sums<WIDTH> sums;
    float highest[OWN], totals[OWN];
#pragma unroll
    for (int m = 0; m < OWN; ++m) highest[m] = -INFINITY, totals[m] = 0;
    copy_rows<ROWS, WIDTH>(query_tile, queries, first);
    for (int start = 0; start < seen; start += TILE<WIDTH>) {
        // The tiles before are not needed any more.
        __syncthreads();
        copy_rows<TILE<WIDTH>, WIDTH>(key_tile, keys, start);
        copy_rows<TILE<WIDTH>, WIDTH>(value_tile, values, start);
        finish_loads();
        Weights<WIDTH> weights;
        add_row_products<WIDTH>(weights, query_tile, key_tile);
        if (start + TILE<WIDTH> > sizes.columns ||
            (sizes.causal && start + TILE<WIDTH> > first + 1)) {
#pragma unroll
            for (int m = 0; m < OWN; ++m)
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    int row = first + thread_y() + m * SIDE, column = start + thread_x() + n * SIDE;
                    if (column >= sizes.columns || (sizes.causal && column > row))
                        weights.at[m][n] = -INFINITY;
                }
        }
#pragma unroll
        for (int m = 0; m < OWN; ++m) {
            float now = highest[m];
#pragma unroll
            for (int n = 0; n < N; ++n) now = fmaxf(now, weights.at[m][n]);
#pragma unroll
            for (int distance = 1; distance < SIDE; distance *= 2)
                now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, distance));
            float shrink = exp2_approx((highest[m] - now) * factor), offset = now * factor,
                  total = 0;
            highest[m] = now;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                weights.at[m][n] = exp2_approx(fmaf(weights.at[m][n], factor, -offset));
                total += weights.at[m][n];
            }
            totals[m] = totals[m] * shrink + total;
#pragma unroll
            for (int i = 0; i < WIDTH / SIDE; ++i) sums.at[m][i] *= shrink;
        }
        add_product<WIDTH>(sums, weights, value_tile, shared_weights);
    }
    float factors[OWN];
#pragma unroll
    for (int m = 0; m < OWN; ++m) {
        float total = totals[m];
#pragma unroll
        for (int distance = 1; distance < SIDE; distance *= 2)
            total += __shfl_xor_sync(0xffffffffu, total, distance);
        factors[m] = 1 / total;
        int row = first + thread_y() + m * SIDE;
        if (thread_x() == 0 && row < sizes.rows)
            log_sums[place.head_index * sizes.rows + row] = highest[m] * sizes.scale + logf(total);
    }
    store_rows<WIDTH>(
        head_of(output, sizes.output, place.batch, place.head, sizes.rows, sizes.value_width),
        first, sums, factors);
}

/// Computes the gradients of the keys and values of a block.
template <int WIDTH>
DEVICE void backward_keys(const float* query, const float* key, const float* value,
                          const float* doutput, const float* log_sums, const float* deltas,
                          float* dkey, float* dvalue, const Attention& sizes, float* shared) {
    constexpr int N = TILE<WIDTH> / SIDE, COUNT = TILE<WIDTH>;
    int key_heads = sizes.heads / sizes.group;
    Place place = place_of(sizes.columns, ROWS, key_heads, false);
    auto keys = head_of(key, sizes.key, place.batch, place.head, sizes.columns, sizes.width);
    auto values =
        head_of(value, sizes.value, place.batch, place.head, sizes.columns, sizes.value_width);
    float* key_tile = shared;
    float* value_tile = key_tile + ROWS * PITCH<WIDTH>;
    float* query_tile = value_tile + ROWS * PITCH<WIDTH>;
    float* doutput_tile = query_tile + COUNT * PITCH<WIDTH>;
    float* shared_weights = doutput_tile + COUNT * PITCH<WIDTH>;
    // The logarithms of the sums, in base 2, and the deltas, of the queries of a tile.
    float* row_values = shared_weights + ROWS * (COUNT + 4);

    int first = place.first;
    float factor = sizes.scale * LOG2_E;
    Sums<WIDTH> dkeys, dvalues;
    copy_rows<ROWS, WIDTH>(key_tile, keys, first);
    copy_rows<ROWS, WIDTH>(value_tile, values, first);
    // The first queries may see none of these keys.
    int begin = sizes.causal ? min(first, sizes.rows) / COUNT * COUNT : 0;
    for (int shared_head = 0; shared_head < sizes.group; ++shared_head) {
        int head = place.head * sizes.group + shared_head;
        auto queries = head_of(query, sizes.query, place.batch, head, sizes.rows, sizes.width);
        auto doutputs =
            head_of(doutput, sizes.doutput, place.batch, head, sizes.rows, sizes.value_width);
        for (int start = begin; start < sizes.rows; start += COUNT) {
            __syncthreads();
            copy_rows<COUNT, WIDTH>(query_tile, queries, start);
            copy_rows<COUNT, WIDTH>(doutput_tile, doutputs, start);
            if (threadIdx.x < COUNT) {
                int row = start + threadIdx.x;
                int64_t at = (place.batch * sizes.heads + head) * sizes.rows + row;
                // The weights of a row that is not there are 2^-infinity.
                row_values[threadIdx.x] = row < sizes.rows ? log_sums[at] * LOG2_E : INFINITY;
                row_values[COUNT + threadIdx.x] = row < sizes.rows ? deltas[at] : 0;
            }
            finish_loads();
            // Weights and their gradients, transposed: a row for each key.
            Weights<WIDTH> weights, gradients;
            add_row_products<WIDTH>(weights, key_tile, query_tile);
            add_row_products<WIDTH>(gradients, value_tile, doutput_tile);
            bool masked = sizes.causal && start < first + ROWS;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                int row = thread_x() + n * SIDE;
                float log_sum = row_values[row], delta = row_values[COUNT + row];
#pragma unroll
                for (int m = 0; m < OWN; ++m) {
                    float& weight = weights.at[m][n];
                    weight = exp2_approx(fmaf(weight, factor, -log_sum));
                    if (masked && first + thread_y() + m * SIDE > start + row) weight = 0;
                    gradients.at[m][n] = weight * (gradients.at[m][n] - delta);
                }
            }
            add_product<WIDTH>(dvalues, weights, doutput_tile, shared_weights);
            add_product<WIDTH>(dkeys, gradients, query_tile, shared_weights);
        }
    }
    // Where no query sees these keys, nothing has waited for their copies.
    commit_copies();
    wait_for_copies<0>();
    float ones[OWN], scales[OWN];
#pragma unroll
    for (int m = 0; m < OWN; ++m) ones[m] = 1, scales[m] = sizes.scale;
    store_rows<WIDTH>(
        head_of(dkey, sizes.dkey, place.batch, place.head, sizes.columns, sizes.width), first,
        dkeys, scales);
    store_rows<WIDTH>(
        head_of(dvalue, sizes.dvalue, place.batch, place.head, sizes.columns, sizes.value_width),
        first, dvalues, ones);
}

/// Computes the gradients of the queries of a block.
template <int WIDTH>
DEVICE void backward_queries(const float* query, const float* key, const float* value,
                             const float* doutput, const float* log_sums, const float* deltas,
                             float* dquery, const Attention& sizes, float* shared) {
    constexpr int N = TILE<WIDTH> / SIDE, COUNT = TILE<WIDTH>;
    Place place = place_of(sizes.rows, ROWS, sizes.heads, sizes.causal);
    int key_head = place.head / sizes.group;
    auto queries = head_of(query, sizes.query, place.batch, place.head, sizes.rows, sizes.width);
    auto doutputs =
        head_of(doutput, sizes.doutput, place.batch, place.head, sizes.rows, sizes.value_width);
    auto keys = head_of(key, sizes.key, place.batch, key_head, sizes.columns, sizes.width);
    auto values =
        head_of(value, sizes.value, place.batch, key_head, sizes.columns, sizes.value_width);
    float* query_tile = shared;
    float* doutput_tile = query_tile + ROWS * PITCH<WIDTH>;
    float* key_tile = doutput_tile + ROWS * PITCH<WIDTH>;
    float* value_tile = key_tile + COUNT * PITCH<WIDTH>;
    float* shared_weights = value_tile + COUNT * PITCH<WIDTH>;

    int first = place.first, seen = sizes.causal ? min(sizes.columns, first + ROWS) : sizes.columns;
    float factor = sizes.scale * LOG2_E;
    float log_sum[OWN], delta[OWN], scales[OWN];
#pragma unroll
    for (int m = 0; m < OWN; ++m) {
        int row = first + thread_y() + m * SIDE;
        int64_t at = place.head_index * sizes.rows + row;
        log_sum[m] = row < sizes.rows ? log_sums[at] * LOG2_E : INFINITY;
        delta[m] = row < sizes.rows ? deltas[at] : 0;
        scales[m] = sizes.scale;
    }
    Sums<WIDTH> dqueries;
    copy_rows<ROWS, WIDTH>(query_tile, queries, first);
    copy_rows<ROWS, WIDTH>(doutput_tile, doutputs, first);
    for (int start = 0; start < seen; start += COUNT) {
        __syncthreads();
        copy_rows<COUNT, WIDTH>(key_tile, keys, start);
        copy_rows<COUNT, WIDTH>(value_tile, values, start);
        finish_loads();
        Weights<WIDTH> weights, gradients;
        add_row_products<WIDTH>(weights, query_tile, key_tile);
        add_row_products<WIDTH>(gradients, doutput_tile, value_tile);
        bool masked = start + COUNT > sizes.columns || (sizes.causal && start + COUNT > first + 1);
#pragma unroll
        for (int m = 0; m < OWN; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n) {
                int row = first + thread_y() + m * SIDE, column = start + thread_x() + n * SIDE;
                float weight = exp2_approx(fmaf(weights.at[m][n], factor, -log_sum[m]));
                if (masked && (column >= sizes.columns || (sizes.causal && column > row)))
                    weight = 0;
                gradients.at[m][n] = weight * (gradients.at[m][n] - delta[m]);
            }
        add_product<WIDTH>(dqueries, gradients, key_tile, shared_weights);
    }
    store_rows<WIDTH>(
        head_of(dquery, sizes.dquery, place.batch, place.head, sizes.rows, sizes.width), first,
        dqueries, scales);
}

} // namespace f32_attention

#define F32_ATTENTION(WIDTH)                                                                     \
    BOUNDED_KERNEL((256, 2), attention_forward_##WIDTH##_f32, const float* query,                \
                   const float* key, const float* value, float* output, float* log_sums,         \
                   Attention sizes) {                                                            \
        DYNAMIC_SHARED(shared);                                                                  \
        f32_attention::forward<WIDTH>(query, key, value, output, log_sums, sizes,                \
                                      reinterpret_cast<float*>(shared));                         \
    }                                                                                            \
    BOUNDED_KERNEL((256, 2), attention_backward_keys_##WIDTH##_f32, const float* query,          \
                   const float* key, const float* value, const float* doutput,                   \
                   const float* log_sums, const float* deltas, float* dkey, float* dvalue,       \
                   Attention sizes) {                                                            \
        DYNAMIC_SHARED(shared);                                                                  \
        f32_attention::backward_keys<WIDTH>(query, key, value, doutput, log_sums, deltas, dkey,  \
                                            dvalue, sizes, reinterpret_cast<float*>(shared));    \
    }                                                                                            \
    BOUNDED_KERNEL((256, 2), attention_backward_queries_##WIDTH##_f32, const float* query,       \
                   const float* key, const float* value, const float* doutput,                   \
                   const float* log_sums, const float* deltas, float* dquery, Attention sizes) { \
        DYNAMIC_SHARED(shared);                                                                  \
        f32_attention::backward_queries<WIDTH>(query, key, value, doutput, log_sums, deltas,     \
                                               dquery, sizes, reinterpret_cast<float*>(shared)); \
    }
F32_ATTENTION(64)
F32_ATTENTION(128)
ATTENTION_DELTA(f32)
