// Flash attention: `softmax(query * key^T * scale) * value` for each batch and head, without the
// matrix of scores.
//
// For half types, on tensor cores. A block has 4 warps. Each warp owns 16 * BANDS rows of one side
// (queries in the forward and for their gradient, keys for the gradients of keys and values), and
// walks over tiles of the other side, which the block loads to shared memory while it computes with
// the tile before. The backward computes weights again from the logarithms of their sums, which the
// forward keeps: one kernel for keys and values, and one for queries, so that nothing is added up
// in an order that depends on timing.
//
// Heads narrower than WIDTH (64 or 128) are padded with zeros in shared memory only.
//
// Launch: blocks of 128 threads; `ceil(own rows / rows of a block) * heads * batch` blocks, where
// heads are those of the own side. With `pitch = 2 * (WIDTH + 8)`, and `keys` and `tile` 128 and 64
// for WIDTH 64, 64 and 32 for WIDTH 128:
//
//                     rows of a block  bytes of dynamic shared memory (more than 48 KiB: raise the
//                     function's limit)
//   forward           128              (128 + 4 * 64) * pitch
//   backward_keys     keys             (2 * keys + 4 * tile) * pitch + 16 * tile
//   backward_queries  128              (2 * 128 + 4 * tile) * pitch
//
// `attention_delta` runs before the two kernels of the backward, with any one-dimensional grid of
// blocks of 32 x 4, each of which has 16 rows.
#include "attention.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;

/// Elements from one row of a tile in shared memory to the next. The additional 16 bytes put the
/// eight rows that `load_matrices` reads at once into different banks.
template <int WIDTH> constexpr int PITCH = WIDTH + 8;

/// Accumulators of a warp: BANDS x COLUMNS matrices of 16 x 8. Of each, a thread has elements (row,
/// column) and the next one, and the same eight rows below.
template <int BANDS, int COLUMNS> struct Accumulators {
    float at[BANDS][COLUMNS][4] = {};
};

DEVICE int lane() { return threadIdx.x % 32; }
/// The row of a 16 x 8 matrix whose elements 0 and 1 this thread has.
DEVICE int own_row() { return lane() / 4; }
/// The column of its elements 0 and 2.
DEVICE int own_column() { return lane() % 4 * 2; }

/// Starts to copy ROWS rows to a tile. What is outside of the matrix becomes zero.
template <int ROWS, int WIDTH, class T>
DEVICE void load_tile(T* tile, const Matrix<const T>& from, int first) {
    if (!from.packs) {
        for (int i = threadIdx.x; i < ROWS * WIDTH; i += THREADS) {
            int row = i / WIDTH, column = i % WIDTH;
            bool inside = first + row < from.rows && column < from.width;
            tile[row * PITCH<WIDTH> + column] =
                inside ? from.at[(first + row) * from.stride + column] : narrow<T>(0.0f);
        }
        return;
    }
    constexpr int PACKS = WIDTH / 8, STEP = THREADS / PACKS;
    int row = threadIdx.x / PACKS, column = threadIdx.x % PACKS * 8;
    const T* source = from.at + (first + row) * from.stride + column;
#pragma unroll
    for (int i = 0; i < ROWS / STEP; ++i) {
        bool inside = first + row < from.rows && column < from.width;
        copy_async(&tile[row * PITCH<WIDTH> + column], inside ? source : from.at, inside ? 16 : 0);
        row += STEP;
        source += STEP * from.stride;
    }
}

/// Rounds a warp's accumulators, times a factor for each row, and writes them to rows `first` and
/// following of a matrix. `tile` is shared memory for these rows that no other warp uses.
template <int WIDTH, class T, int BANDS>
DEVICE void store_rows(const Matrix<T>& to, int first, const Accumulators<BANDS, WIDTH / 8>& values,
                       const float (&factors)[BANDS][2], T* tile) {
    __syncwarp();
#pragma unroll
    for (int band = 0; band < BANDS; ++band)
#pragma unroll
        for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* pair = &values.at[band][n][2 * half];
                int row = band * 16 + half * 8 + own_row();
                *reinterpret_cast<uint32_t*>(&tile[row * PITCH<WIDTH> + n * 8 + own_column()]) =
                    pair_of<T>(pair[0] * factors[band][half], pair[1] * factors[band][half]);
            }
    __syncwarp();
    constexpr int PACKS = WIDTH / 8;
    for (int i = lane(); i < BANDS * 16 * PACKS; i += 32) {
        int row = i / PACKS, column = i % PACKS * 8;
        if (first + row >= to.rows || column >= to.width) continue;
        T* target = to.at + (first + row) * to.stride + column;
        const T* source = &tile[row * PITCH<WIDTH> + column];
        if (to.packs)
            *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
        else
            for (int j = 0; j < 8 && column + j < to.width; ++j) target[j] = source[j];
    }
}

/// A warp's own rows as left operands, read from a tile for each product or, if KEPT, once.
template <int WIDTH, class T, int BANDS, bool KEPT> class OwnRows {
    const T* rows;
    uint32_t kept[KEPT ? WIDTH / 16 : 1][BANDS][4];

  public:
    DEVICE_MEMBER explicit OwnRows(const T* tile)
        : rows(tile + lane() % 16 * PITCH<WIDTH> + lane() / 16 * 8) {
        if constexpr (KEPT) {
#pragma unroll
            for (int k = 0; k < WIDTH; k += 16)
#pragma unroll
                for (int band = 0; band < BANDS; ++band)
                    load_matrices(kept[k / 16][band], rows + band * 16 * PITCH<WIDTH> + k);
        }
    }

    /// Reads columns k to k + 15.
    DEVICE_MEMBER void read(uint32_t (&left)[BANDS][4], int k) const {
#pragma unroll
        for (int band = 0; band < BANDS; ++band) {
            if constexpr (KEPT) {
#pragma unroll
                for (int i = 0; i < 4; ++i) left[band][i] = kept[k / 16][band][i];
            } else {
                load_matrices(left[band], rows + band * 16 * PITCH<WIDTH> + k);
            }
        }
    }
};

/// Adds `own * b^T`: the products of own rows with rows of a tile.
template <int WIDTH, class T, int BANDS, int COLUMNS, bool KEPT>
DEVICE void add_row_products(Accumulators<BANDS, COLUMNS>& sums,
                             const OwnRows<WIDTH, T, BANDS, KEPT>& own, const T* b) {
    b += (lane() % 8 + lane() / 16 * 8) * PITCH<WIDTH> + lane() / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < WIDTH; k += 16) {
        uint32_t left[BANDS][4];
        own.read(left, k);
#pragma unroll
        for (int n = 0; n < COLUMNS; n += 2) {
            uint32_t right[4];
            load_matrices(right, b + n * 8 * PITCH<WIDTH> + k);
#pragma unroll
            for (int band = 0; band < BANDS; ++band) {
                multiply_add<T>(sums.at[band][n], left[band], right[0], right[1]);
                multiply_add<T>(sums.at[band][n + 1], left[band], right[2], right[3]);
            }
        }
    }
}

/// Adds `weights * tile`, with the weights rounded to T: accumulators have just the layout of a
/// left operand.
template <int WIDTH, class T, int BANDS, int ROWS>
DEVICE void add_product(Accumulators<BANDS, WIDTH / 8>& sums,
                        const Accumulators<BANDS, ROWS>& weights, const T* tile) {
    tile += lane() % 16 * PITCH<WIDTH> + lane() / 16 * 8;
#pragma unroll
    for (int k = 0; k < ROWS; k += 2) {
        uint32_t left[BANDS][4];
#pragma unroll
        for (int band = 0; band < BANDS; ++band)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &weights.at[band][k + i / 2][i % 2 * 2];
                left[band][i] = pair_of<T>(pair[0], pair[1]);
            }
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n += 2) {
            uint32_t right[4];
            load_matrices_transposed(right, tile + k * 8 * PITCH<WIDTH> + n * 8);
#pragma unroll
            for (int band = 0; band < BANDS; ++band) {
                multiply_add<T>(sums.at[band][n], left[band], right[0], right[1]);
                multiply_add<T>(sums.at[band][n + 1], left[band], right[2], right[3]);
            }
        }
    }
}

/// Sets the scores to -infinity whose place, row and column, is hidden. Done apart from what else
/// is done to scores, because few tiles have hidden ones.
template <int BANDS, int COLUMNS, class F>
DEVICE void hide(Accumulators<BANDS, COLUMNS>& scores, F hidden) {
#pragma unroll
    for (int band = 0; band < BANDS; ++band)
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (hidden(band * 16 + i / 2 * 8 + own_row(), n * 8 + own_column() + i % 2))
                    scores.at[band][n][i] = -INFINITY;
}

// --- Forward ---

/// Rows of a tile of keys that are loaded at once.
constexpr int FORWARD_BANDS = 2, FORWARD_TILE = 64;

template <int WIDTH, class T>
DEVICE void attention_forward(const T* query, const T* key, const T* value, T* output,
                              float* log_sums, const Attention& sizes, T* shared) {
    constexpr int BANDS = FORWARD_BANDS, TILE = FORWARD_TILE, QUERIES = WARPS * 16 * BANDS;
    Place place = place_of(sizes.rows, QUERIES, sizes.heads, sizes.causal);
    int key_head = place.head / sizes.group;
    auto queries = head_of(query, sizes.query, place.batch, place.head, sizes.rows, sizes.width);
    auto keys = head_of(key, sizes.key, place.batch, key_head, sizes.columns, sizes.width);
    auto values =
        head_of(value, sizes.value, place.batch, key_head, sizes.columns, sizes.value_width);
    T* query_tile = shared;
    // Two tiles each of keys and values: one is loaded while the other is used.
    auto key_tile = [&](int i) { return query_tile + (QUERIES + i % 2 * 2 * TILE) * PITCH<WIDTH>; };
    auto value_tile = [&](int i) { return key_tile(i) + TILE * PITCH<WIDTH>; };

    int first = place.first + threadIdx.x / 32 * 16 * BANDS;
    T* own_queries = query_tile + (first - place.first) * PITCH<WIDTH>;
    int seen = sizes.causal ? min(sizes.columns, place.first + QUERIES) : sizes.columns;
    float factor = sizes.scale * LOG2_E;
    Accumulators<BANDS, WIDTH / 8> sums;
    float highest[BANDS][2], totals[BANDS][2];
#pragma unroll
    for (int band = 0; band < BANDS; ++band)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            highest[band][half] = -INFINITY, totals[band][half] = 0;

    load_tile<QUERIES, WIDTH>(query_tile, queries, place.first);
    commit_copies();
    load_tile<TILE, WIDTH>(key_tile(0), keys, 0);
    load_tile<TILE, WIDTH>(value_tile(0), values, 0);
    commit_copies();
    wait_for_copies<1>();
    __syncthreads();
    // There are registers enough for narrow heads.
    OwnRows<WIDTH, T, BANDS, WIDTH == 64> own(own_queries);
    for (int i = 0; i * TILE < seen; ++i) {
        int start = i * TILE;
        wait_for_copies<0>();
        // The tile is there, and nobody needs the other one any more.
        __syncthreads();
        if (start + TILE < seen) {
            load_tile<TILE, WIDTH>(key_tile(i + 1), keys, start + TILE);
            load_tile<TILE, WIDTH>(value_tile(i + 1), values, start + TILE);
            commit_copies();
        }
        if (sizes.causal && start >= first + 16 * BANDS) continue;

        Accumulators<BANDS, TILE / 8> scores;
        add_row_products(scores, own, key_tile(i));
        if (start + TILE > sizes.columns || (sizes.causal && start + TILE > first + 1))
            hide(scores, [&](int row, int column) {
                return start + column >= sizes.columns ||
                       (sizes.causal && start + column > first + row);
            });
#pragma unroll
        for (int band = 0; band < BANDS; ++band)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& old = highest[band][half];
                float now = old;
#pragma unroll
                for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
                    for (int j = 0; j < 2; ++j) now = fmaxf(now, scores.at[band][n][2 * half + j]);
                // Four threads share a row.
                now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
                now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
                float shrink = exp2_approx((old - now) * factor), offset = now * factor;
                old = now;
                float total = 0;
#pragma unroll
                for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        float& score = scores.at[band][n][2 * half + j];
                        score = exp2_approx(fmaf(score, factor, -offset));
                        total += score;
                    }
                totals[band][half] = totals[band][half] * shrink + total;
#pragma unroll
                for (int n = 0; n < WIDTH / 8; ++n) {
                    sums.at[band][n][2 * half] *= shrink;
                    sums.at[band][n][2 * half + 1] *= shrink;
                }
            }
        add_product<WIDTH>(sums, scores, value_tile(i));
    }

    float factors[BANDS][2];
#pragma unroll
    for (int band = 0; band < BANDS; ++band)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = totals[band][half];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            factors[band][half] = 1 / total;
            int row = first + band * 16 + half * 8 + own_row();
            if (lane() % 4 == 0 && row < sizes.rows)
                log_sums[place.head_index * sizes.rows + row] =
                    highest[band][half] * sizes.scale + logf(total);
        }
    auto outputs =
        head_of(output, sizes.output, place.batch, place.head, sizes.rows, sizes.value_width);
    store_rows<WIDTH>(outputs, first, sums, factors, own_queries);
}

// --- Backward ---

/// Rows of the other side that a warp computes with at a time.
constexpr int STEP = 32;
/// Rows of the other side that are loaded at once.
template <int WIDTH> constexpr int BACKWARD_TILE = WIDTH == 64 ? 64 : 32;
/// Bands of keys: a warp has the gradients of keys and of values in registers.
template <int WIDTH> constexpr int KEY_BANDS = WIDTH == 64 ? 2 : 1;
constexpr int QUERY_BANDS = 2;

/// Computes the gradients of the keys and values of a block.
template <int WIDTH, class T>
DEVICE void attention_backward_keys(const T* query, const T* key, const T* value, const T* doutput,
                                    const float* log_sums, const float* deltas, T* dkey, T* dvalue,
                                    const Attention& sizes, T* shared) {
    constexpr int BANDS = KEY_BANDS<WIDTH>, TILE = BACKWARD_TILE<WIDTH>, KEYS = WARPS * 16 * BANDS;
    int key_heads = sizes.heads / sizes.group;
    Place place = place_of(sizes.columns, KEYS, key_heads, false);
    auto keys = head_of(key, sizes.key, place.batch, place.head, sizes.columns, sizes.width);
    auto values =
        head_of(value, sizes.value, place.batch, place.head, sizes.columns, sizes.value_width);
    T* key_tile = shared;
    T* value_tile = key_tile + KEYS * PITCH<WIDTH>;
    auto query_tile = [&](int i) { return value_tile + (KEYS + i % 2 * 2 * TILE) * PITCH<WIDTH>; };
    auto doutput_tile = [&](int i) { return query_tile(i) + TILE * PITCH<WIDTH>; };
    // The logarithms of the sums, in base 2, and the deltas, of the queries of a tile.
    auto row_values = [&](int i) {
        return reinterpret_cast<float*>(value_tile + (KEYS + 4 * TILE) * PITCH<WIDTH>) +
               i % 2 * 2 * TILE;
    };

    int first = place.first + threadIdx.x / 32 * 16 * BANDS;
    const T* own_keys = key_tile + (first - place.first) * PITCH<WIDTH>;
    const T* own_values = value_tile + (first - place.first) * PITCH<WIDTH>;
    float factor = sizes.scale * LOG2_E;
    Accumulators<BANDS, WIDTH / 8> dkeys, dvalues;

    // Tiles of queries of all heads that share these keys. The first ones of each may see none of
    // them.
    int skipped = sizes.causal ? min(place.first, sizes.rows) / TILE : 0;
    int tiles = (sizes.rows + TILE - 1) / TILE - skipped;
    auto load_queries = [&](int i) {
        int head = place.head * sizes.group + i / tiles, start = (skipped + i % tiles) * TILE;
        auto queries = head_of(query, sizes.query, place.batch, head, sizes.rows, sizes.width);
        auto doutputs =
            head_of(doutput, sizes.doutput, place.batch, head, sizes.rows, sizes.value_width);
        load_tile<TILE, WIDTH>(query_tile(i), queries, start);
        load_tile<TILE, WIDTH>(doutput_tile(i), doutputs, start);
        for (int row = threadIdx.x; row < TILE; row += THREADS) {
            int64_t at = (place.batch * sizes.heads + head) * sizes.rows + start + row;
            bool inside = start + row < sizes.rows;
            // The weights of a row that is not there are 2^-infinity.
            row_values(i)[row] = inside ? log_sums[at] * LOG2_E : INFINITY;
            row_values(i)[TILE + row] = inside ? deltas[at] : 0;
        }
    };
    load_tile<KEYS, WIDTH>(key_tile, keys, place.first);
    load_tile<KEYS, WIDTH>(value_tile, values, place.first);
    commit_copies();
    int count = tiles * sizes.group;
    if (count > 0) load_queries(0);
    commit_copies();
    wait_for_copies<1>();
    __syncthreads();
    // There are registers enough for one band.
    OwnRows<WIDTH, T, BANDS, BANDS == 1> of_keys(own_keys), of_values(own_values);
    for (int i = 0; i < count; ++i) {
        wait_for_copies<0>();
        __syncthreads();
        if (i + 1 < count) {
            load_queries(i + 1);
            commit_copies();
        }
        for (int step = 0; step < TILE; step += STEP) {
            int start = (skipped + i % tiles) * TILE + step;
            if (sizes.causal && start + STEP <= first) continue;
            const T* queries = query_tile(i) + step * PITCH<WIDTH>;
            const T* doutputs = doutput_tile(i) + step * PITCH<WIDTH>;
            // Weights and their gradients, transposed: a row for each key.
            Accumulators<BANDS, STEP / 8> weights, gradients;
            add_row_products(weights, of_keys, queries);
            add_row_products(gradients, of_values, doutputs);
            if (sizes.causal && start < first + 16 * BANDS)
                hide(weights, [&](int key, int row) { return first + key > start + row; });
#pragma unroll
            for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    int row = n * 8 + own_column() + j;
                    float log_sum = row_values(i)[step + row],
                          delta = row_values(i)[TILE + step + row];
#pragma unroll
                    for (int band = 0; band < BANDS; ++band)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            float& weight = weights.at[band][n][2 * half + j];
                            float& gradient = gradients.at[band][n][2 * half + j];
                            weight = exp2_approx(fmaf(weight, factor, -log_sum));
                            gradient = weight * (gradient - delta);
                        }
                }
            add_product<WIDTH>(dvalues, weights, doutputs);
            add_product<WIDTH>(dkeys, gradients, queries);
        }
    }
    // All copies are there, and no other warp reads this warp's keys and values.
    wait_for_copies<0>();
    __syncthreads();
    float ones[BANDS][2], scales[BANDS][2];
#pragma unroll
    for (int band = 0; band < BANDS; ++band)
#pragma unroll
        for (int half = 0; half < 2; ++half) ones[band][half] = 1, scales[band][half] = sizes.scale;
    auto dkey_rows = head_of(dkey, sizes.dkey, place.batch, place.head, sizes.columns, sizes.width);
    auto dvalue_rows =
        head_of(dvalue, sizes.dvalue, place.batch, place.head, sizes.columns, sizes.value_width);
    store_rows<WIDTH>(dkey_rows, first, dkeys, scales, const_cast<T*>(own_keys));
    store_rows<WIDTH>(dvalue_rows, first, dvalues, ones, const_cast<T*>(own_values));
}

/// Computes the gradients of the queries of a block.
template <int WIDTH, class T>
DEVICE void attention_backward_queries(const T* query, const T* key, const T* value,
                                       const T* doutput, const float* log_sums, const float* deltas,
                                       T* dquery, const Attention& sizes, T* shared) {
    constexpr int BANDS = QUERY_BANDS, TILE = BACKWARD_TILE<WIDTH>, QUERIES = WARPS * 16 * BANDS;
    Place place = place_of(sizes.rows, QUERIES, sizes.heads, sizes.causal);
    int key_head = place.head / sizes.group;
    auto queries = head_of(query, sizes.query, place.batch, place.head, sizes.rows, sizes.width);
    auto doutputs =
        head_of(doutput, sizes.doutput, place.batch, place.head, sizes.rows, sizes.value_width);
    auto keys = head_of(key, sizes.key, place.batch, key_head, sizes.columns, sizes.width);
    auto values =
        head_of(value, sizes.value, place.batch, key_head, sizes.columns, sizes.value_width);
    T* query_tile = shared;
    T* doutput_tile = query_tile + QUERIES * PITCH<WIDTH>;
    auto key_tile = [&](int i) {
        return doutput_tile + (QUERIES + i % 2 * 2 * TILE) * PITCH<WIDTH>;
    };
    auto value_tile = [&](int i) { return key_tile(i) + TILE * PITCH<WIDTH>; };

    int first = place.first + threadIdx.x / 32 * 16 * BANDS;
    T* own_queries = query_tile + (first - place.first) * PITCH<WIDTH>;
    const T* own_doutputs = doutput_tile + (first - place.first) * PITCH<WIDTH>;
    int seen = sizes.causal ? min(sizes.columns, place.first + QUERIES) : sizes.columns;
    float factor = sizes.scale * LOG2_E;
    float log_sum[BANDS][2], delta[BANDS][2];
#pragma unroll
    for (int band = 0; band < BANDS; ++band)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = first + band * 16 + half * 8 + own_row();
            int64_t at = place.head_index * sizes.rows + row;
            log_sum[band][half] = row < sizes.rows ? log_sums[at] * LOG2_E : INFINITY;
            delta[band][half] = row < sizes.rows ? deltas[at] : 0;
        }
    Accumulators<BANDS, WIDTH / 8> dqueries;

    load_tile<QUERIES, WIDTH>(query_tile, queries, place.first);
    load_tile<QUERIES, WIDTH>(doutput_tile, doutputs, place.first);
    commit_copies();
    load_tile<TILE, WIDTH>(key_tile(0), keys, 0);
    load_tile<TILE, WIDTH>(value_tile(0), values, 0);
    commit_copies();
    wait_for_copies<1>();
    __syncthreads();
    OwnRows<WIDTH, T, BANDS, WIDTH == 64> of_queries(own_queries), of_doutputs(own_doutputs);
    for (int i = 0; i * TILE < seen; ++i) {
        wait_for_copies<0>();
        __syncthreads();
        if ((i + 1) * TILE < seen) {
            load_tile<TILE, WIDTH>(key_tile(i + 1), keys, (i + 1) * TILE);
            load_tile<TILE, WIDTH>(value_tile(i + 1), values, (i + 1) * TILE);
            commit_copies();
        }
        for (int step = 0; step < TILE; step += STEP) {
            int start = i * TILE + step;
            if (start >= sizes.columns || (sizes.causal && start >= first + 16 * BANDS)) continue;
            const T* step_keys = key_tile(i) + step * PITCH<WIDTH>;
            Accumulators<BANDS, STEP / 8> weights, gradients;
            add_row_products(weights, of_queries, step_keys);
            add_row_products(gradients, of_doutputs, value_tile(i) + step * PITCH<WIDTH>);
            if (start + STEP > sizes.columns || (sizes.causal && start + STEP > first + 1))
                hide(weights, [&](int row, int column) {
                    return start + column >= sizes.columns ||
                           (sizes.causal && start + column > first + row);
                });
#pragma unroll
            for (int band = 0; band < BANDS; ++band)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            float& gradient = gradients.at[band][n][2 * half + j];
                            float weight = exp2_approx(fmaf(weights.at[band][n][2 * half + j],
                                                            factor, -log_sum[band][half]));
                            gradient = weight * (gradient - delta[band][half]);
                        }
            add_product<WIDTH>(dqueries, gradients, step_keys);
        }
    }
    float scales[BANDS][2];
#pragma unroll
    for (int band = 0; band < BANDS; ++band) scales[band][0] = scales[band][1] = sizes.scale;
    auto dquery_rows =
        head_of(dquery, sizes.dquery, place.batch, place.head, sizes.rows, sizes.width);
    store_rows<WIDTH>(dquery_rows, first, dqueries, scales, own_queries);
}

#define ATTENTION_OF_WIDTH(T, WIDTH)                                                               \
    BOUNDED_KERNEL((THREADS, 2), attention_forward_##WIDTH##_##T, const T* query, const T* key,    \
                   const T* value, T* output, float* log_sums, Attention sizes) {                  \
        DYNAMIC_SHARED(shared);                                                                    \
        attention_forward<WIDTH>(query, key, value, output, log_sums, sizes,                       \
                                 reinterpret_cast<T*>(shared));                                    \
    }                                                                                              \
    BOUNDED_KERNEL((THREADS, 2), attention_backward_keys_##WIDTH##_##T, const T* query,            \
                   const T* key, const T* value, const T* doutput, const float* log_sums,          \
                   const float* deltas, T* dkey, T* dvalue, Attention sizes) {                     \
        DYNAMIC_SHARED(shared);                                                                    \
        attention_backward_keys<WIDTH>(query, key, value, doutput, log_sums, deltas, dkey, dvalue, \
                                       sizes, reinterpret_cast<T*>(shared));                       \
    }                                                                                              \
    BOUNDED_KERNEL((THREADS, 2), attention_backward_queries_##WIDTH##_##T, const T* query,         \
                   const T* key, const T* value, const T* doutput, const float* log_sums,          \
                   const float* deltas, T* dquery, Attention sizes) {                              \
        DYNAMIC_SHARED(shared);                                                                    \
        attention_backward_queries<WIDTH>(query, key, value, doutput, log_sums, deltas, dquery,    \
                                          sizes, reinterpret_cast<T*>(shared));                    \
    }

#define ATTENTION(T)           \
    ATTENTION_OF_WIDTH(T, 64)  \
    ATTENTION_OF_WIDTH(T, 128) \
    ATTENTION_DELTA(T)
FOR_HALVES(ATTENTION)
